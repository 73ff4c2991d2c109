"""status.sh, log.sh and cancel.sh under real shells."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote import SHELLS, Cluster

from mlmsub.slurm import jobs
from mlmsub.slurm.jobs import JobState


@pytest.fixture(params=SHELLS)
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Cluster:
    return Cluster(tmp_path, request.param)


@pytest.fixture
def run(cluster: Cluster) -> Path:
    """A run directory with a log and secrets; its job is 123."""
    made = cluster.scratch / "runs" / "a run's $dir"
    for name in ("logs", "state", "secrets"):
        (made / name).mkdir(parents=True)
    (made / "logs/j_123_x.log").write_bytes(b"line 1\n\xff\x00two")
    (made / "secrets/env.sh").write_text("HF_TOKEN=x\n")
    return made


def status(cluster: Cluster, run: Path, job: str = "123", scheduler: str = "slurm") -> JobState:
    done = cluster.run(
        "status",
        slurm_bin="",
        clusters="",
        jobs=job if scheduler == "slurm" else "",
        runs=jobs.run_lines([(job, str(run))]),
    )
    assert done.returncode == 0, done.stderr
    return jobs.parse_status(done.stdout.decode(), [job])[job]


def ended(run: Path, code: str = "0") -> None:
    (run / "state/end").write_text(f"{code} 123 0\n")


# --- status ----------------------------------------------------------------------------------


def test_the_queue_is_asked_once_for_all_of_the_users_jobs(cluster: Cluster, run: Path) -> None:
    cluster.program(
        "squeue", f'echo "$@" >>{cluster.folder}/asked; echo "12|FAILED|None|1|1|x"; echo "123|RUNNING|None|1:00|2|s"'
    )
    assert status(cluster, run) == JobState("running", "RUNNING", elapsed="1:00", nodes="2", start="s", source="queue")
    assert (cluster.folder / "asked").read_text().count("\n") == 1


def test_accounting_is_asked_when_the_queue_has_forgotten(cluster: Cluster, run: Path) -> None:
    cluster.program("sacct", '[[ " $* " == *" -j 123 "* ]] && echo "123|FAILED|7:0|00:01:00|2|s"')
    assert (status(cluster, run).state, status(cluster, run).exit_code) == ("failed", 7)


@pytest.mark.parametrize("failing", ["exit 1", "echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1"])
def test_a_queue_that_does_not_answer_is_not_an_end(cluster: Cluster, run: Path, failing: str) -> None:
    cluster.program("squeue", failing)
    cluster.program("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert status(cluster, run).state == "unknown"
    assert (run / "secrets").exists()


def test_the_runs_own_file_is_the_last_resort(cluster: Cluster, run: Path) -> None:
    ended(run, "7")
    assert status(cluster, run) == JobState("failed", exit_code=7, source="files")


def test_without_slurm_the_files_speak(cluster: Cluster, run: Path) -> None:
    for name in ("squeue", "sacct"):
        (cluster.bin / name).unlink()
    cluster.without("squeue")
    ended(run)
    assert status(cluster, run).state == "succeeded"


def test_a_run_directory_that_is_gone(cluster: Cluster, run: Path) -> None:
    assert status(cluster, run.parent / "none").reason == "its run directory is gone"


@pytest.mark.parametrize("queue", ["", "123|CANCELLED|None|1|1|x", "123|TIMEOUT|None|1|1|x"])
def test_secrets_of_a_job_that_is_over_are_removed(cluster: Cluster, run: Path, queue: str) -> None:
    cluster.program("squeue", f'echo "{queue}"')
    status(cluster, run)
    assert not (run / "secrets").exists()


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "PREEMPTED", "REQUEUED", "SUSPENDED"])
def test_secrets_of_a_job_that_may_run_again_are_kept(cluster: Cluster, run: Path, state: str) -> None:
    cluster.program("squeue", f'echo "123|{state}|None|1|1|x"')
    status(cluster, run)
    assert (run / "secrets/env.sh").exists()


def test_the_latest_attempt_and_its_failure_are_told(cluster: Cluster, run: Path) -> None:
    cluster.program("sacct", 'echo "123|FAILED|7:0|00:01:00|2|s"')
    ended(run, "7")
    for number in ("0", "1"):
        (run / "state" / number).mkdir()
    (run / "state/1/first_failure").symlink_to("7 by rank 1 on node2")
    (run / "state/events.jsonl").write_text(
        '{"time": 1, "event": "iteration", "iteration": 40, "lr": 0.1}\n{"time": 2, "event": "step", "name": "x"}\n'
    )
    (run / "logs/j_123_x.log").write_text(" 1: one\n 0: other\n 1: two\n 1: three\n11: eleven\n 1: four|4\n")
    told = status(cluster, run)
    assert (told.state, told.restart, told.iteration) == ("failed", 1, "40")
    assert (told.failure, told.last_words) == ("7 by rank 1 on node2", ("two", "three", "four|4"))


def test_the_last_sign_of_a_run_that_nobody_knows(cluster: Cluster, run: Path) -> None:
    for path in (run / "logs/j_123_x.log", run / "state"):
        os.utime(path, (time.time() - 3600,) * 2)
    told = status(cluster, run)
    assert told.state == "unknown" and told.age is not None and 3600 <= told.age < 3700


def test_a_run_that_is_cancelled_stays_so(cluster: Cluster, run: Path) -> None:
    """The mark comes before scancel, so that no attempt can start in between."""
    queued(cluster, run, "123 RUNNING")
    cluster.program("scancel", f'test -e "{run}/state/cancelled"'.replace("$", "\\$"))
    assert cancel(cluster, ("123", run)) == "123|\n"
    cluster.program("scancel", "echo denied >&2; exit 1")
    assert cancel(cluster, ("123", run)) == "123|denied\n"
    assert not (run / "state/cancelled").exists()


# --- chains ---------------------------------------------------------------------------------------


def chain(run: Path, claimed: int = 1) -> None:
    """Jobs 123, 124 and 125, of which some have begun."""
    (run / "state/submitted").write_text("123 124 125\n")
    for number in range(claimed):
        (run / f"state/job{f'.{number}' if number else ''}").symlink_to(str(123 + number))


@pytest.mark.parametrize(
    ("queue", "claimed", "end", "job", "state"),
    [
        ("123|PENDING 124|PENDING 125|PENDING", 0, "", "", "pending"),
        ("123|RUNNING 124|PENDING 125|PENDING", 1, "", "", "running"),
        ("123|FAILED 124|PENDING 125|PENDING", 1, "", "124", "pending"),
        ("123|PREEMPTED 124|PENDING 125|PENDING", 1, "", "124", "pending"),
        ("123|TIMEOUT 124|CANCELLED 125|PENDING", 1, "", "125", "pending"),
        ("123|FAILED 124|RUNNING 125|PENDING", 2, "", "124", "running"),
        ("123|FAILED 124|TIMEOUT 125|RUNNING", 3, "", "125", "running"),
        ("123|FAILED 124|TIMEOUT 125|TIMEOUT", 3, "", "125", "timeout"),
        ("123|FAILED 124|CANCELLED 125|CANCELLED", 2, "143 124 1", "124", "cancelled"),
        ("123|CANCELLED 124|FAILED 125|CANCELLED", 2, "143 123 0", "", "cancelled"),
        ("123|FAILED 124|COMPLETED 125|PENDING", 2, "0 124 1", "124", "succeeded"),
    ],
)  # fmt: skip
def test_the_state_of_a_chain_is_that_of_the_link_it_is_at(
    cluster: Cluster, run: Path, queue: str, claimed: int, end: str, job: str, state: str
) -> None:
    chain(run, claimed)
    if end:
        (run / "state/end").write_text(end + "\n")
    lines = " ".join(f"'{line}|None|1:00|2|x'" for line in queue.split())
    cluster.program("squeue", f"printf '%s\\n' {lines}")
    told = status(cluster, run)
    assert (told.state, told.job) == (state, job)
    assert (run / "secrets").exists() == (not end and state in ("pending", "running"))


def test_what_accounting_knows_of_a_chains_last_link(cluster: Cluster, run: Path) -> None:
    chain(run, 3)
    cluster.program("sacct", '[[ " $* " == *" -j 125 "* ]] && echo "125|TIMEOUT|0:0|00:01:00|2|s"')
    assert (status(cluster, run).state, status(cluster, run).job) == ("timeout", "125")


def test_links_are_cancelled_from_the_last_one_on(cluster: Cluster, run: Path) -> None:
    """Were the first to end before the others, the second could start."""
    chain(run)
    own = ("9 RUNNING mine.sh", "10_4 PENDING mine.sh", "11 RUNNING my_job.sbatch", "12 RUNNING check.sh|job.sbatch")
    queued(cluster, run, "123 RUNNING", *own, "125 PENDING", "124 PENDING")
    assert cancel(cluster, ("123", run)) == "123|\n"
    assert (cluster.folder / "cancelled").read_text().split() == ["125", "124", "123"]


def test_a_link_that_ends_while_its_chain_is_cancelled(cluster: Cluster, run: Path) -> None:
    queued(cluster, run, "123 RUNNING")
    cluster.program(
        "scancel",
        "echo 'scancel: error: Kill job error on job id 123: Job/step already completing or completed' >&2; exit 1",
    )
    assert cancel(cluster, ("123", run)) == "123|\n"
    assert (run / "state/cancelled").exists()


def test_following_goes_on_over_links(cluster: Cluster, run: Path) -> None:
    chain(run)
    asked = cluster.folder / "asked"
    cluster.program(
        "squeue",
        f'[[ " $* " == *" 124 "* ]] || exit 0; echo x >>{asked}; '
        f'if [ "$(wc -l <{asked})" -lt 3 ]; then echo PENDING; else echo COMPLETED; fi',
    )
    log(cluster, run, "1")
    assert asked.read_text().count("x") >= 3


@pytest.mark.parametrize(("known", "found"), [("submitted", "123 124 125"), ("links", "")])
def test_a_chain_is_known_once_it_is_whole(cluster: Cluster, run: Path, known: str, found: str) -> None:
    chain(run)
    (run / "state/submitted").rename(run / "state" / known)
    done = cluster.run("find", slurm_bin="", clusters="", runs=jobs.run_lines([("-", str(run))]))
    assert done.stdout.decode() == f"{found}|{run}\n"


# --- logs --------------------------------------------------------------------------------------


def log(cluster: Cluster, run: Path, follow: str = "", timeout: int = 20) -> subprocess.CompletedProcess[bytes]:
    return cluster.run(
        "log", timeout=timeout, slurm_bin="", clusters="", run_dir=str(run), job="123", follow=follow, offset="0"
    )


def test_the_log_comes_byte_for_byte(cluster: Cluster, run: Path) -> None:
    assert log(cluster, run).stdout == b"line 1\n\xff\x00two"


def test_a_log_that_is_not_there_yet_is_empty(cluster: Cluster, run: Path) -> None:
    (run / "logs/j_123_x.log").unlink()
    assert (log(cluster, run).returncode, log(cluster, run).stdout) == (0, b"")


def test_the_log_of_a_run_that_is_gone(cluster: Cluster, run: Path) -> None:
    assert log(cluster, run.parent / "none").returncode == 3


@pytest.mark.parametrize(
    "squeue",
    [
        "",
        "echo COMPLETED",
        "echo CANCELLED",
        "echo TIMEOUT",
        "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
    ],
)
def test_following_ends_with_the_job(cluster: Cluster, run: Path, squeue: str) -> None:
    cluster.program("squeue", squeue)
    assert log(cluster, run, "1").stdout.endswith(b"two")


def test_following_ends_though_squeue_warns(cluster: Cluster, run: Path) -> None:
    cluster.program("squeue", "echo 'squeue: error: a setting is deprecated' >&2; echo COMPLETED")
    assert log(cluster, run, "1", timeout=20).stdout.endswith(b"two")


def test_following_prints_what_comes_later(cluster: Cluster, run: Path) -> None:
    count = cluster.folder / "count"
    cluster.program(
        "squeue",
        f'echo x >>{count}; n=$(wc -l <{count}); printf "more $n" >>{shlex.quote(str(run / "logs/j_123_x.log"))}; '
        "if [ $n -lt 3 ]; then echo RUNNING; elif [ $n = 3 ]; then echo oops >&2; exit 1; else echo COMPLETED; fi",
    )
    assert log(cluster, run, "1").stdout == b"line 1\n\xff\x00twomore 1more 2more 3more 4"


# --- cancel ----------------------------------------------------------------------------------------


def cancel(cluster: Cluster, *runs: tuple[str, Path]) -> str:
    lines = jobs.run_lines([(job, str(path)) for job, path in runs])
    done = cluster.run("cancel", slurm_bin="", clusters="", runs=lines)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def queued(cluster: Cluster, run: Path, *jobs: str) -> None:
    """What squeue knows: `ID STATE`, and the command where it is the user's own."""
    words = [(*job.replace("|", "\0").split(), "job.sbatch")[:3] for job in jobs]
    cluster.queue(*((job, state, str(run), f"{run}/{text}".replace("\0", " ")) for job, state, text in words))


def test_cancelling_removes_the_secrets(cluster: Cluster, run: Path) -> None:
    queued(cluster, run, "123 RUNNING")
    assert cancel(cluster, ("123", run)) == "123|\n"
    assert (cluster.folder / "cancelled").read_text() == "123\n"
    assert not (run / "secrets").exists()


def test_what_scancel_refuses_is_told_and_the_next_goes_on(cluster: Cluster, run: Path) -> None:
    (run.parent / "x/state").mkdir(parents=True)
    other = ("7", "RUNNING", str(run.parent / "x"), "job.sbatch")
    cluster.queue(other, ("123", "RUNNING", str(run), "job.sbatch"))
    cluster.program("scancel", '[ "$1" = 123 ] || { echo "scancel: error: Access denied" >&2; exit 1; }')
    assert cancel(cluster, ("7", run.parent / "x"), ("123", run)) == "7|scancel: error: Access denied\n123|\n"


def test_a_run_that_is_over_is_not_cancelled(cluster: Cluster, run: Path) -> None:
    """Out of time or its node lost, it has left no last word."""
    assert cancel(cluster, ("123", run)) == "123|ended\n"
    assert not (cluster.folder / "cancelled").exists() and not (run / "state/cancelled").exists()


def test_a_run_is_cancelled_also_where_the_queue_does_not_answer(cluster: Cluster, run: Path) -> None:
    cluster.program("squeue", "exit 1")
    assert cancel(cluster, ("123", run)) == "123|\n"
    assert (cluster.folder / "cancelled").read_text() == "123\n" and not (run / "state/end").exists()


def test_without_the_queue_all_links_are_cancelled(cluster: Cluster, run: Path) -> None:
    """The first is over long since, and scancel says so."""
    chain(run, 2)
    gone = "echo 'scancel: error: Kill job error on job id 123: Invalid job id specified' >&2; exit 1"
    cluster.program("squeue", "exit 1")
    cluster.program("scancel", f'[ "$1" != 123 ] || {{ {gone}; }}; echo "$1" >>"{cluster.folder}/cancelled"')
    assert cancel(cluster, ("123", run)) == "123|\n"
    assert (cluster.folder / "cancelled").read_text().split() == ["125", "124"]


def test_without_the_queue_nobody_knows_a_run_that_has_no_job_yet(cluster: Cluster, run: Path) -> None:
    cluster.program("squeue", "exit 1")
    assert cancel(cluster, ("none0", run), ("none1", run.parent / "y")).splitlines() == [
        "none0|squeue does not answer, so it is not known whether there is a job", "none1|ended"
    ]  # fmt: skip


def test_a_run_that_was_over_and_is_requeued_can_be_cancelled(cluster: Cluster, run: Path) -> None:
    ended(run)
    queued(cluster, run, "123 COMPLETING")
    assert cancel(cluster, ("123", run)) == "123|ended\n"
    queued(cluster, run, "123 PENDING")
    assert cancel(cluster, ("123", run)) == "123|\n"
    assert (cluster.folder / "cancelled").read_text() == "123\n" and (run / "state/cancelled").exists()


def test_a_submission_that_was_cut_off_is_over_once_it_is_cancelled(cluster: Cluster, run: Path) -> None:
    (run / "state/links").write_text("123\n")
    queued(cluster, run, "123 PENDING")
    assert cancel(cluster, ("none0", run)) == "none0|\n"
    assert (run / "state/submitted").read_text() == "123\n" and not (run / "state/links").exists()


@pytest.mark.parametrize(("state", "written"), [("PENDING", True), ("RUNNING", False), ("COMPLETING", True)])
def test_a_run_that_waits_has_its_last_word_from_cancel(cluster: Cluster, run: Path, state: str, written: bool) -> None:
    """Between two links of a chain Slurm would call it by what ended the one before."""
    chain(run, 1)
    queued(cluster, run, "125 PENDING", f"124 {state}")
    cancel(cluster, ("123", run))
    assert (run / "state/end").exists() == written
    if written:
        cluster.program("squeue", "printf '%s\n' '123|TIMEOUT|None|1:00|2|x' '124|CANCELLED|None|0:00|2|x'")
        assert (status(cluster, run).state, status(cluster, run).job) == ("cancelled", "124")


def test_a_cancelled_job_is_so_at_once(cluster: Cluster, run: Path) -> None:
    cluster.program("squeue", "echo '123|COMPLETING|None|1:00|2|x'")
    assert status(cluster, run).state == "running"
    (run / "state/cancelled").touch()
    assert status(cluster, run).state == "cancelled"
    ended(run, "0")
    assert status(cluster, run).state == "running", "it has succeeded before"


def test_the_users_own_filters_do_not_hide_jobs(cluster: Cluster, run: Path) -> None:
    program = '[ -z "$SQUEUE_STATES$SACCT_FEDERATION$SCANCEL_INTERACTIVE" ] && echo "123|RUNNING|None|1:00|2|x"'
    cluster.program("squeue", program)
    hidden = {"SQUEUE_STATES": "FAILED", "SACCT_FEDERATION": "1", "SCANCEL_INTERACTIVE": "1"}
    lines = jobs.run_lines([("123", str(run))])
    done = cluster.run("status", env=hidden, slurm_bin="", clusters="", jobs="123", runs=lines)
    assert jobs.parse_status(done.stdout.decode(), ["123"])["123"].state == "running"


@pytest.fixture
def local(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The run as one of the profile `local`: a session of processes."""
    (run / "local").mkdir()
    process = subprocess.Popen(["/bin/bash", "-c", "sleep 60 & sleep 60"], start_new_session=True)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()


def test_a_local_run_lives_and_is_cancelled(cluster: Cluster, run: Path, local: subprocess.Popen[bytes]) -> None:
    job = str(local.pid)
    assert status(cluster, run, job, "local").state == "running"
    cancel(cluster, (job, run))
    assert local.wait(timeout=10) == -15
    assert status(cluster, run, job, "local").state == "cancelled"
    assert not (cluster.folder / "cancelled").exists(), "scancel has no say in it"


def test_the_processes_of_another_are_spared_once_a_run_has_ended(
    cluster: Cluster, run: Path, local: subprocess.Popen[bytes]
) -> None:
    """The run's process id may be somebody else's by then."""
    ended(run)
    cancel(cluster, (str(local.pid), run))
    assert local.poll() is None
    assert (run / "state/end").read_text() == "0 123 0\n"
