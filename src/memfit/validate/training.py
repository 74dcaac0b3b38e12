"""Measured training runs: from what a row states to a job, or to the reason why it cannot be asked.

What the row leaves open is taken from the framework's own scripts (named in `FRAMEWORKS`), never from the measured value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from memfit import account
from memfit.account.estimate import Estimate
from memfit.devices import parse_cluster
from memfit.job import FineTuning, Job, Overheads, Training
from memfit.model import Model
from memfit.units import GiB, MiB
from memfit.validate import corpus
from memfit.validate.report import LeftOut, Outcome, Row, half_digit

METRICS = {"peak_allocated": "allocated", "peak_reserved": "reserved", "nvidia_smi": "device total"}
OUTCOMES = ("fits", "oom")
UNITS = {
    "GB (1e9)": 10**9,
    "GB (1e9, max_memory_allocated)": 10**9,
    "bytes": 1,
    "bytes (HF Trainer memory metrics, rank 0)": 1,
    "GiB": GiB,
    "MiB": MiB,
}
"""Units as the sources state them; any other leaves the row out."""

PRECISIONS: dict[str, tuple[str, str | None, bool | None]] = {
    "bf16-true": ("bf16-true", None, None),
    "bf16-true; base bnb.nf4": ("bf16-true", None, False),
    "pure bf16 (bf16-true)": ("bf16-true", None, None),
    "pure bf16 (bf16-true); base weights bnb.nf4": ("bf16-true", None, False),
    "pure bf16 (bf16-true); base weights bnb.nf4-dq": ("bf16-true", None, True),
    "bf16-mixed (fp32 weights, bf16 autocast)": ("bf16-mixed", "fp32", None),
    "weights bfloat16, adapters autocast to fp32=True, use_amp=False": ("bf16-true", None, None),
    "weights bfloat16": ("bf16-true", None, None),
    "autocast bf16 (bf16=True), weights bfloat16": ("bf16-mixed", "bf16", None),
    # the plugin's 4-bit config sets bnb_4bit_use_double_quant; the steady bytes that the rows state agree with it
    "weights bfloat16, base 4-bit bitsandbytes": ("bf16-true", None, True),
    "autocast bf16 (bf16=True), weights bfloat16, base 4-bit bitsandbytes": ("bf16-mixed", "bf16", True),
}
"""A row's words -> (--precision, --weight-dtype, double quantisation of a 4-bit base)"""

LITGPT_MODULES = {
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "value (default)": ("v_proj",),
    "projection": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "head": (),
}
"""LitGPT's names of what gets adapters; memfit puts none on the output head."""
FAMILY_MODULES = {
    "gpt_neox": {"q_proj": "query_key_value", "k_proj": "query_key_value", "v_proj": "query_key_value", "o_proj": "dense",
                 "gate_proj": "dense_h_to_4h", "up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h"},
    "phi": {"o_proj": "dense", "gate_proj": "fc1", "up_proj": "fc1", "down_proj": "fc2"},
    "phi3": {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
             "up_proj": "gate_up_proj"},
}  # fmt: skip
"""By family: what Llama's module names are called there. An adapter on one of three fused projections is counted on all."""
MODES = {"full": "full", "LoRA": "lora", "QLoRA": "qlora"}


class Framework(NamedTuple):
    """A program that ran rows of the corpus, and what its scripts fix. `pattern` matches the row's `framework`."""

    name: str
    title: str
    pattern: str
    optimizer: str
    """Used where the row does not name one."""
    settings: Mapping[str, Any]
    adapters: Mapping[str, Any]
    runtime: str
    about: str
    config: tuple[tuple[str, Any], ...] = ()
    """What its own modelling code makes of every config."""
    loss_chunk: int = 0
    """Tokens of each sequence in a chunk of its loss."""
    quantised: Mapping[str, Any] = {}
    """What its scripts fix beside `adapters` for a 4-bit base."""
    activations: Mapping[str, str] = {}
    """Activation functions of the config that its own modelling code replaces by another implementation."""


FRAMEWORKS = (
    Framework(
        name="litgpt",
        title="LitGPT",
        pattern=r"LitGPT( commit .*)?$",
        optimizer="adamw",
        settings={"outputs": "kept", "padding": "none", "attention": "sdpa", "loss": "chunked-output"},
        loss_chunk=128,
        # litgpt/finetune/lora.py: lora_dropout 0.05; adapters in the precision of the run; it pins bitsandbytes 0.42
        adapters={"lora_dtype": "bf16", "lora_dropout": 0.05},
        activations={"gelu_new": "gelu_pytorch_tanh"},  # litgpt/model.py GptNeoxMLP: functional.gelu(approximate=...)
        config=(("tie_word_embeddings", False),),
        quantised={"quantizer": "bitsandbytes@0.42"},
        runtime="torch",
        about=(
            "LitGPT has its own modelling code: query, key and value in one matrix with one adapter. memfit counts the Hugging "
            "Face model with what is known of it: a head never tied to the embedding, a loss over chunks of 128 tokens' logits, "
            "bitsandbytes 0.42, which keeps the input of every 4-bit product, and torch's fused GELU where the config names GELU "
            "in Python. The sequence is the cap or the longest sample of the data; the batches that ran may have been shorter."
        ),
    ),
    Framework(
        name="peft",
        title="PEFT's method comparison",
        pattern=r"PEFT method_comparison MetaMathQA",
        optimizer="adamw",
        settings={"outputs": "kept", "padding": "right", "attention": "sdpa"},
        adapters={"lora_dtype": "fp32", "lora_dropout": 0.0},
        runtime="hf",
        about=(
            "A raw loop over the Hugging Face model with padded batches. The sequence is a cap (768): batches are padded to "
            "their own longest sample. An evaluation that generates with batch 50 runs in the same process and counts into "
            "what is reserved."
        ),
    ),
    Framework(
        name="trainer",
        title="Hugging Face SFTTrainer",
        pattern=r"fms-acceleration bench, framework_config=(none|baseline-peft-bnb|accelerated-peft-bnb) ",
        optimizer="adamw-foreach",
        settings={"padding": "none", "attention": "flash"},
        adapters={"lora_dtype": "fp32", "lora_dropout": 0.0},
        runtime="hf-trainer@4.48",
        about=(
            "Sequences of 4,096 tokens, checkpointing, FlashAttention, an A100. Neither the release nor the optimizer is in the "
            "file: releases of that time shift the logits (asked with `hf-trainer@4.48`), and the Trainer's default was "
            "adamw_torch (foreach). The baseline of the 4-bit rows upcasts norms, embedding and head to "
            "fp32 first (prepare_model_for_kbit_training), and TRL casts embedding and head back: `--kbit-prep norms`, under "
            "autocast, without which fp32 hidden states do not go into a 16-bit head. The plugin's own preparation does neither."
        ),
    ),
    Framework(
        name="trainer-liger",
        title="Hugging Face SFTTrainer with Liger's loss",
        pattern=r"fms-acceleration bench, framework_config=(foak-fast-kernels-liger|accelerated-peft-bnb-foak-liger) ",
        optimizer="adamw-foreach",
        settings={"padding": "none", "attention": "flash", "loss": "fused"},
        adapters={"lora_dtype": "fp32", "lora_dropout": 0.0},
        runtime="hf-trainer@4.48",
        about=(
            "The same benchmark with Liger's fused loss. Its plugin also replaces RMSNorm, rotary embedding and adapters by "
            "kernels of its own; the rows are asked with eager modules, as their peaks say. Those of full training bind in the "
            "optimizer step."
        ),
    ),
)


def framework_of(row: Mapping[str, Any]) -> Framework | None:
    """The framework whose pattern matches."""
    return next((one for one in FRAMEWORKS if re.match(one.pattern, row["framework"])), None)


def left_out(row: Mapping[str, Any], file: str) -> LeftOut | None:
    """Why the row cannot be asked; `None` if it can."""
    reason, detail = _reason(row)
    return LeftOut(id=row["id"], file=file, reason=reason, detail=detail) if reason else None


def _reason(row: Mapping[str, Any]) -> tuple[str, str]:
    metric = row["metric"]
    if metric == "peak_unspecified":
        return "the source does not say which memory figure it is", ""
    if metric not in METRICS and metric not in OUTCOMES:
        return "the metric is none of allocated, reserved and device total", metric
    if framework_of(row) is None:
        return "the program's kernels or modelling code are not known", _program(row["framework"])
    variant = re.search(r"(bdlora|lorafa|mica)$", row["id"])
    if row["mode"] not in MODES or variant:
        return "the method is not expressible", variant.group(1) if variant else row["mode"].removeprefix("PEFT:")
    missing = [name for name in ("micro_batch", "seq_len", "precision") if name not in row]
    if missing:
        return "a setting that decides memory is not stated", ", ".join(missing)
    if row.get("optimizer", "AdamW") not in ("AdamW", "torch.optim.AdamW"):
        return "the optimizer is not expressible", row["optimizer"]
    if row["precision"] not in PRECISIONS:
        return "the precision is not expressible", row["precision"]
    if metric in METRICS and row.get("unit") not in UNITS:
        return "the unit is not clear", str(row.get("unit"))
    return ("", "") if "on" in row else ("the device is not stated", "")


def _program(framework: str) -> str:
    """The program's name without its version and settings; of the plugin benchmark, which plugin."""
    plugin = re.search(r"framework_config=([\w-]+)", framework)
    return f"fms-acceleration {plugin.group(1)}" if plugin else re.sub(r" \(.*| config .*|, .*|;.*| [0-9a-f]{8}$", "", framework)


def _targets(row: Mapping[str, Any], family: str) -> tuple[str, ...]:
    """Modules with adapters; LitGPT's default where its tables state none: query and value."""
    stated = (row.get("lora") or {}).get("targets") or ["query", "value"]
    names = stated.split() if isinstance(stated, str) else list(stated)
    found = [module for name in names for module in LITGPT_MODULES.get(name, (name,))]
    names_here = FAMILY_MODULES.get(family, {}) if "LitGPT" in row["framework"] else {}
    return tuple(dict.fromkeys(names_here.get(module, module) for module in found))


def rank_of(model: Model, trainable: int) -> int:
    """The rank that gives so many trained parameters on query and value: r = trainable / (L (h + q + h + kv)).

    Raises:
        ValueError: no whole rank does.
    """
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    rank, rest = divmod(trainable, model.num_layers * (2 * model.hidden_size + q + kv))
    if rest or not rank:
        raise ValueError(f"{trainable} trained parameters are not adapters on query and value of {model.name}")
    return rank


def job_of(row: Mapping[str, Any], metric: str) -> Job:
    """The question that the row answers. What the metric does not count is set to nothing: the interval is the metric's."""
    framework = framework_of(row)
    assert framework is not None
    model = corpus.model_of(row["config"], framework.config, tuple(framework.activations.items()))
    precision, weight_dtype, double_quant = PRECISIONS[row["precision"]]
    settings: dict[str, Any] = {
        "batch": row["micro_batch"],
        "seq": row["seq_len"],
        "grad_accum": row.get("grad_accum", 1),
        "precision": precision,
        "weight_dtype": weight_dtype,
        "optimizer": "adamw" if "optimizer" in row else framework.optimizer,
        "checkpointing": "full" if str(row.get("activation_checkpointing", "off")).startswith("on") else "none",
        **framework.settings,
    }
    if framework.loss_chunk:
        settings["loss_chunks"] = -(-row["seq_len"] // framework.loss_chunk)
    lora = row.get("lora") or {}
    mode = MODES[row["mode"]]
    workload: Training
    if mode == "full":
        workload = Training(**settings)
    else:
        workload = FineTuning(
            method=mode,
            lora_rank=lora.get("rank") or rank_of(model, lora["trainable_params"]),
            lora_targets=",".join(_targets(row, model.family)),
            double_quant=True if double_quant is None else double_quant,
            **framework.adapters,
            **(framework.quantised if mode == "qlora" else {}),
            **settings,
        )
        if mode == "qlora" and "config=baseline-peft-bnb" in row["framework"]:
            workload = workload.replace(kbit_prep="norms", precision="bf16-mixed", weight_dtype="bf16")
        elif mode == "qlora":
            workload = workload.replace(kbit_prep="none")
    overheads = Overheads(
        runtime=framework.runtime,
        cuda_context=None if metric == "device total" else 0,
        fragmentation=0 if metric == "allocated" else None,
    )
    return Job(model=model, workload=workload, overheads=overheads, cluster=parse_cluster(row["on"]), headroom=0.0)


def _estimate(row: Mapping[str, Any], metric: str) -> Estimate:
    return account.estimate(account.resolve(job_of(row, metric)).job)


def measured_bytes(row: Mapping[str, Any]) -> int:
    """The stated value in bytes."""
    value: float = row["value"]
    return round(value * UNITS[row["unit"]])


def group_name(row: Mapping[str, Any]) -> str:
    """`litgpt lora`, `peft full` ..."""
    framework = framework_of(row)
    assert framework is not None
    return f"{framework.name} {MODES[row['mode']]}"


def _static_bytes(estimate: Estimate) -> int:
    """What stays between steps: weights, optimizer states and library workspaces."""
    return sum(one.bytes for one in estimate.ranks[0].components if one.name in ("weights", "optimizer_states", "workspace"))


STEADY = re.compile(r"steady allocated (\d+) bytes")
DEVICE_TOTAL = re.compile(r"nvidia-smi peak (\d+)(?:\.0)? MiB")


def _row(row: Mapping[str, Any], metric: str, measured: int, rounding: int = 0) -> Row:
    """One comparison of the peak by one metric."""
    peak = _estimate(row, metric).peak
    predicted = {"allocated": peak.allocated_bytes, "reserved": peak.reserved_bytes, "device total": peak.device_bytes}[metric]
    return Row(
        id=row["id"],
        measured=measured,
        predicted=predicted,
        relative_to=measured,
        low=peak.low_bytes,
        high=peak.high_bytes,
        rounding=rounding,
        source=row["source"],
    )


def _outcome(row: Mapping[str, Any]) -> Outcome:
    job = job_of(row, "device total")
    peak = _estimate(row, "device total").peak
    usable = job.cluster.usable_bytes if job.cluster else 0
    predicted = "oom" if peak.low_bytes > usable else "fits" if peak.high_bytes <= usable else "tight"
    return Outcome(id=row["id"], observed=row["metric"], predicted=predicted, source=row["source"])


class Measured(NamedTuple):
    """Rows by group, outcomes, and what was left out."""

    rows: dict[str, list[Row]]
    outcomes: list[Outcome]
    left_out: list[LeftOut]


def compare(rows: list[dict[str, Any]], file: str) -> Measured:
    """Every row that can be asked, by the metric that it states; the Trainer's rows also state two other figures."""
    found: dict[str, list[Row]] = {}
    outcomes: list[Outcome] = []
    without: list[LeftOut] = []
    for row in rows:
        reason = left_out(row, file)
        if reason is not None:
            without.append(reason)
            continue
        if row["metric"] in OUTCOMES:
            outcomes.append(_outcome(row))
            continue
        measured = measured_bytes(row)
        metric = METRICS[row["metric"]]
        found.setdefault(group_name(row), []).append(_row(row, metric, measured, half_digit(row["value"], UNITS[row["unit"]])))
        notes = row.get("notes", "")
        steady, total = STEADY.search(notes), DEVICE_TOTAL.search(notes)
        if steady:
            value, predicted = int(steady.group(1)), _static_bytes(_estimate(row, metric))
            one = Row(id=row["id"], measured=value, predicted=predicted, relative_to=value, source=row["source"])
            found.setdefault("trainer steady", []).append(one)
        if total:
            found.setdefault("trainer device", []).append(_row(row, "device total", int(total.group(1)) * MiB))
    return Measured(found, outcomes, without)
