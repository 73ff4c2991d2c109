"""Faults on a real Slurm, those of docs/reliability.md: nothing is lost, done twice, or started again unasked.

A script of a few lines stands for the training. It obeys the same protocol: asked by `stop`, it saves, answers by
`saved` and leaves with exit code 0.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from command import Mlmsub
from faults import SOON, Training
from lab import Lab
from until import until

TOTAL = (
    90  # iterations of 0.5 s: more than end before the signal, which comes after 10 to 40 s, and than one attempt has
)


@pytest.fixture(scope="module")
def limits(lab: Lab, installed_command: Path) -> Training:
    """Runs that all meet their time limit at about the same time, since the shortest that Slurm has is a minute."""
    home = lab.shared / "test_reliability_limits"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    made = Training(Mlmsub(lab, installed_command, home / "home").setup())
    made.submit("again", TOTAL, *SOON, "--requeue")
    made.child("again")
    made.submit("early", 10, *SOON, "--requeue", "--set", "DEAF=1")
    made.submit("refused", 200, *SOON, "--no-requeue")
    made.submit("cancelled", 200, *SOON, "--requeue", "--set", "SLOW_SAVE=20")
    made.submit("unsaved", 200, "--time", "1", "--requeue")
    made.submit("links", TOTAL, *SOON, "--no-requeue", "--chain", "4")
    made.child("links", "early")
    made.submit("unheard", 400, "--time", "1", "--chain", "2")
    return made


@pytest.fixture
def train(mlm: Mlmsub) -> Training:
    return Training(mlm)


# --- the time limit ----------------------------------------------------------------------------


def test_scancel_while_ranks_save(limits: Training) -> None:
    """A requeue after it would bring the run back."""
    until(lambda: limits.state("cancelled", "stop"))
    limits.mlm.lab.run(["scancel", limits.runs["cancelled"]["job_id"]])
    assert limits.wait("cancelled")[0] == "CANCELLED"
    assert limits.log("cancelled").count("=== mlmsub") == 1


def test_a_chain_goes_on_after_a_time_limit_that_nobody_heard(limits: Training) -> None:
    """Early in this file: its second link has only a minute, too."""
    first, second, _ = limits.jobs("unheard")
    until(lambda: limits.state("unheard", "begun", 1), timeout=120)
    cut = limits.attempts("unheard")[0]
    assert (cut["job"], cut["cause"], cut["code"]) == (int(first), "time limit", 143)
    state = limits.mlm.status(second)
    assert (state["state"], state["job"], state["restart"]) == ("running", second, 1)
    limits.mlm.run("cancel", first)
    assert limits.ends("unheard") == ["TIMEOUT", "CANCELLED", "CANCELLED"]
    assert limits.mlm.status(first)["state"] == "cancelled"
    assert not limits.secrets("unheard").exists()


def test_requeue_refused(limits: Training) -> None:
    assert limits.wait("refused") == ("FAILED", "75:0")
    assert "all is saved" in limits.log("refused") and "does not requeue" in limits.log("refused")
    assert [one["cause"] for one in limits.attempts("refused")] == ["time limit"]
    assert not limits.secrets("refused").exists()


def test_a_time_limit_loses_nothing(limits: Training) -> None:
    assert limits.wait("again") == ("COMPLETED", "0:0"), limits.log("again")
    assert limits.trace("again") == list(range(1, TOTAL + 1)), "each iteration once, in order"
    *cut, last = limits.attempts("again")
    assert cut and {attempt["cause"] for attempt in cut} == {"time limit"}
    assert [attempt["restart"] for attempt in (*cut, last)] == list(range(len(cut) + 1))
    assert (last["cause"], last["code"], last["iteration"]) == ("finished", 0, cut[-1]["iteration"])
    assert limits.log("again").count("=== mlmsub") == len(cut) + 1
    assert limits.mlm.status(limits.runs["again"]["run_id"])["state"] == "succeeded"
    until(lambda: limits.seen_by_child("again"))
    assert limits.seen_by_child("again") == str(TOTAL), "what waits for a run starts after its last attempt"


def test_a_time_limit_before_the_ranks_are_ready(limits: Training) -> None:
    """A signal would have killed them, or been lost."""
    assert limits.wait("early") == ("COMPLETED", "0:0"), limits.log("early")
    assert limits.trace("early") == list(range(1, 11))


def test_a_time_limit_that_nobody_heard(limits: Training) -> None:
    assert limits.wait("unsaved")[0] == "TIMEOUT"
    assert limits.mlm.status(limits.runs["unsaved"]["run_id"])["state"] == "timeout"
    assert limits.log("unsaved").count("=== mlmsub") == 1
    assert not limits.secrets("unsaved").exists()


STOPS = """\
import os, sys, time
folder, own = os.path.join(os.environ["MLMSUB_RUN_DIR"], "state", os.environ["MLMSUB_RESTART"]), sys.argv[1]
while os.environ["RANK"] != "0":
    if os.path.exists(f"{folder}/saved") or os.path.exists(f"{own}/done"):
        sys.exit()
    time.sleep(0.1)
done = len(open(f"{own}/trace").readlines()) if os.path.exists(f"{own}/trace") else 0
for n in range(done + 1, 13):
    with open(f"{own}/trace", "a") as trace:
        trace.write(f"{n}\\n")
    time.sleep(0.3)
    if os.path.exists(f"{folder}/stop"):
        with open(f"{folder}/saved", "w") as saved:
            saved.write(str(n))
        sys.exit()
open(f"{own}/done", "w").close()
"""


def test_torchrun_stops_as_python_does(lab: Lab, installed_command: Path, scratch: Path) -> None:
    """The real torchrun, as root, who alone may read this test's own Python. Slurm's signal comes by hand."""
    torchrun = pytest.importorskip("torch") and Path(sys.prefix) / "bin/torchrun"
    train = Training(Mlmsub(lab, installed_command, scratch / "home", user="root").setup())
    mounts = [f"{p}:{p}:ro" for p in sorted({str(Path(sys.prefix)), str(Path(sys.base_prefix))})]
    train.mlm.profile(gpus_per_node=2, launch_script=str(torchrun), mounts=mounts, mem="4G")
    train.mlm.script(
        "train.sh", "mkdir -p /workspace/scratch/$NAME; ${LAUNCH_SCRIPT} train.py /workspace/scratch/$NAME"
    )
    train.mlm.script("train.py", STOPS)
    run = train.submit("one", 12, "--requeue", "--stop-before", "300")
    until(lambda: train.trace("one"))
    lab.run(["scancel", "--batch", "--signal=USR1", run["job_id"]])
    assert train.wait("one") == ("COMPLETED", "0:0"), train.log("one")
    assert train.trace("one") == list(range(1, 13))
    assert [(one["cause"], one["code"]) for one in train.attempts("one")] == [("time limit", 0), ("finished", 0)]


# --- chains --------------------------------------------------------------------------------------


def test_a_chain_goes_on_after_a_time_limit(limits: Training) -> None:
    """And no link is left once the run has succeeded, nor did one start beside another."""
    jobs, run = limits.jobs("links"), limits.runs["links"]
    assert len(jobs) == 5
    ends = limits.ends("links")
    assert limits.trace("links") == list(range(1, TOTAL + 1)), limits.log("links")
    *cut, last = limits.attempts("links")
    assert cut and {attempt["cause"] for attempt in cut} == {"time limit"} and last["cause"] == "finished"
    worked = [str(attempt["job"]) for attempt in (*cut, last)]
    assert worked == jobs[: len(worked)], "each link once, in order"
    assert ends == ["FAILED"] * len(cut) + ["COMPLETED"] + ["CANCELLED"] * (len(jobs) - len(worked))
    log = limits.log("links")
    assert log.count("=== mlmsub") == len(worked) and log.count("HF_TOKEN is hf_kept") == len(worked)
    assert not limits.secrets("links").exists()
    state = limits.mlm.status(run["run_id"])
    assert (state["state"], state["job"], state["restart"]) == ("succeeded", worked[-1], len(cut))
    until(lambda: limits.seen_by_child("links"))
    assert limits.seen_by_child("links") == str(TOTAL), "what waits for a chain and another run starts after both"


def test_a_chain_does_not_go_on_after_a_failure(train: Training) -> None:
    train.submit("one", 200, "--requeue", "--chain", "2", "--set", "FAILS_AT=2")
    child = train.child("one")
    assert train.ends("one") == ["FAILED", "CANCELLED", "CANCELLED"]
    assert train.trace("one") == [1, 2] and not train.secrets("one").exists()
    assert train.mlm.status(train.runs["one"]["run_id"])["exit_code"] == 7
    train.mlm.lab.wait(child["job_id"])
    assert train.seen_by_child("one") == "" and train.mlm.status(child["run_id"])["state"] == "cancelled"


@pytest.mark.parametrize("by", ["scancel", "mlmsub"])
def test_a_cancelled_chain_stays_cancelled(train: Training, by: str) -> None:
    train.submit("one", 200, "--chain", "2")
    until(lambda: train.trace("one"))
    if by == "mlmsub":
        train.mlm.run("cancel", train.runs["one"]["run_id"])
    else:
        train.mlm.lab.run(["scancel", train.jobs("one")[0]])
    assert train.ends("one") == ["CANCELLED"] * 3
    assert train.log("one").count("=== mlmsub") == 1 and not train.secrets("one").exists()
    assert train.mlm.status(train.runs["one"]["run_id"])["state"] == "cancelled"


def test_a_link_that_is_cancelled_in_the_queue_starts_no_other(train: Training) -> None:
    """Its successor would else run beside the one at work."""
    train.submit("one", 10, "--chain", "2")
    until(lambda: train.trace("one"))
    train.mlm.lab.run(["scancel", train.jobs("one")[1]])
    assert train.ends("one") == ["COMPLETED", "CANCELLED", "CANCELLED"]
    assert train.trace("one") == list(range(1, 11))


def test_a_chain_is_cancelled_between_two_links(train: Training) -> None:
    """Slurm's signal comes by hand, and the next link is held."""
    run = train.submit("one", 200, "--stop-before", "300", "--chain", "2")
    first, second, _ = train.jobs("one")
    train.mlm.lab.run(["scontrol", "hold", second])
    until(lambda: train.trace("one"))
    train.mlm.lab.run(["scancel", "--batch", "--signal=USR1", first])
    assert train.mlm.lab.wait(first).state == "FAILED"
    assert train.mlm.status(run["run_id"])["state"] == "requeued"
    train.mlm.run("cancel", run["run_id"])
    assert train.ends("one") == ["FAILED", "CANCELLED", "CANCELLED"]
    assert train.mlm.status(run["run_id"])["state"] == "cancelled"
    assert not train.secrets("one").exists()


def beside(train: Training, run: dict[str, Any]) -> str:
    """A job of the user's own, submitted in the run's directory."""
    argv = ["sbatch", "--parsable", "--mem=10", "-o", "/dev/null", "--wrap", "sleep 300"]
    return train.mlm.lab.run(argv, train.mlm.user, cwd=Path(run["run_dir"])).stdout.strip()


def test_a_users_own_job_in_the_run_directory_is_left_alone(train: Training) -> None:
    """It looks at the logs there, say."""
    run = train.submit("one", 4, "--chain", "1")
    own = beside(train, run)
    assert train.ends("one") == ["COMPLETED", "CANCELLED"]
    second = train.submit("two", 200)
    other = beside(train, second)
    train.mlm.run("cancel", second["run_id"])
    assert train.wait("two")[0] == "CANCELLED"
    for job in (own, other):
        assert train.mlm.lab.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout in ("PENDING\n", "RUNNING\n")
        train.mlm.lab.run(["scancel", job])


# --- cancelled and requeued by hand ------------------------------------------------------------


@pytest.mark.parametrize("by", ["scancel", "mlmsub"])
@pytest.mark.parametrize("when", ["running", "waiting"])
def test_a_cancelled_run_stays_cancelled(train: Training, by: str, when: str) -> None:
    run = train.submit("one", 200, "--requeue")
    until(lambda: train.trace("one"))
    if when == "waiting":
        train.mlm.lab.run(["scontrol", "requeue", run["job_id"]])
        until(lambda: train.mlm.lab.run(["squeue", "-h", "-j", run["job_id"], "-o", "%T"]).stdout == "PENDING\n")
        assert train.mlm.status(run["run_id"])["state"] == "requeued"
    if by == "mlmsub":
        train.mlm.run("cancel", run["run_id"])
    else:
        train.mlm.lab.run(["scancel", run["job_id"]])
    assert train.wait("one")[0] == "CANCELLED"
    assert train.mlm.status(run["run_id"])["state"] == "cancelled"
    assert train.log("one").count("=== mlmsub") == 1
    assert not train.secrets("one").exists()


def test_requeue_by_an_administrator(train: Training) -> None:
    """The next link of a chain waits meanwhile."""
    run = train.submit("one", 40, "--requeue", "--chain", "1")
    until(lambda: train.trace("one"))
    train.mlm.lab.run(["scontrol", "requeue", run["job_id"]])
    assert train.ends("one") == ["COMPLETED", "CANCELLED"], train.log("one")
    assert [(one["cause"], one["job"]) for one in train.attempts("one")] == [
        ("requeued", int(run["job_id"])), ("finished", int(run["job_id"]))
    ]  # fmt: skip
    assert "HF_TOKEN is hf_kept" in train.log("one").split("restart 1")[1], "secrets are there for the next attempt"
    assert not train.secrets("one").exists()


# --- the cluster fails ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "ends"),
    [(["--requeue"], ["COMPLETED"]), (["--no-requeue", "--chain", "1"], ["NODE_FAIL", "COMPLETED"])],
    ids=["requeue", "chain"],
)
def test_a_node_fails(train: Training, how: list[str], ends: list[str]) -> None:
    run = train.submit("one", 12, *how)
    until(lambda: train.trace("one"))
    node = train.mlm.lab.run(["squeue", "-h", "-j", run["job_id"], "-o", "%N"]).stdout.strip()
    train.mlm.lab.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test"])
    try:
        assert train.ends("one") == ends, train.log("one")
    finally:
        train.mlm.lab.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)
    assert [one["cause"] for one in train.attempts("one")] == ["node failure", "finished"]


def test_a_node_fails_before_the_run_has_begun(train: Training) -> None:
    """While the site's modules load, say."""
    train.mlm.profile(gpus_per_node=2, prelude="[[ ! ${SLURM_JOB_ID-} ]] || sleep 5")
    run = train.submit("one", 5, "--no-requeue", "--chain", "1")
    until(lambda: train.mlm.status(run["run_id"])["slurm_state"] == "RUNNING")
    node = train.mlm.lab.run(["squeue", "-h", "-j", run["job_id"], "-o", "%N"]).stdout.strip()
    train.mlm.lab.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test"])
    try:
        assert train.ends("one") == ["NODE_FAIL", "COMPLETED"], train.log("one")
    finally:
        train.mlm.lab.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)
    assert train.trace("one") == list(range(1, 6))


def test_slurmd_is_killed_and_slurmctld_restarted(train: Training) -> None:
    run = train.submit("one", 20, "--requeue")
    until(lambda: train.trace("one"))
    node = train.mlm.lab.run(["squeue", "-h", "-j", run["job_id"], "-o", "%N"]).stdout.strip()
    train.mlm.lab.end(node, signal.SIGKILL)
    train.mlm.lab.end("slurmctld")
    train.mlm.lab.start()
    assert train.wait("one") == ("COMPLETED", "0:0"), train.log("one")
    assert train.trace("one") == list(range(1, 21))
    assert len(train.attempts("one")) == 1


def test_no_space_in_the_run_directory(train: Training) -> None:
    """The node sees a state folder that is full."""
    train.mlm.profile(gpus_per_node=2, nodelist="node1")
    run = train.submit("one", 5, "--requeue", "--sbatch-arg=--hold")
    state, lab = Path(run["run_dir"]) / "state", train.mlm.lab
    pid = (lab.directory / "run/node1.pid").read_text().strip()
    inside = ["nsenter", "--mount", f"--target={pid}"]
    lab.run([*inside, "mount", "-t", "tmpfs", "-o", "nr_inodes=1,mode=777", "tmpfs", str(state)])
    try:
        lab.run(["scontrol", "release", run["job_id"]])
        assert train.wait("one") == ("FAILED", "73:0")
        assert "cannot write to the run directory" in train.log("one")
    finally:
        lab.run([*inside, "umount", str(state)])
    assert train.trace("one") == []
