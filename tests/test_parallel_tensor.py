"""Tensor, sequence and expert parallelism: counts by hand, Korthikanti's closed forms, laws, refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit import api, runtimes
from memfit.account.estimate import Rank
from memfit.errors import UsageError
from memfit.model import Model
from memfit.parallel.experts import split_experts
from memfit.parallel.habits import Habits
from memfit.parallel.legality import largest_legal, legal_near, sequence_reason, tensor_reason
from memfit.parallel.tensor import split_tensors

GiB = 1 << 30


def llama(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256, **changes,
    }  # fmt: skip


def mixtral(**changes: Any) -> dict[str, Any]:
    return llama(
        model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=8, num_experts_per_tok=2, **changes
    )


def deepseek() -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64,
        "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 8, "vocab_size": 256, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1,
    }  # fmt: skip


def gpt2(hidden: int, heads: int, layers: int, vocab: int = 51200, positions: int = 2048) -> dict[str, Any]:
    """With GELU as one function, as Megatron fuses it."""
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": hidden, "n_head": heads, "n_layer": layers,
        "vocab_size": vocab, "n_positions": positions, "activation_function": "gelu",
    }  # fmt: skip


def falcon(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "hidden_size": 64, "num_attention_heads": 8,
        "num_hidden_layers": 2, "vocab_size": 256, "new_decoder_architecture": False, "multi_query": True, **changes,
    }  # fmt: skip


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": llama(),
    "tied": llama(tie_word_embeddings=True),
    "mixtral": mixtral(),
    "deepseek": deepseek(),
    "gpt2": gpt2(64, 8, 2, vocab=256, positions=64),
    "gpt_neox": {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "hidden_size": 64, "num_attention_heads": 8,
        "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256,
    },
    "bloom": {
        "model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_embed": 64, "n_head": 8, "n_layer": 2,
        "vocab_size": 256,
    },
    "falcon": falcon(),
    "falcon-new": falcon(new_decoder_architecture=True, num_kv_heads=2),
    "phi3": llama(model_type="phi3", architectures=["Phi3ForCausalLM"], pad_token_id=0),
    "olmo2": llama(model_type="olmo2", architectures=["Olmo2ForCausalLM"]),
    "qwen3_moe": mixtral() | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 32, "num_experts": 8,
        "head_dim": 8,
    },
    "bert": {
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 64, "num_attention_heads": 8,
        "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256,
    },
    "t5": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "num_heads": 8, "d_kv": 8,
        "d_ff": 128,
        "num_layers": 2, "vocab_size": 256,
    },
    "mamba": {
        "model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
        "vocab_size": 256, "state_size": 16, "intermediate_size": 128, "time_step_rank": 4, "conv_kernel": 4,
    },
}  # fmt: skip
FAMILIES["qwen3_moe"].pop("num_local_experts")


def model_of(config: dict[str, Any]) -> Model:
    return api.load_model(config)


def train(config: dict[str, Any], *, runtime: str = "torch", **degrees: Any) -> Rank:
    workload = {"kind": "train", "batch": 2, "seq": 32, "precision": "bf16-true", "optimizer": "adamw-fused"}
    overheads = {"runtime": runtime, "workspace": 0}
    (rank,) = api.estimate(config, workload, parallelism=degrees or None, overheads=overheads).ranks
    return rank


def components(rank: Rank) -> dict[str, int]:
    return {one.name: one.bytes for one in rank.components}


# --- parameters


def test_a_llama_by_hand() -> None:
    """Llama-3-8B over 8: all matrices and both tables divide, norms do not."""
    config = llama(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256,
    )  # fmt: skip
    model = split_tensors(model_of(config), 8, sequence=False)
    matrices = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert model.num_parameters == 32 * (matrices // 8 + 2 * 4096) + 4096 + 2 * 128256 // 8 * 4096


def test_fewer_key_value_heads_than_devices_are_there_several_times() -> None:
    """8 heads of 8, 4 of keys and values, over 8: each device projects and caches one of each."""
    config = llama()
    model = split_tensors(model_of(config), 8, sequence=False)
    (layer,) = model.segments[1].blocks
    by_name = {one.name: one.shape for one in layer.parameters}
    assert by_name["self_attn.q_proj.weight"] == (8, 64)
    assert by_name["self_attn.k_proj.weight"] == by_name["self_attn.v_proj.weight"] == (8, 64)
    assert by_name["self_attn.o_proj.weight"] == (64, 8)
    assert [one.elements_per_token for one in layer.caches] == [2 * 8]


def test_vocabularies_are_padded() -> None:
    """250 rows over 4 are 63 each; Megatron's are multiples of 128: 50,257 over 8 are 50 x 128."""
    embedding = split_tensors(model_of(llama(vocab_size=250)), 4, sequence=False).segments[0].blocks[0].parameters[0]
    assert embedding.shape == (63, 64)
    padded = split_tensors(model_of(llama(vocab_size=50257)), 8, sequence=False, habits=Habits(vocabulary_multiple=128))
    assert padded.segments[0].blocks[0].parameters[0].shape == (6400, 64)
    assert padded.segments[-1].blocks[0].parameters[-1].shape == (6400, 64)


def test_an_embedding_that_a_runtime_leaves_whole() -> None:
    whole = Habits(whole_embedding=True)
    assert split_tensors(model_of(llama()), 4, sequence=False, habits=whole).segments[0].blocks[0].parameters[0].shape == (
        256,
        64,
    )
    tied = split_tensors(model_of(FAMILIES["tied"]), 4, sequence=False, habits=whole)
    assert tied.segments[0].blocks[0].parameters[0].shape == (64, 64)


def test_latent_attention_keeps_what_it_projects_down_whole() -> None:
    model = split_tensors(model_of(deepseek()), 4, sequence=False)
    by_name = {one.name: one.shape for one in model.segments[1].blocks[0].parameters}
    assert by_name["self_attn.q_a_proj.weight"] == (24, 64)
    assert by_name["self_attn.kv_a_proj_with_mqa.weight"] == (16 + 4, 64)
    assert by_name["self_attn.q_b_proj.weight"] == (2 * 12, 24)
    assert by_name["self_attn.kv_b_proj.weight"] == (2 * 16, 16)
    assert [one.elements_per_token for one in model.segments[1].blocks[0].caches] == [16 + 4]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_shards_sum_to_the_whole(name: str, tp: int) -> None:
    """Parameter by parameter: a part is the whole or a share of it, and the parts of all devices are at least the whole."""
    model = model_of(FAMILIES[name])
    local = split_tensors(model, tp, sequence=False)
    shares = 0
    for segment, other in zip(model.segments, local.segments, strict=True):
        for block, part in zip(segment.blocks, other.blocks, strict=True):
            for one, its in zip(block.parameters, part.parameters, strict=True):
                assert its.name == one.name
                assert one.num_elements <= its.num_elements * tp
                if one.role == "router":
                    assert its.shape == one.shape
                shares += its.num_elements < one.num_elements
    assert shares
    assert model.num_parameters <= local.num_parameters * tp


def test_matrices_without_copies_sum_to_the_whole_exactly() -> None:
    for name in ("llama", "phi3", "gpt2", "gpt_neox", "bloom", "t5"):
        model = model_of(FAMILIES[name])
        local = split_tensors(model, 4, sequence=False)
        for segment, other in zip(model.segments[1:], local.segments[1:], strict=True):
            for block, part in zip(segment.blocks, other.blocks, strict=True):
                for one, its in zip(block.parameters, part.parameters, strict=True):
                    if one.role == "linear":
                        assert 4 * its.num_elements == one.num_elements, one.name


# --- activations


@pytest.mark.parametrize(
    ("hidden", "heads", "layers", "pp", "gib"),
    [
        (6144, 64, 48, 1, 45.5625),
        (12288, 96, 96, 8, 45.5625),
        (20480, 128, 105, 35, 31.640625),
        (25600, 160, 128, 64, 32.958984375),
    ],
    ids=["22B", "175B", "530B", "1T"],
)
def test_korthikanti_weights_and_optimizer(hidden: int, heads: int, layers: int, pp: int, gib: float) -> None:
    """18 B a parameter of the layers' matrices (weights, fp32 gradients, Adam), tp 8: figure 1 of arXiv:2205.05198."""
    model = split_tensors(model_of(gpt2(hidden, heads, layers // pp)), 8, sequence=True)
    elements = sum(
        segment.repeat * one.num_elements
        for segment in model.segments
        for block in segment.blocks
        for one in block.parameters
        if one.role == "linear"
    )
    assert 18 * elements / GiB == pytest.approx(gib, abs=0.005)  # the figure's own digits


@pytest.fixture
def megatron_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that gather their input again in backward."""
    torch = runtimes.RUNTIMES["torch"]
    monkeypatch.setitem(runtimes.RUNTIMES, "torch", torch._replace(regathers=True, collectives="in-place", split_logits=True))


def kept_by_a_layer(*, hidden: int, heads: int, seq: int, batch: int, attention: str, tp: int, sp: bool) -> int:
    """Bytes that one more layer keeps, less what the published forms leave out: 16 B a token of the two norms' statistics."""
    found = []
    for layers in (1, 2):
        workload = {
            "kind": "train", "batch": batch, "seq": seq, "precision": "bf16-true", "optimizer": "sgd", "attention": attention,
            "dropout": 0.1,
        }  # fmt: skip
        parallelism = {"tp": tp, "sp": sp} if tp > 1 else None
        (rank,) = api.estimate(
            gpt2(hidden, heads, layers), workload, parallelism=parallelism, overheads={"runtime": "torch"}
        ).ranks
        assert rank.kept_bytes is not None
        found.append(rank.kept_bytes)
    return found[1] - found[0] - 16 * seq * batch


KORTHIKANTI = [(6144, 64, 4), (12288, 96, 1), (20480, 128, 1), (25600, 160, 1)]


@pytest.mark.usefixtures("megatron_like")
@pytest.mark.parametrize(("hidden", "heads", "batch"), KORTHIKANTI, ids=["22B", "175B", "530B", "1T"])
@pytest.mark.parametrize("t", [1, 8])
def test_korthikanti_activations(hidden: int, heads: int, batch: int, t: int) -> None:
    """Without sequence parallelism sbh (10 + 24/t + 5as/(ht)), with it sbh/t (34 + 5as/h)."""
    s = 2048
    sbh = s * batch * hidden
    given = {"hidden": hidden, "heads": heads, "seq": s, "batch": batch, "attention": "eager", "tp": t}
    scores = 5 * heads * s * s * batch // t
    assert kept_by_a_layer(**given, sp=False) == 10 * sbh + 24 * sbh // t + scores
    if t > 1:
        assert kept_by_a_layer(**given, sp=True) == 34 * sbh // t + scores


@pytest.mark.usefixtures("megatron_like")
def test_korthikanti_without_scores() -> None:
    """34 sbh/t where the scores are not kept; FlashAttention keeps 4 B a head and token in their place."""
    kept = kept_by_a_layer(hidden=6144, heads=64, seq=2048, batch=4, attention="flash", tp=8, sp=True)
    assert kept == 34 * 2048 * 4 * 6144 // 8 + 4 * 64 * 2048 * 4 // 8


def test_dtensor_keeps_gathered_inputs_once() -> None:
    """DTensor's products keep what was gathered: 2h, whole, in place of its part; q, k, v share one, and gate and up."""
    degrees = {"tp": 4, "sp": True}
    dtensor = train(llama(), **degrees).kept_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(runtimes.RUNTIMES, "torch", runtimes.RUNTIMES["torch"]._replace(regathers=True))
        megatron = train(llama(), **degrees).kept_bytes
    tokens, hidden, layers = 2 * 32, 64, 2
    # a part of 2 h / 4 is a part of the norm's result, kept once; the head gathers as well
    assert dtensor is not None
    assert megatron is not None
    assert dtensor - megatron == (2 * layers + 1) * tokens * 2 * hidden * 3 // 4


def test_a_selective_checkpoint_keeps_scattered_sums() -> None:
    """As torchtitan's list does: after attention and after the MLP, 2 h / t a token each."""
    found = []
    for kept in ("attention", "attention,reduce_scatter"):
        workload = {"kind": "train", "batch": 2, "seq": 32, "precision": "bf16-true", "checkpointing": f"selective:{kept}"}
        (rank,) = api.estimate(llama(), workload, parallelism={"tp": 4, "sp": True}, overheads={"runtime": "torch"}).ranks
        found.append(rank.kept_bytes or 0)
    assert found[1] - found[0] == 2 * 2 * (2 * 32) * 2 * 64 // 4


# --- laws


@pytest.mark.parametrize("name", FAMILIES)
def test_no_component_grows_with_the_degree(name: str) -> None:
    one = components(train(FAMILIES[name]))
    for sp in (False, True):
        before = one
        for tp in (2, 4, 8):
            now = components(train(FAMILIES[name], tp=tp, sp=sp))
            for component in ("weights", "gradients", "optimizer_states", "activations"):
                assert now[component] <= before[component], (component, tp)
            before = now


@pytest.mark.parametrize("name", FAMILIES)
def test_sequence_parallelism_only_takes_away_activations(name: str) -> None:
    plain, along = components(train(FAMILIES[name], tp=4, sp=False)), components(train(FAMILIES[name], tp=4, sp=True))
    assert along["activations"] < plain["activations"]
    assert along["weights"] == plain["weights"]


@given(heads=st.integers(1, 12), group=st.integers(1, 4), tp=st.integers(1, 16))
def test_whatever_is_legal_can_be_split(heads: int, group: int, tp: int) -> None:
    model = model_of(
        llama(hidden_size=heads * group * 8, num_attention_heads=heads * group, num_key_value_heads=heads, intermediate_size=240)
    )
    legal = heads * group % tp == 0 and (heads % tp == 0 or tp % heads == 0) and 240 % tp == 0
    assert (tensor_reason(model, tp) is None) == legal
    if not legal:
        with pytest.raises(UsageError, match=f"--tp {tp}: "):
            split_tensors(model, tp, sequence=False)
        return
    local = split_tensors(model, tp, sequence=True)
    assert local.num_parameters * tp >= model.num_parameters


# --- refusals


def test_a_refusal_names_the_nearest_degrees() -> None:
    model = model_of(llama(num_attention_heads=8))
    assert legal_near(model, 6) == (4, 8)
    with pytest.raises(UsageError, match=r"8 attention heads do not divide by 6; .*--tp 4 and --tp 8"):
        split_tensors(model, 6, sequence=False)


def test_a_network_without_a_rule_is_refused_by_name() -> None:
    config = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}
    with pytest.raises(UsageError, match=r"resnet's .* has no rule for tensor parallelism"):
        split_tensors(model_of(config), 2, sequence=False)


def test_the_largest_degree_stays_within_a_machine() -> None:
    model = model_of(llama(num_attention_heads=12, num_key_value_heads=12, hidden_size=96, intermediate_size=96))
    assert largest_legal(model, 8, 8) == 4
    assert largest_legal(model, 16, 8) == 4
    assert largest_legal(model, 3, 8) == 1  # a machine is cut evenly


def test_sequences_that_do_not_divide() -> None:
    assert sequence_reason(4096, 8) is None
    assert "4,096 or 4,104" in (sequence_reason(4100, 8) or "")


@pytest.mark.parametrize(
    ("given", "degrees", "on", "code"),
    [
        ({"seq": 4100}, {"tp": 8, "sp": True}, None, "uneven-sequence"),
        ({"seq": 64}, {"tp": 8}, "4x4xh100", "tensor-parallel-across-machines"),
        ({"seq": 64, "loss": "fused"}, {"tp": 2}, None, "loss-over-split-vocabulary"),
    ],
)
def test_layouts_to_look_at_are_warned_of(given: dict[str, Any], degrees: dict[str, Any], on: str | None, code: str) -> None:
    answer = api.answer(llama(), {"kind": "train", **given}, parallelism=degrees, on=on, overheads={"runtime": "torch"})
    assert code in [one.code for one in answer.warnings]


def test_balanced_routing_is_warned_of() -> None:
    answer = api.answer(mixtral(), {"kind": "train", "seq": 64}, parallelism={"dp_replicate": 4, "ep": 4})
    assert "balanced-experts" in [one.code for one in answer.warnings]


# --- experts


def test_experts_are_spread_and_the_router_is_whole() -> None:
    model = split_experts(model_of(mixtral()), 4)
    by_name = {one.name: one.shape for one in model.segments[1].blocks[0].parameters}
    assert by_name["mlp.experts.gate_up_proj"] == (2, 256, 64)
    assert by_name["mlp.experts.down_proj"] == (2, 64, 128)
    assert by_name["mlp.gate.weight"] == (8, 64)


def test_expert_parallelism_does_not_shrink_activations() -> None:
    """Two all-to-alls and their reordering add to them: two indices of 8 k bytes a token and layer are kept."""
    alone, spread = train(mixtral()), train(mixtral(), dp_replicate=4, ep=4)
    assert alone.kept_bytes is not None
    assert spread.kept_bytes is not None
    tokens, k, layers = 2 * 32, 2, 2
    offsets = 4 * (8 - 2) * layers  # int32, one a local expert
    assert spread.kept_bytes - alone.kept_bytes == 2 * 8 * k * tokens * layers - offsets
    experts = 2 * 8 * 3 * 64 * 128 * layers
    assert components(alone)["weights"] - components(spread)["weights"] == experts * 3 // 4


def test_an_illegal_expert_degree_is_refused() -> None:
    with pytest.raises(UsageError, match=r"8 experts do not divide by 3; .*--ep 2 and --ep 4"):
        split_experts(model_of(mixtral()), 3)
    with pytest.raises(UsageError, match="llama has no experts"):
        split_experts(model_of(llama()), 2)


def test_expert_weights_divide_by_both_in_training_and_stay_whole_in_engines() -> None:
    layer = split_experts(split_tensors(model_of(mixtral()), 2, sequence=True), 4).segments[1].blocks[0]
    by_name = {one.name: one.shape for one in layer.parameters}
    assert by_name["mlp.experts.gate_up_proj"] == (2, 2 * 64, 64)
    engine = split_tensors(model_of(mixtral()), 4, sequence=False, habits=Habits(whole_experts=True))
    by_name = {one.name: one.shape for one in split_experts(engine, 4).segments[1].blocks[0].parameters}
    assert by_name["mlp.experts.gate_up_proj"] == (2, 256, 64)


# --- inference and adapters


def test_inference_divides_weights_and_cache() -> None:
    workload = {"kind": "infer", "context": 64, "concurrency": 2}
    found = [api.estimate(llama(), workload, parallelism={"tp": tp}, overheads={"runtime": "torch"}) for tp in (1, 4)]
    alone, split = (components(one.ranks[0]) for one in found)
    assert alone["kv_cache"] == 4 * split["kv_cache"] == 2 * 64 * 2 * 2 * 4 * 8 * 2
    norms = 2 * (2 * 2 * 64 + 64)
    tables = 4 * 8  # rotary frequencies in fp32
    assert abs(alone["weights"] - norms - 4 * (split["weights"] - norms)) <= 4 * tables


def test_adapters_follow_the_weights() -> None:
    """By columns B is split and A whole, by rows A is split and B whole (r = 16)."""
    workload = {"kind": "finetune", "method": "lora", "batch": 1, "seq": 32, "lora_rank": 16, "lora_dtype": "bf16"}
    workload |= {"precision": "bf16-true", "optimizer": "adamw-fused"}
    (rank,) = api.estimate(llama(), workload, parallelism={"tp": 4}, overheads={"runtime": "torch"}).ranks
    by_columns = [(64, 64), (64, 32), (64, 32), (64, 128), (64, 128)]
    by_rows = [(64, 64), (128, 64)]
    elements = sum(16 * (inner + outer // 4) for inner, outer in by_columns)
    elements += sum(16 * (inner // 4 + outer) for inner, outer in by_rows)
    assert components(rank)["gradients"] == 2 * 2 * elements
