"""Bytes of every component of training, and stored weights, worked out by hand from counts and formats."""

from __future__ import annotations

from typing import Any

import heart_models as models
import pytest

from memfit.account import estimate, resolve
from memfit.account.estimate import Rank
from memfit.devices import parse_cluster
from memfit.errors import UsageError
from memfit.job import FineTuning, Inference, Job, Overheads, Training

GiB = 1 << 30
MiB = 1 << 20
PARAMETERS = 8_030_261_248
EMBEDDING_AND_HEAD = 2 * 128_256 * 4096
NORMS = 65 * 4096
LINEAR = 6_979_321_856
BUFFERS = 1024
"""Rotary frequencies and the like: less than this."""


def llama() -> Any:
    return models.make(models.LLAMA_8B)


def gib(num_bytes: int) -> float:
    return round(num_bytes / GiB, 3)


def nearly(num_bytes: int) -> Any:
    """Exact but for the model's buffers."""
    return pytest.approx(num_bytes + BUFFERS // 2, abs=BUFFERS // 2)


# ------------------------------------------------------------------ weights


def test_the_parts_of_llama_3_1_8b() -> None:
    assert LINEAR + EMBEDDING_AND_HEAD + NORMS == PARAMETERS
    assert gib(2 * PARAMETERS) == 14.958
    assert gib(2 * EMBEDDING_AND_HEAD) == 1.957


@pytest.mark.parametrize(("dtype", "element"), [("bf16", 2), ("fp16", 2), ("fp32", 4)])
def test_weights_without_quantisation(dtype: str, element: int) -> None:
    rank = models.rank_of(llama(), Inference(context=1024, weight_dtype=dtype))
    assert models.component(rank, "weights") == nearly(element * PARAMETERS)


def scales(elements: int, block: int) -> int:
    assert elements % block == 0
    return elements // block


@pytest.mark.parametrize(
    ("quantization", "linear_bytes", "shown"),
    [
        # 4 bit and an fp32 absmax per 64
        ("nf4", LINEAR // 2 + 4 * scales(LINEAR, 64), 3.656),
        # 4 bit, an 8-bit absmax per 64, an fp32 scale per 256 of those
        ("nf4-dq", LINEAR // 2 + scales(LINEAR, 64) + 4 * scales(LINEAR, 64 * 256), 3.353),
        # 4 bit, an fp16 scale and a 4-bit zero point per 128
        ("int4", LINEAR // 2 + 5 * scales(LINEAR, 128) // 2, 3.377),
        # one byte, an fp32 scale per output row: q, k, v, o, gate, up, down of 32 layers
        ("int8", LINEAR + 32 * 4 * (4096 + 1024 + 1024 + 4096 + 14_336 + 14_336 + 4096), 6.505),
        ("fp8", LINEAR + 32 * 4 * (4096 + 1024 + 1024 + 4096 + 14_336 + 14_336 + 4096), 6.505),
    ],
)
def test_quantised_linear_weights_beside_16_bit_embeddings_head_and_norms(
    quantization: str, linear_bytes: int, shown: float
) -> None:
    assert gib(linear_bytes) == shown
    rank = models.rank_of(llama(), Inference(context=1024, weight_dtype="bf16", quantization=quantization))
    assert models.component(rank, "weights") == nearly(linear_bytes + 2 * (EMBEDDING_AND_HEAD + NORMS))


def test_the_quantisation_of_the_checkpoint_is_taken_and_said() -> None:
    model = models.make(models.LLAMA_8B, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    resolved = resolve(Job(model=model, workload=Inference(context=1024)))
    assert resolved.job.workload.quantization == "int4"
    assert ("quantization", "int4", "--quantization") in [(one.name, one.value, one.flag) for one in resolved.assumptions]


def test_a_tied_head_is_stored_once() -> None:
    rank = models.rank_of(models.make(models.GPT2), Training(batch=1, seq=8, precision="32-true"))
    assert models.component(rank, "weights") == nearly(4 * 124_439_808) == nearly(497_759_232)


# ------------------------------------------------------------------ gradients, states


def training(**settings: Any) -> Rank:
    return models.rank_of(llama(), Training(batch=1, seq=128, **settings))


@pytest.mark.parametrize(
    ("settings", "element"),
    [
        ({"precision": "bf16-true"}, 2),
        ({"precision": "32-true"}, 4),
        ({"precision": "fp16-true"}, 2),
        ({"precision": "bf16-mixed"}, 4),
        ({"precision": "bf16-mixed", "weight_dtype": "bf16"}, 2),
        ({"precision": "fp16-mixed"}, 4),
    ],
)
def test_weights_gradients_and_adam_states_have_the_weights_format(settings: dict[str, Any], element: int) -> None:
    rank = training(**settings)
    assert models.component(rank, "weights") == nearly(element * PARAMETERS)
    assert models.component(rank, "gradients") == pytest.approx(element * PARAMETERS, rel=1e-4)
    assert models.component(rank, "optimizer_states") == pytest.approx(2 * element * PARAMETERS, abs=BUFFERS * 4)


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"),
    [
        ("adamw", 8),
        ("adamw-foreach", 8),
        ("adamw-fused", 8),
        ("adamw-loop", 8),
        ("sgd", 0),
        ("sgd-momentum", 4),
        ("custom:states=2,bytes=4", 8),
        ("custom:states=3,bytes=2", 6),
        ("custom:states=0,bytes=4", 0),
    ],
)
def test_optimizer_states_of_fp32_weights(optimizer: str, per_parameter: int) -> None:
    states = models.component(training(precision="32-true", optimizer=optimizer), "optimizer_states")
    # torch keeps a step counter of 4 bytes for each of the 291 tensors of Adam
    assert states == pytest.approx(per_parameter * PARAMETERS, abs=4 * 291)


def test_8_bit_adam_is_2_03125_bytes_a_parameter() -> None:
    """2 states of 1 byte and an fp32 absmax per 256; every tensor of Llama-3.1-8B has at least 4,096 elements and whole
    blocks."""
    expected = 2 * PARAMETERS + 2 * 4 * PARAMETERS // 256
    assert expected / PARAMETERS == 2.03125
    for precision in ("bf16-true", "32-true"):
        assert models.component(training(precision=precision, optimizer="adamw-8bit"), "optimizer_states") == expected


def test_8_bit_adam_keeps_small_tensors_in_32_bit() -> None:
    """Llama-3.2-1B: 33 norms of 2,048 elements are below 4,096: 8 B an element; the other 1,235,746,816 are 2.03125 B."""
    model = models.make(models.LLAMA_1B)
    small = 33 * 2048
    large = 1_235_814_400 - small
    assert model.num_parameters == small + large
    rank = models.rank_of(model, Training(batch=1, seq=128, precision="bf16-true", optimizer="adamw-8bit"))
    assert models.component(rank, "optimizer_states") == 8 * small + 2 * large + 2 * 4 * large // 256


def test_the_trainer_keeps_32_bit_states_of_embeddings() -> None:
    """transformers' Trainer registers them with bitsandbytes; a raw loop quantises them. The head is no embedding."""
    model = models.make(models.LLAMA_8B)
    workload = Training(batch=1, seq=128, precision="bf16-true", optimizer="adamw-8bit")

    def states(runtime: str) -> int:
        return models.component(models.rank_of(model, workload, runtime=runtime), "optimizer_states")

    table = 128_256 * 4096
    assert states("hf-trainer") - states("hf") == 8 * table - (2 * table + 8 * table // 256)


def test_paged_states_live_in_host_memory() -> None:
    found = models.estimate_of(llama(), Training(batch=1, seq=128, precision="bf16-true", optimizer="paged-adamw-8bit"))
    assert found.host_bytes == 2 * PARAMETERS + 8 * PARAMETERS // 256
    assert models.component(found.worst, "optimizer_states") == 0


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw-foreach", 1), ("adamw-fused", 0), ("sgd", 0), ("sgd-momentum", 0)])
def test_a_foreach_step_makes_a_list_as_large_as_the_parameters(optimizer: str, copies: int) -> None:
    step = models.phase(training(precision="bf16-true", optimizer=optimizer), "optimizer-step", "temporary")
    assert step == pytest.approx(copies * 2 * PARAMETERS, abs=BUFFERS)


def test_a_loop_step_makes_three_tensors_of_the_mlps_size() -> None:
    """The root and the denominator of one parameter while the one before still has its denominator: the embedding comes first, so
    2 x 1.05 GB; gate, up and down are equal and follow each other: 3 x 117 MB."""
    step = models.phase(training(precision="bf16-true", optimizer="adamw-loop"), "optimizer-step", "temporary")
    assert 2 * 2 * 128_256 * 4096 <= step <= 3 * 2 * 128_256 * 4096


@pytest.mark.parametrize(
    "optimizer",
    [
        "custom:states=2",
        "custom:bytes=4",
        "custom:",
        "custom:states=-1,bytes=4",
        "custom:states=x,bytes=4",
        "custom:states=2,bytes=4,colour=red",
        "custom:states=²,bytes=4",
        "custom:states=2,bytes=65",
    ],
)
def test_a_custom_optimizer_that_cannot_be_read_is_refused(optimizer: str) -> None:
    with pytest.raises(UsageError, match="custom"):
        training(precision="32-true", optimizer=optimizer)


# ------------------------------------------------------------------ adapters


def test_lora_parameters() -> None:
    """r (in + out) for q, k, v, o, gate, up and down of 32 layers."""
    per_layer = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14_336)
    found = models.estimate_of(llama(), FineTuning(batch=1, seq=128, precision="bf16-true", lora_rank=16))
    assert found.trainable_parameters == 16 * 32 * per_layer == 41_943_040
    rank = found.worst
    assert models.component(rank, "weights") == nearly(2 * PARAMETERS + 4 * 41_943_040)
    assert models.component(rank, "gradients") == 4 * 41_943_040
    assert models.component(rank, "optimizer_states") == pytest.approx(8 * 41_943_040, abs=4 * 448)


def test_lora_targets_and_16_bit_adapters() -> None:
    settings = {
        "batch": 1,
        "seq": 128,
        "precision": "bf16-true",
        "lora_rank": 8,
        "lora_targets": "q_proj, v_proj",
        "lora_dtype": "bf16",
    }
    found = models.estimate_of(llama(), FineTuning(**settings))
    assert found.trainable_parameters == 8 * 32 * ((4096 + 4096) + (4096 + 1024)) == 3_407_872
    assert models.component(found.worst, "gradients") == 2 * 3_407_872


def test_targets_that_no_module_has_are_refused() -> None:
    for targets in ("q_prj", "lm_heat", ","):
        with pytest.raises(UsageError, match="lora-targets"):
            models.estimate_of(llama(), FineTuning(batch=1, seq=128, lora_targets=targets))


def test_full_fine_tuning_is_training() -> None:
    settings = {"batch": 2, "seq": 512, "precision": "bf16-mixed"}
    full = models.rank_of(llama(), FineTuning(method="full", **settings))
    assert full.peak == models.rank_of(llama(), Training(**settings)).peak


@pytest.mark.parametrize(("double", "linear_bytes"), [(True, 3_600_416_768), (False, 3_925_868_544)])
def test_qlora_weights(double: bool, linear_bytes: int) -> None:
    """NF4 linear layers, 16-bit embeddings, head and norms, fp32 adapters."""
    rank = models.rank_of(llama(), FineTuning(method="qlora", batch=1, seq=128, double_quant=double))
    assert models.component(rank, "weights") == nearly(linear_bytes + 2 * (EMBEDDING_AND_HEAD + NORMS) + 4 * 41_943_040)


def test_qlora_dequantises_one_matrix_at_a_time() -> None:
    """At one token the largest working tensor is a 16-bit copy of gate, up or down: 2 x 4096 x 14336."""
    rank = models.rank_of(llama(), FineTuning(method="qlora", batch=1, seq=1, checkpointing="full"))
    assert models.phase(rank, "forward", "temporary") >= 2 * 4096 * 14_336


# ------------------------------------------------------------------ moments of a training step


def test_the_ends_of_forward_and_backward() -> None:
    """Before backward: weights, states, inputs, what is kept, the outputs; after: the gradients in place of what was kept."""
    tokens, vocab = 2 * 256, 128_256
    rank = models.rank_of(llama(), Training(batch=2, seq=256, precision="bf16-true", optimizer="sgd", outputs="kept"))
    assert rank.kept_bytes is not None
    inputs, outputs = 16 * tokens, 2 * vocab * tokens
    # the ids are in the inputs and in what is kept
    assert rank.forward_end_bytes == pytest.approx(
        2 * PARAMETERS + inputs + outputs + rank.kept_bytes - 8 * tokens, abs=8 * BUFFERS
    )
    assert rank.backward_end_bytes == pytest.approx(4 * PARAMETERS + inputs + outputs, abs=8 * BUFFERS)


def test_the_trainer_drops_the_outputs() -> None:
    job = Job(
        model=llama(), workload=Training(batch=1, seq=256, precision="bf16-true"), overheads=Overheads(runtime="hf-trainer")
    )
    resolved = resolve(job).job
    assert resolved.workload.outputs == "dropped"
    kept = resolve(Job(model=llama(), workload=Training(batch=1, seq=256, precision="bf16-true"))).job
    difference = estimate(kept).worst.backward_end_bytes - estimate(resolved).worst.backward_end_bytes  # type: ignore[operator]
    assert difference == 2 * 128_256 * 256


@pytest.mark.parametrize("settings", [{"zero_grad": "zeros"}, {"grad_accum": 4}])
def test_gradients_that_stay_are_there_in_forward(settings: dict[str, Any]) -> None:
    freed = training(precision="bf16-true", optimizer="sgd")
    stays = training(precision="bf16-true", optimizer="sgd", **settings)
    assert stays.forward_end_bytes - freed.forward_end_bytes == 2 * PARAMETERS  # type: ignore[operator]
    assert stays.backward_end_bytes == freed.backward_end_bytes


def test_the_first_step_has_no_states_until_its_end() -> None:
    rank = training(precision="32-true", optimizer="adamw-fused")
    for name in ("forward", "loss", "backward"):
        steady = next(one for one in rank.phases if one.name == name and not one.first_step)
        first = next(one for one in rank.phases if one.name == name and one.first_step)
        assert steady.allocated_bytes - first.allocated_bytes == models.component(rank, "optimizer_states")
        assert first.components.get("optimizer_states", 0) == 0


def test_autocast_keeps_its_casts_of_trained_weights_until_the_block_ends() -> None:
    """Checkpointed, all 16-bit copies of linear weights are alive at the loss: 2 x (linear + head)."""
    mixed = models.rank_of(llama(), Training(batch=1, seq=1, precision="bf16-mixed", checkpointing="full", optimizer="sgd"))
    single = models.rank_of(llama(), Training(batch=1, seq=1, precision="32-true", checkpointing="full", optimizer="sgd"))
    difference = models.phase(mixed, "loss") - models.phase(single, "loss")
    assert difference == pytest.approx(2 * (LINEAR + EMBEDDING_AND_HEAD // 2), rel=1e-3)


# ------------------------------------------------------------------ the three numbers


def test_reserved_and_device_bytes_are_sums() -> None:
    overheads = {"workspace": 100 * MiB, "cuda_context": 300 * MiB, "fragmentation": 500 * MiB}
    bare = training(precision="bf16-true").peak
    full = models.rank_of(llama(), Training(batch=1, seq=128, precision="bf16-true"), **overheads).peak
    assert full.allocated_bytes - bare.allocated_bytes == 100 * MiB
    assert full.reserved_bytes - full.allocated_bytes == 500 * MiB
    assert full.device_bytes - full.reserved_bytes == 300 * MiB
    assert bare.allocated_bytes == bare.reserved_bytes == bare.device_bytes


@pytest.mark.parametrize(
    ("device", "training", "expected"),
    [
        ("h100", True, 64 * MiB),
        ("h100", False, 32 * MiB),
        ("a100-80gb", True, 17_039_360),
        ("4090", False, 8_519_680),
        ("m4-max-64", True, 0),
    ],
)
def test_cublas_workspaces(device: str, training: bool, expected: int) -> None:
    """8.125 MiB before Hopper, 32 MiB on it, one for each thread that runs matrix products."""
    workload = Training(batch=1, seq=8, precision="bf16-true") if training else Inference(context=8)
    job = Job(model=models.make(models.GPT2), workload=workload, cluster=parse_cluster(device))
    assert models.component(estimate(resolve(job).job).worst, "workspace") == expected


def test_ids_and_labels_are_counted() -> None:
    assert models.component(models.rank_of(llama(), Training(batch=3, seq=100, precision="bf16-true")), "inputs") == 3 * 100 * 16
    # generate() keeps ids and position ids
    assert models.component(models.rank_of(llama(), Inference(context=100, concurrency=3)), "inputs") == 3 * 100 * 16


# ------------------------------------------------------------------ what contradicts itself


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (Inference(context=100, prompt=200), "--prompt 200 is longer than --context 100"),
        (Training(precision="bf16-true", weight_dtype="fp32"), "--weight-dtype fp32 contradicts --precision bf16-true"),
        (Training(precision="32-true", weight_dtype="bf16"), "contradicts"),
        (FineTuning(method="qlora", precision="32-true"), "qlora"),
    ],
)
def test_contradictions_are_refused(workload: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(Job(model=llama(), workload=workload))


def test_what_is_open_is_decided_and_said_with_its_flag() -> None:
    resolved = resolve(Job(model=llama(), workload=Training()))
    work = resolved.job.workload
    assert (work.seq, work.precision, work.weight_dtype, work.outputs) == (4096, "bf16-mixed", "fp32", "kept")
    flags = {one.name: one.flag for one in resolved.assumptions}
    for name in ("seq", "precision", "weight_dtype", "outputs", "batch", "optimizer", "checkpointing", "attention"):
        assert flags[name] == "--" + name.replace("_", "-")


def test_nothing_is_assumed_about_what_was_said() -> None:
    settings = {
        "batch": 2,
        "seq": 77,
        "precision": "bf16-true",
        "outputs": "dropped",
        "checkpointing": "full",
        "optimizer": "sgd",
    }
    resolved = resolve(Job(model=llama(), workload=Training(**settings)))
    assert {name: getattr(resolved.job.workload, name) for name in settings} == settings
    assert not {one.name for one in resolved.assumptions} & set(settings)


def test_kbit_preparation_makes_everything_but_the_quantised_layers_fp32() -> None:
    """Llama-3.1-8B: 2 V h + 65 norms of h elements go from 2 to 4 bytes; the NF4 matrices stay as they are."""
    rest = 2 * 128_256 * 4096 + 65 * 4096
    plain, prepared = (
        models.component(models.rank_of(llama(), FineTuning(method="qlora", batch=1, seq=128, kbit_prep=kbit)), "weights")
        for kbit in ("none", "full")
    )
    assert prepared - plain == 2 * rest


def test_kbit_preparation_keeps_fp32_boundaries() -> None:
    """Checkpointed: each layer's input is the fp32 residual stream, 4 h bytes a token instead of 2 h."""
    plain, prepared = (
        models.rank_of(llama(), FineTuning(method="qlora", batch=1, seq=128, checkpointing="full", kbit_prep=kbit)).kept_bytes
        for kbit in ("none", "full")
    )
    # beside 32 boundaries: the final norm keeps x (4 h, in both) and nothing of h else, as it and the head are frozen
    assert prepared - plain == 32 * 128 * 2 * 4096
