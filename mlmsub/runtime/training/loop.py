"""The iterations of a training: when to log, to evaluate, to save and to stop."""

import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mlmsub.runtime.data import hidden_states
from mlmsub.runtime.data.packing import PackedDataset
from mlmsub.runtime.errors import CheckFailed
from mlmsub.runtime.progress import Steps, say
from mlmsub.runtime.training.losses import NAME as LOSS
from mlmsub.runtime.training.trainer import Forward, Trainer, read
from mlmsub.runtime.training.writers import Writers

# (split, samples that the job has consumed) -> this rank's micro-batches from there on, endless
Data = Callable[[str, int], Iterator[Any]]
# what is told of the last iteration alone, while losses are means
LAST = ("lr", "grad_norm")


@dataclass(frozen=True)
class Intervals:
    """In iterations; 0 is never. ``evaluations``: global batches of one evaluation."""

    log: int = 100
    evaluate: int = 0
    evaluations: int = 0
    save: int = 0

    @classmethod
    def of(cls, args: Namespace) -> "Intervals":
        """As Megatron's ``--log-interval``, ``--eval-interval``, ``--eval-iters`` and ``--save-interval`` say."""
        evaluate = args.eval_interval if args.eval_iters else 0
        return cls(args.log_interval, evaluate or 0, args.eval_iters or 0, args.save_interval or 0)


def batches(data: PackedDataset | hidden_states.Dataset, args: Namespace, split: str, consumed: int) -> Iterator[Any]:
    """This data-parallel rank's micro-batches: ``train`` in the order of the seed, the others as they lie."""
    from megatron.core import parallel_state

    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    seed = args.seed if split == "train" else None
    return data.batches(split, args.micro_batch_size, rank, ranks, consumed, seed)


def run(
    trainer: Trainer,
    data: Data,
    forward: Forward,
    intervals: Intervals,
    save: Callable[[Trainer], None],
    *,
    steps: Steps,
    evaluate: Callable[[Trainer], dict[str, float]] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> bool:
    """Train from ``trainer.iteration`` to ``--train-iters``; all ranks call this.

    ``should_stop`` is asked on rank 0, once before each iteration. Whatever ends the loop, the last iteration has been
    saved. Returns True at the end of the training, and False if it was stopped before.

    Losses and norms are read where they are told, where it pauses and at the end. CheckFailed on all ranks if one of
    them since was not finite: nothing is saved after that.
    """
    last = trainer.args.train_iters
    batches = data("train", trainer.consumed)
    saved = trainer.iteration  # it was loaded, or there is nothing to save yet
    writers = Writers(trainer.args)
    report = _Report(trainer, steps, writers)
    while trainer.iteration < last and not _asked(should_stop):
        report.add(trainer.step(batches, forward))
        now = trainer.iteration
        if _due(now, intervals.log):
            report.tell()
        if _due(now, intervals.evaluate) or (intervals.evaluate and now == last):
            with report.paused():
                count = intervals.evaluations
                means = trainer.evaluate(data("valid", 0), forward, count) if count else {}
                _tell_evaluation(trainer, means, evaluate(trainer) if evaluate else {}, steps, writers)
        if _due(now, intervals.save):
            with report.paused():
                save(trainer)
            saved = now
    report.tell()
    writers.close()
    if saved != trainer.iteration:
        save(trainer)
    return bool(trainer.iteration >= last)


def _due(iteration: int, interval: int) -> bool:
    return bool(interval) and iteration % interval == 0


def _asked(should_stop: Callable[[], bool] | None) -> bool:
    """What rank 0 is told, on every rank: all leave the loop at the same iteration."""
    import torch
    import torch.distributed as dist

    if should_stop is None:
        return False
    answer = torch.zeros(1)  # in host memory: it travels through gloo, and no GPU is waited for
    if dist.get_rank() == 0 and should_stop():
        answer.fill_(1)
    dist.broadcast(answer, src=0)
    return bool(answer.item())


def _tell_evaluation(
    trainer: Trainer, means: dict[str, float], more: dict[str, float], steps: Steps, writers: Writers
) -> None:
    """``means`` are losses per token of the validation data, ``more`` what the stage measures besides."""
    parts = [f"validation loss at iteration {trainer.iteration}"]
    for name, value in {**means, **more}.items():
        parts.append(f"{name} value: {value:.6E}")
        if name == LOSS:
            parts.append(f"{name} PPL: {math.exp(min(20, value)):.6E}")
    say(f" {' | '.join(parts)} |")
    values = {_key(name): value for name, value in {**means, **more}.items()}
    steps.event("evaluation", iteration=trainer.iteration, **values)
    writers.add(trainer.iteration, {f"valid_{name}": value for name, value in values.items()})


class _Report:
    """Means over the iterations since the last line, which looks as Megatron's own training log does."""

    def __init__(self, trainer: Trainer, steps: Steps, writers: Writers) -> None:
        self.trainer, self.steps, self.writers = trainer, steps, writers
        self._begin()

    def _begin(self) -> None:
        self._sums: dict[str, Any] = {}  # numbers or tensors, of all iterations: one that is not finite stays in them
        self._last: dict[str, Any] = {}
        self._since, self._first = time.monotonic(), self.trainer.iteration + 1

    def add(self, values: dict[str, Any]) -> None:
        """Of the iteration that has just been; nothing here waits for the device."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._last = {name: value for name, value in values.items() if name in LAST}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is not the iterations': evaluations and saves."""
        if self._count:
            self._read()
        start = time.monotonic()
        yield
        self._since += time.monotonic() - start

    def tell(self) -> None:
        if not self._count:
            return
        sums, last = self._read(), read(self._last)
        args, seconds = self.trainer.args, max(time.monotonic() - self._since, 1e-9) / self._count
        rate, norm = last["lr"], last.get("grad_norm")
        losses = {name: total / self._count for name, total in sums.items() if name not in LAST}
        tokens = args.global_batch_size * args.seq_length / seconds
        parts = [
            f"iteration {self.trainer.iteration:8d}/{args.train_iters:8d}",
            f"consumed samples: {self.trainer.consumed:12d}",
            f"elapsed time per iteration (ms): {seconds * 1000:.1f}",
            f"tokens per second: {tokens:.0f}",
            f"learning rate: {rate:.6E}",
            f"global batch size: {args.global_batch_size:5d}",
            *(f"{name}: {value:.6E}" for name, value in losses.items()),
            *([] if norm is None else [f"grad norm: {norm:.3f}"]),
        ]
        say(f" [{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())}] {' | '.join(parts)} |")
        values = {
            "lr": rate, "grad_norm": norm, "ms": round(seconds * 1000, 3), "tokens_per_second": round(tokens, 1),
            **{_key(name): value for name, value in losses.items()},
        }  # fmt: skip
        self.steps.event("iteration", iteration=self.trainer.iteration, consumed=self.trainer.consumed, **values)
        self.writers.add(self.trainer.iteration, values)
        self._begin()

    @property
    def _count(self) -> int:
        return self.trainer.iteration + 1 - self._first

    def _read(self) -> dict[str, float]:
        """The sums as numbers: all work of the iterations is done. CheckFailed on all ranks if one is not finite."""
        sums = read(self._sums)
        bad = [name for name, total in sums.items() if not math.isfinite(total)]
        if bad:
            last = self.trainer.iteration
            of = f"iteration {last}" if self._first == last else f"one of the iterations {self._first} to {last}"
            problem = f"{', '.join(bad)} of {of} is not finite."
            raise CheckFailed("training", problem, "go on from the last save with a lower --lr, or look at the data.")
        return sums


def _key(name: str) -> str:
    return name.replace(" ", "_")
