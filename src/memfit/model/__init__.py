"""The description of a model: blocks of operations over named tensors, whatever it was read from."""

from memfit.model.builder import BlockBuilder
from memfit.model.description import (
    ACTIVATION_FUNCTIONS,
    AXES,
    KEY_TOKEN,
    ONCE,
    PAIR,
    POSITION,
    POSITION_PAIR,
    SEQUENCE,
    TOKEN,
    Block,
    CacheSpec,
    Model,
    Op,
    Parameter,
    Segment,
    SharedTensor,
    Value,
)

__all__ = [
    "ACTIVATION_FUNCTIONS",
    "AXES",
    "KEY_TOKEN",
    "ONCE",
    "PAIR",
    "POSITION",
    "POSITION_PAIR",
    "SEQUENCE",
    "TOKEN",
    "Block",
    "BlockBuilder",
    "CacheSpec",
    "Model",
    "Op",
    "Parameter",
    "Segment",
    "SharedTensor",
    "Value",
]
