"""Reading a config from the Hub: the real library against a real server on 127.0.0.1 that answers as the Hub does.

The library reads its variables when it is imported, so every case runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import memfit
from memfit.sources.hub import _within

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}
TOKEN = "hf_secretsecretsecret"
FILES = {
    "org/diffusion": ["model_index.json", "unet/config.json", "vae/config.json"],
    "org/sentences": ["modules.json", "0_Transformer/config.json"],
    "org/original": ["params.json", "consolidated.00.pth"],
    "org/adapter": ["adapter_config.json", "adapter_model.safetensors"],
    "org/gguf": ["model-q4_k_m.gguf"],
    "org/empty": ["README.md"],
}
"""Repositories without a config.json, and the names of the files that they do have."""


class Hub(BaseHTTPRequestHandler):
    """The two kinds of address that the library asks: a file of a repository, and what a repository holds."""

    protocol_version = "HTTP/1.1"
    log: list[tuple[str, str, str | None]]
    released: threading.Event

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.log.append((self.command, self.path, self.headers.get("Authorization")))
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.describe("/".join(parts[2:4]))
        elif len(parts) == 5 and parts[2] == "resolve" and parts[4] == "config.json":
            self.file("/".join(parts[:2]), parts[3])
        else:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound"})

    def describe(self, repo: str) -> None:
        siblings = [{"rfilename": name} for name in FILES.get(repo, ())]
        self.send(200, json.dumps({"id": repo, "siblings": siblings}).encode(), {"Content-Type": "application/json"})

    def file(self, repo: str, revision: str) -> None:
        if repo == "org/model" and revision in ("main", "v1", COMMIT):
            config = {**CONFIG, "revision_read": revision}
            self.send(200, json.dumps(config).encode(), self.found(f'"etag-{revision}"'))
        elif repo == "org/model":
            self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif repo == "org/gated" and self.headers.get("Authorization") == f"Bearer {TOKEN}":
            self.send(200, json.dumps(CONFIG).encode(), self.found('"etag-gated"'))
        elif repo == "org/gated":
            self.send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model org/gated is restricted."})
        elif repo == "org/forbidden":
            self.send(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "You are not in the authorized list."})
        elif repo == "org/private":
            self.send(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif repo in FILES:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        elif repo == "org/large":
            self.send(200, b"", {**self.found('"etag-large"'), "Content-Length": str(100 << 20)})
        elif repo == "org/unknown-size":
            self.send(200, b"", {**self.found('"etag-unknown"'), "Content-Length": None})
        elif repo == "org/broken":
            self.send(200, b'{"model_type": ', self.found('"etag-broken"'))
        elif repo == "org/busy":
            self.send(503, b"", {})
        elif repo == "org/limited":
            self.send(429, b"", {})
        elif repo == "org/hangs":
            self.released.wait(60)
        else:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    @staticmethod
    def found(etag: str) -> dict[str, str | None]:
        return {"ETag": etag, "X-Repo-Commit": COMMIT, "Content-Type": "application/json"}

    def send(self, status: int, body: bytes, headers: dict[str, str | None]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Connection": "close", **headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Server:
    """The server's address and what it was asked."""

    def __init__(self, server: ThreadingHTTPServer, log: list[tuple[str, str, str | None]]) -> None:
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self.log = log


@pytest.fixture
def hub() -> Iterator[Server]:
    handler = type("Handler", (Hub,), {"log": [], "released": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield Server(server, handler.log)
    handler.released.set()
    server.shutdown()
    server.server_close()
    thread.join()


CODE = """
import json, sys
from memfit.errors import MemfitError
from memfit.sources import load_config
for text in sys.argv[1:]:
    try:
        found = load_config(text)
        print(json.dumps({"config": found.config, "name": found.name, "source": found.source}))
    except MemfitError as error:
        print(json.dumps({"error": str(error), "exit_code": error.exit_code}))
"""


def load(texts: list[str], home: Path, endpoint: str, **variables: str) -> list[dict]:
    """What `load_config` says to each text, in one fresh process with these variables and no others of the Hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    environment = {
        **kept, "HOME": str(home), "HF_HOME": str(home / "hf"), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(Path(memfit.__file__).parents[1]), **variables,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CODE, *texts], capture_output=True, text=True, timeout=120, env=environment, cwd=home, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert TOKEN not in done.stdout
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert all("\n" not in answer.get("error", "") for answer in answers)
    return answers


def test_reads_caches_and_answers_from_the_cache(hub, tmp_path):
    (found,) = load(["org/model"], tmp_path, hub.url)
    assert found["config"] == {**CONFIG, "revision_read": "main"}
    assert found["name"] == "org/model"
    assert found["source"] == "config.json of org/model at 0123456789ab on the Hugging Face Hub"
    assert [method for method, _, _ in hub.log].count("GET") == 1
    assert all(path == "/org/model/resolve/main/config.json" for _, path, _ in hub.log)
    assert all(token is None for _, _, token in hub.log)

    hub.log.clear()
    (again,) = load(["org/model"], tmp_path, hub.url)
    assert again["config"] == found["config"]
    assert [method for method, _, _ in hub.log] == ["HEAD"]

    hub.log.clear()
    (offline,) = load(["org/model"], tmp_path, hub.url, HF_HUB_OFFLINE="1")
    assert offline["config"] == found["config"]
    assert "cached copy" in offline["source"]
    assert hub.log == []

    (unreachable,) = load(["org/model"], tmp_path, "http://127.0.0.1:9")
    assert unreachable["config"] == found["config"]
    assert "cached copy (the Hub was not reached)" in unreachable["source"]


def test_revisions(hub, tmp_path):
    v1, commit, missing = load(["org/model@v1", f"org/model@{COMMIT}", "org/model@v2"], tmp_path, hub.url)
    assert v1["config"]["revision_read"] == "v1"
    assert v1["name"] == "org/model@v1"
    assert commit["config"]["model_type"] == "llama"
    assert missing["error"] == "org/model@v2 has no such revision on the Hub; name a branch, a tag or a commit after the @"
    assert missing["exit_code"] == 1


def test_a_preset_is_not_asked_for_but_a_revision_of_it_is(hub, tmp_path):
    preset, revision = load(["Qwen/Qwen3-8B", "Qwen/Qwen3-8B@main"], tmp_path, hub.url)
    assert preset["name"] == "qwen3-8b"
    assert "does not exist on the Hub" in revision["error"]
    assert {path for _, path, _ in hub.log} == {"/Qwen/Qwen3-8B/resolve/main/config.json"}


def test_the_token_is_sent_and_never_shown(hub, tmp_path):
    found, forbidden, private = load(["org/gated", "org/forbidden", "org/private"], tmp_path, hub.url, HF_TOKEN=TOKEN)
    assert found["config"] == CONFIG
    assert {token for _, _, token in hub.log} == {f"Bearer {TOKEN}"}
    assert forbidden["error"].startswith("org/forbidden is gated: the token in use has no access; accept its licence on")
    assert "org/private does not exist on the Hub or is private: the token in use has no access" in private["error"]


def test_without_a_token(hub, tmp_path):
    gated, private = load(["org/gated", "org/private"], tmp_path, hub.url)
    assert gated["error"] == (
        "org/gated is gated: no token is set (HF_TOKEN), and without one it has no access; accept its licence on "
        "huggingface.co/org/gated and set HF_TOKEN to a read token, or download its config.json by hand and give its path"
    )
    assert gated["exit_code"] == 1
    assert "does not exist on the Hub or is private: no token is set (HF_TOKEN)" in private["error"]


def test_repositories_without_a_config(hub, tmp_path):
    names = list(FILES)
    words = dict(zip(names, (answer["error"] for answer in load(names, tmp_path, hub.url)), strict=True))
    assert "diffusers" in words["org/diffusion"]
    assert "(it has unet/config.json, vae/config.json)" in words["org/diffusion"]
    assert "a sentence-transformers repository" in words["org/sentences"]
    assert "0_Transformer/config.json" in words["org/sentences"]
    assert "it has only params.json, the original format" in words["org/original"]
    assert "an adapter (PEFT), not a model; give its base model" in words["org/adapter"]
    assert "GGUF files" in words["org/gguf"]
    assert words["org/empty"].startswith("org/empty has no config.json on the Hub: give a repository that has one, or the path")


def test_what_the_server_must_not_send(hub, tmp_path):
    large, unknown, broken = load(["org/large", "org/unknown-size", "org/broken"], tmp_path, hub.url)
    assert large["error"].startswith("org/large: its config.json is of 104,857,600 bytes; at most 4,194,304 bytes (4 MiB)")
    assert "of unknown size" in unknown["error"]
    assert broken["error"].startswith("config.json of org/broken on the Hub, line 1, column 16: not JSON, it ends too early")
    assert [path for method, path, _ in hub.log if method == "GET"] == ["/org/broken/resolve/main/config.json"]


def test_errors_of_the_server(hub, tmp_path):
    missing, busy, limited = load(["org/nothing", "org/busy", "org/limited"], tmp_path, hub.url)
    assert missing["error"].startswith("org/nothing does not exist on the Hub; check the spelling")
    assert "the Hub answered with status 503; try again, or download its config.json by hand" in busy["error"]
    assert "too many requests to the Hub (status 429)" in limited["error"]


def test_no_answer_is_waited_for_only_so_long(hub, tmp_path):
    (found,) = load(["org/hangs"], tmp_path, hub.url, HF_HUB_ETAG_TIMEOUT="1")
    assert "the Hub did not answer within 1 s; try again, or download its config.json by hand and give its path" in found["error"]


def test_a_library_that_hangs_is_left_alone():
    released = threading.Event()
    with pytest.raises(TimeoutError):
        _within(0.01, released.wait)
    released.set()
    assert _within(10, lambda: 3) == 3


def test_a_cache_that_cannot_be_written(hub, tmp_path):
    (tmp_path / "file").touch()
    (found,) = load(["org/model"], tmp_path, hub.url, HF_HOME=str(tmp_path / "file"))
    assert "the cache folder is not writable; set HF_HOME to one that is" in found["error"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("HF_HUB_ETAG_TIMEOUT", "abc", "HF_HUB_ETAG_TIMEOUT is 'abc' and must be a positive whole number of seconds"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "1.5", "HF_HUB_DOWNLOAD_TIMEOUT is '1.5' and must be a positive whole number of seconds"),
        ("HF_HUB_ETAG_TIMEOUT", "-1", "HF_HUB_ETAG_TIMEOUT is '-1' and must be a positive whole number of seconds"),
        ("HF_ENDPOINT", "http://[::1", "an environment variable is wrong, one of HF_"),
    ],
)
def test_variables_that_the_library_cannot_read_are_one_line(hub, tmp_path, name, value, words):
    (found,) = load(["org/model"], tmp_path, hub.url, **{name: value})
    assert found["error"].startswith("org/model: huggingface_hub cannot be used: ")
    assert words in found["error"]
    assert hub.log == []


def test_offline_and_unreachable_without_a_cached_copy(hub, tmp_path):
    (offline,) = load(["org/model"], tmp_path, hub.url, HF_HUB_OFFLINE="1")
    assert offline["error"].startswith("org/model is not in the cache, and HF_HUB_OFFLINE is set; unset it once to fetch it")
    assert hub.log == []
    (unreachable,) = load(["org/model"], tmp_path, "http://127.0.0.1:9")
    assert "the Hub cannot be reached (network, proxy or HF_ENDPOINT)" in unreachable["error"]


def test_what_is_no_hub_id_is_not_asked_for(hub, tmp_path):
    (answer,) = load(["org/mo..del"], tmp_path, hub.url)
    assert answer["error"] == "org/mo..del is not a Hub id; write organisation/name or organisation/name@revision"
    assert answer["exit_code"] == 2
    assert hub.log == []
