"""The process group and Megatron's parallel groups: NCCL on GPUs, gloo on a CPU."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from mlmsub.runtime.env import Env, Layout
from mlmsub.runtime.errors import StageError


@contextmanager
def process_group(env: Env, world_size: int | None = None, minutes: int = 10) -> Iterator[None]:
    """Join the default group of ``world_size`` processes (default: all of the run), and leave it in order.

    One process alone needs no address: it meets itself in memory. After an error among several, the group
    stays as it is, since a peer may be inside a collective: this process ends, and the launcher the others.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    size = world_size or env.world_size
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(env.local_rank)
    if size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            env.required(name, f"{size} processes need a place to meet; start them with mlmsub or torchrun.")
    dist.init_process_group(
        # modelopt and Megatron gather CPU tensors and objects too
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=HashStore() if size == 1 else None,
        rank=env.rank,
        world_size=size,
        timeout=timedelta(minutes=minutes),
    )
    failed = True
    try:
        yield
        dist.barrier()
        failed = False
    finally:
        if size == 1 or not failed:
            _leave()


def _leave() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def model_parallel(args: Namespace) -> None:
    """Make Megatron's groups as parsed arguments say, and seed every generator."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    sizes = Layout(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
    )
    sizes.check(torch.distributed.get_world_size())
    if args.virtual_pipeline_model_parallel_size:
        raise StageError("MLM_EXTRA_ARGS", "modelopt does not support virtual pipeline stages.", "leave them out.")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
    )
    torch.manual_seed(args.seed)
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(args.seed)


def barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def gather(value: object) -> list[Any]:
    """The values of all ranks, by rank."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
