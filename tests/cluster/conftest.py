"""Fixtures of the cluster tests: one cluster of 8 nodes x 8 pretended GPUs for the whole session."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import Mlmsub, installed
from lab import Lab, Unavailable, default_lab, running
from laptop import Laptop, LoginNode, without_slurm
from sshd_lab import Account, make_account, remove_account


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The running cluster. Tests that ask for it are skipped where this machine cannot have one."""
    try:
        with running(default_lab()) as started:
            yield started
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def scratch(lab: Lab, request: pytest.FixtureRequest) -> Path:
    """An empty folder of the test's own on the shared file system; it belongs to the ordinary user."""
    folder = lab.shared / re.sub(r"\W+", "_", request.node.name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.chown(folder, lab.user, lab.user)
    return folder


@pytest.fixture(scope="session")
def installed_command(lab: Lab) -> Path:
    """The installed `mlmsub`, as in a fresh `pip install`."""
    return installed()


@pytest.fixture
def mlm(lab: Lab, installed_command: Path, scratch: Path) -> Mlmsub:
    """mlmsub in the hands of the ordinary user, with the profile `lab` for this cluster."""
    mlm = Mlmsub(lab, installed_command, scratch / "home").setup()
    mlm.profile()
    return mlm


@pytest.fixture(scope="session")
def login_node(lab: Lab) -> Iterator[LoginNode]:
    """The cluster's sshd, with Slurm's commands on PATH."""
    yield from serve(lab, "login-node", f"SetEnv SLURM_CONF={lab.slurm_conf}")


@pytest.fixture(scope="session")
def bare_login_node(lab: Lab) -> Iterator[LoginNode]:
    """Another one, where a session without login shell has no Slurm command on PATH."""
    path = without_slurm(lab.directory / "without-slurm")
    yield from serve(lab, "bare-login-node", f"SetEnv SLURM_CONF={lab.slurm_conf} PATH={path}")


def serve(lab: Lab, name: str, options: str) -> Iterator[LoginNode]:
    server = LoginNode(lab.directory / name, options=options)
    server.folder.mkdir(exist_ok=True)
    server.start()
    server.allow(lab.ssh_key)
    yield server
    server.stop()


@pytest.fixture
def laptop_of(lab: Lab, installed_command: Path, scratch: Path, tmp_path: Path) -> Callable[..., Laptop]:
    """Make a laptop: laptop_of(server), or with another login name or home."""

    def make(server: LoginNode, login: str = lab.user, home: str = "laptop") -> Laptop:
        return Laptop(
            lab, installed_command, tmp_path / home, there=scratch, server=server, key=lab.ssh_key, login=login
        ).setup()

    return make


@pytest.fixture
def laptop(laptop_of: Callable[..., Laptop], login_node: LoginNode) -> Laptop:
    return laptop_of(login_node)


@pytest.fixture(scope="session")
def account(lab: Lab) -> Iterator[Callable[[str, str], Account]]:
    """Make an account with this login shell and start-up file."""
    made: list[Account] = []

    def make(shell: str, startup: str) -> Account:
        user = make_account("mlmr", shell, lab.shared / "home")
        made.append(user)
        (user.home / f".{Path(shell).name}rc").write_text(startup)
        return user

    yield make
    for user in made:
        remove_account(user)
