"""A subprocess as a `Channel`: the local shell, and the user's ssh program."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from mlmsub.transport.wire import CHUNK

_LINGER = 0.3  # seconds that a program may take to end once its answer is complete


class ProcessChannel:
    """`argv` with three pipes; `own_group` puts it in a session of its own, which `kill` ends as a whole."""

    def __init__(self, argv: Sequence[str], *, own_group: bool, env: Mapping[str, str] | None = None) -> None:
        self._own_group = own_group
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=own_group,
            env=env,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        self._stderr = self._process.stderr

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._stdin.write(view) :]

    def close_write(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()

    def read_stdout(self) -> bytes:
        return self._read(self._stdout)

    def read_stderr(self) -> bytes:
        return self._read(self._stderr)

    @staticmethod
    def _read(stream: IO[bytes]) -> bytes:
        """Closes at the end, in the thread that reads: closed by another one, the number of the descriptor could
        belong to the next channel's pipe before this thread's read begins.
        """
        data = stream.read(CHUNK)
        if not data:
            stream.close()
        return data or b""

    def finish(self) -> int | None:
        """The program's status as a shell gives it. One that stays (its pipes are still held by a background
        process of the script) is ended itself; what the script left running is not.
        """
        try:
            status = self._process.wait(_LINGER)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            status = self._process.wait()
        return status if status >= 0 else 128 - status

    def kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                if self._own_group:
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()
        self._process.wait()
