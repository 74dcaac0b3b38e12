"""How programs run pipeline stages: a row for each, of what stages hold beside the layers' activations."""

from __future__ import annotations

from typing import NamedTuple


class Pipelining(NamedTuple):
    """Habits of a pipeline that decide memory."""

    name: str
    split: str
    """How layers are given to stages: see `memfit.parallel.stages.SPLITS`."""
    keeps_buffers: bool
    """A buffer for the input, and one for the output's gradient, of every micro-batch of the step is there all the time."""
    keeps_sent: bool
    """The output that was sent stays until its micro-batch's backward is through."""
    tied: str
    """What becomes of a head that shares the embedding's table, which is on another stage."""
    source: str


TORCH = Pipelining(
    name="torch.distributed.pipelining",
    split="weighted",
    keeps_buffers=True,
    keeps_sent=True,
    tied="torch's stages have no way to share a tensor: the head is counted as one of its own",
    source=(
        "torch 2.13 distributed/pipelining/stage.py: _setup_forward_recv_info and _create_grad_recv_info make a buffer for every "
        "micro-batch, fwd_cache holds outputs and inputs; torchtitan distributed/pipeline_parallel.py"
    ),
)

MEGATRON = Pipelining(
    name="Megatron-LM",
    split="even",
    keeps_buffers=False,
    keeps_sent=False,
    tied="first and last stage each have the table, its gradient and its optimizer states; the gradients are added up",
    source=(
        "Megatron-LM core/pipeline_parallel/schedules.py: deallocate_output_tensor frees what was sent, inputs wait in a list; "
        "core/distributed/finalize_model_grads.py adds up the gradients of word embeddings"
    ),
)

DEEPSPEED = Pipelining(
    name="DeepSpeed",
    split="even",
    keeps_buffers=False,
    keeps_sent=True,
    tied="first and last stage each have the table (TiedLayerSpec), its gradient and its optimizer states",
    source="DeepSpeed runtime/pipe/engine.py: pipe_buffers hold inputs and outputs of min(p - i, m) micro-batches",
)

PIPELINES = {"torch": TORCH, "megatron": MEGATRON, "deepspeed": DEEPSPEED}
"""By the name in `Runtime.pipeline`."""
