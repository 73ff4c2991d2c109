"""What a stage says when it cannot go on."""


class StageError(Exception):
    """A condition that the user can change, told in one line: the field, what is wrong, how to fix it.

    ``exit_code`` is 2 for a wrong or missing input and 1 for a stage whose work failed its own checks.
    """

    exit_code = 2

    def __init__(self, field: str, problem: str, fix: str = "") -> None:
        self.field, self.problem, self.fix = field, problem, fix
        super().__init__(f"{field}: {problem}" + (f" Fix: {fix}" if fix else ""))


class CheckFailed(StageError):
    """The stage ran and its output is not what was promised."""

    exit_code = 1
