"""Where a stage writes: one folder, filled beside its final place and moved there when it has been checked.

A folder that exists is not a result. Everything is written to ``<target>/.part`` and moved up only after
the stage verified it, the file that makes it count (the marker) last: so a reader never takes a part for
a whole, also after a kill, and also when the target is a mount point that could not be renamed.
"""

import json
import os
import shutil
from pathlib import Path

from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import CheckFailed, StageError
from mlmsub.runtime.progress import Steps, say

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
        self._claims = env.run_dir / "state" / "outputs.json"
        self._overwrite = env.flag("MLM_OVERWRITE")

    def check(self, **inputs: Path | None) -> None:
        """Raise StageError if writing here would destroy an input or something that another run made."""
        for name, path in inputs.items():
            if path is not None and path.exists() and self.target.exists() and path.samefile(self.target):
                raise StageError(
                    self.variable,
                    f"is the same folder as {name} ({path}).",
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
        write_json(self._claims, sorted({*self._claimed(), str(self.target)}))
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
        (self.target / self.marker).unlink(missing_ok=True)
        for entry in self._entries():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        for entry in made:
            entry.replace(self.target / entry.name)
        self.part.rmdir()

    def _entries(self) -> list[Path]:
        return [path for path in self.target.iterdir() if path.name != PART] if self.target.is_dir() else []

    def _claimed(self) -> list[str]:
        return list(json.loads(self._claims.read_text())) if self._claims.is_file() else []


def finish(env: Env, stage: str, model: str, outputs: dict[str, str], steps: Steps) -> None:
    """Tell the job that the stage verified its outputs: ``state/<restart>/done.json`` (rank 0 only)."""
    if env.rank != 0:
        return
    steps.summary(stage, outputs)
    file = env.run_dir / "state" / str(env.integer("MLMSUB_RESTART", 0)) / "done.json"
    seconds = {name: round(value, 3) for name, value in steps.seconds.items()}
    write_json(file, {"stage": stage, "model": model, "outputs": outputs, "seconds": seconds})
    say(f"  done.json = {file}")
