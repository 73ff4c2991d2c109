"""Everything that can go wrong between here and the cluster, one class per cause.

    TransportError
      ConnectFailed          no TCP connection, no SSH on the other side, a name that does not resolve
      HostKeyUnknown         the host is not in known_hosts
      HostKeyChanged         the host shows another key than known_hosts has, or a revoked one
      AuthFailed             the server refused what was tried
      PromptNeeded           a question must be asked and nobody may be asked
      ScriptNotStarted       logged in, but the login shell did not run the script
      ConnectionLost         the connection ended before the script did
      CommandTimeout         the script ran longer than allowed

A script that ran and returned non-zero is not among them: that is a `Result`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

PROMPT_FIX = (
    "run the command in a terminal without --no-prompt; or put the key in an agent (ssh-add); or open a master "
    "connection once (ssh -fNM HOST, ControlPath set in your ssh configuration) and use the openssh transport"
)
FEWER_KEYS_FIX = "offer fewer keys: set IdentityFile and `IdentitiesOnly yes` for this host (ssh configuration)"
UNKNOWN_KEY_FIX = (
    "compare the fingerprint with the one that the cluster's documentation or administrators give (on the host: "
    "ssh-keygen -lf FILE, for /etc/ssh/ssh_host_*_key.pub); if they agree, repeat the command with --accept-new"
)
REVOKED_KEY_FIX = "do not connect; ask the cluster's administrators"
CHANGED_KEY_FIX = (
    "somebody may be listening in, or the host was reinstalled: ask the cluster's administrators. Only if the "
    "new fingerprint is right: {remove}   and repeat the command with --accept-new"
)


@dataclass(eq=False)
class TransportError(Exception):
    """`where` it happened, what was run, what came back, and `fix`: what to do next."""

    message: str
    _: KW_ONLY
    where: str
    fix: str
    command: str = ""
    exit_code: int | None = None
    stderr: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class ConnectFailed(TransportError):
    """The host could not be reached, or does not speak SSH."""


@dataclass(eq=False, kw_only=True)
class HostKeyError(TransportError):
    """The host could not prove who it is; stops before any authentication.

    `key_type` and `fingerprint` (SHA256:...) are those shown by the host, `file` and `line` the entry of
    known_hosts that speaks against it (empty and 0 for an unknown host). Through the ssh program they are
    given as far as its messages tell them.
    """

    key_type: str = ""
    fingerprint: str = ""
    file: str = ""
    line: int = 0


class HostKeyUnknown(HostKeyError):
    """No known_hosts file has an entry for the host."""


class HostKeyChanged(HostKeyError):
    """known_hosts has another key for the host, or marks this one as revoked."""


@dataclass(eq=False, kw_only=True)
class AuthFailed(TransportError):
    """`tried` methods in order, and `wanted`: those that the server would still take."""

    tried: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()


@dataclass(eq=False, kw_only=True)
class PromptNeeded(TransportError):
    """The login needs an answer (`question`), and prompting is off or there is no terminal."""

    question: str = ""


class ScriptNotStarted(TransportError):
    """The login worked, but the script did not run: a login shell that exits, a forced command."""

    @classmethod
    def by_login_shell(cls, where: str, command: str, status: int | None, output: str) -> ScriptNotStarted:
        """The login shell ended with `status` and said `output`."""
        said = output.strip().splitlines()[-1:] or ["nothing"]
        return cls(
            f"logged in, but the login shell ended with exit code {status} instead of running the script: {said[0]}",
            where=where,
            command=command,
            exit_code=status,
            stderr=output,
            fix="try `ssh HOST true`: a start-up file that exits or reads its stdin has to leave "
            "non-interactive shells alone",
        )


class ConnectionLost(TransportError):
    """The connection ended before the script did; the script may have run, wholly or in part."""

    @classmethod
    def during_script(cls, where: str, command: str, status: int | None, output: str) -> ConnectionLost:
        """The streams ended without the script's exit code."""
        return cls(
            "the connection ended before the script did",
            where=where,
            command=command,
            exit_code=status,
            stderr=output,
            fix="look whether it took effect before you repeat it",
        )


class CommandTimeout(TransportError):
    """The script did not end in time; on a remote host it may still be running."""
