"""Where a training saves: one folder that grows by an iteration at a time, and that a restart goes on from."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import checkpoint
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import CheckFailed, StageError
from mlmsub.runtime.outputs import Growing
from mlmsub.runtime.training import record


class Folder(Growing):
    """MLM_MODEL_SAVE of a training. What counts in it is what its tracker names, at any time.

    A folder whose tracker holds a number may be gone on with, by any run of the same ``stage``; another run's with
    anything else in it is refused. ``in_place``: the folder may be the checkpoint that the training starts from, and
    is never emptied.
    """

    def __init__(self, env: Env, target: Path, stage: str, in_place: bool = False) -> None:
        super().__init__(env, record.FIELD, target, checkpoint.TRACKER)
        self.stage, self.in_place = stage, in_place
        self._overwrite = self._overwrite and not in_place
        self._left = ""  # how this run has left the tracker

    def check(self, **inputs: Path | None) -> None:
        """Raise StageError if writing here would destroy an input or something that another run made."""
        if not self.in_place:
            super().check(**inputs)
            self._refuse_inside(inputs)
        word = self.tracker()
        if word.isdigit():
            record.check_stage(self.stage, self.target / checkpoint.named(word))

    def begin(self) -> None:
        super().begin()
        self._left = self.tracker()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Round a save; all ranks. CheckFailed where another run has saved here since this one did."""
        distributed.on_main(self._refuse_others)
        yield
        distributed.on_main(self._remember)

    def goes_on(self) -> bool:
        return self.tracker().isdigit()

    def tracker(self) -> str:
        """The tracker's word, unless what is here is another run's and about to be removed."""
        if self._overwrite and str(self.target) not in self._claimed():
            return ""
        return checkpoint.tracker(self.target, self.variable)

    def _refuse_others(self) -> None:
        word = self.tracker()
        if word != self._left:
            was = self._left or "absent"
            problem = f"another run is at work in {self.target}: its {self.marker} says {word}, and was {was}."
            raise CheckFailed(self.variable, problem, "let one run end, or give this one another folder.")

    def _remember(self) -> None:
        self._left = self.tracker()

    def _refuse_inside(self, inputs: dict[str, Path | None]) -> None:
        for name, path in inputs.items():
            if path is not None and self.target.resolve().is_relative_to(path.resolve()):
                problem = f"{self.target} is inside of {name} ({path})."
                raise StageError(self.variable, problem, f"give {self.variable} another folder.")
