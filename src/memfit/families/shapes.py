"""Typical shapes of models by size: the table behind `sizes`. Each row is the shape of a published model.

Three forms: a gated decoder (`llama`), a decoder without gate (`gpt_neox`), an encoder (`bert`). A form knows how many parameters
a shape has, what is typical when a dimension is not given, and how to write the shape as a config.
"""

from __future__ import annotations

from typing import Any

from memfit.records import Record

MAX_PARAMETERS = 10**15
"""Shapes above this are typing errors; products of it with bytes stay within 64 bits."""


class Shape(Record):
    """The dimensions of one model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    """Whether the embedding and the head are one matrix."""
    positions: int
    """Longest sequence."""


def _rows(*rows: tuple[int, int, int, int, int, int], vocab: int, tied: bool, positions: int) -> tuple[Shape, ...]:
    """Shapes from (layers, hidden, heads, kv_heads, head_dim, ffn) that share the rest."""
    return tuple(
        Shape(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn,
              vocab=vocab, tied=tied, positions=positions)
        for layers, hidden, heads, kv_heads, head_dim, ffn in rows
    )  # fmt: skip


class Form:
    """One way to build a model from a shape. `name` is the config's `model_type`."""

    name: str
    noun: str
    shapes: tuple[Shape, ...]
    sizes: tuple[int, int]
    """Fewest and most parameters that a size alone may ask for."""
    grouped_heads: bool
    rotary: bool
    ffn_rule: str
    instead: str = ""

    def layer(self, shape: Shape) -> int:
        """Parameters of one layer."""
        raise NotImplementedError

    def outside(self, shape: Shape) -> int:
        """Parameters outside the layers: embeddings, last norm, head."""
        raise NotImplementedError

    def config(self, shape: Shape) -> dict[str, Any]:
        """The shape in the words of a Hugging Face config.json."""
        raise NotImplementedError

    def typical_ffn(self, hidden: int) -> int:
        """Width of the feed-forward layer when it was not given: 4 h (Vaswani et al. 2017)."""
        return 4 * hidden

    def typical_vocab(self, hidden: int) -> int:
        """Vocabulary when it was not given."""
        raise NotImplementedError

    def typical_head_dim(self, hidden: int) -> int:
        """Width of a head when the number of heads was not given: 128 from a hidden size of 2,048 on if it divides, else 64."""
        return 128 if hidden >= 2048 and hidden % 128 == 0 else 64

    def typically_tied(self, hidden: int) -> bool:
        """Whether embedding and head are one matrix when nothing is known."""
        return False

    def parameters(self, shape: Shape) -> int:
        """All parameters, tied ones once."""
        return self.outside(shape) + shape.layers * self.layer(shape)


class GatedDecoder(Form):
    """Llama: RMSNorm, rotary positions, grouped heads, SwiGLU, no biases."""

    name = "llama"
    noun = "gated decoder"
    sizes = (10**7, 10**13)
    grouped_heads = True
    rotary = True
    ffn_rule = "8/3 of the hidden size (Llama), rounded up to a multiple of 256, of 32 below a hidden size of 1,024"
    shapes = (
        # llama2.c stories15M, stories42M, stories110M
        *_rows((6, 288, 6, 6, 48, 768), (8, 512, 8, 8, 64, 1376), (12, 768, 12, 12, 64, 2048),
               vocab=32000, tied=True, positions=131072),
        # SmolLM2-135M, SmolLM2-360M
        *_rows((30, 576, 9, 3, 64, 1536), (32, 960, 15, 5, 64, 2560), vocab=49152, tied=True, positions=131072),
        # Qwen2.5-0.5B; Llama-3.2-1B; Qwen2.5-1.5B; Llama-3.2-3B
        *_rows((24, 896, 14, 2, 64, 4864), vocab=151936, tied=True, positions=131072),
        *_rows((16, 2048, 32, 8, 64, 8192), vocab=128256, tied=True, positions=131072),
        *_rows((28, 1536, 12, 2, 128, 8960), vocab=151936, tied=True, positions=131072),
        *_rows((28, 3072, 24, 8, 128, 8192), vocab=128256, tied=True, positions=131072),
        # Llama-3.1-8B (a 7B is fitted to it); Llama-2-13B; Qwen2.5-14B and -32B; Llama-3.1-70B and -405B
        *_rows((32, 4096, 32, 8, 128, 14336), vocab=128256, tied=False, positions=131072),
        *_rows((40, 5120, 40, 40, 128, 13824), vocab=32000, tied=False, positions=131072),
        *_rows((48, 5120, 40, 8, 128, 13824), (64, 5120, 40, 8, 128, 27648), vocab=152064, tied=False, positions=131072),
        *_rows((80, 8192, 64, 8, 128, 28672), (126, 16384, 128, 8, 128, 53248), vocab=128256, tied=False, positions=131072),
    )  # fmt: skip

    def layer(self, shape: Shape) -> int:
        """2 norms of h; query and output h x q each; key and value h x kv each; gate, up and down h x f each."""
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return shape.hidden * (2 + 2 * queries + 2 * keys + 3 * shape.ffn)

    def outside(self, shape: Shape) -> int:
        """Embedding and head V x h (one matrix if tied), last norm h."""
        return shape.hidden * (shape.vocab * (1 if shape.tied else 2) + 1)

    def typical_ffn(self, hidden: int) -> int:
        """8/3 h, with which three matrices cost as much as two of 4 h, rounded up to a multiple of 256 (Touvron et al. 2023), or
        of 32 in small models (llama2.c)."""
        step = 256 if hidden >= 1024 else 32
        return -(-8 * hidden // (3 * step)) * step

    def typical_vocab(self, hidden: int) -> int:
        """Llama 3's 128,256; below a hidden size of 1,024 Llama 2's 32,000."""
        return 128256 if hidden >= 1024 else 32000

    def typically_tied(self, hidden: int) -> bool:
        """As Llama 3.2, Qwen2.5 and SmolLM2 do up to a hidden size of 2,048."""
        return hidden <= 2048

    def config(self, shape: Shape) -> dict[str, Any]:
        """A `llama` config."""
        return {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "head_dim": shape.head_dim, "hidden_act": "silu", "hidden_size": shape.hidden, "intermediate_size": shape.ffn,
            "max_position_embeddings": shape.positions, "mlp_bias": False, "num_attention_heads": shape.heads,
            "num_hidden_layers": shape.layers, "num_key_value_heads": shape.kv_heads, "rms_norm_eps": 1e-05,
            "tie_word_embeddings": shape.tied, "torch_dtype": "bfloat16", "vocab_size": shape.vocab,
        }  # fmt: skip


class PlainDecoder(Form):
    """GPT-NeoX: LayerNorm, rotary positions, biases, a feed-forward of two matrices with GELU."""

    name = "gpt_neox"
    noun = "decoder without gate (GPT-NeoX)"
    sizes = (14 * 10**6, 10**13)
    grouped_heads = False
    rotary = True
    ffn_rule = "4 times the hidden size"
    instead = ", or --gated for grouped heads"
    shapes = (
        # Pythia 14M, 70M, 160M, 410M, 1B, 1.4B, 2.8B, 6.9B, 12B; GPT-NeoX-20B; OPT-66B's and GPT-3's depth and width
        *_rows((6, 128, 4, 4, 32, 512), (6, 512, 8, 8, 64, 2048), (12, 768, 12, 12, 64, 3072), (24, 1024, 16, 16, 64, 4096),
               (16, 2048, 8, 8, 256, 8192), (24, 2048, 16, 16, 128, 8192), (32, 2560, 32, 32, 80, 10240),
               (32, 4096, 32, 32, 128, 16384), (36, 5120, 40, 40, 128, 20480), (44, 6144, 64, 64, 96, 24576),
               (64, 9216, 72, 72, 128, 36864), (96, 12288, 96, 96, 128, 49152), vocab=50304, tied=False, positions=131072),
    )  # fmt: skip

    def layer(self, shape: Shape) -> int:
        """2 LayerNorms of 2h; query-key-value 3h^2 + 3h; output h^2 + h; feed-forward 2hf + f + h."""
        hidden, ffn = shape.hidden, shape.ffn
        return 4 * hidden + 4 * hidden * (hidden + 1) + 2 * hidden * ffn + ffn + hidden

    def outside(self, shape: Shape) -> int:
        """Embedding and head V x h each, last LayerNorm 2h."""
        return shape.hidden * (2 * shape.vocab + 2)

    def typical_vocab(self, hidden: int) -> int:
        """Pythia's 50,304."""
        return 50304

    def config(self, shape: Shape) -> dict[str, Any]:
        """A `gpt_neox` config."""
        return {
            "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "hidden_act": "gelu", "hidden_dropout": 0.0, "hidden_size": shape.hidden, "intermediate_size": shape.ffn,
            "layer_norm_eps": 1e-05, "max_position_embeddings": shape.positions, "num_attention_heads": shape.heads,
            "num_hidden_layers": shape.layers, "rotary_pct": 0.25, "tie_word_embeddings": shape.tied, "torch_dtype": "bfloat16",
            "use_parallel_residual": True, "vocab_size": shape.vocab,
        }  # fmt: skip


class Encoder(Form):
    """BERT with its masked-language-model head: post-LayerNorm, learned positions, biases, GELU, head tied to the embedding."""

    name = "bert"
    noun = "encoder (BERT)"
    sizes = (43 * 10**5, 10**12)
    grouped_heads = False
    rotary = False
    ffn_rule = "4 times the hidden size"
    shapes = (
        # BERT tiny, mini, small, medium, base, large (Turc et al. 2019, Devlin et al. 2019); Megatron-BERT 1.3B and 3.9B
        *_rows((2, 128, 2, 2, 64, 512), (4, 256, 4, 4, 64, 1024), (4, 512, 8, 8, 64, 2048), (8, 512, 8, 8, 64, 2048),
               (12, 768, 12, 12, 64, 3072), (24, 1024, 16, 16, 64, 4096), (24, 2048, 32, 32, 64, 8192),
               (48, 2560, 40, 40, 64, 10240), vocab=30522, tied=True, positions=512),
    )  # fmt: skip

    def layer(self, shape: Shape) -> int:
        """Query, key, value, output h^2 + h each; feed-forward 2hf + f + h; 2 LayerNorms of 2h."""
        hidden, ffn = shape.hidden, shape.ffn
        return 4 * hidden * (hidden + 1) + 2 * hidden * ffn + ffn + hidden + 4 * hidden

    def outside(self, shape: Shape) -> int:
        """Word, position and type embeddings with LayerNorm (V + P + 2 + 2) h; head: h^2 + h, LayerNorm 2h, bias V."""
        hidden = shape.hidden
        return hidden * (shape.vocab + shape.positions + 2 + 2) + hidden * (hidden + 1) + 2 * hidden + shape.vocab

    def typical_vocab(self, hidden: int) -> int:
        """BERT's 30,522."""
        return 30522

    def typical_head_dim(self, hidden: int) -> int:
        """64 in every size of BERT."""
        return 64

    def typically_tied(self, hidden: int) -> bool:
        """The masked-language-model head shares the word embedding."""
        return True

    def config(self, shape: Shape) -> dict[str, Any]:
        """A `bert` config."""
        return {
            "model_type": "bert", "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1, "hidden_size": shape.hidden, "intermediate_size": shape.ffn, "layer_norm_eps": 1e-12,
            "max_position_embeddings": shape.positions, "num_attention_heads": shape.heads, "num_hidden_layers": shape.layers,
            "position_embedding_type": "absolute", "tie_word_embeddings": shape.tied, "torch_dtype": "float32",
            "type_vocab_size": 2, "vocab_size": shape.vocab,
        }  # fmt: skip


FORMS: dict[str, Form] = {form.name: form for form in (GatedDecoder(), PlainDecoder(), Encoder())}
