"""Unit tests: pure code, and bash where it alone can say what a quoted word is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from mlmsub.app import config

# no deadline, since machines differ; no database, since a checkout must stay clean
settings.register_profile("mlmsub", deadline=None, max_examples=60, database=None)
settings.load_profile("mlmsub")


@pytest.fixture
def user(tmp_path: Path) -> config.User:
    """A person with an empty home, in an empty folder, with USER_FSW set."""
    cwd = tmp_path / "work"
    cwd.mkdir()
    return config.User({"HOME": str(tmp_path / "home"), "USER_FSW": "/lustre/me"}, cwd)


@pytest.fixture
def write_profile(user: config.User) -> Callable[[str, str], Path]:
    """Write a profile of the person `user`: name, YAML text."""

    def write(name: str, text: str) -> Path:
        user.profiles_dir.mkdir(parents=True, exist_ok=True)
        path = user.profiles_dir / f"{name}.yaml"
        path.write_text(text)
        return path

    return write
