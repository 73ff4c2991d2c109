"""Where a stage writes: one folder, filled beside its final place and moved there when it has been checked.

A folder that exists is not a result. Everything is written to ``<target>/.part`` and moved up only after
the stage verified it, the file that makes it count (the marker) last: so a reader never takes a part for
a whole, also after a kill, and also when the target is a mount point that could not be renamed.
"""

import json
import os
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import CheckFailed, StageError, writing
from mlmsub.runtime.progress import Steps, peak_memory, say

PART = ".part"


def write_json(file: Path, data: object) -> None:
    """Write atomically: a reader sees the old file or the whole new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(json.dumps(data, indent=1) + "\n")
    scratch.replace(file)


class Output:
    """A folder that this stage makes. ``variable`` is where the user chose it, ``marker`` its last file."""

    def __init__(self, env: Env, variable: str, target: Path, marker: str) -> None:
        self.variable, self.target, self.marker = variable, target, marker
        self.part = target / PART
        self._run_dir = env.run_dir
        self._claims = env.run_dir / "state" / "outputs.json"
        self._overwrite = env.flag("MLM_OVERWRITE")

    def check(self, **inputs: Path | None) -> None:
        """Raise StageError if writing here would destroy an input or something that another run made."""
        here = self.target.resolve()
        for name, path in {**inputs, "the run directory": self._run_dir}.items():
            if path is None or not path.resolve().is_relative_to(here):
                continue
            same = path.resolve() == here
            raise StageError(
                self.variable,
                f"is the same folder as {name} ({path})." if same else f"{self.target} holds {name} ({path}).",
                f"give {self.variable} another folder.",
            )
        if self.target.exists() and not self.target.is_dir():
            raise StageError(self.variable, f"{self.target} is a file.", "give a folder.")
        if self._entries() and not self._overwrite and str(self.target) not in self._claimed():
            raise StageError(
                self.variable,
                f"{self.target} is not empty and was not written by this run.",
                f"give {self.variable} another folder, or set MLM_OVERWRITE=1 to replace what is there.",
            )

    def begin(self) -> None:
        """Make the empty part folder (one process only), and note in the run directory that it is ours."""
        self._claim()
        try:
            if self.part.exists():
                shutil.rmtree(self.part)
            self.part.mkdir(parents=True)
        except OSError as error:
            raise StageError(self.variable, f"cannot write to {self.target}: {error.strerror}.") from error

    def publish(self) -> None:
        """Move the finished part up (one process only), replacing what an earlier try left there."""
        made = sorted(self.part.iterdir(), key=lambda path: (path.name == self.marker, path.name))
        if not made or made[-1].name != self.marker:
            raise CheckFailed(self.variable, f"{self.part} has no {self.marker}; nothing was published.")
        with writing(self.variable, self.target):
            (self.target / self.marker).unlink(missing_ok=True)
            self._empty()
            for entry in made:
                entry.replace(self.target / entry.name)
            self.part.rmdir()

    def _empty(self) -> None:
        for entry in self._all():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _all(self) -> list[Path]:
        return [path for path in self.target.iterdir() if path.name != PART] if self.target.is_dir() else []

    def _entries(self) -> list[Path]:
        """What is in the way of this output."""
        return self._all()

    def _claim(self) -> None:
        with writing("MLMSUB_RUN_DIR", self._claims):
            write_json(self._claims, sorted({*self._claimed(), str(self.target)}))

    def _claimed(self) -> list[str]:
        return list(json.loads(self._claims.read_text())) if self._claims.is_file() else []


class Growing(Output, ABC):
    """An output that grows in its place over restarts, and counts by what its marker names at any time.

    MLM_OVERWRITE=1 empties what another run made, once, and never what this run did before its restart.
    """

    @abstractmethod
    def goes_on(self) -> bool:
        """Whether there is something of this kind, which any run may go on with."""

    def begin(self) -> None:
        """Make the folder (one process only), and note in the run directory that it is ours."""
        mine = str(self.target) in self._claimed()
        try:
            if self._overwrite and not mine:
                self._empty()
            self.target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StageError(self.variable, f"cannot write to {self.target}: {error.strerror}.") from error
        self._claim()

    def _entries(self) -> list[Path]:
        return [] if self.goes_on() else super()._entries()


def finish(env: Env, name: str, model: str, stages: list[Steps]) -> None:
    """Tell the job that all stages verified their outputs: ``state/<restart>/done.json`` (rank 0 only).

    ``seconds`` are those of the steps of one stage, or of each of several stages.
    """
    if env.rank != 0:
        return
    parts: list[dict[str, Any]] = [
        {"stage": one.stage, "outputs": one.outputs, "seconds": {k: round(v, 3) for k, v in one.seconds.items()}}
        for one in stages
    ]
    made = {variable: path for one in stages for variable, path in one.outputs.items()}
    done: dict[str, Any] = {"stage": name, "model": model, "outputs": made}
    if len(stages) == 1:
        done["seconds"] = parts[0]["seconds"]
    else:
        done["seconds"] = {one.stage: round(sum(o.total for o in stages if o.stage == one.stage), 3) for one in stages}
        done["stages"] = parts
    file = env.run_dir / "state" / str(env.integer("MLMSUB_RESTART", 0)) / "done.json"
    with writing("MLMSUB_RUN_DIR", file):
        write_json(file, {**done, "peak_gib": peak_memory()})
    say(f"  done.json = {file}")
