"""SSH without an ssh program: one connection, through any number of jump hosts, each one checked."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

import paramiko

from mlmsub.transport import wire
from mlmsub.transport.auth import Login, Questions
from mlmsub.transport.base import Prompter
from mlmsub.transport.errors import ConnectFailed, ConnectionLost, ScriptNotStarted, TransportError
from mlmsub.transport.hostkeys import KnownHosts, lookup_name
from mlmsub.transport.ssh_config import HostConfig

# A peer that has vanished is noticed after about a minute, also while nothing is sent.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
_STATUS_WAIT = 10.0

# without a handler of the program's own, logging would write paramiko's tracebacks to stderr
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class ParamikoTransport(wire.ScriptRunner):
    """Connects when made. `hops` are the jump hosts and, last, the host itself."""

    def __init__(
        self,
        hops: Sequence[HostConfig],
        *,
        prompter: Prompter | None = None,
        accept_new: bool = False,
        connect_timeout: float = 20.0,
    ) -> None:
        self.where = hops[-1].where
        self.warnings = tuple(dict.fromkeys(w for hop in hops for w in hop.warnings))
        self._open: list[paramiko.Transport] = []
        self._proxy: subprocess.Popen[bytes] | None = None
        self._timeout = connect_timeout
        self._accept_new = accept_new
        self._questions_off = prompter is None
        questions = Questions(prompter)
        try:
            for hop in hops:
                self._add_hop(hop, questions)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all hops, the last first."""
        super().close()
        for transport in reversed(self._open):
            transport.close()
        self._open.clear()
        if self._proxy is not None:
            self._proxy.terminate()
            self._proxy.wait()
            self._proxy = None

    def _add_hop(self, hop: HostConfig, questions: Questions) -> None:
        """Connect, check the host key, log in: in this order, on every hop."""
        transport = self._handshake(hop)
        self._open.append(transport)
        known = KnownHosts.for_host(
            lookup_name(hop.hostname, hop.port, hop.host_key_alias),
            lookup_name(hop.hostname, 22, hop.host_key_alias),
            hop.known_hosts,
            hop.global_known_hosts,
        )
        self.warnings += known.warnings
        options = transport.get_security_options()
        options.key_types = known.preferred_algorithms(options.key_types)
        try:
            transport.start_client()  # its own timeout would end it without an error
            key = transport.get_remote_server_key()
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise _connect_failed(hop, error) from error
        known.check(
            key.get_name(), key.asbytes(), where=hop.where, accept_new=self._accept_new, hashed=hop.hash_known_hosts
        )
        Login(transport, hop, questions).run()

    def _handshake(self, hop: HostConfig) -> paramiko.Transport:
        try:
            transport = paramiko.Transport(self._socket(hop))
        except (paramiko.SSHException, OSError) as error:
            raise _connect_failed(hop, error) from error
        transport.daemon = True
        transport.banner_timeout = transport.handshake_timeout = self._timeout
        return transport

    def _socket(self, hop: HostConfig) -> Any:
        if self._open:
            return self._open[-1].open_channel(
                "direct-tcpip", (hop.hostname, hop.port), ("127.0.0.1", 0), timeout=self._timeout
            )
        if hop.proxy_command:
            near, far = socket.socketpair()
            with far:
                self._proxy = subprocess.Popen(
                    ["/bin/sh", "-c", f"exec {hop.proxy_command}"],
                    stdin=far.fileno(),
                    stdout=far.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=self._questions_off,  # without a terminal it cannot ask
                )
            return near
        connection = socket.create_connection((hop.hostname, hop.port), timeout=self._timeout)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small requests in a row
        for name, value in _KEEPALIVE.items():
            with contextlib.suppress(AttributeError, OSError):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return connection

    def _exec(self, command: str) -> _Exec:
        if not self._open:
            raise ConnectionLost("the connection is closed", where=self.where, fix="run the command again")
        try:
            channel = self._open[-1].open_session(timeout=self._timeout)
            channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise ConnectionLost(
                f"no command can be started ({error or type(error).__name__})",
                where=self.where,
                command=command,
                fix="run it again; if it stays so, the server allows no commands or too few sessions",
            ) from error
        return _Exec(channel)

    def _error(self, command: str, ended: wire.Ended) -> TransportError:
        if not ended.started and ended.status not in (None, -1):
            return ScriptNotStarted.by_login_shell(self.where, command, ended.status, ended.said)
        return ConnectionLost.during_script(self.where, command, ended.status, ended.said)


class _Exec:
    """One exec channel of the connection."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def write(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except (EOFError, paramiko.SSHException) as error:
            raise OSError("the connection is gone") from error

    def close_write(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.shutdown_write()

    def read_stdout(self) -> bytes:
        return self._channel.recv(wire.CHUNK)

    def read_stderr(self) -> bytes:
        return self._channel.recv_stderr(wire.CHUNK)

    def finish(self) -> int | None:
        self._channel.status_event.wait(0 if not self._channel.eof_received else _STATUS_WAIT)
        status = self._channel.exit_status
        self.kill()
        return status

    def kill(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()


def _connect_failed(hop: HostConfig, error: BaseException) -> ConnectFailed:
    at = f"{hop.hostname} port {hop.port}"
    if isinstance(error, socket.gaierror):
        message, fix = f"{hop.hostname}: unknown host name", "check the name, your network and your VPN"
    elif isinstance(error, TimeoutError):
        message, fix = (f"{at}: no answer", "check your network and VPN, or whether a jump host is needed (ProxyJump)")
    elif isinstance(error, ConnectionRefusedError):
        message, fix = f"{at}: connection refused", "check the port; sshd may not be running there"
    elif isinstance(error, paramiko.ChannelException):
        message = f"{at}: the jump host cannot or may not connect to it ({error})"
        fix = "check the name as seen from the jump host, and that it allows TCP forwarding"
    elif hop.proxy_command:
        message = f"ProxyCommand gave no connection ({error}): {hop.proxy_command}"
        fix = "try the ProxyCommand by hand"
    else:
        message, fix = (f"{at}: {error or type(error).__name__}", "check that this port belongs to an SSH server")
    return ConnectFailed(message, where=hop.where, fix=fix)
