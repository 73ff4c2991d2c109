"""Runs the stages of a run in order, in one set of processes: ``quantize+export+generate``.

A stage starts from what the stage before it made. It is handed the live model where both work in the same groups; then
the Megatron checkpoint between them is neither written nor read, unless the user named a place for it. Where the
layouts differ (export splits by layers only) it is, and the groups are formed anew.
"""

import gc
import importlib
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed, megatron_args, megatron_refusals, outputs, session
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError, Stopped
from mlmsub.runtime.modelconf import ModelConf
from mlmsub.runtime.progress import Steps, say
from mlmsub.runtime.session import Job
from mlmsub.runtime.stage import CHECKPOINT, BaseStage

AND = "+"
WAIT = timedelta(days=7)  # of a process that has no part in a stage
DONE, STOPPED = "done", "stopped"
ENDED = 143  # the exit code of a process that ends because of another's failure


@dataclass(frozen=True)
class Step:
    """One stage of a run: whether it is handed the model of the stage before, and whether its output is written."""

    name: str
    kind: type[BaseStage]
    live: bool
    saves: bool


def plan(names: Sequence[str], kinds: Sequence[type[BaseStage]], env: Env) -> list[Step]:
    """Decide what is handed over live, and which checkpoints between the stages need not be written."""
    places = [(layout, size or env.world_size) for layout, size in (kind.place(env) for kind in kinds)]
    live = [
        index > 0 and kind.takes_live and kinds[index - 1].gives_live and places[index] == places[index - 1]
        for index, kind in enumerate(kinds)
    ]
    makers = [index for index, kind in enumerate(kinds) if kind.makes == CHECKPOINT]

    def saves(index: int) -> bool:
        kind = kinds[index]
        asked = env.text(CHECKPOINT) is not None and [index] == makers[-1:]
        if kind.makes != CHECKPOINT or not kind.may_skip_save or index == len(kinds) - 1 or asked:
            return True
        readers_end = next((maker for maker in makers if maker > index), len(kinds) - 1)
        return not all(live[index + 1 : readers_end + 1])

    return [Step(name, kinds[index], live[index], saves(index)) for index, name in enumerate(names)]


class Run:
    """The stages of one run, ``text`` their names with + between. ``current``: the one at work, for messages."""

    def __init__(self, text: str, model: str, words: list[str], env: Env) -> None:
        self.text, self.model, self.env = text, model, env
        self.names = text.split(AND)
        self.current = text
        place = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
        self._words, self._flags = words[:place], tuple(words[place:])
        self._stages: list[BaseStage] = []
        self._live: Any = None
        self._conf: ModelConf | None = None  # of the live model

    def __call__(self) -> None:
        """Make all stages, then run them. StageError: an input, or what a stage finds, is wrong."""
        if self.env.rank >= self.env.world_size:
            raise StageError("RANK", f"{self.env.rank} is not below WORLD_SIZE={self.env.world_size}.", "correct one.")
        events = self.env.run_dir / "state" / "events.jsonl"
        Steps(events, self.text).event("start", model=self.model)
        self._make(events)
        world = max(map(self._size, self._stages))
        if self._left_out(world, self.text):
            return
        session.load_libraries(self._stages[0].job)
        store = distributed.meet(self.env, world)
        spans = [list(group) for _, group in groupby(self._stages, lambda stage: (stage.layout, self._size(stage)))]
        for number, span in enumerate(spans):
            self._span(store, str(number), span, last=number == len(spans) - 1)
        outputs.finish(self.env, self.text, self.model, [stage.job.steps for stage in self._stages])

    def _make(self, events: Path) -> None:
        """Make the stages, each with the words, the variables and the place that are its own."""
        kinds = [importlib.import_module(f"mlmsub.runtime.stages.{name}").Stage for name in self.names]
        steps = plan(self.names, kinds, self.env)
        words, env, made_by = list(self._words), self.env, ""
        for index, step in enumerate(steps):
            self.current = step.name
            later = steps[index + 1 :]
            count = step.kind.words if later and step.kind.words is not None else len(words)
            mine, words = words[:count], words[count:]
            # the name that the user gave is the last checkpoint's
            nameless = step.kind.makes == CHECKPOINT and any(one.kind.makes == CHECKPOINT for one in later)
            stage = step.kind(
                Job(
                    step.name, self.model, mine, env.changed(MLM_MODEL_SAVE="") if nameless else env,
                    Steps(events, step.name), self._flags, self.names[: index + 1].count(step.name),
                    made_by, step.live, step.saves,
                )
            )  # fmt: skip
            self._stages.append(stage)
            if step.kind.makes == CHECKPOINT:
                env, made_by = env.changed(MLM_MODEL_CKPT=str(stage.outputs[CHECKPOINT])), step.name
        self._refuse_not_taken()
        self.current = self.text

    def _refuse_not_taken(self) -> None:
        """Refuse flags that the stages decide, and those of the reference's scripts that no stage of the run has."""
        for stage in self._stages:
            self.current = stage.job.stage
            given = (*self.env.arguments(megatron_refusals.FIELD), *self._flags)
            megatron_refusals.refuse_decided(given)
            others = {flag for other in self._stages if other is not stage for flag in _flags(other)}
            for word in (*stage.defaults, *given):
                flag = word.partition("=")[0]
                if flag in stage.not_taken and flag not in others:
                    problem = f"{flag} is not implemented by mlmsub's {stage.job.stage}."
                    field = megatron_refusals.where([flag], given)
                    raise StageError(field, problem, stage.not_taken[flag])

    def _size(self, stage: BaseStage) -> int:
        return stage.world_size or self.env.world_size

    def _left_out(self, world: int, names: str) -> bool:
        """Whether this process has no part in stages that use the first ``world`` ones; it says so."""
        rank, size = self.env.rank, self.env.world_size
        if rank >= world:
            print(f"rank {rank}: {names} uses {world} of {size} processes; not this one", file=sys.stderr)
        return rank >= world

    def _span(self, store: Any, key: str, span: list[BaseStage], last: bool) -> None:
        """Run stages that work in the same groups."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        world = self._size(span[0])
        if self._left_out(world, AND.join(stage.job.stage for stage in span)):
            if not last:
                _wait(store, f"end of {key}")
            return
        waited_for = world < self.env.world_size and not last
        place = PrefixStore(key, store)  # the groups' names repeat from span to span
        with (
            _telling(store, f"end of {key}") if waited_for else nullcontext(),
            distributed.process_group(self.env, world, store=place),
        ):
            for stage in span:
                self._stage(stage)
            self._drop_model()

    def _stage(self, stage: BaseStage) -> None:
        job = stage.job
        self.current = job.stage
        if len(self._stages) > 1:
            say(f"=== {job.stage}")
            job.steps.event("start", model=self.model)
        start = time.monotonic()
        if not job.live:
            self._drop_model()
        if not job.live:  # the checkpoint of a stage before is there by now, and says if that has pruned the model
            self._conf = job.conf()
        formed = session.form(job, self._conf or stage.conf, stage.layout, self._arguments(stage), stage.defaults)
        if job.live:
            say("the model of the stage before is used as it is: no checkpoint is read")
        self._live = stage.run(formed, self._live)
        distributed.barrier()
        made = {name: str(path) for name, path in stage.outputs.items()} if job.saves else {}
        job.steps.finish(made, time.monotonic() - start)

    def _drop_model(self) -> None:
        if self._live is not None:
            import torch

            self._live = None
            gc.collect()
            torch.cuda.empty_cache()

    def _arguments(self, stage: BaseStage) -> megatron_args.AddArguments:
        """The stage's own flags, and those of the others of this run, which it may meet on its line and never sees."""

        def add(parser: ArgumentParser) -> None:
            stage.add_arguments(parser)
            for number, other in enumerate(self._stages):
                if other is not stage:
                    _add_unseen(parser, other, f"stage {number}")

        return add


def _flags(stage: BaseStage) -> list[str]:
    parser = ArgumentParser(add_help=False)
    stage.add_arguments(parser)
    return [flag for action in parser._actions for flag in action.option_strings]


def _add_unseen(parser: ArgumentParser, stage: BaseStage, prefix: str) -> None:
    """Let ``parser`` take the flags of ``stage`` that it does not know, under names that nobody reads."""
    own = ArgumentParser(add_help=False)
    stage.add_arguments(own)
    for action in own._actions:
        action.option_strings = [flag for flag in action.option_strings if flag not in parser._option_string_actions]
        action.dest = f"{prefix} {action.dest}"
        if action.option_strings:
            parser._add_action(action)


@contextmanager
def _telling(store: Any, key: str) -> Iterator[None]:
    """Tell the processes that wait for ``key`` how it ended: done, stopped, or the exit code of the failure."""
    told = "1"
    try:
        yield
        told = DONE
    except Stopped:
        told = STOPPED
        raise
    except StageError as error:
        told = str(error.exit_code)
        raise
    finally:
        store.set(key, told)


def _wait(store: Any, key: str) -> None:
    """Wait until other processes have done a stage; end as they do if they fail."""
    import torch.distributed as dist

    try:
        store.wait([key], WAIT)
        told = store.get(key).decode()
    except dist.DistError:  # the first process, which keeps the store, is gone
        told = str(ENDED)
    if told == STOPPED:
        raise Stopped
    if told != DONE:
        raise SystemExit(int(told))
