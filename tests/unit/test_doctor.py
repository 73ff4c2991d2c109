"""What a cluster's answers mean for a profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlmsub.app import doctor as app
from mlmsub.app.config import NamedProfile
from mlmsub.core.doctor import PYXIS, Finding, judge, parse
from mlmsub.core.profile import Profile

HEALTHY = "\n".join(
    [
        "version|slurm 24.05.4",
        "partition|batch*|up|4:00:00|64|gpu:h100:8(S:0-1)|2063000|224",
        "partition|small|up|1:00:00|4|gpu:a100:4|500000|64",
        "partition|cpu|up|1-00:00:00|10|(null)|500000|64",
        "mpi|MPI plugin types are...",
        "mpi|\tpmix",
        "mpi|\tpmi2",
        "mpi|specific pmix plugin versions available: pmix_v4",
        *(f"pyxis|{option}" for option in PYXIS),
        "config|WaitTime=0 sec",
        "config|EnforcePartLimits=ALL",
        "config|PreemptMode=OFF",
        "sacct|yes",
        "account|team",
        "association|team||normal",
        "runs|writable|104857600",
        "scratch|writable|104857600",
        "image|there",
    ]
)
PROFILE = Profile(image="/images/x.sqsh", scratch="/lustre/me", gpu_type="h100")


def finding(what: str, answer: str = HEALTHY, profile: Profile = PROFILE) -> Finding:
    return next(found for found in judge(parse(answer), profile) if found.what == what)


def test_a_healthy_cluster_has_nothing_to_mend() -> None:
    found = judge(parse(HEALTHY), PROFILE)
    assert {f.severity for f in found} <= {"ok", "info"}
    assert not any(f.fix for f in found)


@pytest.mark.parametrize(
    ("what", "was", "becomes", "severity", "fix"),
    [
        ("MPI", "mpi|\tpmix\n", "", "error", "mpi: pmi2"),
        ("Pyxis", "pyxis|container-image\n", "", "error", "newer Pyxis"),
        ("GPUs", "gpu:h100:8(S:0-1)", "gpu:4", "error", "gpus_per_node: 4"),
        ("GPUs", "gpu:h100:8(S:0-1)", "(null)", "error", "gpu_request: none"),
        ("partition", "batch*", "batch", "error", "batch, cpu, small"),
        ("account", "account|team", "account|", "warning", "team"),
        ("scratch", "scratch|writable|104857600", "scratch|not-writable|/lustre", "error", "scratch"),
        ("scratch", "scratch|writable|104857600", "scratch|missing|/lustre/me", "error", "make it"),
        ("run directories", "runs|writable|104857600", "runs|writable|10", "warning", "space"),
        ("image", "image|there", "image|missing", "error", "image"),
        ("WaitTime", "WaitTime=0 sec", "WaitTime=30 sec", "info", "--wait=0"),
        ("limits", "EnforcePartLimits=ALL", "EnforcePartLimits=NO", "info", "after it submits"),
    ],
)
def test_what_is_amiss_is_named_with_its_cure(what: str, was: str, becomes: str, severity: str, fix: str) -> None:
    found = finding(what, HEALTHY.replace(was, becomes))
    assert found.severity == severity
    assert fix in found.fix


def test_without_pyxis_no_container_can_start() -> None:
    answer = "\n".join(line for line in HEALTHY.splitlines() if not line.startswith("pyxis"))
    assert finding("Pyxis", answer).severity == "error"


def test_without_sbatch_nothing_else_is_said() -> None:
    (only,) = judge(parse("no-sbatch|/usr/bin:/bin"), PROFILE)
    assert only.severity == "error" and "slurm_bin" in only.fix


def test_the_profiles_partition_counts_not_the_default() -> None:
    found = finding("GPUs", profile=Profile(partition="small", gpus_per_node=8))
    assert found.settles == {"gpus_per_node": "4", "gpu_type": "a100"}


def test_an_account_that_is_not_yours() -> None:
    assert finding("account", profile=Profile(account="theirs")).severity == "error"


@pytest.mark.parametrize("answer", ["", "\n", "nonsense", "partition|x", "runs|", "config|=", "scratch|writable|?"])
def test_an_answer_that_is_not_whole_is_no_traceback(answer: str) -> None:
    (only,) = judge(parse(answer), PROFILE)
    assert only.severity == "error" and not only.settles


def test_writing_adds_what_is_open_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text("# my cluster\npartition: small\ngpus_per_node: 2  # on purpose\n")
    profile = Profile(partition="small", gpus_per_node=2)
    added = app.write(NamedProfile("lab", profile, str(path)), judge(parse(HEALTHY), profile))
    assert added == {"max_nodes": "4", "max_time": "1:00:00", "gpu_type": "a100"}
    assert path.read_text() == (
        "# my cluster\npartition: small\ngpus_per_node: 2  # on purpose\n# found by mlmsub doctor\n"
        "max_nodes: 4\nmax_time: 1:00:00\ngpu_type: a100\n"
    )
    assert app.write(NamedProfile("lab", profile, str(path)), judge(parse(HEALTHY), profile)) == {}


def test_preemption_is_told_for_the_partition_of_the_profile() -> None:
    answer = f"{HEALTHY}\nconfig|KillWait=30 sec\npreempt|batch|REQUEUE|120\npreempt|small|CANCEL|0\npreempt|cpu|OFF|0"
    assert finding("preemption", answer).found == "PreemptMode=OFF, KillWait=30 sec"
    kept = finding("preemption in batch", answer)
    assert (kept.found, kept.fix) == ("PreemptMode=REQUEUE, GraceTime=120", "")
    found = judge(parse(answer), Profile(partition="small,cpu"))
    (one,) = [f for f in found if f.what.startswith("preemption in")]
    assert one.what == "preemption in small" and "--chain" in one.fix
