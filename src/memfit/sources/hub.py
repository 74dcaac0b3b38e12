"""`config.json` of a repository on the Hugging Face Hub, through `huggingface_hub`.

The library reads `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and `HF_HUB_OFFLINE` itself, once, when it is imported. One request without
retries asks for size and commit; then the cache answers, or the file is fetched into it. If the Hub cannot be reached, the cached
copy is taken. No error text of the library or of the server is shown: it can hold a token.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from memfit.errors import InputError, UsageError
from memfit.sources.files import MAX_CONFIG_BYTES, printable, read_config_file

TIMEOUT_SECONDS = 10.0
"""The longest wait for one answer; `HF_HUB_ETAG_TIMEOUT` can only shorten it."""
DOWNLOAD_SECONDS = 30.0
"""The longest wait for the file itself (at most 4 MiB), retries of the library included."""
_COMMIT = r"snapshots[/\\]([0-9a-f]{40})[/\\]"
T = TypeVar("T")
BY_HAND = "or download its config.json by hand and give its path"


class HubConfig(NamedTuple):
    """A config from the Hub, and the words that say where it came from."""

    config: dict[str, Any]
    source: str


def read_hub_config(repo_id: str, revision: str | None = None) -> HubConfig:
    """The config of `repo_id` at `revision` (a branch, a tag or a commit; `main` if not given).

    Raises:
        InputError: there is no such repository, revision or file; it is gated; the Hub cannot be reached and nothing is cached;
            the file is too large or no config. One line that says what to do.
        UsageError: `repo_id` is not a repository id.
    """
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.utils
    except ImportError:
        raise InputError(f"{repo_id}: reading from the Hub needs the package huggingface_hub; install it, {BY_HAND}") from None
    except Exception:  # it reads its environment variables when it is imported
        raise _bad_settings(repo_id) from None
    if _timeout(huggingface_hub) <= 0:
        raise _bad_settings(repo_id)
    shown = printable(f"{repo_id}@{revision}" if revision else repo_id)
    with _quiet(huggingface_hub):
        path, cached = _download(huggingface_hub, repo_id, revision, shown)
    found = re.search(_COMMIT, path)
    commit = f" at {found[1][:12]}" if found else ""
    copy = ", cached copy (the Hub was not reached)" if cached else ""
    return HubConfig(
        config=read_config_file(path, f"config.json of {shown} on the Hub"),
        source=f"config.json of {shown}{commit} on the Hugging Face Hub{copy}",
    )


_WHOLE_NUMBERS = ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")


def _bad_settings(repo_id: str) -> InputError:
    """The error when huggingface_hub refuses its environment: with the variable that is at fault where it can be told."""
    given = {name: os.environ[name].strip() for name in _WHOLE_NUMBERS if name in os.environ}
    wrong = [name for name, value in given.items() if not value.isdecimal()]
    must_be = "must be a positive whole number of seconds"
    what = " and ".join(f"{name} is {printable(given[name], 40)!r} and {must_be}" for name in wrong)
    if not what:
        names = sorted(name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE_")))
        what = f"an environment variable is wrong, one of {', '.join(names[:12])}" if names else "the package is broken"
    return InputError(f"{repo_id}: huggingface_hub cannot be used: {what}; correct it, {BY_HAND}")


def _download(hub: Any, repo_id: str, revision: str | None, shown: str) -> tuple[str, bool]:
    """The path of the file in the cache, and whether the Hub was not asked."""
    try:
        seconds = _timeout(hub)
        url = hub.hf_hub_url(repo_id, "config.json", revision=revision)
        metadata = _within(seconds + 1, lambda: hub.get_hf_file_metadata(url, timeout=seconds))
    except Exception as error:  # every HTTP library that huggingface_hub has used has its own tree of errors
        path = _cached_after(hub, error, repo_id, revision)
        if path is None:
            raise _explained(hub, error, repo_id, revision, shown) from None
        return path, True
    if metadata.size is None or metadata.size > MAX_CONFIG_BYTES:
        size = "of unknown size" if metadata.size is None else f"of {metadata.size:,} bytes"
        raise InputError(f"{shown}: its config.json is {size}; at most {MAX_CONFIG_BYTES:,} bytes (4 MiB) are read, {BY_HAND}")
    path = hub.try_to_load_from_cache(repo_id, "config.json", revision=metadata.commit_hash) if metadata.commit_hash else None
    if not isinstance(path, str):
        try:
            path = _within(
                DOWNLOAD_SECONDS,
                lambda: hub.hf_hub_download(repo_id, "config.json", revision=revision, etag_timeout=seconds),
            )
        except Exception as error:
            raise _explained(hub, error, repo_id, revision, shown) from None
    return path, False


def _within(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, or `TimeoutError`: the limits of HTTP libraries are per read, and name resolution has none."""
    import threading

    done: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError
    return done[0]


def _timeout(hub: Any) -> float:
    return min(TIMEOUT_SECONDS, float(hub.constants.HF_HUB_ETAG_TIMEOUT))


def _cached_after(hub: Any, error: Exception, repo_id: str, revision: str | None) -> str | None:
    """The cached file, where the error does not say that it is not on the Hub (any more)."""
    errors = hub.utils
    if isinstance(error, errors.HFValidationError | errors.RevisionNotFoundError | errors.EntryNotFoundError):
        return None
    if _kind(hub, error) == "not-found":
        return None
    path = hub.try_to_load_from_cache(repo_id, "config.json", revision=revision)
    return path if isinstance(path, str) else None


def _kind(hub: Any, error: Exception) -> str:
    """What went wrong, by the library's own errors, the status of the answer, and the names that HTTP libraries give errors."""
    errors = hub.utils
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    names = {base.__name__ for cause in _causes(error) for base in type(cause).__mro__}
    if isinstance(error, errors.HFValidationError):
        return "bad-id"
    if "OfflineModeIsEnabled" in names:
        return "offline"
    if isinstance(error, errors.GatedRepoError):
        return "gated"
    if isinstance(error, errors.RevisionNotFoundError):
        return "no-revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "private" if status in (401, 403) else "not-found"
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return "no-file"
    if status in (401, 403):
        return "gated"
    if status is not None:
        return f"status-{status}"
    if any("Timeout" in name or "timeout" in name for name in names):
        return "timeout"
    if isinstance(error, OSError) and error.filename is not None:
        return "cache"
    return "no-network"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those that it was raised from."""
    seen = 0
    current: BaseException | None = error
    while current is not None and seen < 10:
        yield current
        current = current.__cause__ or current.__context__
        seen += 1


def _explained(hub: Any, error: Exception, repo_id: str, revision: str | None, shown: str) -> InputError | UsageError:
    """The error in one line that says what to do. Nothing that the library or the server wrote is in it."""
    kind = _kind(hub, error)
    token = "the token in use" if _has_token(hub) else "no token is set (HF_TOKEN), and without one it"
    page = f"huggingface.co/{repo_id}"
    if kind == "bad-id":
        return UsageError(f"{shown} is not a Hub id; write organisation/name or organisation/name@revision")
    if kind == "no-file":
        return InputError(f"{shown} has no config.json on the Hub: {_what_else(hub, repo_id, revision)}")
    texts = {
        "offline": f"is not in the cache, and HF_HUB_OFFLINE is set; unset it once to fetch it, {BY_HAND}",
        "gated": f"is gated: {token} has no access; accept its licence on {page} and set HF_TOKEN to a read token, {BY_HAND}",
        "private": f"does not exist on the Hub or is private: {token} has no access; check the spelling, set HF_TOKEN, {BY_HAND}",
        "not-found": "does not exist on the Hub; check the spelling (organisation/name), or give the path of a config.json",
        "no-revision": "has no such revision on the Hub; name a branch, a tag or a commit after the @",
        "timeout": f"could not be read: the Hub did not answer within {_timeout(hub):g} s; try again, {BY_HAND}",
        "cache": f"could not be stored: the cache folder is not writable; set HF_HOME to one that is, {BY_HAND}",
        "no-network": f"could not be read: the Hub cannot be reached (network, proxy or HF_ENDPOINT); try again, {BY_HAND}",
        "status-429": f"could not be read: too many requests to the Hub (status 429); wait, or set HF_TOKEN, {BY_HAND}",
    }
    if kind.startswith("status-") and kind not in texts:
        status = kind.removeprefix("status-")
        return InputError(f"{shown} could not be read: the Hub answered with status {status}; try again, {BY_HAND}")
    return InputError(f"{shown} {texts[kind]}")


def _has_token(hub: Any) -> bool:
    try:
        return bool(hub.get_token())
    except Exception:
        return False


def _what_else(hub: Any, repo_id: str, revision: str | None) -> str:
    """What kind of repository it is that has no config.json, from the names of its files, and what to give instead."""
    try:
        info = hub.HfApi().model_info(repo_id, revision=revision, timeout=_timeout(hub))
        names = {str(sibling.rfilename) for sibling in info.siblings or ()}
    except Exception:
        names = set()
    inner = sorted(name for name in names if name.endswith("/config.json") and name.count("/") == 1)
    parts = f" (it has {', '.join(printable(name, 60) for name in inner[:4])})" if inner else ""
    if "model_index.json" in names:
        return f"it is a pipeline of the diffusers library, and diffusion models are not read yet{parts}"
    if "modules.json" in names:
        return f"it is a sentence-transformers repository; download the config.json of its transformer and give its path{parts}"
    if "adapter_config.json" in names:
        return "it holds an adapter (PEFT), not a model; give its base model"
    if "params.json" in names:
        return "it has only params.json, the original format; give the repository of its Hugging Face version (often with -hf)"
    if any(name.endswith(".gguf") for name in names):
        return "it holds GGUF files, which are not read yet; give the repository that they were made from"
    return f"give a repository that has one, or the path of a config.json{parts}"


@contextmanager
def _quiet(hub: Any) -> Iterator[None]:
    """No progress bars and no warnings of the library: results are on stdout, and errors are one line."""
    import logging

    bars_were_on = not hub.utils.are_progress_bars_disabled()
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            logger.setLevel(logging.CRITICAL)
            if bars_were_on:
                hub.utils.disable_progress_bars()
            yield
        finally:
            logger.setLevel(level)
            if bars_were_on:
                hub.utils.enable_progress_bars()


def name_in_cache(path: str) -> str | None:
    """`org/name` of a file in the Hub's cache folder (`.../models--org--name/snapshots/<commit>/config.json`)."""
    for part in reversed(os.path.normpath(path).split(os.sep)):
        if part.startswith("models--") and len(part) < 200:
            return part.removeprefix("models--").replace("--", "/", 1)
    return None
