"""RoBERTa, DistilBERT, ELECTRA, ALBERT, ModernBERT, T5, BART: parameters of the real classes, steps of real tiny models.

What differs from decoders: projections and layers that share parameters, a decoder beside an encoder, one embedding used three
times, position biases that all layers read.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_truth
import transformers
from torch_truth import Case

from memfit import account
from memfit.errors import InputError, UnknownArchitectureError
from memfit.families import build_model
from memfit.job import Inference, Job, Overheads, Training

BERT_LIKE = {"vocab_size": 90, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 50,
             "max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "roberta": {**BERT_LIKE, "type_vocab_size": 1},
    "xlm-roberta": BERT_LIKE,
    "distilbert": {"vocab_size": 90, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 50, "max_position_embeddings": 40,
                   "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "electra": {**BERT_LIKE, "embedding_size": 12},
    "albert": {**BERT_LIKE, "embedding_size": 12, "num_hidden_layers": 4, "classifier_dropout_prob": 0.0},
    "modernbert": {"vocab_size": 90, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 20,
                   "pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2,
                   "local_attention": 16},
    "t5": {"vocab_size": 90, "d_model": 24, "d_kv": 5, "d_ff": 50, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
           "dropout_rate": 0.0, "decoder_start_token_id": 0},
    "bart": {"vocab_size": 90, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
             "decoder_attention_heads": 3, "encoder_ffn_dim": 50, "decoder_ffn_dim": 40, "max_position_embeddings": 40,
             "dropout": 0.0},
}  # fmt: skip
SMALL["mt5"] = SMALL["umt5"] = SMALL["t5"]
PREFIX = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "distilbert": "DistilBert", "electra": "Electra", "albert": "Albert",
          "modernbert": "ModernBert", "t5": "T5", "mt5": "MT5", "umt5": "UMT5", "bart": "Bart"}  # fmt: skip
ENCODER_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
T5_HEADS = ("Model", "EncoderModel", "ForConditionalGeneration", "ForSequenceClassification", "ForTokenClassification")
HEADS = {
    **dict.fromkeys(("roberta", "xlm-roberta", "distilbert", "albert", "modernbert"), ENCODER_HEADS),
    "electra": (*ENCODER_HEADS, "ForPreTraining"),
    **dict.fromkeys(("t5", "mt5", "umt5"), T5_HEADS),
    "bart": ("Model", "ForConditionalGeneration", "ForSequenceClassification", "ForQuestionAnswering"),
}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "roberta": [{"tie_word_embeddings": False}, {"hidden_act": "relu", "pad_token_id": 3}],
    "xlm-roberta": [{}],
    "distilbert": [{"tie_word_embeddings": False}, {"sinusoidal_pos_embds": True}],
    "electra": [{"tie_word_embeddings": False}, {"embedding_size": 24}],
    "albert": [{"tie_word_embeddings": False}, {"num_hidden_groups": 2, "inner_group_num": 3}, {"num_hidden_groups": 3}],
    "modernbert": [
        {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True},
        {"tie_word_embeddings": False, "decoder_bias": False},
        {"layer_types": ["sliding_attention"] * 4},
    ],
    "t5": [{"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, {"relative_attention_num_buckets": 8}],
    "mt5": [{}, {"feed_forward_proj": "gated-silu"}],
    "umt5": [{}, {"num_layers": 1, "num_decoder_layers": None}],
    "bart": [{"tie_word_embeddings": False}, {"scale_embedding": True}],
}
CASES = [
    (model_type, head, variant)
    for model_type, heads in HEADS.items()
    for number, head in enumerate(heads)
    # every head of the plain config, and every variant with two of them
    for variant in ({}, *(one for place, one in enumerate(VARIANTS[model_type]) if (place - number) % len(heads) < 2))
]


def config_of(model_type: str, **settings: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SMALL[model_type], **settings}


def real_case(config: dict[str, Any], head: str, labels: str = "token") -> Case:
    model_type = str(config["model_type"])
    settings = transformers.CONFIG_MAPPING[model_type](**{key: value for key, value in config.items() if key != "model_type"})
    return Case(getattr(transformers, PREFIX[model_type] + head), settings, labels)


@pytest.mark.parametrize(("model_type", "head", "variant"), CASES)
def test_parameters_are_those_of_the_real_class(model_type: str, head: str, variant: dict[str, Any]) -> None:
    labels = 2 if head == "ForQuestionAnswering" else 3
    config = config_of(model_type, **variant, num_labels=labels)
    model = build_model(config, name="small", source="test", head=PREFIX[model_type] + head)
    assert model.num_parameters == torch_truth.count_parameters(real_case(config, head))


def test_albert_counts_shared_layers_once() -> None:
    """V e + P e + 2 e + 2 e; e h + h; one layer 4 (h^2 + h) + 2 h f + f + h + 4 h; pooler h^2 + h; with h 24, e 12, f 50."""
    layer = 4 * (24 * 24 + 24) + 2 * 24 * 50 + 50 + 24 + 4 * 24
    expected = (90 + 40 + 2) * 12 + 2 * 12 + 12 * 24 + 24 + layer + 24 * 24 + 24
    assert build_model(config_of("albert"), name="small", source="test", head="AlbertModel").num_parameters == expected


STEPS: list[tuple[str, str, dict[str, Any], str, bool]] = [
    ("roberta", "ForMaskedLM", {}, "token", False),
    ("distilbert", "ForSequenceClassification", {}, "sequence", True),
    ("electra", "ForMaskedLM", {}, "token", False),
    ("albert", "ForMaskedLM", {"hidden_act": "gelu"}, "token", False),
    ("albert", "ForTokenClassification", {"num_hidden_groups": 2, "inner_group_num": 2}, "token", False),
    ("modernbert", "ForMaskedLM", {}, "token", True),
    ("t5", "ForConditionalGeneration", {}, "token", False),
    ("t5", "ForConditionalGeneration", {"feed_forward_proj": "gated-gelu"}, "token", True),
    ("umt5", "ForConditionalGeneration", {}, "token", True),
    ("t5", "ForTokenClassification", {}, "token", False),
    ("bart", "ForConditionalGeneration", {}, "token", False),
    ("bart", "ForConditionalGeneration", {"tie_word_embeddings": False}, "token", True),
]


@pytest.mark.parametrize(("model_type", "head", "variant", "labels", "checkpointed"), STEPS)
def test_a_step_takes_what_the_real_model_takes(
    model_type: str, head: str, variant: dict[str, Any], labels: str, checkpointed: bool
) -> None:
    """fp32, eager, a target of another length than the source. The labels that the loss keeps are the batch's, counted twice."""
    batch, seq, target = 3, 32, 12
    config = config_of(model_type, **variant)
    case = real_case(config, head, labels)
    model = torch_truth.make_model(case, "32-true", "eager")
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = torch_truth.make_inputs(case, batch, seq)
    described = build_model(config, name="small", source="test", head=PREFIX[model_type] + head)
    if described.encoder_decoder:
        inputs["labels"] = torch.zeros(batch, target, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    real = torch_truth.training_step(model, inputs, optimizer)
    workload = Training(
        batch=batch, seq=seq, target_seq=target, precision="32-true", attention="eager", optimizer="sgd", outputs="kept",
        checkpointing="full" if checkpointed else "none",
    )  # fmt: skip
    job = Job(model=described, workload=workload, overheads=Overheads(workspace=0, cuda_context=0, fragmentation=0))
    ours = account.estimate(account.resolve(job).job).worst
    few = 16 + 8 * inputs["labels"].numel()
    assert abs((ours.forward_end_bytes or 0) - real.forward_end) <= few
    assert abs((ours.backward_end_bytes or 0) - real.backward_end) <= few
    assert abs(ours.peak.allocated_bytes - real.peak) <= few + 0.002 * real.peak


def test_the_target_is_as_long_as_the_source_unless_said() -> None:
    model = build_model(config_of("t5"), name="small", source="test")
    resolved = account.resolve(Job(model=model, workload=Training(seq=20))).job.workload
    assert isinstance(resolved, Training)
    assert resolved.target_seq == 20


def test_an_encoder_alone_runs_without_a_cache() -> None:
    encoder = build_model(config_of("t5"), name="small", source="test", head="T5EncoderModel")
    job = account.resolve(Job(model=encoder, workload=Inference(context=32, weight_dtype="bf16"))).job
    phases = {phase.name: phase.allocated_bytes for phase in account.estimate(job).worst.phases}
    assert phases["prefill"] > phases["load"] >= 2 * encoder.num_parameters


@pytest.mark.parametrize(
    ("model_type", "settings", "error"),
    [
        ("bart", {"encoder_layerdrop": 0.1}, InputError),
        ("bart", {"decoder_attention_heads": 5}, InputError),
        ("t5", {"feed_forward_proj": "gated-mystery"}, InputError),
        ("roberta", {"is_decoder": True}, InputError),
        ("roberta", {"max_position_embeddings": 2}, InputError),
        ("albert", {"num_hidden_groups": 9}, InputError),
        ("modernbert", {"sparse_prediction": True}, InputError),
        ("electra", {"mystery_size": 3}, UnknownArchitectureError),
    ],
)
def test_what_is_not_understood_is_refused(model_type: str, settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        build_model(config_of(model_type, **settings), name="small", source="test")
