"""Contract tests: the scripts that mlmsub writes and sends, executed under real shells with stand-ins around them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))  # specs.py, the builders

from rundir import RunDir
from specs import script_spec

settings.register_profile(
    "contract", deadline=None, max_examples=12, database=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(autouse=True)
def few_examples() -> Iterator[None]:
    """Each example starts processes."""
    before = settings.default
    settings.load_profile("contract")
    yield
    if before is not None:
        settings._current_profile = "mlmsub" if "mlmsub" in settings._profiles else "default"


@pytest.fixture
def run_dir(tmp_path: Path) -> Callable[..., RunDir]:
    """Make a run directory: of a script by default, on this machine, with these fields of its RunSpec changed."""

    def make(*command: str, **changes: Any) -> RunDir:
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        fields = {"image": "", "mounts": (), "runs_root": str(tmp_path / "runs"), "sbatch_args": ()} | changes
        if "stage" not in fields:
            fields["workdir"] = str(work)
            return RunDir(script_spec(*(command or ("true",)), **fields), tmp_path)
        from specs import run_spec

        return RunDir(run_spec(**fields), tmp_path)

    return make
