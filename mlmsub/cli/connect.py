"""Opens the way to a run's cluster: one connection per command and cluster, whatever the command does over it."""

from __future__ import annotations

import queue
import sys
import threading
from dataclasses import dataclass, field
from types import TracebackType

from mlmsub import transport
from mlmsub.app.config import Place
from mlmsub.cli import output
from mlmsub.transport import Transport
from mlmsub.transport.openssh import OpenSSHTransport


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
class Connecting:
    """One connection on its way, in a thread of its own.

    Questions wait until the command asks for the connection: by then it has found its own input right, and they are
    asked in its thread, where Ctrl-C ends them and leaves the terminal as it was.
    """

    place: Place
    trust: Trust
    prepare: bool
    _events: queue.Queue[tuple[str, bool] | Transport | BaseException] = field(default_factory=queue.Queue)
    _answers: queue.Queue[str] = field(default_factory=queue.Queue)
    _opened: Transport | None = None

    def start(self) -> None:
        threading.Thread(target=self._connect, daemon=True).start()

    def ask(self, text: str, secret: bool) -> str:
        """Called by the transport, in the connection's thread."""
        self._events.put((text, secret))
        return self._answers.get()

    def _connect(self) -> None:
        asks = not self.trust.no_prompt and sys.stdin.isatty()
        try:
            opened = transport.open(
                self.place.host,
                self.place.transport,
                ssh_config=self.place.ssh_config or None,
                prompter=self if asks else None,
                no_prompt=not asks,
                accept_new=self.trust.accept_new,
            )
            # with a terminal, ssh would ask its questions at once
            if self.prepare and not (asks and isinstance(opened, OpenSSHTransport)):
                opened.prepare()
            self._events.put(opened)
        except BaseException as error:
            self._events.put(error)

    def result(self) -> Transport:
        """The connection; raises what made it fail."""
        while self._opened is None:
            event = self._events.get()
            if isinstance(event, BaseException):
                self._events.put(event)
                raise event
            if isinstance(event, tuple):
                self._answers.put(Terminal().ask(*event))
            else:
                self._opened = event
                for warning in getattr(event, "warnings", ()):
                    output.note(warning.encode())
        return self._opened

    def close(self) -> None:
        """Close it if it is there; one that is still on its way ends with the process."""
        while self._opened is None and not self._events.empty():
            event = self._events.get()
            if isinstance(event, tuple | BaseException):
                return
            self._opened = event
        if self._opened is not None:
            self._opened.close()


@dataclass
class Connections:
    """The connections of one command; leaving the context closes them."""

    trust: Trust = Trust()
    _begun: dict[Place, Connecting] = field(default_factory=dict)
    _here: Transport = field(default_factory=transport.LocalTransport)

    def begin(self, place: Place, *, prepare: bool = True) -> None:
        """Start to connect while the caller does something else; `prepare` also starts the exec of its first `run`."""
        if place.host and place not in self._begun:
            self._begun[place] = Connecting(place, self.trust, prepare)
            self._begun[place].start()

    def to(self, place: Place) -> Transport:
        """The connection to a place, opened at the first call. Raises TransportError."""
        if not place.host:
            return self._here
        self.begin(place, prepare=False)
        return self._begun[place].result()

    def __enter__(self) -> Connections:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all; the next `to` opens anew."""
        for connecting in self._begun.values():
            connecting.close()
        self._begun.clear()
