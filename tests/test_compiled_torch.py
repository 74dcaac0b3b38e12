"""What torch.compile keeps of a Llama layer, against its own partitioner: the layer is traced and split, nothing is generated."""

from __future__ import annotations

from typing import Any

import pytest

import memfit

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BATCH, SEQ, HIDDEN, HEADS, FFN = 2, 64, 128, 4, 256
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": HIDDEN,
    "intermediate_size": FFN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 512,
}  # fmt: skip


def kept_by_partitioner(*, autocast: bool) -> int:
    """Bytes that the layer's forward graph hands to its backward graph: no parameters, each storage once."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    found: dict[str, int] = {}

    def forward(graph: Any, _: Any) -> Any:
        nodes = list(graph.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        tables, parameters = inputs[1:3], inputs[3:]
        outputs = next(node for node in nodes if node.op == "output").args[0]
        for node in outputs[1:]:
            # the attention's output and its view with the heads side by side are one storage
            if node in parameters or node in tables or node.name.startswith("alias"):
                continue
            value = node.meta["val"]
            found[node.name] = value.numel() * value.element_size()
            if node.target is torch.ops.aten.permute.default and value.dim() == 2 and not autocast:
                del found[node.name]  # a weight, transposed: a view of the parameter
        return graph

    config = transformers.LlamaConfig(**{k: v for k, v in CONFIG.items() if k not in ("model_type", "architectures")})
    config._attn_implementation = "sdpa"
    dtype = torch.float32 if autocast else torch.bfloat16
    with FakeTensorMode():
        torch.set_default_dtype(dtype)
        try:
            layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer(config, 0)
        finally:
            torch.set_default_dtype(torch.float32)
        names, parameters = zip(*layer.named_parameters(), strict=True)
        x = torch.empty(BATCH, SEQ, HIDDEN, dtype=dtype, requires_grad=True)
        table = torch.empty(1, SEQ, HIDDEN // HEADS, dtype=dtype)

        def run(x: Any, cos: Any, sin: Any, *values: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                weights = dict(zip(names, values, strict=True))
                keywords = {"position_embeddings": (cos, sin), "attention_mask": None}
                return torch.func.functional_call(layer, weights, (x,), keywords)

        aot_function(
            run,
            fw_compiler=forward,
            bw_compiler=lambda graph, _: graph,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )(x, table, table, *parameters)
    return sum(found.values())


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_a_layer_keeps_what_the_partitioner_hands_to_backward(autocast: bool) -> None:
    kept = []
    for layers in (1, 2):
        workload = {
            "kind": "train", "batch": BATCH, "seq": SEQ, "kernels": "compile",
            "precision": "bf16-mixed" if autocast else "bf16-true",
        }  # fmt: skip
        one = memfit.estimate({**CONFIG, "num_hidden_layers": layers}, workload).ranks[0].kept_bytes
        assert one is not None
        kept.append(one)
    assert kept[1] - kept[0] == kept_by_partitioner(autocast=autocast)


def test_the_loss_keeps_logits_in_their_own_format() -> None:
    kept = {}
    for vocabulary in (100, 300):
        config = {**CONFIG, "num_hidden_layers": 1, "vocab_size": vocabulary}
        workload = {"kind": "train", "batch": BATCH, "seq": SEQ, "kernels": "compile", "precision": "bf16-true"}
        kept[vocabulary] = memfit.estimate(config, workload).ranks[0].kept_bytes
    assert kept[300] - kept[100] == BATCH * SEQ * 200 * 2
