"""An SSH server whose login asks as the test wants; sshd with PAM cannot be made to ask two things at once."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import paramiko


class Dialogue(paramiko.ServerInterface):
    """`steps` is a list of methods; keyboard-interactive goes through `rounds` of (prompt, echo, right answer)."""

    def __init__(self, steps: list[str], rounds: list[list[tuple[str, bool, str]]], password: str) -> None:
        self.steps, self.rounds, self.password = list(steps), rounds, password
        self.used: list[str] = []
        self._round = 0

    def get_allowed_auths(self, username: str) -> str:
        return self.steps[0] if self.steps else ""

    def _passed(self, method: str, right: bool) -> int:
        self.used.append(method)
        if not right or not self.steps or method not in self.steps[0].split(","):
            return paramiko.AUTH_FAILED
        self.steps.pop(0)
        return paramiko.AUTH_PARTIALLY_SUCCESSFUL if self.steps else paramiko.AUTH_SUCCESSFUL

    def check_auth_password(self, username: str, password: str) -> int:
        return self._passed("password", password == self.password)

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return self._passed("publickey", True)

    def check_auth_interactive(self, username: str, submethods: str) -> int | paramiko.InteractiveQuery:
        self._round = 0
        if "keyboard-interactive" not in self.get_allowed_auths(username).split(",") or not self.rounds:
            return self._passed("keyboard-interactive", False)
        return self._question()

    def _question(self) -> paramiko.InteractiveQuery:
        query = paramiko.InteractiveQuery("Login", "Have your telephone ready")
        for prompt, echo, _ in self.rounds[self._round]:
            query.add_prompt(prompt, echo)
        return query

    def check_auth_interactive_response(self, responses: list[str]) -> int | paramiko.InteractiveQuery:
        if list(responses) != [answer for _, _, answer in self.rounds[self._round]]:
            return self._passed("keyboard-interactive", False)
        self._round += 1
        if self._round < len(self.rounds):
            return self._question()
        return self._passed("keyboard-interactive", True)


class PasswordServer:
    """Serves one login on loopback; `dialogue.used` tells which methods the client used."""

    address = "127.0.0.1"

    def __init__(self, host_key: Path, dialogue: Dialogue) -> None:
        self.dialogue = dialogue
        self._host_key = paramiko.Ed25519Key.from_private_key_file(str(host_key))
        self._listener = socket.create_server((self.address, 0))
        self.port = int(self._listener.getsockname()[1])
        self._transport: paramiko.Transport | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def known_hosts_line(self) -> str:
        return f"[{self.address}]:{self.port} ssh-ed25519 {self._host_key.get_base64()}\n"

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        self._transport = paramiko.Transport(connection)
        self._transport.add_server_key(self._host_key)
        self._transport.start_server(threading.Event(), server=self.dialogue)

    def stop(self) -> None:
        self._listener.close()
        if self._transport is not None:
            self._transport.close()
