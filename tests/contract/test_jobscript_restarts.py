"""job.sbatch and attempts.sh with stand-ins for Slurm: when a run is started again, and when never."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rundir import RunDir

from mlmsub.core.spec import Parent

Make = Callable[..., RunDir]

ASK = "kill -USR1 $PPID; sleep 0.2\n"  # the time limit is near
SAVED = 'echo 12 >"$STATE/$MLMSUB_RESTART/saved"\n'
# Slurm ends a job that it requeues: first SIGTERM to its shell, then SIGKILL to all
REQUEUES = """\
echo "$@" >>"$STATE/../scontrol"
case $1 in
    requeue)
        (sleep 0.3; kill -TERM "$JOB"; pkill -KILL -P "$JOB"; sleep 0.3; kill -KILL "$JOB") >/dev/null 2>&1 </dev/null &
        ;;
    show) [[ $2 == hostnames ]] || echo "JobState=RUNNING ${SHOWN-Restarts=0 PreemptTime=None}" ;;
esac
"""
REFUSES = 'case $1 in requeue) echo "presently disabled"; exit 1 ;; show) echo Restarts=0 PreemptTime=None ;; esac\n'


class Job:
    """A run of a script, whose job can be started several times."""

    def __init__(self, made: RunDir, scontrol: str = REQUEUES) -> None:
        self.made, self.state = made, made.dir / "state"
        (made.dir / "secrets").mkdir()
        # the job's process id is known to whoever its shell started
        made.program("scontrol", f"STATE={self.state} JOB=$(cat {made.folder}/job.pid 2>/dev/null)\n{scontrol}")
        made.program("scancel", f'echo "$@" >>{made.folder}/scancel')
        made.program("sacct", "printf 'PREEMPTED\\nRUNNING\\n'")

    def start(self, srun: str, *links: str, **how: Any) -> int:
        self.made.srun(f"STATE={self.state}; echo $PPID >{self.made.folder}/job.pid\n{srun}")
        done = self.made.job(*links, **how)
        self.said = done.stderr or ""
        return done.returncode

    @property
    def attempts(self) -> list[dict[str, Any]]:
        file = self.state / "attempts.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def requeued(self) -> bool:
        file = self.made.dir / "scontrol"
        return file.exists() and f"requeue {self.made.job_id}" in file.read_text()

    @property
    def over(self) -> bool:
        """The run has had its last word; else another attempt finds all that it needs."""
        over = (self.state / "end").exists()
        assert over != (self.made.dir / "secrets").exists()
        return over


def test_asked_saved_and_requeued(run_dir: Make) -> None:
    job = Job(run_dir())
    job.start(ASK + SAVED)
    assert job.requeued and not job.over
    (line,) = job.attempts
    assert line | {"seconds": 0} == {
        "restart": 0, "job": int(job.made.job_id), "cause": "time limit", "code": 0, "seconds": 0, "iteration": 12
    }  # fmt: skip
    assert job.start("exit 0") == 0
    assert job.over and [one["cause"] for one in job.attempts] == ["time limit", "finished"]
    assert [one["restart"] for one in job.attempts] == [0, 1]


@pytest.mark.parametrize(
    ("srun", "code"),
    [
        (ASK, 0),  # it finished before it had to save
        (ASK + "exit 7", 7),
        (ASK + SAVED + "exit 7", 7),
        (SAVED + 'echo {} >"$STATE/$MLMSUB_RESTART/done.json"\n' + ASK, 0),
        ("kill -TERM $PPID; sleep 0.2\n" + ASK + SAVED, 143),
        (ASK + SAVED + "kill -TERM $PPID; sleep 0.2\n", 143),
    ],
    ids=["finished", "failed", "failed-after-its-save", "done", "cancelled", "cancelled-after-its-save"],
)
def test_no_requeue(run_dir: Make, srun: str, code: int) -> None:
    job = Job(run_dir())
    assert job.start(srun) == code
    assert not job.requeued and job.over
    assert (job.state / "end").read_text().split()[0] == str(code)


def test_a_native_stage_that_saves_without_being_done_is_not_done(run_dir: Make) -> None:
    job = Job(run_dir(stage="finetune"))
    job.start(ASK + SAVED)
    assert job.requeued and not job.over


def test_a_refused_requeue_says_what_to_do(run_dir: Make) -> None:
    job = Job(run_dir(), REFUSES)
    assert job.start(ASK + SAVED) == 75
    assert "presently disabled" in job.said and "--requeue" in job.said and job.over


@pytest.mark.parametrize("shown", ["Restarts=1 PreemptTime=None", "Restarts=1"])
@pytest.mark.parametrize("srun", ["kill -TERM $PPID; sleep 0.2; exit 143", "exit 143", "exit 1"])
def test_what_slurm_starts_again_keeps_its_secrets(run_dir: Make, srun: str, shown: str) -> None:
    """Preempted, a node lost, requeued by somebody: the next attempt needs them."""
    job = Job(run_dir())
    assert job.start(srun, env={"SHOWN": shown}) == 143
    assert not job.requeued and not job.over
    assert job.start("exit 0", env={"SLURM_RESTART_COUNT": "1", "SHOWN": shown}) == 0
    first, second = job.attempts
    assert (first["cause"], first["code"], second["cause"]) == ("preempted", 143, "finished")


def test_ranks_that_saved_in_a_grace_time_wait_for_slurm(run_dir: Make) -> None:
    """The job's shell is told at the end of the grace time only; to end now would count as success."""
    later = "(sleep 0.5; kill -TERM $PPID) >/dev/null 2>&1 </dev/null &\n"
    job = Job(run_dir())
    shown = {"SHOWN": "Restarts=1 PreemptTime=2026-11-30T21:54:57"}
    assert job.start(later + SAVED, env=shown) == 143
    assert not job.over and "preempted; all is saved (iteration 12)" in job.said


def test_a_sigterm_by_somebody_is_an_end(run_dir: Make) -> None:
    job = Job(run_dir())
    assert job.start(SAVED) == 143
    assert job.over and not job.requeued


def test_an_exit_code_of_75_is_a_failure_like_others(run_dir: Make) -> None:
    job = Job(run_dir())
    assert job.start("exit 75") == 75
    assert [one["cause"] for one in job.attempts] == ["failed"] and job.over


def test_a_rank_without_last_word_is_no_success(run_dir: Make) -> None:
    """srun says 0 when it has lost the node."""
    job = Job(run_dir())
    assert job.start('rm "$STATE/0/rank-1"; exit 0') == 137


def test_a_cancelled_run_does_nothing_when_it_is_started_again(run_dir: Make) -> None:
    job = Job(run_dir())
    (job.state / "cancelled").touch()
    assert job.start("touch $STATE/ran") == 143
    assert not (job.state / "ran").exists() and job.over


def test_a_job_that_slurm_starts_twice_is_at_work_once(run_dir: Make) -> None:
    """slurmctld was killed before it had written down that the job runs, and starts it on another node."""
    job = Job(run_dir())
    (job.state / "0").mkdir()
    (job.state / "0/begun").write_text(f"1 {job.made.job_id} 0\n")
    assert job.start("touch $STATE/ran") == 3
    assert not (job.state / "ran").exists() and not job.over and job.attempts == []
    job.made.program("sacct", "echo RUNNING")  # accounting that has not heard of the first one's end
    assert job.start("exit 0", restart=1) == 0
    assert [one["cause"] for one in job.attempts] == ["cut off", "finished"]


def test_an_attempt_that_comes_back_after_the_next_one_says_nothing(run_dir: Make) -> None:
    job = Job(run_dir())
    assert job.start("mkdir $STATE/1; exit 0") == 143
    assert not job.over and job.attempts == []


# --- bounds --------------------------------------------------------------------------------------


def earlier(job: Job, *iterations: int, seconds: int = 10) -> None:
    """Attempts that are over."""
    lines = []
    for number, iteration in enumerate(iterations):
        (job.state / str(number)).mkdir()
        lines.append(
            {"restart": number, "job": 1, "cause": "time limit", "code": 0, "seconds": seconds, "iteration": iteration}
        )
    (job.state / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_number_of_restarts_is_bounded(run_dir: Make) -> None:
    job = Job(run_dir(max_restarts=1))
    earlier(job, 5)
    assert job.start(ASK + SAVED) == 75
    assert "started again 1 times" in job.said and job.over and not job.requeued


def test_so_are_restarts_by_slurm(run_dir: Make) -> None:
    job = Job(run_dir(max_restarts=1))
    earlier(job, 5, 10)
    assert job.start("touch $STATE/ran") == 75
    assert not (job.state / "ran").exists() and job.over


@pytest.mark.parametrize(("allowed", "code"), [(19, 75), (20, 75), (1000, 0)])
def test_the_time_of_all_attempts_is_bounded(run_dir: Make, allowed: int, code: int) -> None:
    job = Job(run_dir(max_total_time=allowed))
    earlier(job, 5, 10)
    assert job.start("exit 0") == code


@pytest.mark.parametrize(
    ("iterations", "code"),
    [((5, 10), 0), ((5, 5), 0), ((5, 5, 5), 75), ((5, 5, 9), 0), ((-1, -1), 0), ((5, 9, 9, 9), 75), ((9, 9, 10), 0)],
)
def test_two_attempts_without_progress_are_enough(run_dir: Make, iterations: tuple[int, ...], code: int) -> None:
    job = Job(run_dir())
    earlier(job, *iterations)
    assert job.start("exit 0") == code
    assert ("saved nothing newer" in job.said) == (code == 75)


def test_a_training_that_never_saved_has_made_no_progress(run_dir: Make) -> None:
    job = Job(run_dir(stage="train"))
    earlier(job, -1, -1)
    assert job.start("exit 0") == 75


def test_megatrons_own_line_tells_of_a_save(run_dir: Make) -> None:
    job = Job(run_dir())
    text = "0:   successfully saved checkpoint from iteration     500 to /x\n 0: iteration 777\n"
    (job.made.dir / "logs/a.log").write_text(text)
    job.start("exit 143", env={"SHOWN": "Restarts=1"})
    job.start("exit 0", restart=1)
    assert [one["iteration"] for one in job.attempts] == [500, 500]


# --- chains --------------------------------------------------------------------------------------

# What Slurm says of the job itself, and of the one before it.
SAYS = """\
case "$*" in
    *hostnames*) echo node1 ;;
    requeue*) echo "$@" >>"$STATE/../scontrol" ;;
    *" $SLURM_JOB_ID") echo "JobState=COMPLETING ${SHOWN-Reason=None} Restarts=0 PreemptTime=${PREEMPTED-None} " ;;
    *" 100") echo "JobId=100 JobState=${BEFORE-COMPLETED} Reason=None Restarts=0" ;;
esac
"""


class Chain(Job):
    """A run of three jobs, of which `queue` are still in the queue; the first is 100."""

    def __init__(self, made: RunDir, *queue: str) -> None:
        super().__init__(made, SAYS)
        made.job_id = "100"
        lines = "".join(f"{job}|{made.dir}|{made.dir}/job.sbatch 100\n" for job in queue) + (
            f"7|/elsewhere|/elsewhere/job.sbatch\n900|{made.dir}|{made.dir}/mine.sh\n901_4|{made.dir}|wrap\n"
            f"902|{made.dir}|{made.dir}/my_job.sbatch\n903|{made.dir}|{made.dir}/check.sh job.sbatch\n"
        )
        (made.folder / "queue").write_text(lines)
        made.program("squeue", f"cat {made.folder}/queue")

    @property
    def cancelled(self) -> list[str]:
        file = self.made.folder / "scancel"
        return file.read_text().split() if file.exists() else []

    def earlier(self, cause: str = "", code: int = 0, end: str = "") -> None:
        """The first link has worked, and left this line, or none."""
        (self.state / "0").mkdir()
        (self.state / "0/begun").write_text("1 100\n")
        (self.state / "job").symlink_to("100")
        line = {"restart": 0, "job": 100, "cause": cause, "code": code, "seconds": 5, "iteration": 7}
        if cause:
            (self.state / "attempts.jsonl").write_text(json.dumps(line) + "\n")
        if end:
            (self.state / "end").write_text(f"{end}\n")
            shutil.rmtree(self.made.dir / "secrets")


def test_a_link_leaves_the_rest_to_the_next(run_dir: Make) -> None:
    job = Chain(run_dir(chain=2), "102", "101", "100")
    assert job.start(ASK + SAVED) == 75
    assert "the chain's next job goes on" in job.said and not job.requeued
    assert not job.over and job.cancelled == []
    assert job.start("exit 0", "100", job_id="101") == 0
    assert [(one["restart"], one["job"], one["cause"]) for one in job.attempts] == [
        (0, 100, "time limit"), (1, 101, "finished"),
    ]  # fmt: skip
    assert job.over and job.cancelled == ["102"]


def test_the_last_link_is_requeued_where_slurm_may(run_dir: Make) -> None:
    job = Chain(run_dir(chain=2), "100")
    job.made.program("sleep", "true")  # for Slurm to end the job
    assert job.start(ASK + SAVED) == 75
    assert job.requeued and not job.over


@pytest.mark.parametrize(
    ("line", "end", "slurm", "code"),
    [
        (("time limit", 0), "", "FAILED", 0),
        (("preempted", 143), "", "PREEMPTED", 0),
        (("node failure", 143), "", "NODE_FAIL", 0),
        ((), "", "TIMEOUT", 0),
        ((), "", "PREEMPTED", 0),
        ((), "", "NODE_FAIL", 0),
        ((), "", "CANCELLED", 143),
        ((), "", "FAILED", 143),
        ((), "", "OUT_OF_MEMORY", 143),
        ((), "", "", 143),
        (("failed", 7), "7 100 0", "FAILED", 7),
        (("failed", 7), "", "FAILED", 7),
        (("ended", 143), "143 100 0", "CANCELLED", 143),
        (("time limit", 0), "75 100 0", "FAILED", 75),
        (("finished", 0), "0 100 0", "COMPLETED", 0),
        (("time limit", 0), "never 100 0", "FAILED", 1),
    ],
)  # fmt: skip
def test_when_a_link_works(run_dir: Make, line: tuple[Any, ...], end: str, slurm: str, code: int) -> None:
    job = Chain(run_dir(chain=2), "103", "102")
    job.earlier(*line, end=end)
    job.made.program("sacct", f"echo {slurm}")
    assert job.start("touch $STATE/ran", "100", job_id="102", env={"BEFORE": slurm}) == code
    works = code == 0 and not end
    assert (job.state / "ran").exists() == works
    assert job.over and job.cancelled == ["103"]
    assert (job.state / "end").read_text().split()[:2] == (end.split()[:2] or [str(code), "102" if works else "100"])


def test_a_link_after_one_whose_prelude_failed(run_dir: Make) -> None:
    job = Chain(run_dir(chain=2), "102", "101")
    assert job.start("touch $STATE/ran", "100", job_id="101", env={"BEFORE": "FAILED"}) == 1
    assert not (job.state / "ran").exists() and (job.state / "end").read_text() == "1 100 0\n"


@pytest.mark.parametrize("slurm", ["CANCELLED", ""])
def test_a_link_whose_run_never_began_does_not_begin_it(run_dir: Make, slurm: str) -> None:
    """The first was cancelled in the queue."""
    job = Chain(run_dir(chain=2), "102", "101")
    job.made.program("sacct", "true")
    assert job.start("touch $STATE/ran", "100", job_id="101", env={"BEFORE": slurm}) == 143
    assert not (job.state / "ran").exists() and job.over and job.cancelled == ["102"]
    assert (job.state / "end").read_text() == "143 none 0\n"


@pytest.mark.parametrize("slurm", ["NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "TIMEOUT"])
def test_a_link_whose_run_was_cut_off_before_it_began_begins_it(run_dir: Make, slurm: str) -> None:
    job = Chain(run_dir(chain=2), "102", "101")
    assert job.start("touch $STATE/ran", "100", job_id="101", env={"BEFORE": slurm}) == 0
    assert (job.state / "ran").exists() and (job.state / "end").read_text() == "0 101 0\n"


def test_a_link_after_one_that_was_cancelled_before_it_began(run_dir: Make) -> None:
    """By scancel, while it started: what it was to go on with stays."""
    job = Chain(run_dir(chain=3), "103")
    job.earlier("time limit")
    job.made.program("sacct", "echo CANCELLED by 1001")
    assert job.start("touch $STATE/ran", "100", "101", job_id="102") == 143
    assert not (job.state / "ran").exists() and job.over and job.cancelled == ["103"]


def test_what_slurm_said_at_an_end_holds_where_it_has_forgotten_the_job(run_dir: Make) -> None:
    """Without accounting, and after MinJobAge."""
    job = Chain(run_dir(chain=1), "100", "101")
    job.start("kill -TERM $PPID; sleep 0.2; exit 143", env={"SHOWN": "Reason=TimeLimit"})
    job.made.program("sacct", "exit 1")
    job.made.program("scontrol", f"STATE={job.state}\n" + SAYS.replace('*" 100")', '*" 999")'))
    assert job.start("exit 0", "100", job_id="101") == 0
    assert [one["cause"] for one in job.attempts] == ["time limit", "finished"]


def test_the_time_of_an_attempt_that_was_cut_off_counts(run_dir: Make) -> None:
    """As far as its log goes."""
    job = Chain(run_dir(chain=1))
    job.earlier()
    for path in (job.state / "0/begun", job.state / "0"):
        os.utime(path, (1, 1))
    log = job.made.folder / "log"
    log.touch()
    os.utime(log, (41, 41))
    assert job.start("exit 0", "100", job_id="101", env={"BEFORE": "NODE_FAIL"}, log=log) == 0
    assert job.attempts[0]["seconds"] == 40


def test_a_link_after_a_success_whose_last_word_is_not_seen(run_dir: Make) -> None:
    """Another node's network file system may show it later."""
    job = Chain(run_dir(chain=2), "103", "102")
    job.earlier()
    assert job.start("touch $STATE/ran", "100", job_id="102") == 0
    assert not (job.state / "ran").exists() and (job.state / "end").read_text() == "0 100 1\n"


@pytest.mark.parametrize("slurm", ["RUNNING", "PENDING", "COMPLETING"])
def test_a_link_beside_one_at_work_leaves_all_to_it(run_dir: Make, slurm: str) -> None:
    job = Chain(run_dir(chain=2), "102", "101")
    job.earlier()
    assert job.start("touch $STATE/ran", "100", job_id="101", env={"BEFORE": slurm}) == 3
    assert not (job.state / "ran").exists() and not job.over and job.cancelled == [] and job.attempts == []


def test_a_link_is_one_job(run_dir: Make) -> None:
    """Another sbatch of the same link, which was late, does nothing, whichever comes first."""
    job = Chain(run_dir(chain=1))
    job.earlier("time limit")
    assert job.start("exit 0", "100", job_id="105") == 0
    (job.state / "end").unlink()
    assert job.start("touch $STATE/ran", "100", job_id="101") == 3
    assert not (job.state / "ran").exists() and "is job 105" in job.said


@pytest.mark.parametrize(
    "shown",
    [{"SHOWN": "Reason=TimeLimit"}, {"SHOWN": "Reason=NodeDown"}, {"PREEMPTED": "2026-11-30T21:54:57"}],
)
def test_what_slurm_may_have_cut_off_is_for_the_next_link_to_judge(run_dir: Make, shown: dict[str, str]) -> None:
    job = Chain(run_dir(chain=1), "100", "101")
    assert job.start("kill -TERM $PPID; sleep 0.2; exit 143", env=shown) == 143
    assert not job.over and job.attempts == [] and job.cancelled == []


@pytest.mark.parametrize(
    ("srun", "queue", "mark"),
    [
        ("kill -TERM $PPID; sleep 0.2; exit 143", ("100", "101"), False),  # by scancel
        ("ln -s '7 by rank 0' $STATE/0/first_failure; exit 143", ("100", "101"), True),
        ("exit 7", ("100", "101"), False),
        ("kill -TERM $PPID; sleep 0.2; exit 143", ("100",), True),  # there is no next one
    ],
    ids=["scancel", "a-rank-failed", "failed", "the-last"],
)
def test_what_a_link_judges_itself(run_dir: Make, srun: str, queue: tuple[str, ...], mark: bool) -> None:
    job = Chain(run_dir(chain=1), *queue)
    job.start(srun, env={"SHOWN": "Reason=TimeLimit"} if mark else {})
    assert job.over and job.cancelled == (["101"] if "101" in queue else [])


def test_a_chain_is_bounded_like_a_job(run_dir: Make) -> None:
    job = Chain(run_dir(chain=3, max_restarts=1), "101", "102", "103")
    job.earlier("time limit")
    assert job.start(ASK + 'echo 20 >"$STATE/1/saved"', "100", job_id="101") == 75
    assert "started again 1 times" in job.said and job.over and job.cancelled == ["103", "102"]


# --- the runs that it waits for --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "end", "works"),
    [
        ("afterok", "0", True), ("afterok", "7", False), ("afterok", "never", False), ("afterok", "", False),
        ("afternotok", "0", False), ("afternotok", "7", True), ("afternotok", "", True),
        ("afterany", "7", True), ("afterany", "", True),
    ],
)  # fmt: skip
def test_what_it_waits_for_must_have_ended_as_it_must(
    run_dir: Make, tmp_path: Path, condition: str, end: str, works: bool
) -> None:
    """Of a chain, Slurm knows only that all its links are over."""
    parent = tmp_path / "a parent's $run"
    (parent / "state").mkdir(parents=True)
    if end:
        (parent / "state/end").write_text(f"{end} 100 0\n")
    job = Job(run_dir(parents=(Parent("p", str(parent), condition),)))  # type: ignore[arg-type]
    job.made.program("sleep", "true")
    assert job.start("touch $STATE/ran") == (0 if works else 1)
    assert (job.state / "ran").exists() == works and job.over
    assert (job.state / "end").read_text().split()[0] == ("0" if works else "never")
    assert (f"the run {parent.name} has" in job.said) == (not works)


def test_a_restart_asks_nobody_any_more(run_dir: Make) -> None:
    """The run that it waited for may have been removed."""
    job = Job(run_dir(parents=(Parent("p", "/gone", "afterok"),)))
    earlier(job, 5)
    assert job.start("exit 0") == 0


# --- the time that a save takes --------------------------------------------------------------------


@pytest.mark.parametrize(("stop_before", "advised"), [(120, True), (125, False)])
def test_a_save_that_took_long_is_told(run_dir: Make, stop_before: int, advised: bool) -> None:
    job = Job(run_dir(sbatch={"signal": f"B:USR1@{stop_before}", "requeue": ""}))
    job.start(ASK + "sleep 1.2\n" + SAVED)
    assert ("--stop-before should be 12" in job.said) == advised
    assert (job.state / "advice").exists() == advised and job.requeued


def test_a_save_that_was_too_late_is_told(run_dir: Make) -> None:
    job = Job(run_dir(sbatch={"signal": "B:USR1@120"}))
    job.start(ASK + "kill -TERM $PPID; sleep 0.2; exit 143", env={"SHOWN": "Restarts=0 Reason=TimeLimit "})
    assert "came before all was saved: --stop-before should be 240 or more" in (job.state / "advice").read_text()


# --- what else can be wrong -------------------------------------------------------------------


def test_without_a_note_there_is_no_restart(run_dir: Make) -> None:
    """The bounds would not hold."""
    job = Job(run_dir())
    (job.state / "attempts.jsonl").symlink_to("/dev/full")
    assert job.start(ASK + SAVED) == 75
    assert not job.requeued and "cannot be written" in job.said


@pytest.mark.parametrize("name", ["job", "0"])
def test_a_run_directory_that_cannot_be_written(run_dir: Make, name: str) -> None:
    job = Job(run_dir())
    (job.made.bin / ("ln" if name == "job" else "mkdir")).write_text("#!/bin/sh\nexit 1\n")
    (job.made.bin / ("ln" if name == "job" else "mkdir")).chmod(0o755)
    assert job.start("touch $STATE/ran") == 73
    assert "cannot write to the run directory" in job.said and not (job.state / "ran").exists()


def test_a_script_can_have_a_signal(run_dir: Make, tmp_path: Path) -> None:
    job = Job(run_dir(script_signal="TERM"))
    job.start(ASK + "exit 0")
    assert (job.made.folder / "scancel").read_text() == f"--signal=TERM {job.made.job_id}\n"
    assert job.requeued and not job.over


def test_a_script_with_a_signal_lives_through_it(run_dir: Make) -> None:
    """The shells between srun and the program that acts on the signal would die of it."""
    made = run_dir("bash", "-c", 'kill -TERM $$ $PPID; echo "lives"; exit 0', nodes=1, tasks_per_node=1)
    code, said = made.rank(env={"MLMSUB_SCRIPT_SIGNAL": "TERM"})
    assert (code, "lives" in said) == (0, True)


@pytest.mark.parametrize(("last_act", "code"), [("exit 0", 0), ("exit 1", 143)])
def test_after_sigterm_success_is_a_ranks_own_and_failure_is_not(run_dir: Make, last_act: str, code: int) -> None:
    made = run_dir("bash", "-c", f"trap : TERM; kill -TERM $PPID $$; {last_act}", nodes=1, tasks_per_node=1)
    assert made.rank()[0] == code
    assert made.state("rank-0") == str(code) and made.state("first_failure") == ""
