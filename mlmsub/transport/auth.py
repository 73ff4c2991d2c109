"""Logging in with paramiko: one method after the other, until the server is satisfied.

paramiko's SSHClient.connect guesses: it sends a password to `password`, again to keyboard-interactive, and
cannot go on after a partial success. Here the server's own list of remaining methods drives the loop, so that
key and code, password and code, and any number of questions work.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import paramiko
from paramiko.agent import AgentSSH
from paramiko.pkey import PublicBlob, UnknownKeyType

from mlmsub.transport.base import Prompter
from mlmsub.transport.errors import FEWER_KEYS_FIX, PROMPT_FIX, AuthFailed, ConnectionLost, PromptNeeded
from mlmsub.transport.ssh_config import HostConfig

PROMPT_TIMEOUT = 600.0  # seconds to fetch a telephone; sshd's LoginGraceTime usually ends it earlier
_METHODS = ("publickey", "keyboard-interactive", "password")


class _SocketAgent(AgentSSH):
    """An agent behind IdentityAgent's socket; paramiko itself looks at SSH_AUTH_SOCK only."""

    def __init__(self, path: str) -> None:
        super().__init__()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._connect(connection)  # type: ignore[attr-defined]  # the stubs leave it out

    def close(self) -> None:
        """End the connection to the agent."""
        self._close()  # type: ignore[attr-defined]


class _AgentKey(paramiko.AgentKey):
    """An agent's key that the agent may refuse to use (confirmation, missing token).

    paramiko would drop the connection; the server turns an empty signature down, and the next key is tried.
    """

    def sign_ssh_data(self, data: Any, algorithm: str | None = None) -> Any:
        try:
            return super().sign_ssh_data(data, algorithm)
        except paramiko.SSHException:
            return b""


class Questions:
    """Asks the person, or says that a question would be needed. Remembers passphrases for the next hop."""

    def __init__(self, prompter: Prompter | None) -> None:
        self._prompter = prompter
        self.keys: dict[str, paramiko.PKey | None] = {}

    def ask(self, where: str, text: str, secret: bool) -> str:
        """The answer; PromptNeeded when nobody may be asked."""
        if self._prompter is None:
            raise PromptNeeded(
                f"the login asks {text.strip()!r}, and prompting is off",
                where=where,
                question=text.strip(),
                fix=PROMPT_FIX,
            )
        return self._prompter.ask(text, secret)


class Login:
    """One login on one hop."""

    def __init__(self, transport: paramiko.Transport, host: HostConfig, questions: Questions) -> None:
        self._transport = transport
        self._host = host
        self._questions = questions
        self._allowed: list[str] = []
        self._tried: list[str] = []
        self._used_up: set[str] = set()
        self._agents: list[Any] = []
        self._keys = self._candidate_keys()

    def run(self) -> None:
        """Log in. Raises AuthFailed, PromptNeeded or ConnectionLost."""
        self._transport.auth_timeout = PROMPT_TIMEOUT
        try:
            self._attempt(self._transport.auth_none)
            while not self._transport.is_authenticated():
                self._next()
        finally:
            self._keys.close()
            for agent in self._agents:
                agent.close()

    def _next(self) -> None:
        """Try the best method that is left."""
        method = next((m for m in _METHODS if m in self._allowed and m not in self._used_up), None)
        if method == "publickey":
            key = next(self._keys, None)
            if key is None:
                self._used_up.add(method)
                return
            self._tried.append(f"{method} {_describe(key)}")
            self._attempt(self._transport.auth_publickey, key)
        elif method == "keyboard-interactive":
            self._tried.append(method)
            self._interactive()
        elif method == "password":
            self._used_up.add(method)
            secret = self._questions.ask(self._host.where, f"{self._host.where}'s password: ", True)
            self._tried.append(method)
            self._attempt(self._transport.auth_password, secret, fallback=False)
        else:
            raise self._refused()

    def _attempt(self, call: Callable[..., list[str]], *args: Any, **kwargs: Any) -> bool:
        """Make one request, note what the server takes next. False when it was refused."""
        try:
            self._allowed = list(call(self._host.user, *args, **kwargs))
        except paramiko.BadAuthenticationType as error:
            self._allowed = list(error.allowed_types)
            return False
        except (paramiko.SSHException, EOFError, OSError) as error:
            if self._transport.is_active() and isinstance(error, paramiko.AuthenticationException):
                return False
            raise self._dropped(error) from error
        return True

    def _interactive(self) -> None:
        """All rounds of keyboard-interactive.

        paramiko calls the handler in its own thread; the questions are asked here, in the caller's, so that
        Ctrl-C reaches whoever reads from the terminal.
        """
        asked: queue.Queue[tuple[str, str, list[tuple[str, bool]]] | None] = queue.Queue()
        answers: queue.Queue[list[str] | None] = queue.Queue()
        outcome: list[bool | BaseException] = []

        def handler(title: str, instructions: str, prompts: list[tuple[str, bool]]) -> list[str]:
            asked.put((title, instructions, list(prompts)))
            if (answer := answers.get()) is None:
                raise paramiko.SSHException("no answer")
            return answer

        def worker() -> None:
            try:
                outcome.append(self._attempt(self._transport.auth_interactive, handler))
            except BaseException as error:
                outcome.append(error)
            finally:
                asked.put(None)

        threading.Thread(target=worker, daemon=True).start()
        questions = 0
        try:
            while (round_ := asked.get()) is not None:
                questions += len(round_[2])
                answers.put(self._answer(*round_))
        except BaseException:
            answers.put(None)
            raise
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        if not outcome[0]:
            # who answered wrongly is not asked once more by another method; but a server that asked nothing
            # (sshd without PAM offers the method all the same) leaves that method open
            self._used_up |= {"keyboard-interactive", "password"} if questions else {"keyboard-interactive"}

    def _answer(self, title: str, instructions: str, prompts: list[tuple[str, bool]]) -> list[str]:
        lead = "".join(f"{text.strip()}\n" for text in (title, instructions) if text.strip())
        return [
            self._questions.ask(self._host.where, f"{lead if index == 0 else ''}({self._host.where}) {text}", not echo)
            for index, (text, echo) in enumerate(prompts)
        ]

    def _candidate_keys(self) -> Generator[paramiko.PKey, None, None]:
        """Keys in the order of offering: agent keys that the configuration names, the agent's others, plain
        files, and last the encrypted files, whose passphrase is asked for only then.
        """
        files = [f for f in self._host.identity_files if Path(f).is_file() or Path(f + ".pub").is_file()]
        wanted = {blob for f in files if (blob := _public_blob(f)) is not None}
        in_agent = self._agent_keys()
        offered = [k for k in in_agent if k.asbytes() in wanted]
        if not self._host.identities_only:
            offered += [k for k in in_agent if k.asbytes() not in wanted]
        yield from offered
        done = {k.asbytes() for k in offered}
        encrypted = []
        for file in files:
            if _public_blob(file) in done:
                continue
            try:
                key = self._questions.keys.get(file) or _load(file, None)
            except _Encrypted:
                encrypted.append(file)
                continue
            if key is not None and key.asbytes() not in done:
                yield key
        for file in encrypted:
            if file not in self._questions.keys:
                text = f"passphrase for {file} (empty: do not use it): "
                secret = self._questions.ask(self._host.where, text, True)
                self._questions.keys[file] = _load(file, secret.encode()) if secret else None
                if secret and self._questions.keys[file] is None:
                    self._tried.append(f"publickey {file} (wrong passphrase)")
            if (key := self._questions.keys[file]) is not None:
                yield key

    def _agent_keys(self) -> list[paramiko.AgentKey]:
        if self._host.identity_agent == "none":
            return []
        try:
            path = self._host.identity_agent
            agent: Any = paramiko.Agent() if path in ("", "SSH_AUTH_SOCK") else _SocketAgent(path)
        except (OSError, paramiko.SSHException):
            return []
        self._agents.append(agent)
        return [_AgentKey(agent, key.blob, key.comment) for key in agent.get_keys()]

    def _refused(self) -> AuthFailed:
        tried, wanted = tuple(self._tried), tuple(self._allowed)
        message = f"login refused; tried {', '.join(tried) or 'nothing'}; the server wants {', '.join(wanted)}"
        if "publickey" in wanted and not any(t.startswith("publickey") for t in tried):
            fix = "no key was found: name one with IdentityFile in your ssh configuration, or ssh-add it"
        elif not set(wanted) & set(_METHODS):
            fix = "use the openssh transport: only the ssh program knows these methods"
        else:
            fix = "check the user name and that this key or password is the right one for this host"
        return AuthFailed(message, where=self._host.where, tried=tried, wanted=wanted, fix=fix)

    def _dropped(self, error: BaseException) -> AuthFailed | ConnectionLost:
        tried = tuple(self._tried)
        if "too many" in str(error).lower() or len(tried) >= 5:
            return AuthFailed(
                f"the server closed the connection after {len(tried)} attempts ({error})",
                where=self._host.where,
                tried=tried,
                fix=FEWER_KEYS_FIX,
            )
        return ConnectionLost(
            f"the connection ended during the login ({error or type(error).__name__})",
            where=self._host.where,
            fix="try again; the server may limit the number of logins, or the time to answer",
        )


class _Encrypted(Exception):
    """The key file needs a passphrase."""


def _load(file: str, passphrase: bytes | None) -> paramiko.PKey | None:
    """The private key in `file`; None when paramiko can use none there, or the passphrase is wrong."""
    try:
        return paramiko.PKey.from_path(file, passphrase)  # type: ignore[arg-type]  # takes bytes, not str
    except paramiko.PasswordRequiredException as error:
        raise _Encrypted from error
    except TypeError as error:  # so says the cryptography package about an encrypted key
        if passphrase is None:
            raise _Encrypted from error
        return None
    except (OSError, ValueError, paramiko.SSHException, UnknownKeyType):
        return None


def _public_blob(file: str) -> bytes | None:
    """The public half, from FILE.pub or from FILE itself when that is a public key."""
    for candidate in (file, file + ".pub"):
        try:
            first = Path(candidate).read_bytes().split(b"\n", 1)[0].split()
        except OSError:
            continue
        if len(first) >= 2 and not first[0].startswith(b"-----"):
            try:
                return PublicBlob.from_string(b" ".join(first[:2]).decode()).key_blob
            except (ValueError, UnicodeDecodeError):
                continue
    return None


def _describe(key: paramiko.PKey) -> str:
    return f"{key.get_name()} (agent: {key.comment})" if isinstance(key, paramiko.AgentKey) else key.get_name()
