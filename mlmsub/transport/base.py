"""What every way to the cluster has in common: one protocol, one result, one way to ask a question."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol


@dataclass(frozen=True)
class Result:
    """What a script left behind. `exit_code` is the script's own, 128 + n when signal n ended it."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Prompter(Protocol):
    """Asks the person at the terminal; the command line hands one in, the library never prints."""

    def ask(self, text: str, secret: bool) -> str:
        """Show `text` and return the answer without its newline; `secret` means: do not echo."""
        ...


class Transport(Protocol):
    """Runs POSIX shell scripts in one place: this machine, or a host behind SSH.

    `where` names the place in messages. A transport holds at most one connection; `run` may be called
    any number of times on it, from one thread at a time. Leaving the context closes it.
    """

    where: str

    def prepare(self) -> None:
        """Start what the next `run` will need, so that its way there passes while the caller does something else.

        Optional. A failure may show here, or only in that `run`.
        """
        ...

    def run(self, script: str, stdin: bytes | Iterable[bytes] = b"", timeout: float | None = None) -> Result:
        """Run `script` under /bin/sh, whatever the login shell is, with `stdin` as its standard input.

        The script may have any length and any character but NUL. A non-zero exit is a Result; not reaching
        or losing the place is a `TransportError`. After `CommandTimeout` (`timeout` in seconds) or
        `ConnectionLost` the script may have run, wholly or in part.
        """
        ...

    def stream(
        self, script: str, on_output: Callable[[bytes], None], on_stderr: Callable[[bytes], None] | None = None
    ) -> int:
        """Run `script` without stdin, hand on its output as it comes, and return its exit code.

        Whatever the script started is ended with the connection, so following a log leaves no process
        on the other side.
        """
        ...

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        ...

    def __enter__(self) -> Transport: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
