"""A transport that answers from a function, keeps what it was asked.

fake = FakeTransport(lambda call: Result(0, b"123\\n", b""))
submit(fake, ...)
assert "sbatch" in fake.calls[0].script
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType

from mlmsub.transport.base import Result


@dataclass(frozen=True)
class Call:
    """One script that the code under test sent, with all of its stdin."""

    script: str
    stdin: bytes
    timeout: float | None = None
    streamed: bool = False


class FakeTransport:
    """`handler` gets each Call and returns its Result, or raises the error that the test wants to see."""

    def __init__(self, handler: Callable[[Call], Result], where: str = "fake") -> None:
        self.where = where
        self.calls: list[Call] = []
        self.closed = False
        self._handler = handler

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def run(self, script: str, stdin: bytes | Iterable[bytes] = b"", timeout: float | None = None) -> Result:
        """Record the call and answer it."""
        data = bytes(stdin) if isinstance(stdin, bytes | bytearray | memoryview) else b"".join(stdin)
        return self._answer(Call(script, data, timeout))

    def stream(
        self, script: str, on_output: Callable[[bytes], None], on_stderr: Callable[[bytes], None] | None = None
    ) -> int:
        """Record the call and hand on its answer in small pieces."""
        result = self._answer(Call(script, b"", streamed=True))
        for start in range(0, len(result.stdout), 3):
            on_output(result.stdout[start : start + 3])
        if on_stderr is not None and result.stderr:
            on_stderr(result.stderr)
        return result.exit_code

    def close(self) -> None:
        """Remember it."""
        self.closed = True

    def __enter__(self) -> FakeTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, call: Call) -> Result:
        assert not self.closed, "used after close()"
        self.calls.append(call)
        return self._handler(call)
