"""What a stage says when it cannot go on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def first_line(error: BaseException) -> str:
    """What an error of a library says, as far as it fits a sentence; its kind where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


class StageError(Exception):
    """A condition that the user can change, told in one line: the field, what is wrong, how to fix it.

    ``exit_code`` is 2 for a wrong or missing input and 1 for a stage whose work failed its own checks.
    """

    exit_code = 2
    told_elsewhere = False  # rank 0 raises the same, and tells it

    def __init__(self, field: str, problem: str, fix: str = "") -> None:
        self.field, self.problem, self.fix = field, problem, fix
        super().__init__(field, problem, fix)  # as its arguments are given, so that ranks can send it to each other

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}" + (f" Fix: {self.fix}" if self.fix else "")


class CheckFailed(StageError):
    """The stage ran and its output is not what was promised."""

    exit_code = 1


class Stopped(Exception):
    """The job asked for an early end, and all is saved: the run ends with 0, and without the word that it is done."""


@contextmanager
def writing(field: str, path: Path) -> Iterator[None]:
    """Tell a disk that is full, or cannot be written for another reason, as CheckFailed of ``field`` with the path."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        first = error.__context__ if isinstance(error.__context__, OSError) else error  # a library's word for it
        if not isinstance(first, OSError) and type(first).__name__ != "SafetensorError":
            raise
        reason = getattr(first, "strerror", None) or str(first)
        raise CheckFailed(field, f"{path} cannot be written: {reason}.", "make room, or give another place.") from error
