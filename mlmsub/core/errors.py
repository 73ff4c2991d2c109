"""The errors that mlmsub raises; the command line alone turns them into text and an exit code.

MlmsubError
|- UsageError         2  the command or a file it names is wrong
|- ChecksFailed       3  the run was understood, and cannot work
|- ClusterLacks       3  the same, found out on the cluster: an image, a mount, space
|- TransportError     4  the cluster was not reached (mlmsub.transport.errors)
|- SchedulerRefused   5  Slurm said no
`- JobFailed          6  the job ran, and failed
"""

from __future__ import annotations

from collections.abc import Sequence

from mlmsub.core.issues import Issue


class MlmsubError(Exception):
    """Base of all errors that a user may see; `fix` says what to do next."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


class UsageError(MlmsubError):
    """An argument, a variable or a file that the user named is wrong."""

    exit_code = 2


class ChecksFailed(MlmsubError):
    """At least one issue is an error; nothing was sent."""

    exit_code = 3

    def __init__(self, issues: Sequence[Issue]) -> None:
        errors = [issue for issue in issues if issue.severity == "error"]
        super().__init__(f"{len(errors)} error{'s' if len(errors) != 1 else ''}; nothing was submitted")
        self.issues = tuple(issues)


class ClusterLacks(MlmsubError):
    """Something that the run needs is not there on the cluster; nothing was submitted."""

    exit_code = 3


class SchedulerRefused(MlmsubError):
    """Slurm refused the job or does not answer; `stderr` is what it printed.

    `may_exist` says that a job may have been made all the same: the submission is to be taken up again, not forgotten.
    """

    exit_code = 5

    def __init__(
        self,
        message: str,
        *,
        fix: str = "",
        command: str = "",
        code: int = 0,
        stderr: str = "",
        may_exist: bool = False,
    ) -> None:
        super().__init__(message, fix=fix)
        self.command, self.code, self.stderr, self.may_exist = command, code, stderr, may_exist


class JobFailed(MlmsubError):
    """The job ended otherwise than in success (`submit --watch`)."""

    exit_code = 6
