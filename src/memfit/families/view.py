"""A config seen by a family: it records the keys that are read and refuses with the names of those that nobody understood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.errors import InputError, UnknownArchitectureError
from memfit.job import Assumption
from memfit.precision import TORCH_DTYPES

LARGEST_DIMENSION = 1 << 31
"""No dimension of a real model comes near this; above it a config is broken or hostile."""
LARGEST_LAYERS = 1 << 10
"""Deeper than any published transformer (the deepest have a few hundred layers); a longer list is broken or hostile."""
MOST_STAGES = 1 << 6
"""More stages than any network has; each halves the image."""

IRRELEVANT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _diffusers_version _name_or_path add_prefix_space
    architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward classifier_dropout context_window_size custom_pipelines decoder_start_token_id directionality
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    id2label initializer_range is_causal is_decoder is_encoder_decoder is_llama_config label2id layer_norm_eps
    layer_norm_epsilon length_penalty mask_value max_length max_sequence_length min_length model_type n_ctx name_or_path
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_scores pad_token_id pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
    pooler_type prefill_chunk_size prefix pretraining_tp problem_type query_pre_attn_scalar remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate rms_norm_eps rope_interleaved rope_parameters rope_scaling
    rope_theta rotary_emb_base scale_attn_by_inverse_layer_idx scale_attn_weights selective_checkpoint_enabled
    sep_token_id sequence_parallel_enabled sliding_window_size summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params temperature tf_legacy_loss
    tokenizer tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unsloth_fixed unsloth_version use_bfloat16 use_bidirectional_attention use_cache use_mrope
    """.split()  # noqa: SIM905
)
"""Keys that do not change memory: token ids, generation settings, initialisation, names, constants of formulas."""


class ConfigView:
    """Reads typed values by key; every read key is understood, what is left over is not."""

    def __init__(self, config: Mapping[str, Any], name: str, *, image: int | None = None) -> None:
        self._config = config
        self.name = name
        self.image = image
        """Side of the images that the user gave, in place of the config's."""
        self._used: set[str] = set()
        self.assumptions: list[Assumption] = []
        """What a family took where neither the config nor the user says it."""

    def _raw(self, key: str) -> Any:
        self._used.add(key)
        return self._config.get(key)

    def has(self, key: str) -> bool:
        """Whether the config gives the key a value."""
        return self._raw(key) is not None

    def _refuse(self, key: str, raw: Any, wanted: str) -> InputError:
        try:
            shown = repr(raw)
        except ValueError:  # an integer of more digits than Python prints
            shown = "so large a number"
        return InputError(f"{self.name}: {key} must be {wanted}, not {shown if len(shown) <= 40 else shown[:37] + '...'}")

    def size(self, key: str, default: int | None = None, *, maximum: int = LARGEST_DIMENSION) -> int:
        """A positive whole number.

        Raises:
            InputError: it is missing without a default, of another type, not positive or beyond any real model.
        """
        raw = self._raw(key)
        if raw is None:
            if default is None:
                raise InputError(f"{self.name}: the config does not give {key}, which the memory depends on; add it")
            return default
        if isinstance(raw, bool) or not isinstance(raw, int | float) or raw != raw or raw != int(min(max(raw, -1), maximum + 1)):
            raise self._refuse(key, raw, f"a whole number from 1 to {maximum:,}")
        value = int(raw)
        if not 1 <= value <= maximum:
            raise self._refuse(key, raw, f"a whole number from 1 to {maximum:,}")
        return value

    def count(self, key: str, default: int) -> int:
        """A whole number that may be 0."""
        return 0 if self._raw(key) == 0 else self.size(key, default)

    def optional_size(self, key: str) -> int | None:
        """A positive whole number, or `None` where the config says null or nothing."""
        return self.size(key) if self.has(key) else None

    def layers(self, key: str) -> int:
        """A number of layers."""
        return self.size(key, maximum=LARGEST_LAYERS)

    def sizes(self, key: str, default: Sequence[int], length: int | None = None) -> tuple[int, ...]:
        """A list of positive whole numbers, one for each stage; `length`: how many there must be."""
        raw = self._raw(key)
        given = list(default) if raw is None else raw
        if not isinstance(given, list | tuple) or not 1 <= len(given) <= MOST_STAGES or (length and len(given) != length):
            wanted = f"a list of {length} whole numbers, one for each stage" if length else "a list of whole numbers"
            raise self._refuse(key, raw, wanted)
        for one in given:
            if isinstance(one, bool) or not isinstance(one, int) or not 1 <= one <= LARGEST_DIMENSION:
                raise self._refuse(key, one, f"a whole number from 1 to {LARGEST_DIMENSION:,} in each place")
        return tuple(given)

    def sides(self, key: str, default: int) -> tuple[int, int]:
        """Height and width: one number for both, or a list of two."""
        if isinstance(self._raw(key), list | tuple):
            height, width = self.sizes(key, (), 2)
            return height, width
        side = self.size(key, default)
        return side, side

    def number(self, key: str, default: float) -> float:
        """A number from 0 to a million."""
        raw = self._raw(key)
        if raw is None:
            return default
        if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 <= raw <= 1_000_000:
            raise self._refuse(key, raw, "a number from 0 to 1,000,000")
        return float(raw)

    def ignore(self, *keys: str) -> None:
        """Keys of this family that do not change memory."""
        self._used.update(keys)

    def indices(self, key: str) -> frozenset[int]:
        """A list of layers by index, from 0; empty where the config says null or nothing."""
        raw = self._raw(key)
        given = [] if raw is None else raw
        if not isinstance(given, list) or len(given) > LARGEST_LAYERS:
            raise self._refuse(key, raw, "a list of layers")
        for one in given:
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < LARGEST_LAYERS:
                raise self._refuse(key, one, f"a layer from 0 to {LARGEST_LAYERS - 1} in each place")
        return frozenset(given)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object; empty where the config says null or nothing."""
        raw = self._raw(key)
        if raw is not None and not isinstance(raw, dict):
            raise self._refuse(key, raw, "an object")
        return raw or {}

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        raw = self._raw(key)
        if raw is None:
            return default
        if not isinstance(raw, bool):
            raise self._refuse(key, raw, "true or false")
        return raw

    def probability(self, key: str, default: float) -> float:
        """A number from 0 to 1."""
        raw = self._raw(key)
        if raw is None:
            return default
        if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 <= raw <= 1:
            raise self._refuse(key, raw, "a number from 0 to 1")
        return float(raw)

    def states(self, key: str) -> bool:
        """Whether the config has the key at all, be it with null."""
        self._used.add(key)
        return key in self._config

    def cap(self, key: str, default: bool) -> bool:
        """Whether scores or logits are soft-capped: a number, or null for not."""
        raw = self._raw(key)
        if raw is not None and (isinstance(raw, bool) or not isinstance(raw, int | float)):
            raise self._refuse(key, raw, "a number or null")
        return default if not self.states(key) else raw is not None

    def text(self, key: str, default: str) -> str:
        """A text."""
        raw = self._raw(key)
        if raw is None:
            return default
        if not isinstance(raw, str):
            raise self._refuse(key, raw, "a text")
        return raw

    def choice(self, key: str, default: str, known: Sequence[str]) -> str:
        """One of the known names; others are refused, since what they would allocate is unknown."""
        value = self.text(key, default)
        if value not in known:
            raise self._refuse(key, value, "one of " + ", ".join(sorted(known)))
        return value

    def says(self, key: str, word: str) -> bool:
        """Whether a key that may be a number or a word is this word."""
        return bool(self._raw(key) == word)

    def refuse(self, key: str, wanted: str) -> None:
        """Refuse a value that is understood and not counted.

        Raises:
            InputError: always.
        """
        raise self._refuse(key, self._raw(key), wanted)

    def layer_types(self, num_layers: int, known: Sequence[str] = ("full_attention", "sliding_attention")) -> list[str] | None:
        """`layer_types`: one name per layer."""
        raw = self._raw("layer_types")
        if raw is None:
            return None
        if not isinstance(raw, list) or len(raw) != num_layers:
            raise self._refuse("layer_types", raw, f"a list of {num_layers} names, one per layer")
        for one in raw:
            if one not in known:
                raise self._refuse("layer_types", one, f"{' or '.join(known)} in each place")
        return list(raw)

    def rotary_share(self, key: str, default: float) -> float:
        """The share of each head that is rotated: `rope_parameters.partial_rotary_factor` (transformers 5) or an older key."""
        older = self.probability(key, default)
        parameters = self._raw("rope_parameters")
        stated = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
        if stated is None:
            return older
        if isinstance(stated, bool) or not isinstance(stated, int | float) or not 0 <= stated <= 1:
            raise self._refuse("rope_parameters.partial_rotary_factor", stated, "a number from 0 to 1")
        return float(stated)

    def dtype(self) -> str | None:
        """The checkpoint's format: `dtype` or `torch_dtype`.

        Raises:
            InputError: a format that is not known.
        """
        raw = self._raw("dtype") or self._raw("torch_dtype")
        if raw is None or raw == "auto":
            return None
        found = TORCH_DTYPES.get(raw.removeprefix("torch.")) if isinstance(raw, str) else None
        if found is None:
            raise self._refuse("dtype" if self._raw("dtype") else "torch_dtype", raw, f"one of {', '.join(TORCH_DTYPES)}")
        return found

    def num_labels(self) -> int:
        """Labels of a classification head: the length of id2label, or num_labels, or 2."""
        raw = self._raw("id2label")
        return len(raw) if isinstance(raw, dict) and raw else self.size("num_labels", 2)

    def classification_loss(self) -> str:
        """The loss over a sequence's labels: `problem_type`, or the mean square for one label.

        Source: transformers 5 loss/loss_utils.py, ForSequenceClassificationLoss; the older classes do the same.

        Raises:
            InputError: a problem type that is not known.
        """
        default = "regression" if self.num_labels() == 1 else "single_label_classification"
        return _PROBLEM_LOSSES[self.choice("problem_type", default, tuple(_PROBLEM_LOSSES))]

    def quantization(self) -> str | None:
        """The format that `quantization_config` names, among those of `memfit.precision.QUANTIZED`.

        Raises:
            InputError: a method or a width that is not known.
        """
        raw = self._raw("quantization_config")
        if raw is None:
            return None
        if not isinstance(raw, dict):
            raise self._refuse("quantization_config", raw, "an object")
        method = str(raw.get("quant_method", "bitsandbytes" if "load_in_4bit" in raw else ""))
        bits = raw.get("bits", raw.get("w_bit"))
        if method == "mxfp4":
            return "mxfp4"
        if method in ("fp8", "fbgemm_fp8"):
            return "fp8"
        if method in ("gptq", "awq") and bits in (4, 8, None):
            return "int8" if bits == 8 else "int4"
        if method == "bitsandbytes":
            if raw.get("load_in_8bit"):
                return "int8"
            return "nf4-dq" if raw.get("bnb_4bit_use_double_quant") else "nf4"
        found = _compressed_tensors(raw) if method in ("compressed-tensors", "modelopt", "") else None
        if found is None:
            raise self._refuse(
                "quantization_config",
                method or raw,
                "a method that is known: mxfp4, fp8, fbgemm_fp8, gptq, awq, bitsandbytes, "
                "compressed-tensors or modelopt with 4 or 8 bits",
            )
        return found

    def quantization_details(self) -> tuple[str, ...]:
        """What `quantization_config` says of the weights beside the format, in words: it is not followed."""
        raw = self._raw("quantization_config")
        return _weight_details(raw, self.quantization()) if isinstance(raw, dict) else ()

    def quantization_cache(self) -> tuple[str, ...]:
        """The keys with which `quantization_config` names a format for the KV cache."""
        raw = self._raw("quantization_config")
        keys = ("kv_cache_scheme", "kv_cache_quant_algo")
        return tuple(key for key in keys if raw.get(key)) if isinstance(raw, dict) else ()

    def finish(self) -> None:
        """Refuse if there are keys that nothing read and that are not known to be irrelevant.

        Raises:
            UnknownArchitectureError: with the names of those keys.
        """
        left = sorted(
            str(key)[:60]
            for key in self._config
            if key not in self._used and key not in IRRELEVANT and self._config[key] is not None
        )
        if left:
            family = self._config.get("model_type")
            raise UnknownArchitectureError(
                f"{self.name}: {', '.join(left[:8])}{' and more' if len(left) > 8 else ''} in the config of {family!r} "
                "may change memory and is not understood; remove it if it does not, or ask for support of it"
            )


def _compressed_tensors(raw: Mapping[str, Any]) -> str | None:
    """fp8 or int4/int8 from compressed-tensors' config_groups or modelopt's quant_algo."""
    algorithm = str(raw.get("quant_algo", "")).upper()
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return "fp8"
    groups = raw.get("config_groups")
    kinds: set[tuple[str, str]] = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            kinds.add((str(weights.get("type")), str(weights.get("num_bits"))))
    known = {("float", "8"): "fp8", ("int", "8"): "int8", ("int", "4"): "int4"}
    return known.get(kinds.pop()) if len(kinds) == 1 else None


_PROBLEM_LOSSES = {"regression": "mse", "single_label_classification": "cross-entropy", "multi_label_classification": "bce"}
"""The loss of a sequence classifier by its config's problem_type."""

_LEFT_OUT_KEYS = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers", "llm_int8_skip_modules", "dynamic")
"""Keys of quantization_config that name modules which are not quantised, or otherwise."""
_NEVER_QUANTISED = ("lm_head", "embed", "norm")
"""Modules that are not counted as quantised anyway, by a part of their name."""
_COUNTED_GROUP = 128
"""Elements that share a scale in `memfit.precision.QUANTIZED`'s int4."""


def _weight_details(raw: Mapping[str, Any], name: str | None) -> tuple[str, ...]:
    """Modules that are left out, a quantised head, and a group size other than the one that is counted."""
    if name == "mxfp4":  # all but the experts is left out, and counted so
        return ()
    found = []
    for key in _LEFT_OUT_KEYS:
        modules = raw.get(key)
        listed = [str(one) for one in modules] if isinstance(modules, list | dict) else []
        others = [one for one in listed if not any(part in one for part in _NEVER_QUANTISED)]
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            found.append(f"{key} {others[0][:60]}{more}")
    if raw.get("lm_head") is True:
        found.append("lm_head is quantised too")
    sizes = [raw.get("group_size"), raw.get("q_group_size")]
    groups = raw.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        sizes.append(weights.get("group_size") if isinstance(weights, dict) else None)
    counted = (_COUNTED_GROUP,) if name == "int4" else (-1,)
    other = [one for one in sizes if isinstance(one, int) and not isinstance(one, bool) and one not in counted]
    if other and name in ("int4", "int8", "fp8"):
        found.append(f"group_size {str(other[0])[:20]}")
    return tuple(found)
