"""Completions of many prompts: batches of one length each, decoded in step until every row has ended."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mlmsub.runtime.errors import first_line
from mlmsub.runtime.generation.decoding import Decoder, on_any_rank
from mlmsub.runtime.generation.sampling import Sampling, choose
from mlmsub.runtime.progress import say

# steps between two looks at which rows have ended: a look waits for the GPU
STRIDE = {"cuda": 8, "cpu": 1}
# a step looks at the cache up to the batch's longest row, rounded up to this; each length is a CUDA graph of its own
REACH = 256
WARM_UP = 3  # eager steps before a capture, on its stream: libraries make their workspaces there


@dataclass(frozen=True)
class Task:
    """One completion to make. ``name`` seeds its random numbers; ``limit`` is its number of tokens at most."""

    name: str
    prompt: list[int]
    limit: int


@dataclass(frozen=True)
class Completion:
    """``tokens`` end with the end token if there was one; then ``reason`` is "stop", else "length"."""

    tokens: list[int]
    reason: str


@dataclass
class Speed:
    """What it took: seconds of the prompts and of the steps, tokens made."""

    prefill: float = 0.0
    decode: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0


@dataclass
class _Batch:
    """The state of a batch on the device, at addresses that never change. Rows without a task have ended at once."""

    tokens: Any  # [rows, 1] the next to read
    positions: Any  # [rows, 1] where it goes
    lengths: Any  # [rows] tokens made
    limits: Any  # [rows]
    ended: Any  # [rows]
    made: Any  # [rows, most]
    draws: Any  # [rows, most]
    step: Any  # [1] tokens that the longest row has


@dataclass
class Generator:
    """Makes completions with one decoder, ``rows`` at a time and at most ``most`` tokens each.

    ``lockstep``: ranks with other prompts take part in every pass (experts are spread over them), so all go on until
    the last row anywhere has ended. ``graphs``: replay the step as a CUDA graph; falls back to eager steps.
    """

    decoder: Decoder
    rows: int
    most: int
    ends: list[int]
    sampling: Sampling
    lockstep: bool = False
    graphs: bool = False
    speed: Speed = field(default_factory=Speed)

    def __post_init__(self) -> None:
        device, rows = self.decoder.device, self.rows
        self._state = _Batch(
            tokens=torch.zeros(rows, 1, dtype=torch.long, device=device),
            positions=torch.zeros(rows, 1, dtype=torch.long, device=device),
            lengths=torch.zeros(rows, dtype=torch.long, device=device),
            limits=torch.zeros(rows, dtype=torch.long, device=device),
            ended=torch.zeros(rows, dtype=torch.bool, device=device),
            made=torch.zeros(rows, self.most, dtype=torch.long, device=device),
            draws=torch.zeros(rows, self.most, dtype=torch.float64, device=device),
            step=torch.zeros(1, dtype=torch.long, device=device),
        )
        self._ends = torch.tensor(self.ends, dtype=torch.long, device=device)
        self._warm: dict[int, int] = {}  # eager steps so far, by reach
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}
        self._side: Any = torch.cuda.Stream() if self.graphs else None  # type: ignore[no-untyped-call]

    def run(
        self,
        tasks: list[Task],
        length: int,
        on_end: Callable[[int, Completion], None],
    ) -> None:
        """Complete at most ``rows`` tasks; ``on_end(place in tasks, completion)`` is called as each ends.

        ``length``: the prompts are padded to it; the same number on all ranks that take part.
        """
        if not tasks and not self.lockstep:
            return
        state = self._state
        begin = time.perf_counter()
        tokens, prompts = self._load(tasks, length)
        self._advance(self.decoder.prefill(tokens, prompts))
        open_rows = self._report(set(range(len(tasks))), on_end)
        prefilled = time.perf_counter()
        reach = max([len(task.prompt) + task.limit for task in tasks], default=1)
        reach = min(-(-reach // REACH) * REACH, self.decoder.cursor.capacity)
        done, most = 1, max([task.limit for task in tasks], default=1)
        while self._goes_on(open_rows):
            # without lockstep no row is open beyond ``most``
            stride = STRIDE[state.ended.device.type]
            for _ in range(stride if self.lockstep else min(stride, most - done)):
                self._step(reach)
                done += 1
            open_rows = self._report(open_rows, on_end)
        self.speed.prefill += prefilled - begin
        self.speed.decode += time.perf_counter() - prefilled
        self.speed.prompt_tokens += sum(len(task.prompt) for task in tasks)

    def _load(self, tasks: list[Task], length: int) -> tuple[Any, Any]:
        """Fill the state; returns the padded prompts [rows, length] and their lengths [rows]."""
        state, device = self._state, self.decoder.device
        tokens = torch.zeros(self.rows, length, dtype=torch.long)
        prompts = torch.ones(self.rows, dtype=torch.long)
        limits = torch.zeros(self.rows, dtype=torch.long)
        for row, task in enumerate(tasks):
            tokens[row, : len(task.prompt)] = torch.tensor(task.prompt)
            prompts[row], limits[row] = len(task.prompt), task.limit
            if not self.sampling.greedy:
                state.draws[row] = torch.tensor(self.sampling.draws(task.name, self.most), dtype=torch.float64)
        prompts = prompts.to(device)
        state.limits.copy_(limits)
        state.ended.copy_(limits == 0)
        state.lengths.zero_()
        state.step.zero_()
        state.positions.copy_(prompts[:, None] - 1)  # of the last token that was read
        return tokens.to(device), prompts

    def _step(self, reach: int) -> None:
        if reach in self._captured:
            self._captured[reach].replay()
        elif self.graphs:
            self._warm_up(reach)
        else:
            self._eager(reach)

    def _eager(self, reach: int) -> None:
        state = self._state
        self._advance(self.decoder.step(state.tokens, state.positions, reach))

    def _warm_up(self, reach: int) -> None:
        """An eager step on the capturing stream; after the last of them, capture, which runs nothing."""
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._eager(reach)
        current.wait_stream(self._side)
        self._warm[reach] = self._warm.get(reach, 0) + 1
        if self._warm[reach] < WARM_UP:
            return
        graph = torch.cuda.CUDAGraph()
        problem = ""
        try:
            # thread_local: another thread (NCCL's watchdog) may call CUDA meanwhile
            with torch.cuda.graph(graph, stream=self._side, capture_error_mode="thread_local"):
                self._eager(reach)
        except RuntimeError as error:  # the kernels of some quantizers ask the GPU for a value
            problem = first_line(error)
        if on_any_rank(bool(problem), parallel_state.get_tensor_model_parallel_group(), self.decoder.device):
            say(f"INFO: no CUDA graph of the decode step ({problem or 'another rank failed'}): its steps are eager")
            self.graphs, self._captured = False, {}
        else:
            self._captured[reach] = graph

    def _advance(self, logits: Any) -> None:
        """Choose each row's next token and note it; nothing here waits for the GPU."""
        state = self._state
        if logits is not None:
            draws = state.draws.gather(1, state.step.expand(self.rows, 1))[:, 0]
            state.tokens.copy_(choose(logits.flatten(0, -2), self.sampling, draws)[:, None])
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(state.tokens, last, group=parallel_state.get_pipeline_model_parallel_group())
        state.made.scatter_(1, state.step.clamp(max=self.most - 1).expand(self.rows, 1), state.tokens)
        going = ~state.ended
        state.step += 1
        state.lengths += going
        state.positions += going[:, None]
        state.ended |= (state.tokens == self._ends).any(-1) | (state.lengths >= state.limits)

    def _report(self, open_rows: set[int], on_end: Callable[[int, Completion], None]) -> set[int]:
        """Wait for the device, hand out the rows that have ended, return those that have not."""
        state = self._state
        ended, lengths = torch.stack((state.ended.long(), state.lengths)).tolist()
        new = [row for row in sorted(open_rows) if ended[row]]
        if new:
            made = state.made[torch.tensor(new, device=state.made.device)].tolist()
            for row, tokens in zip(new, made, strict=True):
                tokens = tokens[: lengths[row]]
                self.speed.tokens += len(tokens)
                on_end(row, Completion(tokens, "stop" if tokens[-1] in self.ends else "length"))
        return open_rows - set(new)

    def _goes_on(self, open_rows: set[int]) -> bool:
        if not self.lockstep:
            return bool(open_rows)
        return on_any_rank(bool(open_rows), parallel_state.get_data_parallel_group(), self.decoder.device)
