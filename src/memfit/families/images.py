"""What image families share: the size of the images, heads, and runs of blocks with stochastic depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.errors import InputError, UnknownArchitectureError, did_you_mean
from memfit.families.common import repeated_segments
from memfit.families.view import ConfigView
from memfit.job import Assumption
from memfit.model import Block, BlockBuilder, Segment, Value
from memfit.model.ops import vision
from memfit.model.ops.vision import Grid

TYPICAL_SIDE = 224
BACKBONE_KEYS = ("stage_names", "out_features", "out_indices")
"""Keys of backbones, which say what is handed out."""


def image_grid(config: ConfigView, default: int | None = TYPICAL_SIDE, *, typical: int = TYPICAL_SIDE) -> Grid:
    """Height and width of the images: the user's, the config's, the config class's default, or a typical size (`default` None).

    A config without the key leaves the size to whoever makes the batches; what is taken is then an assumption.
    """
    if config.image is not None:
        config.ignore("image_size")
        return Grid(config.image, config.image)
    if default is None and not config.has("image_size"):
        config.assumptions.append(
            Assumption(name="image", value=typical, why="the config does not say how large the images are", flag="--image")
        )
    return Grid(*config.sides("image_size", default or typical))


def stated_grid(config: ConfigView, default: int = TYPICAL_SIDE) -> Grid:
    """The size of images that the config was made for: that of its table of positions."""
    return Grid(*config.sides("image_size", default))


def checked(config: ConfigView, grid: Grid, what: str) -> Grid:
    """A grid with at least one place.

    Raises:
        InputError: the image is too small for the network.
    """
    if min(grid) < 1:
        raise InputError(f"{config.name}: the image is too small, nothing is left of it at the {what}; give a larger --image")
    return grid


def check_class(architecture: str, prefix: str, *more: str) -> str:
    """The class without its prefix: Model, ForImageClassification, or one of `more`.

    Raises:
        UnknownArchitectureError: another class.
    """
    known = [prefix + end for end in ("ForImageClassification", "Model", *more)]
    if architecture not in known:
        raise UnknownArchitectureError(
            f"the head of {architecture!r} is not known{did_you_mean(architecture, known)}; known are {', '.join(known)}"
        )
    return architecture.removeprefix(prefix)


def classification(b: BlockBuilder, pooled: Value, config: ConfigView, *held: Value) -> Value:
    """Linear classifier and loss; `held`: what the model's outputs hold until the loss is there."""
    logits = vision.linear(b, "classifier", pooled, (pooled.width, config.num_labels()), role="head")
    loss = b.loss(logits, upcast=False, function=config.classification_loss())
    b.until_here(*held)
    return loss


def head_segment(block: Block) -> Segment:
    """The last segment."""
    return Segment((block,), role="head")


def stage_segments(rates: Sequence[float], make: Callable[[int, bool], Block], kinds: int = 1) -> tuple[Segment, ...]:
    """The blocks of a stage, equal ones as one segment.

    `make(kind, drops)` builds one: its kind alternates (0, 1, ...), and it drops paths where its rate is not 0.
    """
    names = [f"{place % kinds},{int(rate > 0)}" for place, rate in enumerate(rates)]
    found = {name: (int(name.split(",")[0]), name.endswith(",1")) for name in names}
    return repeated_segments(names, lambda name: make(*found[name]))


def feed_forward_width(name: str, ratio: float, width: int) -> int:
    """`mlp_ratio` times the width, rounded down.

    Raises:
        InputError: nothing is left of the width.
    """
    found = int(width * ratio)
    if found < 1:
        raise InputError(f"{name}: mlp_ratio {ratio:g} leaves nothing of a width of {width}")
    return found


def depth_rates(rate: float, depths: Sequence[int]) -> list[list[float]]:
    """Stochastic depth grows evenly from 0 at the first block to `rate` at the last."""
    total = sum(depths)
    rates = [rate * place / max(total - 1, 1) for place in range(total)]
    found, start = [], 0
    for depth in depths:
        found.append(rates[start : start + depth])
        start += depth
    return found


def check_heads(config: ConfigView, hidden: int, heads: int) -> None:
    """The width of the states must be a multiple of the number of heads."""
    if hidden % heads:
        raise InputError(f"{config.name}: a width of {hidden} is not a multiple of {heads} attention heads")


def check_depth(config: ConfigView, depths: Sequence[int]) -> int:
    """The number of blocks of all stages, within what any network has."""
    if sum(depths) > 1024:
        raise InputError(f"{config.name}: depths add up to {sum(depths):,} blocks, more than 1,024")
    return sum(depths)
