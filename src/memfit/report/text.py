"""Words and numbers as every face shows them, and the cleaning of text that came from outside."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any

from memfit.units import GiB, KiB, MiB, format_count, format_gib

if TYPE_CHECKING:
    from memfit.devices import Cluster
    from memfit.fit.answer import Answer, Kernel, Limit, Recommendation
    from memfit.job import Job

VERDICT_WORDS = {"yes": "FITS", "tight": "TIGHT", "no": "DOES NOT FIT"}
NOTICE = "estimate, verify on a real run"

_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode categories that can move the cursor, hide or reorder text: control, format, surrogate, private, separators."""


def version() -> str:
    """The version of memfit, without importlib.metadata."""
    from memfit._version import __version__

    return __version__


def plain(text: object, limit: int = 2000) -> str:
    """Text in one line that cannot steer a terminal or a page: what is invisible becomes `?`, white space one space."""
    return visible(" ".join(str(text)[:limit].split()))


def visible(text: str, keep: str = "") -> str:
    """The text with `?` for every character that is not shown but acts, except those in `keep`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join("?" if char not in keep and unicodedata.category(char) in _INVISIBLE else char for char in text)


def show_value(value: Any) -> str:
    """A value of an input as a reader writes it: `yes`, `8,192`, `bf16-true`, `not set`."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    return plain(value)


def percent(part: int, whole: int) -> str:
    """`77 %`; empty without a whole; `<1 %` for what is there but rounds to nothing."""
    if whole <= 0:
        return ""
    share = 100 * part / whole
    return "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"


def show_bytes(num_bytes: int) -> str:
    """GiB with two digits, MiB below a tenth of it, KiB below one MiB: a token of a cache is 128.00 KiB, not 0.00 GiB."""
    size = abs(num_bytes)
    if size == 0:
        return "0"
    if size < MiB:
        return f"{num_bytes / KiB:.2f} KiB" if size >= KiB else f"{num_bytes} B"
    return f"{num_bytes / MiB:.2f} MiB" if size < GiB // 10 else format_gib(num_bytes)


def component_name(name: str) -> str:
    """`KV cache` for `kv_cache`."""
    return plain(name).replace("_", " ").replace("kv ", "KV ").replace("cuda ", "CUDA ")


def cluster_name(cluster: Cluster) -> str:
    """`8x H100 SXM 80GB`."""
    return f"{cluster.count}x {plain(cluster.device.title)}"


def headline(answer: Answer) -> str:
    """The verdict in one line, its word first; without a device, what the job needs and the smallest devices that offer it."""
    if answer.verdict is not None:
        word = VERDICT_WORDS[answer.verdict.fits]
        summary = plain(answer.verdict.summary)
        return summary if summary.upper().startswith(word) else f"{word}: {summary}"
    peak = answer.estimate.peak
    text = f"NEEDS {show_bytes(peak.device_bytes)} on each device, at {peak.phase}"
    if answer.smallest_devices:
        devices = ", ".join(f"{count}x {plain(name)}" for name, count in answer.smallest_devices)
        return f"{text}; smallest GPUs that hold it: {devices}"
    return text + "; no single GPU of the catalogue holds it"


def question(answer: Answer) -> str:
    """What was asked, in one line: the kind of work, the model and the numbers that matter most."""
    workload = answer.job.workload
    model = answer.job.model
    verbs = {"train": "Training", "finetune": "Fine-tuning", "infer": "Inference with"}
    verb = verbs.get(workload.kind, workload.kind)
    parts = [f"{verb} {plain(model.name, 120)} ({format_count(model.num_parameters)} parameters)"]
    for name, label in (("batch", "batch"), ("seq", "sequence"), ("context", "context"), ("concurrency", "concurrency"),
                        ("method", ""), ("precision", ""), ("optimizer", ""), ("weight_dtype", "weights"),
                        ("quantization", "quantization")):  # fmt: skip
        value = getattr(workload, name, None)
        if value is not None and not (name == "weight_dtype" and workload.kind != "infer"):
            parts.append(f"{label} {show_value(value)}".strip())
    return ", ".join(parts)


def layout_text(job: Job) -> str:
    """The degrees and their product, and what runs over them: `pp 4 x dp_shard 16 = 64 devices, ...`; empty for one device."""
    from memfit.account.layout import DEGREES, layout_of

    one = layout_of(job)
    if one.devices == 1:
        return ""
    degrees = " x ".join(f"{name} {getattr(one, name)}" for name in reversed(DEGREES) if getattr(one, name) > 1)
    parts = [f"{degrees} = {one.devices:,} devices"]
    if one.sp:
        parts.append("sequence parallel")
    if one.ep > 1:
        parts.append(f"experts over {one.ep}")
    if one.zero:
        parts.append(f"ZeRO-{one.zero} ({one.scheme}) over {one.shards:,}")
    if one.pp > 1 and job.workload.kind != "infer":
        chunks = f" of {one.virtual_stages} chunks a stage" if one.virtual_stages > 1 else ""
        parts.append(f"{one.schedule}{chunks} over {getattr(job.workload, 'grad_accum', 1):,} micro-batches")
    return ", ".join(parts)


def interval(answer: Answer) -> str:
    """The uncertainty of the device peak in words."""
    peak = answer.estimate.peak
    low, high = show_bytes(peak.low_bytes), show_bytes(peak.high_bytes)
    if low.split(" ")[1:] == high.split(" ")[1:]:
        low = low.split(" ")[0]
    return f"90 %: {low} to {high}, 99 %: below {show_bytes(peak.safe_bytes)}"


def flags_text(recommendation: Recommendation) -> str:
    """The flags of a change as they are typed."""
    return " ".join(plain(flag) for flag in recommendation.flags)


def limit_note(limit: Limit) -> str:
    """The phase that binds at a limit, and what bounds it beside memory."""
    return plain(limit.binds) + (f"; {plain(limit.remark)}" if limit.remark else "")


def fits_word(fits: str | None) -> str:
    """The verdict of one change: a word, never a colour alone."""
    return {"yes": "fits", "tight": "tight", "no": "too large"}.get(fits or "", "")


def kernel_text(kernel: Kernel) -> str:
    """What a kernel is, for how many layers, and what its mask costs."""
    layers = "" if kernel.layers is None else f" ({kernel.layers} layers)"
    cost = f"; the mask costs {show_bytes(kernel.costs_bytes)}" if kernel.costs_bytes else ""
    return f"{kernel.why}{layers}{cost}"
