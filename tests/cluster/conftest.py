"""Fixtures of the cluster tests: one cluster of 8 nodes x 8 pretended GPUs for the whole session."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Mlmsub, installed
from lab import Lab, Unavailable, default_lab, running


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
