"""Real sshd processes, accounts and keys for the transport's tests."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
IS_ROOT = os.getuid() == 0
PASSWORD, CODE = "correct horse", "424242"
PAM_SERVICE = "mlmsub-test-sshd"


def call(*argv: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(a) for a in argv], check=True, capture_output=True, text=True, **kwargs)  # type: ignore[call-overload]


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    call("ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", path.name, "-f", path)
    return path


def public(path: Path) -> str:
    kind, blob, *_ = path.with_name(path.name + ".pub").read_text().split()
    return f"{kind} {blob}"


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


@dataclass
class Sshd:
    """One sshd on loopback (or in the network namespace `netns`), ended by its process id."""

    folder: Path
    options: str = ""
    address: str = "127.0.0.1"
    netns: str = ""
    binary: str = SSHD
    host_key_types: tuple[str, ...] = ("ed25519",)
    port: int = 0
    log: Path = field(init=False)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> Sshd:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "log"
        self.port = self.port or (22022 if self.netns else free_port(self.address))
        keys = [self.host_key(kind) for kind in self.host_key_types]
        lines = [f"Port {self.port}", f"ListenAddress {self.address}", *(f"HostKey {key}" for key in keys)]
        lines += [f"AuthorizedKeysFile {self.authorized_keys}", "StrictModes no", "PidFile none", "LogLevel VERBOSE"]
        lines += ["PasswordAuthentication no", "KbdInteractiveAuthentication no", "MaxStartups 50"]
        own = [line.split()[0] for line in self.options.splitlines() if line]
        lines = [line for line in lines if line.split()[0] not in own] + [self.options]
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n")
        if IS_ROOT:
            Path("/run/sshd").mkdir(exist_ok=True)
        enter = ["nsenter", f"--net=/run/netns/{self.netns}"] if self.netns else []
        with self.log.open("wb") as log:
            argv = [*enter, self.binary, "-D", "-e", "-f", str(self.folder / "sshd_config")]
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while "Server listening" not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)
        return self

    def host_key(self, kind: str = "ed25519") -> Path:
        path = self.folder / f"host_{kind}"
        return path if path.exists() else make_key(path, kind)

    @property
    def authorized_keys(self) -> Path:
        return self.folder / "authorized_keys"

    def allow(self, *keys: Path) -> None:
        self.authorized_keys.write_text("".join(public(key) + "\n" for key in keys))
        self.authorized_keys.chmod(0o644)

    def known_hosts_line(self, name: str = "", kind: str = "ed25519") -> str:
        return f"{name or f'[{self.address}]:{self.port}'} {public(self.host_key(kind))}\n"

    def attempts(self) -> list[str]:
        """What the log shows of logins: none of it may be there when the host key was not accepted."""
        signs = ("Accepted", "Failed", "Postponed", "Partial", "Connection closed by authenticating user")
        return [line for line in self.log.read_text().splitlines() if line.startswith(signs)]

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def kill_sessions(self) -> None:
        """What a crashed or unplugged login node looks like: listener and connections end at once."""
        assert self.process is not None
        children = _descendants(self.process.pid)
        for pid in [self.process.pid, *children]:
            if _command(pid).startswith("sshd"):
                os.kill(pid, 9)
        self.process.wait()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def _descendants(pid: int) -> list[int]:
    out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    children = [int(word) for word in out.split()]
    return children + [below for child in children for below in _descendants(child)]


@dataclass(frozen=True)
class Account:
    name: str
    home: Path
    shell: str


def make_account(prefix: str, shell: str, homes: Path) -> Account:
    # not numbered by process: a run that was killed leaves its homes where the next one works, and numbers come back
    name = f"{prefix}{secrets.token_hex(4)}{Path(shell).name}"
    home = homes / name
    call("useradd", "--no-create-home", "--home-dir", home, "--shell", shell, name)
    home.mkdir(parents=True)
    call("chpasswd", input=f"{name}:{PASSWORD}\n")
    shutil.chown(home, name, name)
    return Account(name, home, shell)


def remove_account(account: Account) -> None:
    call("userdel", "--force", account.name)  # a process of it may still be ending
    shutil.rmtree(account.home, ignore_errors=True)


@dataclass
class Person:
    """Answers by what the question contains, and remembers what was asked."""

    answers: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, bool]] = field(default_factory=list)

    def ask(self, text: str, secret: bool) -> str:
        self.asked.append((text, secret))
        return next((answer for part, answer in self.answers.items() if part in text), "")
