"""status.sh, log.sh and cancel.sh under real shells."""

from __future__ import annotations

import shlex
import subprocess
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
    assert log(cluster, run, "1", timeout=3).stdout.endswith(b"two")


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


def test_cancelling_removes_the_secrets(cluster: Cluster, run: Path) -> None:
    assert cancel(cluster, ("123", run)) == "123|\n"
    assert (cluster.folder / "cancelled").read_text() == "123\n"
    assert not (run / "secrets").exists()


def test_what_scancel_refuses_is_told_and_the_next_goes_on(cluster: Cluster, run: Path) -> None:
    cluster.program("scancel", '[ "$1" = 123 ] || { echo "scancel: error: Access denied" >&2; exit 1; }')
    assert cancel(cluster, ("7", run.parent / "x"), ("123", run)) == "7|scancel: error: Access denied\n123|\n"


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
