"""The user's own ssh program: GSSAPI, hardware keys, certificates, an open master connection, all it can do.

ssh asks its questions itself, on the terminal. Every `run` is one call of ssh: to be asked once for all of them,
ControlMaster must be set in the ssh configuration; it is used when present, never forced.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from mlmsub.transport import wire
from mlmsub.transport.errors import (
    CHANGED_KEY_FIX,
    FEWER_KEYS_FIX,
    PROMPT_FIX,
    REVOKED_KEY_FIX,
    UNKNOWN_KEY_FIX,
    AuthFailed,
    ConnectFailed,
    ConnectionLost,
    HostKeyChanged,
    HostKeyError,
    HostKeyUnknown,
    PromptNeeded,
    ScriptNotStarted,
    TransportError,
)
from mlmsub.transport.process import ProcessChannel

_SSH_FAILED = 255
_ASKING = ("keyboard-interactive", "password")


class OpenSSHTransport(wire.ScriptRunner):
    """Connects with each `run`, and where it may ask only once. Host keys and BatchMode hold for jump hosts too."""

    def __init__(
        self,
        host: str,
        *,
        ssh_config: str | None = None,
        user: str | None = None,
        port: int | None = None,
        no_prompt: bool = False,
        accept_new: bool = False,
        connect_timeout: float = 20.0,
    ) -> None:
        self.where = (f"{user}@" if user else "") + host + (f":{port}" if port else "")
        self._no_prompt = no_prompt
        program = shutil.which("ssh")
        if program is None:
            raise ConnectFailed(
                "there is no ssh program",
                where=self.where,
                fix="install OpenSSH's client, or use the paramiko transport",
            )
        self._folder = tempfile.TemporaryDirectory(prefix="mlmsub-ssh-")
        config = Path(self._folder.name, "config")
        around = _config(ssh_config, no_prompt, accept_new, connect_timeout)
        config.write_text(around)
        options = "-T -x -o ClearAllForwardings=yes -o RemoteCommand=none"
        self._argv = [program, "-F", str(config), *options.split()]
        self._argv += ["-l", user] if user else []
        self._argv += ["-p", str(port)] if port else []
        self._host = host
        # Whoever types a code types it once: the first login is kept for this command.
        self._own_master = not no_prompt and not self._keeps_masters()
        if self._own_master:
            keep = ["ControlMaster auto", f"ControlPath {self._folder.name}/%C", "ControlPersist 30"]
            config.write_text("\n".join([*keep, around]))

    def _keeps_masters(self) -> bool:
        argv = [*self._argv, "-G", "--", self._host]
        shown = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout
        return any(line.startswith("controlpath ") and line != "controlpath none" for line in shown.splitlines())

    def has_master(self) -> bool:
        """Whether ssh would go through a master connection that is open already."""
        argv = [*self._argv, "-O", "check", "--", self._host]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        """Remove the configuration; a master connection of the user's stays."""
        super().close()
        if self._own_master and Path(self._folder.name).exists():
            argv = [*self._argv, "-O", "exit", "--", self._host]
            subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        self._folder.cleanup()

    def _exec(self, command: str) -> ProcessChannel:
        # A session of its own has no terminal: no part of ssh, nor of a jump host's ssh, can ask.
        env = {**os.environ, "SSH_ASKPASS_REQUIRE": "never"} if self._no_prompt else None
        return ProcessChannel([*self._argv, "--", self._host, command], own_group=self._no_prompt, env=env)

    def _error(self, command: str, ended: wire.Ended) -> TransportError:
        if ended.started:
            return ConnectionLost.during_script(self.where, command, ended.status, ended.said)
        if ended.status != _SSH_FAILED:
            return ScriptNotStarted.by_login_shell(self.where, command, ended.status, ended.said)
        error = classify(ended.said, where=self.where, no_prompt=self._no_prompt)
        return self._with_fingerprint(error) if isinstance(error, HostKeyUnknown) else error

    def _with_fingerprint(self, error: HostKeyUnknown) -> HostKeyUnknown:
        """ssh names the key of an unknown host only when it is verbose; it stops before authentication all the same."""
        argv = [self._argv[0], "-v", "-o", "BatchMode=yes", *self._argv[1:], "--", self._host, "true"]
        said = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stderr
        keys = re.findall(r"Server host key: (\S+) (SHA256:\S+)", said)
        if not keys:
            return error
        key_type, fingerprint = keys[-1]  # a jump host's comes before
        return HostKeyUnknown(
            f"the host key is not known ({key_type}, {fingerprint}); nothing was sent",
            where=error.where,
            key_type=key_type,
            fingerprint=fingerprint,
            stderr=error.stderr,
            fix=UNKNOWN_KEY_FIX,
        )


def _config(ssh_config: str | None, no_prompt: bool, accept_new: bool, connect_timeout: float) -> str:
    """A configuration around the user's: what comes first wins, and -F reaches the ssh of a jump host too."""
    files = [ssh_config] if ssh_config else [str(Path.home() / ".ssh/config"), "/etc/ssh/ssh_config"]
    lines = [f"StrictHostKeyChecking {'accept-new' if accept_new else 'yes'}"]
    lines += ["ForkAfterAuthentication no", "StdinNull no"]
    lines += ["BatchMode yes"] if no_prompt else []
    lines += [f'Include "{Path(file).absolute()}"' for file in files if Path(file).exists()]
    lines += ["Host *", f"ConnectTimeout {max(1, round(connect_timeout))}"]
    lines += ["ServerAliveInterval 15", "ServerAliveCountMax 4"]
    return "\n".join(lines) + "\n"


def classify(said: str, *, where: str, no_prompt: bool) -> TransportError:
    """The typed error for what an ssh program said before it ended with 255."""
    return _host_key_error(said, where) or _login_error(said, where, no_prompt) or _connect_error(said, where)


def _host_key_error(said: str, where: str) -> HostKeyError | None:
    def found(pattern: str) -> str:
        match = re.search(pattern, said)
        return match[1] if match else ""

    key_type = found(r"(?:the|No|Offending) (\w+) (?:key sent|host key is known|key in)")
    shown = found(r"(SHA256:[A-Za-z0-9+/]+)")
    file, line = found(r"Offending .*key in (\S+):\d+"), int(found(r"Offending .*key in \S+:(\d+)") or 0)
    if "REVOKED HOST KEY" in said or "HOST IDENTIFICATION HAS CHANGED" in said:
        revoked = "REVOKED HOST KEY" in said
        remove = found(r"(ssh-keygen -f .* -R .*)") or "ssh-keygen -R HOST"
        return HostKeyChanged(
            f"the host shows {'a revoked key' if revoked else 'another key than before'} ({key_type}, {shown}; "
            f"{file}:{line}); nothing was sent",
            where=where,
            key_type=key_type,
            fingerprint=shown,
            file=file,
            line=line,
            stderr=said,
            fix=REVOKED_KEY_FIX if revoked else CHANGED_KEY_FIX.format(remove=remove.strip()),
        )
    if "host key is known for" in said or "Host key verification failed" in said:
        return HostKeyUnknown(
            f"the host key{f' ({key_type})' if key_type else ''} is not known; nothing was sent",
            where=where,
            key_type=key_type,
            fingerprint=shown,
            stderr=said,
            fix=UNKNOWN_KEY_FIX,
        )
    return None


def _login_error(said: str, where: str, no_prompt: bool) -> TransportError | None:
    denied = re.search(r"Permission denied \(([^)]*)\)", said)
    if denied:
        wanted = tuple(denied[1].split(","))
        if no_prompt and set(wanted) & set(_ASKING):
            return PromptNeeded(
                f"the login needs an answer ({', '.join(wanted)}), and prompting is off",
                where=where,
                stderr=said,
                fix=PROMPT_FIX,
            )
        return AuthFailed(
            f"login refused; the server wants {', '.join(wanted)}",
            where=where,
            wanted=wanted,
            stderr=said,
            fix="check the user name and the key or password; without prompting an encrypted key has to be in an "
            "agent (ssh-add); `ssh -v HOST` shows what is offered",
        )
    if "Too many authentication failures" in said:
        return AuthFailed(
            "the server closed the connection after too many attempts",
            where=where,
            stderr=said,
            fix=FEWER_KEYS_FIX,
        )
    return None


def _connect_error(said: str, where: str) -> ConnectFailed:
    lines = [line.removeprefix("ssh: ").strip() for line in said.splitlines() if line.strip()]
    return ConnectFailed(
        "; ".join(lines[-3:]) or "ssh failed without a message",
        where=where,
        exit_code=_SSH_FAILED,
        stderr=said,
        fix="try `ssh HOST true` by hand; check the name, your network and VPN; is a jump host needed?",
    )
