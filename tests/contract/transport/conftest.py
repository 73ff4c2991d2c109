"""Fixtures: a real sshd, throw-away accounts (as root), an agent."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sshd_lab import (
    CODE,
    IS_ROOT,
    PAM_SERVICE,
    PASSWORD,
    SSHD,
    Account,
    Sshd,
    make_account,
    make_key,
    remove_account,
)

SHELLS = {"sh": "/bin/sh", "bash": "/bin/bash", "tcsh": "tcsh", "fish": "fish", "nologin": "nologin"}


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


@pytest.fixture(scope="session")
def room() -> Iterator[Path]:
    """A folder that other accounts can use (pytest's own are 0700)."""
    with tempfile.TemporaryDirectory(prefix="mlmsub-ssh-test-") as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.fixture(scope="session")
def user_key(room: Path) -> Path:
    if not shutil.which("ssh-keygen"):
        pytest.skip("no ssh-keygen (openssh-client)")
    return make_key(room / "user_key")


@pytest.fixture(scope="session")
def start_sshd(room: Path, user_key: Path) -> Iterator[Callable[..., Sshd]]:
    """Make an sshd of one's own: start_sshd("name", options="...")."""
    if not Path(SSHD).exists():
        pytest.skip("no sshd (openssh-server)")
    started: list[Sshd] = []

    def start(name: str, **options: object) -> Sshd:
        server = Sshd(room / name, **options).start()  # type: ignore[arg-type]
        started.append(server)
        server.allow(user_key)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def sshd(start_sshd: Callable[..., Sshd]) -> Sshd:
    return start_sshd("plain", host_key_types=("ed25519", "ecdsa"))


@pytest.fixture(scope="session")
def pam_binary(room: Path) -> Iterator[str]:
    """sshd under another name, hence with a PAM service of its own: password and code are two fixed words."""
    if not IS_ROOT or not Path("/etc/pam.d").is_dir():
        pytest.skip("a PAM service of its own needs root")
    binary, check, service = room / PAM_SERVICE, room / "check", Path("/etc/pam.d") / PAM_SERVICE
    shutil.copy2(SSHD, binary)
    check.write_text(f'#!/bin/sh\nx=$(tr -d "\\0")\n[ "$x" = "{PASSWORD}" ] || [ "$x" = "{CODE}" ]\n')
    check.chmod(0o755)
    service.write_text(
        f"auth required pam_exec.so expose_authtok quiet {check}\nauth required pam_permit.so\n"
        "account required pam_permit.so\nsession required pam_permit.so\n"
    )
    yield str(binary)
    service.unlink()


@pytest.fixture(scope="session")
def account(room: Path) -> Iterator[Callable[[str], Account]]:
    """The account whose login shell is `sh`, `bash`, `tcsh`, `fish` or `nologin`."""
    made: dict[str, Account] = {}

    def get(shell: str) -> Account:
        if not IS_ROOT:
            pytest.skip("making accounts needs root")
        path = shutil.which(SHELLS[shell], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        if path is None:
            pytest.skip(f"{shell} is not installed")
        if shell not in made:
            made[shell] = make_account("mlmt", path, room / "home")
        return made[shell]

    yield get
    for user in made.values():
        remove_account(user)


@pytest.fixture
def write_config(tmp_path: Path, user_key: Path, account: Callable[[str], Account]) -> Callable[..., str]:
    """An ssh configuration with the host `lab`; extra lines come first, and so win."""

    def write(server: Sshd, *extra: str, known: str | None = None) -> str:
        known_hosts = tmp_path / "known_hosts"
        if not known_hosts.exists():
            known_hosts.write_text(server.known_hosts_line() if known is None else known)
        config = tmp_path / "ssh_config"
        lines = [*extra, f"HostName {server.address}", f"Port {server.port}", f"UserKnownHostsFile {known_hosts}"]
        lines += ["GlobalKnownHostsFile none", f"IdentityFile {user_key}", "ControlPath none"]
        lines += [f"User {account('sh').name}"] if IS_ROOT else []
        config.write_text("Host lab\n" + "".join(f"  {line}\n" for line in lines))
        return str(config)

    return write


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An ssh-agent of the test's own; the socket."""
    if not shutil.which("ssh-agent"):
        pytest.skip("no ssh-agent")
    with tempfile.TemporaryDirectory() as folder:  # tmp_path may be too long for a socket's name
        path = Path(folder, "agent")
        process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
        while not path.exists():
            assert process.poll() is None
        yield path
        process.terminate()
        process.wait()
