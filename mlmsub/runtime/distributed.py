"""The process group and Megatron's parallel groups: NCCL on GPUs, gloo on a CPU."""

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Timer
from typing import Any, NoReturn

from mlmsub.runtime.env import Env, Layout
from mlmsub.runtime.errors import StageError, first_line


def meet(env: Env, world_size: int) -> Any:
    """The store through which the first ``world_size`` processes of a run find each other, for its whole life.

    One process alone needs no address: it meets itself in memory.
    """
    from torch.distributed import HashStore, rendezvous  # type: ignore[attr-defined]

    if world_size == 1:
        return HashStore()
    by = f"{world_size} processes need a place to meet; start them with mlmsub or torchrun."
    place = f"{env.required('MASTER_ADDR', by)}:{env.required('MASTER_PORT', by)}"
    env.integer("MASTER_PORT", 0)
    waiting = Timer(30, print, [f"rank {env.rank}: waiting for all {world_size} processes at {place}"])
    waiting.daemon = True
    waiting.start()
    try:
        store, _rank, _size = next(rendezvous("env://", env.rank, world_size))
    except (RuntimeError, ValueError) as error:
        reason = first_line(error)
        raise StageError(
            "MASTER_ADDR", f"{world_size} processes did not meet at {place}: {reason}",
            "look for the first rank that failed, and that rank 0's host can be reached there.",
        ) from error  # fmt: skip
    finally:
        waiting.cancel()
    return store


@contextmanager
def process_group(env: Env, world_size: int | None = None, minutes: int = 10, store: Any = None) -> Iterator[None]:
    """Join the default group of ``world_size`` processes (default: all of the run), and leave it in order.

    ``store``: where its processes meet, a place of its own in the run's store (``meet``). After an error among
    several, the group stays as it is, since a peer may be inside a collective: this process ends, and the
    launcher the others.
    """
    import torch
    import torch.distributed as dist

    size = world_size or env.world_size
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(env.local_rank)
    dist.init_process_group(
        # modelopt and Megatron gather CPU tensors and objects too
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=meet(env, size) if store is None else store,
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


def end(run: Callable[[], int]) -> NoReturn:
    """End this process with the code of ``run``, also where a failure has left the group as it was.

    Python's own end would take the group down under its peers' connections, and gloo answers that with an abort:
    the task would end with 134 instead of its own code.
    """
    try:
        code = run()
    except Exception:
        traceback.print_exc()
        code = 1
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        raise SystemExit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def model_parallel(args: Namespace) -> None:
    """Make Megatron's groups as parsed arguments say, unless they are there, and seed every generator."""
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
    if not parallel_state.model_parallel_is_initialized():
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


def world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


def barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def gather(value: object) -> list[Any]:
    """The values of all ranks, by rank."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree(problem: StageError | None) -> None:
    """Raise on every rank what the first rank with a problem has found; all ranks call it.

    A rank that raised alone would leave the others inside a collective until its timeout.
    """
    for found in gather(problem):
        if found is not None:
            raise told_once(found)


def told_once(error: StageError) -> StageError:
    """An error that every rank raises: rank 0 tells it."""
    import torch.distributed as dist

    error.told_elsewhere = dist.get_rank() > 0
    return error


def on_main(make: Callable[[], Any]) -> Any:
    """What ``make`` returns on rank 0, on every rank; a StageError of it is raised on all."""
    import torch.distributed as dist

    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = make()
        except StageError as error:
            told[1] = error
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told_once(told[1])
    return told[0]
