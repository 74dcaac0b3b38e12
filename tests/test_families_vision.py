"""Image models: parameters of the real classes, bytes by hand for their operations, and what images change in a job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_truth
import transformers
from torch_truth import Case

from memfit import api
from memfit.account import estimate, resolve
from memfit.account.forms import ZERO, Form, per_axis
from memfit.account.liveness import Accumulation, BlockMemory, measure
from memfit.errors import InputError, UnknownArchitectureError, UsageError
from memfit.families import build_model
from memfit.fit.limits import numbers_of
from memfit.job import FineTuning, Inference, Job, Overheads, Training
from memfit.kernels import KernelPolicy, lower
from memfit.model import ONCE, SEQUENCE, BlockBuilder, Model
from memfit.model.ops import vision
from memfit.model.ops.vision import Grid
from memfit.precision import training_policy

NOTHING_BESIDE = Overheads(workspace=0, cuda_context=0, fragmentation=0)
PREFIX = {"vit": "ViT", "dinov2": "Dinov2", "swin": "Swin", "convnext": "ConvNext", "resnet": "ResNet", "segformer": "Segformer"}

VIT = {"model_type": "vit", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 100,
       "image_size": 32, "patch_size": 8}  # fmt: skip
DINOV2 = {"model_type": "dinov2", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 28,
          "patch_size": 7}  # fmt: skip
SWIN = {"model_type": "swin", "image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 4, "drop_path_rate": 0.0}  # fmt: skip
CONVNEXT = {"model_type": "convnext", "hidden_sizes": [16, 32], "depths": [2, 1], "num_stages": 2}
RESNET = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 1]}
SEGFORMER = {"model_type": "segformer", "depths": [1, 2, 1, 1], "hidden_sizes": [16, 32, 48, 64],
             "num_attention_heads": [1, 2, 3, 4], "drop_path_rate": 0.0}  # fmt: skip


def make(config: dict[str, Any], head: str = "ForImageClassification", image: int | None = None) -> Model:
    return build_model(config, name="test", source="test", head=PREFIX[config["model_type"]] + head, image=image)


def real(config: dict[str, Any], head: str = "ForImageClassification") -> Case:
    options = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.CONFIG_MAPPING[config["model_type"]](**options)
    return Case(getattr(transformers, PREFIX[config["model_type"]] + head), made)


# ------------------------------------------------------------------ parameters


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (VIT, {}),
        (VIT, {"qkv_bias": False, "num_labels": 7, "pooler_output_size": 20, "patch_size": [4, 8], "image_size": [32, 48]}),
        (DINOV2, {}),
        (DINOV2, {"use_mask_token": False, "use_swiglu_ffn": True, "mlp_ratio": 3, "num_labels": 5}),
        (SWIN, {}),
        (SWIN, {"use_absolute_embeddings": True, "qkv_bias": False, "mlp_ratio": 2.5, "depths": [1, 3], "image_size": 72}),
        (CONVNEXT, {}),
        (CONVNEXT, {"layer_scale_init_value": 0.0, "patch_size": 2, "num_channels": 1, "num_labels": 4}),
        (RESNET, {}),
        (RESNET, {"layer_type": "basic", "hidden_sizes": [16, 16], "num_labels": 3}),
        (RESNET, {"downsample_in_first_stage": True, "downsample_in_bottleneck": True, "depths": [1, 3]}),
        (SEGFORMER, {}),
        (SEGFORMER, {"sr_ratios": [4, 2, 2, 1], "mlp_ratios": [2, 3, 4, 4], "patch_sizes": [7, 3, 5, 3], "num_labels": 9}),
    ],
)
@pytest.mark.parametrize("head", ["ForImageClassification", "Model"])
def test_parameters_are_those_of_the_real_class(config: dict[str, Any], changes: dict[str, Any], head: str) -> None:
    config = {**config, **changes}
    assert make(config, head, image=128).num_parameters == torch_truth.count_parameters(real(config, head))


def test_vit_base_by_hand() -> None:
    """Patches 3 p^2 h + h; class token h; positions 197 h; a layer 4 h^2 + 4 h + 2 h f + f + h + 4 h; last norm 2 h; labels."""
    config = {"model_type": "vit", "num_labels": 1000}
    layer = 4 * 768**2 + 4 * 768 + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    expected = 768 * 3 * 16**2 + 768 + 768 + 197 * 768 + 12 * layer + 2 * 768 + 768 * 1000 + 1000
    model = make(config)
    assert model.num_parameters == expected == 86_567_656
    assert (model.tokens_per_image, model.pixels) == (197, 3 * 224 * 224)


def test_resnet_50_by_hand() -> None:
    model = make({"model_type": "resnet", "num_labels": 1000})
    assert model.num_parameters == 25_557_032
    assert model.buffer_bytes == 53 * 8 + 2 * 4 * 26_560  # 53 batch norms over 26,560 channels


def test_batch_norm_buffers_are_those_of_the_real_class() -> None:
    case = real(RESNET)
    buffers = sum(one.numel() * one.element_size() for one in case.cls(case.config).buffers())
    assert make(RESNET).buffer_bytes == buffers
    swin = real(SWIN)
    assert make(SWIN).buffer_bytes == sum(one.numel() * one.element_size() for one in swin.cls(swin.config).buffers())


# ------------------------------------------------------------------ kept bytes of real models


def real_kept(config: dict[str, Any], batch: int, side: int) -> int:
    case = real(config)
    model = torch_truth.make_model(case, "32-true", "eager")
    pixels = torch.randn(batch, 3, side, side)
    return torch_truth.kept_bytes(model, {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)})


@pytest.mark.parametrize(
    ("config", "side"),
    [
        (VIT, 32),
        (DINOV2, 28),
        (DINOV2, 42),  # positions are interpolated
        ({**DINOV2, "use_swiglu_ffn": True, "drop_path_rate": 0.5}, 28),
        (SWIN, 64),
        ({**SWIN, "image_size": 72, "drop_path_rate": 0.5}, 72),  # grids of 18 and 9: padded to windows of 4
        (CONVNEXT, 50),
        ({**CONVNEXT, "drop_path_rate": 0.3}, 48),
        (RESNET, 61),
        ({**RESNET, "layer_type": "basic", "hidden_act": "gelu"}, 64),
        (SEGFORMER, 96),
        ({**SEGFORMER, "drop_path_rate": 0.3, "reshape_last_stage": False}, 64),
    ],
)
def test_kept_bytes_are_those_of_the_real_model(config: dict[str, Any], side: int) -> None:
    """In fp32 the CPU keeps what CUDA keeps, but for one number of the loss (4 B)."""
    model = make(config, image=side)
    job = Job(model=model, workload=Training(batch=3, precision="32-true", attention="eager"), overheads=NOTHING_BESIDE)
    kept = estimate(resolve(job).job).worst.kept_bytes
    assert kept is not None
    assert abs(kept - real_kept(config, 3, side)) <= 4


# ------------------------------------------------------------------ operations by hand


def measured(b: BlockBuilder, output: Any, precision: str = "32-true", input_dtype: str = "fp32") -> BlockMemory:
    policy = KernelPolicy(precision=training_policy(precision, None), attention="eager")
    lowered = lower(b.done(output), policy, input_requires_grad=True, input_dtype=input_dtype)
    return measure(lowered, accumulation=Accumulation(), outputs_kept=False, is_last=False)


def by_axis(form: Form) -> dict[int, int]:
    return dict(per_axis(form))


def test_a_convolution_keeps_its_input() -> None:
    b = BlockBuilder("x", 8 * 100, SEQUENCE)
    out = vision.convolution(b, "conv", b.input, (8, 4), Grid(10, 10).after(3, 2, 1), kernel=3)
    assert out.width == 4 * 5 * 5
    assert by_axis(measured(b, out).kept) == {SEQUENCE: 4 * 800}


def test_a_convolution_under_autocast_keeps_the_casts_of_input_and_weight() -> None:
    b = BlockBuilder("x", 8 * 100, SEQUENCE)
    out = vision.convolution(b, "conv", b.input, (8, 4), Grid(10, 10), kernel=3)
    assert by_axis(measured(b, out, "bf16-mixed").kept) == {SEQUENCE: 2 * 800, ONCE: 2 * 4 * 8 * 9}


def test_a_grouped_convolution_has_one_input_channel_a_filter() -> None:
    b = BlockBuilder("x", 8 * 100, SEQUENCE)
    block = b.done(vision.convolution(b, "conv", b.input, (8, 8), Grid(10, 10), kernel=7, groups=8, bias=False))
    assert block.num_parameters == 8 * 49


def test_batch_norm_keeps_its_input_and_statistics_of_the_batch() -> None:
    b = BlockBuilder("x", 8 * 100, SEQUENCE)
    assert by_axis(measured(b, vision.batch_norm(b, "bn", b.input, 8)).kept) == {SEQUENCE: 4 * 800, ONCE: 2 * 4 * 8}


def test_max_pool_keeps_its_input_and_indices() -> None:
    b = BlockBuilder("x", 8 * 100, SEQUENCE)
    out = vision.max_pool(b, b.input, 8, Grid(10, 10).after(3, 2, 1))
    assert by_axis(measured(b, out).kept) == {SEQUENCE: 4 * 800 + 8 * 8 * 25}


def test_stochastic_depth_keeps_one_number_a_sample() -> None:
    b = BlockBuilder("x", 800, SEQUENCE)
    assert by_axis(measured(b, vision.drop_path(b, b.input, 0.2)).kept) == {SEQUENCE: 4}
    b = BlockBuilder("x", 800, SEQUENCE)
    assert measured(b, vision.drop_path(b, b.input, 0.0)).kept == ZERO


def test_window_attention_keeps_copies_the_softmax_and_nothing_of_the_bias() -> None:
    """2 windows of 2 x 2, 2 heads, 8 channels: copies of q, k and v 3 x 64, softmax 2 x 2 x 4 x 4, all fp32."""
    b = BlockBuilder("x", 8 * 8, SEQUENCE)
    bias = vision.relative_bias(b, "bias", 2, 2)
    assert bias.width == 2 * 2**4
    out = vision.attention(b, b.input, b.input, b.input, heads=2, channels=8, groups=2, bias=bias)
    assert by_axis(measured(b, out).kept) == {SEQUENCE: 4 * (3 * 64 + 64)}


# ------------------------------------------------------------------ jobs


def test_image_sets_the_tokens_but_not_the_table_of_positions() -> None:
    model = make({**VIT, "num_labels": 2}, image=64)
    assert (model.tokens_per_image, model.pixels) == (8 * 8 + 1, 3 * 64 * 64)
    assert model.num_parameters == make({**VIT, "num_labels": 2}).num_parameters
    resolved = resolve(Job(model=model, workload=Training(seq=4096, padding="right")))
    assert (resolved.job.workload.seq, resolved.job.workload.padding) == (65, "none")  # type: ignore[union-attr]


@pytest.mark.parametrize("config", [VIT, DINOV2, SWIN, CONVNEXT, RESNET, SEGFORMER])
def test_every_family_trains_and_infers_and_its_limit_is_the_batch(config: dict[str, Any]) -> None:
    model = make(config, image=128)
    training = resolve(Job(model=model, workload=Training(batch=2))).job
    inference = resolve(Job(model=model, workload=Inference(concurrency=2))).job
    assert (numbers_of(training), numbers_of(inference)) == (("batch",), ("concurrency",))
    assert estimate(training).peak.allocated_bytes > estimate(inference).peak.allocated_bytes > 0


@pytest.mark.parametrize("config", [VIT, DINOV2, SWIN, CONVNEXT, RESNET, SEGFORMER])
def test_peaks_grow_with_the_image_and_checkpointing_keeps_less(config: dict[str, Any]) -> None:
    def run(image: int, **workload: Any) -> Any:
        job = Job(model=make(config, image=image), workload=Training(batch=4, **workload), overheads=NOTHING_BESIDE)
        return estimate(resolve(job).job)

    assert run(160).peak.allocated_bytes > run(128).peak.allocated_bytes
    assert (run(128, checkpointing="full").worst.kept_bytes or 0) < (run(128).worst.kept_bytes or 0)
    assert run(128, checkpointing="full").peak.allocated_bytes <= run(128).peak.allocated_bytes


def test_a_size_that_nobody_states_is_an_assumption() -> None:
    assumed = {one.name: one for one in make(RESNET).assumptions}
    assert (assumed["image"].value, assumed["image"].flag) == (224, "--image")
    assert "image" not in {one.name for one in make(RESNET, image=96).assumptions}
    assert make(SEGFORMER).pixels == 3 * 512 * 512


def test_checkpointing_that_the_class_does_not_offer_is_said() -> None:
    codes = [code for code, _ in resolve(Job(model=make(RESNET), workload=Training(checkpointing="full"))).warnings]
    assert "checkpointing-by-hand" in codes
    assert "checkpointing-by-hand" not in [
        code for code, _ in resolve(Job(model=make(VIT), workload=Training(checkpointing="full"))).warnings
    ]


@pytest.mark.parametrize(
    ("config", "image", "wanted"),
    [
        (SWIN, 16, "window of 4"),
        (CONVNEXT, 2, "too small"),
        (SEGFORMER, 16, "too small"),
        ({**SEGFORMER, "depths": [1, 1]}, None, "depths"),
        ({**RESNET, "depths": [1, 1, 1]}, 64, "length"),
        ({**CONVNEXT, "hidden_sizes": [16, -1]}, 64, "hidden_sizes"),
        ({**SWIN, "num_heads": [3, 4]}, 64, "multiple of 3"),
        ({**CONVNEXT, "depths": [1000, 1000]}, 64, "blocks"),
        ({**VIT, "patch_size": "8"}, 64, "patch_size"),
        ({**DINOV2, "mlp_ratio": -1}, 56, "mlp_ratio"),
    ],
)
def test_configs_that_make_no_sense_are_refused(config: dict[str, Any], image: int | None, wanted: str) -> None:
    with pytest.raises(InputError, match=wanted):
        make(config, image=image)


def test_unknown_heads_and_keys_are_refused() -> None:
    with pytest.raises(UnknownArchitectureError, match="ViTForImageClassification"):
        make(VIT, "ForMaskedImageModeling")
    with pytest.raises(UnknownArchitectureError, match="num_registers"):
        make({**DINOV2, "num_registers": 4})


def test_the_facade_takes_an_image_size() -> None:
    model = api.load_model(VIT, dimensions={"image": 64})
    assert model.tokens_per_image == 65


@pytest.mark.parametrize("config", [DINOV2, SWIN])
def test_a_feed_forward_layer_has_a_width(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="mlp_ratio 0 leaves nothing of a width"):
        make({**config, "mlp_ratio": 0})


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_model_without_linear_layers_takes_no_adapters(method: str) -> None:
    with pytest.raises(UsageError, match="resnet has no linear layer but its head"):
        resolve(Job(model=make(RESNET), workload=FineTuning(method=method)))
