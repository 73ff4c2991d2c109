"""Forward passes over samples of one length, through all pipeline stages: for calibration and for losses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

TOKENS_PER_BATCH = 16384  # enough to keep a GPU busy; the activations of more would only cost memory
LARGEST_BATCH = 32


def batch_size(length: int, device: str) -> int:
    """Samples per forward pass: 32 of 512 tokens and 4 of 4096 on a GPU, 8 on a CPU."""
    if device == "cpu":
        return 8
    return max(1, min(LARGEST_BATCH, TOKENS_PER_BATCH // length))


def sequence_multiple(args: Any) -> int:
    """What the length of a sample must divide by: its shares under sequence and context parallelism."""
    tensor = args.tensor_model_parallel_size if args.sequence_parallel else 1
    context = args.context_parallel_size
    return int(tensor * (2 * context if context > 1 else 1))


def share(samples: Any) -> Any:
    """This data-parallel rank's samples; every rank gets equally many, since experts talk across ranks."""
    import torch
    from megatron.core import parallel_state

    ranks = parallel_state.get_data_parallel_world_size()
    wanted = -(-len(samples) // ranks) * ranks
    index = torch.arange(wanted) % len(samples)
    return samples[index[parallel_state.get_data_parallel_rank() :: ranks]]


def batches(samples: Any, size: int) -> list[Any]:
    """The samples in batches of ``size``, and what is left in a smaller one."""
    return list(samples.split(size))


def forward_loop(samples: Any, size: int, device: str, logits: bool = False) -> Callable[[Any], None]:
    """The forward loop that modelopt calls: every sample once, through all pipeline stages.

    ``logits``: run the output layer too, where the caller watches it.
    """

    def loop(model: Any) -> None:
        with nullcontext() if logits else without_logits(model):
            forward(model, batches(samples, size), device)

    return loop


def forward(model: Any, parts: list[Any], device: str, labels: bool = False) -> list[Any]:
    """Forward batches of token ids [samples, length] through the pipeline, without gradients.

    With ``labels`` the last stage returns per batch the losses [samples, length - 1] of the next tokens, in fp32;
    else, and on the other stages, the list is empty.
    """
    import torch

    found: list[Any] = []
    with torch.no_grad():
        # the schedule of a pipeline passes tensors of one shape
        for whole in (True, False):
            group = [part for part in parts if (len(part) == len(parts[0])) == whole]
            if group:
                found += _run(model, group, device, labels)
    return found


def place(ids: Any, device: str) -> dict[str, Any]:
    """A batch on the device with its positions, labels and loss mask; under context parallelism this rank's part.

    The label of a token is the next one; the last token has none, so its place in ``loss_mask`` is 0.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    ids = ids.to(device)
    mask = torch.ones_like(ids, dtype=torch.float)
    mask[:, -1] = 0
    positions = torch.arange(ids.shape[1], device=device).expand(ids.shape[0], -1)
    batch = {"tokens": ids, "positions": positions, "labels": ids.roll(-1, 1), "loss_mask": mask}
    if parallel_state.get_context_parallel_world_size() > 1:
        group = parallel_state.get_context_parallel_group()
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    return batch


def _run(model: Any, parts: list[Any], device: str, labels: bool) -> list[Any]:
    """Forward batches of one size through the pipeline."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    size, length = parts[0].shape

    def step(batch_iterator: Iterator[Any], stage: Any) -> tuple[Any, Callable[..., Any]]:
        batch = place(next(batch_iterator), device)
        wanted = batch["labels"] if labels else None
        out = stage(batch["tokens"], batch["positions"], None, labels=wanted)
        if out is None:  # modelopt's layerwise calibration ends a forward where it has seen enough
            out = torch.zeros((), device=device)
        mask = batch["loss_mask"]
        return out, lambda result, **_asked: result.float()[mask > 0] if labels else None

    found = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(parts),
        model=[model],
        num_microbatches=len(parts),
        seq_length=length,
        micro_batch_size=size,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return [losses for losses in found if losses is not None]


@contextmanager
def without_logits(model: Any) -> Iterator[None]:
    """Leave out the output layer, unless it is quantized: its logits are most of the memory and unused."""
    layer = getattr(model, "output_layer", None)
    quantized = layer is not None and any(
        getattr(module, "is_enabled", False) for name, module in layer.named_modules() if "quantizer" in name
    )
    if quantized or not model.post_process:
        yield
        return
    model.post_process = False
    try:
        yield
    finally:
        model.post_process = True
