"""Builds a block so that a family file reads like the model's forward pass; shapes are inferred from the values."""

from __future__ import annotations

from memfit.model.description import (
    KEY_TOKEN,
    SEQUENCE,
    TARGET_KEY_TOKEN,
    TARGET_TOKEN,
    TOKEN,
    Block,
    CacheSpec,
    Op,
    Parameter,
    StateSpec,
    Value,
)


class BlockBuilder:
    """Records operations in execution order. Every method returns the value(s) that the operation produces."""

    def __init__(self, name: str, width: int, axis: int = TOKEN) -> None:
        self.name = name
        self._ops: list[Op] = []
        self._num_values = 1
        self._caches: list[CacheSpec] = []
        self._state: StateSpec | None = None
        self._externals: dict[str, Value] = {}
        self._holds: list[tuple[int, int]] = []
        self._provides: dict[str, Value] = {}
        self.input = Value(0, axis, width)

    def _value(self, axis: int, width: int) -> Value:
        value = Value(self._num_values, axis, width)
        self._num_values += 1
        return value

    def op(
        self,
        kind: str,
        name: str,
        inputs: tuple[Value, ...],
        width: int,
        parameters: tuple[Parameter, ...] = (),
        axis: int | None = None,
        **attributes: object,
    ) -> Value:
        """Records one operation with one output; op libraries (`memfit.model.ops`) are functions that call this."""
        output = self._value(inputs[0].axis if axis is None else axis, width)
        self._ops.append(Op(kind, name, inputs, (output,), parameters, attributes))
        return output

    def done(self, output: Value, *, input_held: bool = True) -> Block:
        """The finished block."""
        return Block(
            self.name,
            self.input,
            output,
            tuple(self._ops),
            tuple(self._caches),
            tuple(self._externals.items()),
            tuple(self._holds),
            tuple(self._provides.items()),
            input_held=input_held,
            state=self._state,
        )

    def external(self, name: str, width: int, axis: int = TOKEN) -> Value:
        """A value that another segment or block provides: the encoder's output (`Segment.provides`), a shared position bias."""
        if name not in self._externals:
            self._externals[name] = self._value(axis, width)
        return self._externals[name]

    def provide(self, name: str, value: Value) -> None:
        """Later blocks read this value as `external(name)`."""
        self._provides[name] = value

    def until_here(self, *values: Value) -> None:
        """These values were arguments or local names of a module whose call ends here, so none of them was freed before."""
        self._holds += [(value.id, len(self._ops) - 1) for value in values]

    def embedding(
        self, name: str, rows: int, width: int, *, axis: int = TOKEN, ids: str = "batch", tied_to: str = "", split: str = "vocab"
    ) -> Value:
        """Table look-up: rows x width parameters.

        `ids`: the batch's; `positions`, made for one sequence; `made` for every row of the result; or a buffer's.
        """
        weight = Parameter(name + ".weight", (rows, width), "embedding", split, tied_to)
        return self.op("embedding", name, (self.input,), width, (weight,), axis, ids=ids)

    def linear(
        self,
        name: str,
        x: Value,
        out: int,
        *,
        bias: bool = False,
        split: str = "column",
        tied_to: str = "",
        role: str = "linear",
        kind: str = "linear",
    ) -> Value:
        """y = x W^T [+ b]; W is out x in."""
        parameters = [Parameter(name + ".weight", (out, x.width), role, split, tied_to)]
        if bias:
            parameters.append(Parameter(name + ".bias", (out,), "bias", split if split == "column" else "none"))
        return self.op(kind, name, (x,), out, tuple(parameters))

    def head(self, name: str, x: Value, rows: int, *, bias: bool = False, tied_to: str = "", second_bias: bool = False) -> Value:
        """The output projection to the vocabulary: never quantised, no adapter; `tied_to` an embedding's weight.

        `second_bias`: a bias that the class declares beside the used one (BERT's, when nothing is tied).
        """
        made = self.linear(name, x, rows, bias=bias, split="vocab", tied_to=tied_to, role="head", kind="head")
        if second_bias:
            op = self._ops[-1]
            self._ops[-1] = op._replace(parameters=(*op.parameters, Parameter(name + ".second_bias", (rows,), "unused")))
        return made

    def rms_norm(self, name: str, x: Value, *, heads: int = 1, offset: bool = False) -> Value:
        """x / rms(x) * w over the last dimension (width / heads); `offset`: multiplied by 1 + w in fp32 (Gemma)."""
        weight = Parameter(name + ".weight", (x.width // heads,), "norm")
        return self.op("rms_norm", name, (x,), x.width, (weight,), heads=heads, offset=offset)

    def layer_norm(self, name: str, x: Value) -> Value:
        """(x - mean) / std * w + b over the last dimension."""
        shape = (x.width,)
        parameters = (Parameter(name + ".weight", shape, "norm"), Parameter(name + ".bias", shape, "norm"))
        return self.op("layer_norm", name, (x,), x.width, parameters)

    def rotary(
        self,
        q: Value,
        k: Value,
        *,
        head_dim: int,
        rotary_dim: int | None = None,
        in_fp32: str = "",
        fp32_tables: bool = False,
        cast_back: bool = False,
        parts_named: bool = False,
    ) -> tuple[Value, Value]:
        """Rotary position embedding of q and k; `rotary_dim` rotates only the first part of each head, and joins the parts.

        `in_fp32`: q and k are cast before, and a name holds the casts (`named`) or each product makes its own (`twice`);
        `fp32_tables`: cos and sin are in fp32 whatever the hidden states are;
        `cast_back`: the results are cast to the format that q and k had;
        `parts_named`: names of the attention's forward hold the rotated parts beside what joins them.
        """
        out_q, out_k = self._value(q.axis, q.width), self._value(k.axis, k.width)
        attributes = {
            "head_dim": head_dim,
            "rotary_dim": rotary_dim,
            "in_fp32": in_fp32,
            "fp32_tables": fp32_tables,
            "cast_back": cast_back,
            "parts_named": parts_named,
        }
        self._ops.append(Op("rotary", "rotary", (q, k), (out_q, out_k), (), attributes))
        return out_q, out_k

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        num_heads: int,
        num_kv_heads: int,
        causal: bool = True,
        window: int | None = None,
        softcap: bool = False,
        dropout: float = 0.0,
        head_major: bool = False,
        softmax_dtype: str | None = "fp32",
        cached: bool = True,
        bias: Value | None = None,
    ) -> Value:
        """softmax(q k^T / sqrt(d) [+ bias]) v; `head_major`: q lies as (batch, heads, seq, dim), so the output is copied.

        `softmax_dtype`: eager implementations that ask for a softmax in fp32; `None` leaves it in the scores' format.
        """
        if cached:
            self.cache(q, k, v, window)
        return self.op(
            "attention",
            "attention",
            (q, k, v) if bias is None else (q, k, v, bias),
            num_heads * (v.width // num_kv_heads),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            causal=causal,
            window=window,
            softcap=softcap,
            dropout=dropout,
            head_major=head_major,
            softmax_dtype=softmax_dtype,
            cached=cached,
        )

    def cache(self, q: Value, k: Value, v: Value, window: int | None = None) -> None:
        """These keys and values stay in the KV cache; `attention` says so itself.

        Those of an encoder's output are as many as its tokens, all others as many as tokens were seen.
        """
        axis = (TARGET_KEY_TOKEN if k.axis == TARGET_TOKEN else TOKEN) if q.axis == TARGET_TOKEN else KEY_TOKEN
        self._caches.append(CacheSpec(k.width + v.width, window, axis))

    def cache_latents(self, *latents: Value) -> None:
        """This layer's cache keeps what keys and values are projected up from."""
        self._caches.append(CacheSpec(sum(latent.width for latent in latents)))

    def keep_state(self, state: StateSpec) -> None:
        """This layer's recurrent state stays between tokens; the mixers say so themselves."""
        self._state = state

    def split(self, x: Value, *widths: int) -> tuple[Value, ...]:
        """Views of a fused projection: the whole stays in memory as long as any part does."""
        outputs = tuple(self._value(x.axis, width) for width in widths)
        self._ops.append(Op("split", "split", (x,), outputs))
        return outputs

    def activation(self, function: str, x: Value) -> Value:
        """gelu, gelu_new, silu, relu, tanh ... by the name that configs use."""
        return self.op("activation", function, (x,), x.width, function=function)

    def multiply(self, a: Value, b: Value) -> Value:
        """a * b, element by element."""
        return self.op("multiply", "multiply", (a, b), a.width)

    def add(self, a: Value, b: Value) -> Value:
        """a + b, element by element; a position value is broadcast over the batch."""
        return self.op("add", "add", (a, b), a.width, axis=max(a.axis, b.axis))

    def scale(self, x: Value) -> Value:
        """x times a number or an untrained scalar."""
        return self.op("scale", "scale", (x,), x.width)

    def softcap(self, x: Value) -> Value:
        """tanh(x / c) * c"""
        return self.op("softcap", "softcap", (x,), x.width)

    def dropout(self, x: Value, probability: float) -> Value:
        """Zeroes elements with a probability in training; nothing where it is 0."""
        return self.op("dropout", "dropout", (x,), x.width, probability=probability)

    def one_token(self, x: Value, *, view: bool = True) -> Value:
        """One token of every sequence: the first as a view, or the last real one by its index (a copy)."""
        return self.op("one_token", "one_token", (x,), x.width, axis=SEQUENCE, view=view)

    def loss(self, logits: Value, *, upcast: bool, function: str = "cross-entropy") -> Value:
        """`cross-entropy`, `mse` or `bce`; `upcast`: of `logits.float()`, as transformers' own loss functions do."""
        return self.op("loss", function, (logits,), 1, axis=0, upcast=upcast, function=function)

    def opaque(self, name: str, *, params: int, elements: int) -> Value:
        """Known by counts alone: `params` parameters, `elements` kept for backward per sequence."""
        weight = (Parameter(name, (params,), "linear"),)
        return self.op("opaque", name, (self.input,), elements, weight, axis=SEQUENCE)
