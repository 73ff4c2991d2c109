"""Contract tests: the scripts that mlmsub writes and sends, executed under real shells with stand-ins around them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))  # specs.py, the builders

from rundir import RunDir
from specs import run_spec, script_spec


@pytest.fixture
def run_dir(tmp_path: Path) -> Callable[..., RunDir]:
    """Make a run directory: of a script by default, on this machine, with these fields of its RunSpec changed."""

    def make(*command: str, **changes: Any) -> RunDir:
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        fields = {"image": "", "mounts": (), "runs_root": str(tmp_path / "runs"), "sbatch_args": ()} | changes
        if "stage" in fields:
            return RunDir(run_spec(**fields), tmp_path)
        return RunDir(script_spec(*(command or ("true",)), **{"workdir": str(work)} | fields), tmp_path)

    return make
