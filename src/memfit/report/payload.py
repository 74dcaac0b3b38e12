"""An answer as one JSON object. The keys are a contract with other tools: they change only by addition.

`memfit/data/answer.schema.json` describes the object; the tests hold real answers against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memfit.report.text import NOTICE, version

if TYPE_CHECKING:
    from memfit.account.estimate import CacheUse, Component, Peak, Phase, Rank
    from memfit.devices import Cluster
    from memfit.fit.answer import Answer
    from memfit.job import Job

SCHEMA_VERSION = 1


def _parallelism(job: Job) -> dict[str, Any]:
    """The degrees of the layout; `zero` is the ZeRO stage, `sp` the devices that share a sequence beside `tp`."""
    from memfit.account.layout import layout_of

    one = layout_of(job)
    replicas = 1 if job.cluster is None else job.cluster.count // (one.devices // one.dp_replicate)
    return {
        "dp_replicate": max(replicas, one.dp_replicate),
        "dp_shard": one.dp_shard,
        "tp": one.tp,
        "sp": one.tp if one.sp else 1,
        "cp": one.cp,
        "pp": one.pp,
        "ep": one.ep,
        "zero": one.zero,
        "sharding": one.scheme or None,
        "schedule": one.schedule if one.pp > 1 else None,
        "virtual_stages": one.virtual_stages,
        "offload": one.offload,
    }


def to_json(answer: Answer) -> dict[str, Any]:
    """The answer as plain dicts, lists, strings and numbers; bytes are integers."""
    estimate = answer.estimate
    job = answer.job
    return {
        "schema_version": SCHEMA_VERSION,
        "memfit_version": version(),
        "notice": NOTICE,
        "model": _model(answer),
        "workload": _workload(answer),
        "parallelism": _parallelism(job),
        "runtime": _runtime(job.overheads.runtime),
        "device": None if job.cluster is None else _device(job.cluster),
        "ranks": [_rank(rank) for rank in estimate.ranks],
        "peak": {"rank": estimate.worst.rank, **_peak(estimate.peak)},
        "host": {"bytes": estimate.host_bytes},
        "kv_cache": None if estimate.cache is None else _cache(estimate.cache),
        "verdict": None if answer.verdict is None else answer.verdict.as_dict(),
        "limits": {name: limit.as_dict() for name, limit in answer.limits.items()},
        "recommendations": [{**one.as_dict(), "flags": list(one.flags)} for one in answer.recommendations],
        "rule_of_thumb": None if answer.rule_of_thumb is None else answer.rule_of_thumb.as_dict(),
        "assumptions": [
            {"name": one.name, "value": json_value(one.value), "why": one.why, "flag": one.flag} for one in answer.assumptions
        ],
        "warnings": [{"code": one.code, "text": one.text} for one in answer.warnings],
        "verify": [{"how": one.why, "command": one.command} for one in answer.verify],
        "next": [{"why": one.why, "command": one.command} for one in answer.next],
        "overheads": {
            "communication": job.overheads.communication,
            "cuda_context": job.overheads.cuda_context,
            "workspace": job.overheads.workspace,
            "fragmentation": job.overheads.fragmentation,
        },
        "headroom": job.headroom,
        "smallest_devices": [{"device": name, "count": count} for name, count in answer.smallest_devices],
        "notes": list(estimate.notes),
        "kernels": [one.as_dict() for one in answer.kernels],
    }


def json_value(value: Any) -> Any:
    """The value itself if JSON has it, a list for a tuple, else its text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, list | tuple):
        return [json_value(one) for one in value]
    if isinstance(value, dict):
        return {str(key): json_value(one) for key, one in value.items()}
    return str(value)


def trainable_parameters(answer: Answer) -> int:
    """Parameters that the optimizer updates: none in inference, the adapters' in LoRA and QLoRA, else all."""
    counted = answer.estimate.trainable_parameters
    workload = answer.job.workload
    if counted is not None:
        return counted
    if workload.kind == "infer":
        return 0
    if getattr(workload, "method", "full") == "full":
        return answer.job.model.num_parameters
    from memfit.fit.thumb import adapter_parameters
    from memfit.job import FineTuning

    assert isinstance(workload, FineTuning)
    return adapter_parameters(workload, answer.estimate)


def _model(answer: Answer) -> dict[str, Any]:
    model = answer.job.model
    return {
        "name": model.name,
        "family": model.family,
        "parameters": model.num_parameters,
        "active_parameters": model.facts.get("active_parameters", model.num_parameters),
        "trainable_parameters": trainable_parameters(answer),
        "source": model.source,
        "architecture": model.architecture,
    }


def _workload(answer: Answer) -> dict[str, Any]:
    workload = answer.job.workload
    fields = {name: json_value(getattr(workload, name)) for name in workload.field_names}
    return {"kind": workload.kind, **fields}


def _runtime(name: str | None) -> dict[str, Any]:
    from memfit.runtimes import DEFAULT_RUNTIME, find_runtime

    runtime = find_runtime(name) if name else DEFAULT_RUNTIME
    return {"name": runtime.name, "version": runtime.version}


def _device(cluster: Cluster) -> dict[str, Any]:
    device = cluster.device
    return {
        "name": device.name,
        "count": cluster.count,
        "marketed_bytes": device.marketed_bytes,
        "usable_bytes": cluster.usable_bytes,
        "id": device.id,
        "vendor": device.vendor,
        "kind": device.kind,
        "reading": cluster.reading,
        "usable_source": device.usable_source,
    }


def _component(component: Component) -> dict[str, Any]:
    return {
        "name": component.name,
        "bytes": component.bytes,
        "at_peak_bytes": component.at_peak_bytes,
        "low_bytes": component.low_bytes,
        "high_bytes": component.high_bytes,
        "counted_in": component.counted_in,
        "basis": component.basis,
        "formula": component.formula,
        "source": component.source,
    }


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "name": phase.name,
        "allocated_bytes": phase.allocated_bytes,
        "components": dict(phase.components),
        "first_step": phase.first_step,
    }


def _peak(peak: Peak) -> dict[str, Any]:
    return peak.as_dict()


def _rank(rank: Rank) -> dict[str, Any]:
    forward_end = None
    if rank.kept_bytes is not None:
        forward_end = {"kept_bytes": rank.kept_bytes, "allocated_bytes": rank.forward_end_bytes}
    return {
        "rank": rank.rank,
        "count": rank.count,
        "holds": rank.holds or None,
        "components": [_component(component) for component in rank.components],
        "phases": [_phase(phase) for phase in rank.phases],
        "forward_end": forward_end,
        "backward_end": None if rank.backward_end_bytes is None else {"allocated_bytes": rank.backward_end_bytes},
        "peak": _peak(rank.peak),
    }


def _cache(cache: CacheUse) -> dict[str, Any]:
    return {**cache.as_dict(), "max_concurrency": json_value(cache.max_concurrency)}
