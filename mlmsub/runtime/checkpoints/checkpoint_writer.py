"""How a distributed checkpoint is written: through torch's file writer, by one thread or several."""

import os
import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _write_item
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mlmsub.runtime import distributed
from mlmsub.runtime.progress import say

# below this many bytes per process a second file costs as much as it saves
LARGE = 2**30
# pickling and checksums keep one thread below the speed of a disk; more than four gained nothing (benchmarks/)
THREADS = 4


class Writer(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """megatron-core's torch_dist format, written by torch.distributed.checkpoint with ``_Files``.

    megatron-core 0.19.2's writer copies every tensor to host memory before it writes the first, writes one of its
    files before the threads for the others start, and hides the cause of a failure. Both leave ``thread_count``
    files per process, and the same plan.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica,
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=_Files(str(checkpoint_dir), thread_count=self.thread_count),
            planner=planner,
        )


class _Files(FileSystemWriter):
    """Writes the files of its plan with a thread for each, one tensor in host memory at a time.

    torch 2.11's own threads lose their exceptions (the save would end well, and lack what they had to write), and
    keep all that they have copied to the host until their file is finished.
    """

    def _write_data(self, planner: Any, file_queue: queue.Queue[Any]) -> Future[list[WriteResult]]:
        files = [file_queue.get() for _ in range(file_queue.qsize())]
        with ThreadPoolExecutor(self.thread_count) as pool:
            written = list(pool.map(lambda file: self._write_file(planner, *file), files))
        problem = next((part for part in written if isinstance(part, str)), None)
        if problem is not None:
            raise OSError(problem)
        done: Future[list[WriteResult]] = Future()
        done.set_result([one for part in written for one in part if not isinstance(one, str)])
        return done

    def _write_file(self, planner: Any, path: Path, key: str, items: list[Any]) -> list[WriteResult] | str:
        """Write one file; returns what was written, or what went wrong (frames kept in an exception crash later)."""
        try:
            with path.open("wb") as stream:
                written = []
                for item in items:
                    data = planner.resolve_data(item)
                    if isinstance(data, torch.Tensor):
                        data = _on_host(data.detach())
                    written.append(_write_item(self.transforms, stream, data, item, key, self.serialization_format))
                os.fsync(stream.fileno())
            return written
        except Exception as error:
            return str(_first(error))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory, and alone there: a view would be pickled with all that it is a view of.

    The copy of a GPU's tensor has ended when this returns; it runs on the default stream, on which Megatron and
    modelopt compute. Pinned memory goes back to torch's pool when the tensor is written, and is used for the next.
    """
    if not tensor.is_cuda:
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    with torch.cuda.device(tensor.device):  # a new thread begins on GPU 0, and would open a context there
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _first(error: BaseException) -> BaseException:
    """What went wrong first: torch.save's cleanup after a full disk ends in an error of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def for_state(state: dict[str, Any]) -> Any:
    """The strategy for the size of a model's sharded state (all ranks call it): see ``LARGE``. It says what it chose.

    Large: several threads, and the data-parallel ranks write a share each of what they all hold.
    """
    tensors = [part.data for part in state.values() if isinstance(part, ShardedTensor | ShardedTensorFactory)]
    size = max(distributed.gather(sum(tensor.nbytes for tensor in tensors)))
    shown = f"{size / 2**30:.2f} GiB per process"
    if size < LARGE:
        say(f"{shown}: each process that has something of its own writes one file")
        return Writer("torch_dist", 1)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    writer = Writer("torch_dist", 1, thread_count=THREADS)
    say(f"{shown}: {THREADS} threads per process, and shared among {group.size()} data-parallel processes")
    return FullyParallelSaveStrategyWrapper(writer, group) if group.size() > 1 else writer
