"""Opens the way to a run's cluster: one connection per command and cluster, whatever the command does over it."""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

from mlmsub import transport
from mlmsub.app.config import Place
from mlmsub.transport import Transport


@dataclass(frozen=True)
class Trust:
    """What a command may do to get in: ask questions, accept the key of a host that it never met."""

    no_prompt: bool = False
    accept_new: bool = False


class Terminal:
    """Asks on the terminal itself, so that stdin and stdout stay the command's."""

    def ask(self, text: str, secret: bool) -> str:
        import getpass

        if secret:
            return getpass.getpass(text if text.endswith(" ") else f"{text} ")
        with open("/dev/tty", "r+", buffering=1) as tty:  # noqa: PTH123
            tty.write(text if text.endswith(" ") else f"{text} ")
            return tty.readline().rstrip("\n")


@dataclass
class Connections:
    """The connections of one command; leaving the context closes them."""

    trust: Trust = Trust()
    _open: dict[Place, Future[Transport]] = field(default_factory=dict)
    _thread: ThreadPoolExecutor | None = None

    def to(self, place: Place) -> Transport:
        """The connection to a place, opened at the first call. Raises TransportError."""
        return self.begin(place).result()

    def begin(self, place: Place) -> Future[Transport]:
        """Start to connect while the caller does something else."""
        if place not in self._open:
            if not place.host:  # nothing to wait for
                self._open[place] = done = Future[Transport]()
                done.set_result(transport.LocalTransport())
            else:
                self._thread = self._thread or ThreadPoolExecutor(max_workers=1)
                self._open[place] = self._thread.submit(self._connect, place)
        return self._open[place]

    def _connect(self, place: Place) -> Transport:
        asks = not self.trust.no_prompt and sys.stdin.isatty()
        return transport.open(
            place.host,
            place.transport,
            ssh_config=place.ssh_config or None,
            prompter=Terminal() if asks else None,
            no_prompt=not asks,
            accept_new=self.trust.accept_new,
        )

    def __enter__(self) -> Connections:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in self._open.values():
            if opened.done() and not opened.cancelled() and opened.exception() is None:
                opened.result().close()
        if self._thread:
            self._thread.shutdown(wait=False, cancel_futures=True)
