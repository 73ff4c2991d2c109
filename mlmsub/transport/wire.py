"""How a script travels: one exec string for every login shell, script and stdin in one byte stream.

The login shell of the account sees a single line without newline, `!`, backslash or single quote inside the
quotes, so sh, bash, csh, tcsh, zsh and fish all read it alike. It starts /bin/sh, which takes eight digits, a
script of so many bytes from its stdin, and leaves the rest to the script. Neither appears in a process list. Since
the string does not depend on the script, the exec can be started before the script is known.

`dd bs=1 count=N` would be the short way to read exactly N bytes but costs two system calls per byte; here
each `dd` takes at most what is missing, and the loop goes on after a short read.

The script's output is framed by a random marker on both streams. What a .bashrc prints falls off in front,
the exit code comes from the script and not from an ssh program that also says 255 for its own failures,
and a background process that keeps the pipes open does not hold up the answer.
"""

from __future__ import annotations

import queue
import secrets
import shlex
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, TypeVar

from mlmsub.transport.base import Result
from mlmsub.transport.errors import CommandTimeout, TransportError

CHUNK = 1 << 16

_Self = TypeVar("_Self", bound="ScriptRunner")

_BOOT = (
    "exec /bin/sh -c '"
    "m={marker}; r() {{ n=$1; while [ $n -gt 0 ]; do "
    'c=$(dd bs=$n count=1 2>/dev/null; echo .); c=${{c%.}}; [ -n "$c" ] || exit; '
    'printf %s "$c"; n=$((n - ${{#c}})); done; }}; s=$(LC_ALL=C; r $(r 8) 2>/dev/null); '
    'case $s in "#$m"*) echo $m; echo $m >&2; (eval "$s"); r=$?; echo $m $r; echo $m $r >&2; exit $r;; esac; '
    "exit 126'"
)

# The watcher reads the connection's stdin: when the client goes away it ends the whole process group, which
# is the session's own (sshd and LocalTransport both call setsid).
_WATCHED = """exec 3<&0 </dev/null
{{ cat <&3; kill 0; }} >/dev/null 2>&1 &
( exec 3<&-; eval {script} )
r=$?
kill $! 2>/dev/null
exit $r"""


@dataclass(frozen=True)
class Request:
    """One script, ready to send: the exec string, the marker that frames its output, the bytes in front."""

    command: str
    marker: bytes
    head: bytes


def new_marker() -> str:
    """What frames one exec's output; random, so that nothing the script prints is taken for it."""
    return f"mlmsub-{secrets.token_hex(8)}"


def boot(marker: str) -> str:
    """The exec string."""
    return _BOOT.format(marker=marker)


def make_request(script: str, marker: str = "") -> Request:
    """Frame `script`; a NUL in it is a ValueError, since no shell can hold one."""
    if "\0" in script:
        raise ValueError("a shell script cannot contain NUL")
    marker = marker or new_marker()
    text = f"#{marker}\n{script}\n".encode("utf-8", "surrogateescape")
    return Request(boot(marker), marker.encode(), b"%8d" % len(text) + text)


class Frame:
    """Cuts the script's own bytes out of one stream.

    `before` is what came ahead of the script (all of it, if the script never started), `exit_code` is set
    once the closing marker has been seen.
    """

    def __init__(self, marker: bytes) -> None:
        self._open, self._close = marker + b"\n", marker + b" "
        self._held = b""
        self.before = b""
        self.started = False
        self.exit_code: int | None = None

    def feed(self, data: bytes) -> bytes:
        """Take what arrived, return what of it belongs to the script and can be handed on at once."""
        if self.exit_code is not None:
            return b""
        self._held += data
        if not self.started:
            self.before, found, rest = self._held.partition(self._open)
            if not found:
                return b""
            self.started, self._held = True, rest
        body, found, rest = self._held.partition(self._close)
        if found:
            code, newline, _ = rest.partition(b"\n")
            self._held = found + rest
            if newline:
                self.exit_code = int(code)
            return body
        keep = next((n for n in range(len(self._close) - 1, 0, -1) if body.endswith(self._close[:n])), 0)
        self._held = body[len(body) - keep :]
        return body[: len(body) - keep]

    def rest(self) -> bytes:
        """What was held back when the stream ended without a closing marker."""
        return self._held if self.started and self.exit_code is None else b""


class Channel(Protocol):
    """One running exec: what `exchange` needs of a subprocess or of an SSH channel.

    Reads block and return b"" at the end; `write` may raise OSError once the other side is gone. Each of stdin,
    stdout and stderr is used by one thread of its own, `finish` and `kill` by any.
    """

    def write(self, data: bytes) -> None: ...
    def close_write(self) -> None: ...
    def read_stdout(self) -> bytes: ...
    def read_stderr(self) -> bytes: ...
    def finish(self) -> int | None:
        """Let go of the exec after its streams have ended or its answer is complete; its status if known."""
        ...

    def kill(self) -> None:
        """End the exec now."""
        ...


@dataclass(frozen=True)
class Ended:
    """How an exec ended. `exit_code` is the script's own and None when the closing marker never came."""

    exit_code: int | None
    started: bool
    status: int | None
    stdout: bytes
    stderr: bytes
    noise: bytes

    @property
    def said(self) -> str:
        """What came on stderr, and before the script on either stream."""
        return (self.noise + self.stderr).decode(errors="replace")


class _Feeder(threading.Thread):
    """Writes head and stdin while the streams are read, so that no side waits for the other's full pipe.

    It alone writes and closes; with `keep_open` it closes when `release` is set.
    """

    def __init__(self, channel: Channel, chunks: Iterator[bytes], keep_open: bool) -> None:
        super().__init__(daemon=True)
        self._channel, self._chunks = channel, chunks
        self.release = threading.Event()
        if not keep_open:
            self.release.set()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for chunk in self._chunks:
                try:
                    self._channel.write(chunk)
                except OSError:  # the script ended without reading all of it, or the streams will tell why
                    return
            self.release.wait()
        except BaseException as error:
            self.error = error
            self._channel.kill()
        finally:
            self._channel.close_write()


def _pieces(head: bytes, stdin: bytes | Iterable[bytes]) -> Iterator[bytes]:
    yield head
    for block in (stdin,) if isinstance(stdin, bytes | bytearray | memoryview) else stdin:
        view = memoryview(block)
        for start in range(0, len(view), CHUNK):
            yield bytes(view[start : start + CHUNK])


class _Readers:
    """Two threads that read the streams into one bounded queue; an empty piece marks an end."""

    def __init__(self, channel: Channel) -> None:
        self._queue: queue.Queue[tuple[int, bytes]] = queue.Queue(64)
        self._stopped = False
        for index, read in enumerate((channel.read_stdout, channel.read_stderr)):
            threading.Thread(target=self._pump, args=(index, read), daemon=True).start()

    def _pump(self, index: int, read: Callable[[], bytes]) -> None:
        while not self._stopped:
            try:
                data = read()
            except OSError:
                data = b""
            self._queue.put((index, data))
            if not data:
                return

    def get(self, deadline: float | None) -> tuple[int, bytes]:
        """The next piece; queue.Empty at the deadline."""
        return self._queue.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """Let threads that wait for room in the queue go."""
        self._stopped = True
        while not self._queue.empty():
            self._queue.get_nowait()


Kind = Literal["stdout", "stderr"]
Sink = Callable[[Kind, bytes], None]


def exchange(
    channel: Channel,
    request: Request,
    stdin: bytes | Iterable[bytes] = b"",
    *,
    where: str,
    timeout: float | None = None,
    sink: Sink | None = None,
    keep_stdin_open: bool = False,
) -> Ended:
    """Send the request, feed `stdin`, collect both streams until they are complete.

    With `sink` the pieces go there as they come and stdout is not kept. Raises CommandTimeout, or whatever
    reading `stdin` raised; the exec has been ended then.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    kinds: tuple[Kind, Kind] = ("stdout", "stderr")
    frames = (Frame(request.marker), Frame(request.marker))
    kept: tuple[list[bytes], list[bytes]] = ([], [])
    feeder = _Feeder(channel, _pieces(request.head, stdin), keep_stdin_open)
    readers = _Readers(channel)
    feeder.start()
    open_ends = {0, 1}
    try:
        while open_ends and feeder.error is None:
            index, data = readers.get(deadline)
            piece = frames[index].feed(data) if data else frames[index].rest()
            if piece and sink is not None:
                sink(kinds[index], piece)
            if piece and (sink is None or index == 1):
                kept[index].append(piece)
            if not data or frames[index].exit_code is not None:
                open_ends.discard(index)
    except queue.Empty:
        channel.kill()
        raise CommandTimeout(
            f"no end after {timeout:g} seconds",
            where=where,
            command=request.command,
            stderr=b"".join(kept[1]).decode(errors="replace"),
            fix="it may still be running there: look before you repeat it, or allow more time",
        ) from None
    except BaseException:
        channel.kill()
        raise
    finally:
        readers.stop()
        feeder.release.set()
    if feeder.error is not None:
        channel.finish()
        raise feeder.error
    status = channel.finish()
    return Ended(
        exit_code=frames[1].exit_code if frames[1].exit_code is not None else frames[0].exit_code,
        started=frames[0].started or frames[1].started,
        status=status,
        stdout=b"".join(kept[0]),
        stderr=b"".join(kept[1]),
        noise=frames[1].before + frames[0].before,
    )


class ScriptRunner(ABC):
    """The `Transport` protocol on top of two things that differ: how to start an exec, and what its end means."""

    where: str
    _prepared: tuple[str, Channel] | None = None  # marker and exec

    @abstractmethod
    def _exec(self, command: str) -> Channel:
        """Start `command` over there."""

    @abstractmethod
    def _error(self, command: str, ended: Ended) -> TransportError:
        """Why there is no exit code of the script."""

    def prepare(self) -> None:
        """See `Transport.prepare`."""
        if self._prepared is None:
            marker = new_marker()
            self._prepared = marker, self._exec(boot(marker))

    def run(self, script: str, stdin: bytes | Iterable[bytes] = b"", timeout: float | None = None) -> Result:
        """See `Transport.run`."""
        marker, channel = self._prepared or ("", None)
        request = make_request(script, marker)
        self._prepared = None
        channel = channel or self._exec(request.command)
        return self._result(request, exchange(channel, request, stdin, where=self.where, timeout=timeout))

    def stream(
        self, script: str, on_output: Callable[[bytes], None], on_stderr: Callable[[bytes], None] | None = None
    ) -> int:
        """See `Transport.stream`."""
        request = make_request(_WATCHED.format(script=shlex.quote(script)))

        def sink(kind: Kind, data: bytes) -> None:
            if kind == "stdout":
                on_output(data)
            elif on_stderr is not None:
                on_stderr(data)

        channel = self._exec(request.command)
        ended = exchange(channel, request, where=self.where, sink=sink, keep_stdin_open=True)
        return self._result(request, ended).exit_code

    def _result(self, request: Request, ended: Ended) -> Result:
        if ended.exit_code is None:
            raise self._error(request.command, ended)
        return Result(ended.exit_code, ended.stdout, ended.stderr)

    def close(self) -> None:
        """See `Transport.close`."""
        if self._prepared is not None:
            _, channel = self._prepared
            self._prepared = None
            channel.close_write()
            channel.finish()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
