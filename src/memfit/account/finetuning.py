"""What fine-tuning trains: from the workload's words to the policy of its kernels; what would train nothing is refused."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from memfit.account.selection import GENERAL, layers_of, trained_parameters
from memfit.errors import UsageError, did_you_mean
from memfit.job import FineTuning
from memfit.kernels.context import ALL_LINEAR, Adapter, Choice, KernelPolicy, Prefix, target_of
from memfit.model import Model
from memfit.precision import QUANTIZED, PrecisionPolicy
from memfit.runtimes import Runtime

if TYPE_CHECKING:
    from memfit.job import Training

ADAPTER_METHODS = ("lora", "qlora", "dora", "ia3")
IA3_TARGETS = ("k_proj", "v_proj", "down_proj", "fc2", "query_key_value", "dense_4h_to_h", "key", "value")
"""Modules that PEFT scales where the config names none, of those that the model has (utils/constants.py)."""
IA3_INPUTS = ("down_proj", "fc2", "dense_4h_to_h", "wo", "w2", "output_linear", "c_proj")
"""Those whose input is scaled: the second product of a feed-forward."""
KEEPS_INPUTS_BEFORE = (0, 43, 2)
"""bitsandbytes 0.43.2: "activations being unnecessary for frozen parameters" are no longer kept (its changelog)."""


LONGEST_LIST = 24
"""Modules named in a message."""


@lru_cache(maxsize=256)
def names(text: str) -> tuple[str, ...]:
    """A list with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def choice_of(workload: FineTuning) -> Choice | None:
    """Which of the model's own parameters are trained; `None` where it is all of them, or none."""
    freeze, unfreeze = names(workload.freeze), names(workload.unfreeze)
    if workload.method == "freeze" and not (freeze or unfreeze):
        unfreeze = ("head",)
    if workload.lora_bias == "all":
        unfreeze = (*unfreeze, "bias")
    elif workload.lora_bias == "lora_only":
        unfreeze = (*unfreeze, "bias of " + workload.lora_targets)
    base = workload.method == "full" or (workload.method == "freeze" and bool(freeze))
    saved = names(workload.modules_to_save)
    return Choice(base, freeze, unfreeze, saved) if freeze or unfreeze or saved else None


def is_quantized(workload: Training) -> bool:
    """Whether the linear layers are stored in 4 bits."""
    return isinstance(workload, FineTuning) and workload.method == "qlora"


def _keeps_input(workload: FineTuning) -> bool:
    release = (workload.quantizer or "").partition("@")[2]
    return bool(release) and tuple(int(part) for part in release.split(".")) < KEEPS_INPUTS_BEFORE


def _adapter(model: Model, workload: FineTuning) -> tuple[Adapter, tuple[str, ...]]:
    kind = "dora" if workload.use_dora or workload.method == "dora" else "ia3" if workload.method == "ia3" else "lora"
    targets = names(workload.lora_targets)
    scales = tuple(one for one in targets if one in IA3_INPUTS) if kind == "ia3" else ()
    dropout = 0.0 if kind == "ia3" else workload.lora_dropout
    return Adapter(workload.lora_rank, workload.lora_dtype, dropout, kind, scales), targets


def fields(model: Model, workload: Training, precision: PrecisionPolicy) -> dict[str, Any]:
    """The fields of a kernel policy that say what is trained, beside what, in which format."""
    if not isinstance(workload, FineTuning):
        return {"precision": precision}
    choice = choice_of(workload)
    found: dict[str, Any] = {
        "precision": precision,
        "train_all": workload.method == "full" and choice is None,
        "choice": choice,
    }
    if workload.method in ADAPTER_METHODS:
        found["adapter"], found["adapter_targets"] = _adapter(model, workload)
    if workload.method == "prompt":
        found |= {"virtual_tokens": workload.virtual_tokens, "virtual_dtype": workload.lora_dtype}
    if workload.method == "prefix":
        found |= {"prefix": _prefix(model, workload), "causal_mask": True}
    if is_quantized(workload):
        stored = QUANTIZED["nf4-dq" if workload.double_quant else "nf4"]
        found["quantized"] = stored._replace(keeps_input=True) if _keeps_input(workload) else stored
        if workload.kbit_prep == "full":
            found["precision"] = precision._replace(weight="fp32")
        elif workload.kbit_prep == "norms" and precision.weight != "fp32":
            found["norm_dtype"] = "fp32"
    return found


def _prefix(model: Model, workload: FineTuning) -> Prefix:
    """Keys and values of all layers, as the cache holds them; the projection's default width is that of a layer's keys."""
    layer = max(cache.elements_per_token for cache, _ in model.caches) // 2
    width = sum(cache.elements_per_token * layers for cache, layers in model.caches)
    hidden = (workload.prefix_hidden or layer) if workload.prefix_projection else 0
    return Prefix(workload.virtual_tokens, width, layer, hidden, workload.lora_dtype)


def virtual_tokens(workload: Training) -> int:
    """Trained tokens that come before each sequence and run through the layers with it."""
    return workload.virtual_tokens if isinstance(workload, FineTuning) and workload.method == "prompt" else 0


def virtual_keys(workload: Training) -> int:
    """Tokens of which attention reads trained keys and values; no others of them are computed."""
    return workload.virtual_tokens if isinstance(workload, FineTuning) and workload.method == "prefix" else 0


def _check_prefix(model: Model, workload: FineTuning) -> None:
    """PEFT puts the prefix into the cache object of a decoder, which checkpointing does without."""
    ops = [op for segment in model.segments for block in segment.blocks for op in block.ops]
    if model.kind != "decoder" or not model.caches:
        raise UsageError(f"--method prefix puts keys and values into the cache of a decoder; {model.family} has none")
    if model.states or not any(op.attributes.get("cached") for op in ops):
        raise UsageError(f"--method prefix needs layers that all cache keys and values; {model.family} has others")
    if workload.checkpointing != "none":
        raise UsageError("--method prefix excludes --checkpointing: transformers has no cache under it, and PEFT refuses it")


def resolve(model: Model, workload: FineTuning, runtime: Runtime, choices: Any) -> None:
    """Decides what the workload leaves open and refuses what cannot be meant; `choices` collects assumptions and warnings."""
    if is_quantized(workload) and workload.kbit_prep is None:
        why = {
            "none": "norms, embedding and head keep 16 bit; PEFT's prepare_model_for_kbit_training makes them fp32: full",
            "norms": "TRL's SFTTrainer of that time upcasts what is not quantised, and casts embedding and head back",
        }[runtime.kbit_prep]
        choices.assume("kbit_prep", runtime.kbit_prep, why)
    _check_companions(workload)
    if workload.method in ADAPTER_METHODS:
        _check_targets(model, workload, choices)
    _check_selectors(model, workload)
    if workload.method == "prefix":
        _check_prefix(model, workload)
    if workload.method == "prompt" and model.kind != "decoder":
        raise UsageError(f"--method prompt puts tokens before the text of a decoder; {model.family} is none")
    loss = choices.changes.get("loss", workload.loss)
    if loss in ("fused", "cut", "chunked", "chunked-output") and "lm_head" in names(workload.lora_targets):
        raise UsageError(f"--loss {loss} reads the head's weight itself: an adapter on lm_head would not be used")
    policy = KernelPolicy(**fields(model, workload, PrecisionPolicy("", "bf16", "bf16", False)))
    own = policy.train_all or trained_parameters(model, policy)
    if not own and policy.adapter is None and not policy.virtual_tokens and policy.prefix is None:
        frozen = f"--freeze {workload.freeze[:60]}" if workload.freeze else f"--method {workload.method}"
        how = f", and {model.name} has no {workload.unfreeze[:60]} to unfreeze" if workload.unfreeze else ""
        raise UsageError(f"{frozen} leaves nothing that is trained{how}")


def _check_companions(workload: FineTuning) -> None:
    """What PEFT trains beside adapters, where the method has none: it would be trained by itself, or twice."""
    low_rank = tuple(one for one in ADAPTER_METHODS if one != "ia3")
    for flag, given, methods in (
        ("--use-dora", workload.use_dora, low_rank),
        ("--lora-bias " + workload.lora_bias, workload.lora_bias != "none", low_rank),
        ("--modules-to-save", workload.modules_to_save, ADAPTER_METHODS),
    ):
        if given and workload.method not in methods:
            beside = "; --unfreeze names what is trained" if workload.method == "freeze" else ""
            raise UsageError(f"{flag} belongs to --method {', '.join(methods)}, not to {workload.method}{beside}")


def _modules(model: Model, *roles: str) -> set[str]:
    return {
        target_of(parameter)
        for segment in model.segments
        for block in segment.blocks
        for parameter in block.parameters
        if not roles or (parameter.role in roles and len(parameter.shape) == 2)
    }


def _check_selectors(model: Model, workload: FineTuning) -> None:
    """A word that selects nothing would silently train, or freeze, nothing."""
    modules = _modules(model)
    for flag, text, general in (
        ("--freeze", workload.freeze, GENERAL),
        ("--unfreeze", workload.unfreeze, GENERAL),
        ("--modules-to-save", workload.modules_to_save, ()),
    ):
        for one in names(text):
            if one in modules or one in general or (general and layers_of(one) is not None):
                continue
            hint = did_you_mean(one[:60], [*general, *modules])
            listed = ", ".join(sorted(modules)[:LONGEST_LIST])
            takes = f"{', '.join(general)}, layers:N or a module's name" if general else f"names of modules: {listed}"
            raise UsageError(f"{flag} names {one[:60]!r}{hint}, which {model.family} does not have; it takes {takes}")


def _check_targets(model: Model, workload: FineTuning, choices: Any) -> None:
    """Targets that no module has would silently train nothing."""
    modules = _modules(model, "linear")
    named = _modules(model, "linear", "head", "embedding")
    targets = names(workload.lora_targets)
    if targets == (ALL_LINEAR,) and workload.method == "ia3":
        targets = tuple(one for one in IA3_TARGETS if one in modules)
        if not targets and modules:
            raise UsageError(f"--method ia3: say with --lora-targets what is scaled of {', '.join(sorted(modules))}")
        if targets:
            why = "keys, values and the second product of the feed-forward, as PEFT does"
            choices.assume("lora_targets", ",".join(targets), why)
            return
        targets = (ALL_LINEAR,)
    if targets == (ALL_LINEAR,):
        if not modules:
            raise UsageError(
                f"--method {workload.method}: {model.family} has no linear layer but its head: nothing gets an adapter"
            )
        return
    unknown = [one for one in targets if one not in named]
    if len(unknown) == len(targets):
        wrong = f"{unknown[0][:60]!r}{did_you_mean(unknown[0][:60], named)}" if unknown else "nothing"
        raise UsageError(f"--lora-targets names {wrong}; {model.family} has {', '.join(sorted(named))}, or {ALL_LINEAR} for all")
    if unknown:
        text = f"{model.family} has no module {', '.join(one[:60] for one in unknown)}: --lora-targets trains the others only"
        choices.warnings.append(("unmatched-targets", text))
