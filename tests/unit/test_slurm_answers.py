"""What Slurm's commands, and our scripts around them, print."""

from __future__ import annotations

import pytest

from mlmsub.core.errors import MlmsubError, SchedulerRefused
from mlmsub.slurm import jobs, refusals
from mlmsub.slurm.jobs import JobState

# --- submit.sh's answer ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("job 123\n", (("123",), False)),
        ("existing 77\n", (("77",), True)),
        ("\nnoise\njob 5\n", (("5",), False)),
        ("job 5\njob 6\n", (("5",), False)),
        ("job 5 6 7\n", (("5", "6", "7"), False)),
        ("twin 5 6\n", (("5", "6"), True)),
    ],
)
def test_a_submission_that_went_well(answer: str, expected: tuple[tuple[str, ...], bool]) -> None:
    assert jobs.parse_submission(answer) == expected


@pytest.mark.parametrize(
    ("word", "place", "message", "fix"),
    [
        ("not-writable", "/r", "cannot write runs to /r", "runs_root"),
        ("no-space", "/r", "no space", "runs_root"),
        ("no-inodes", "/r", "no inodes", "remove files"),
        ("no-image", "/i.sqsh", "/i.sqsh is not there", "CONTAINER_IMAGE"),
        ("no-mount-source", "/d", "/d is to be mounted", "mounts"),
        ("not-unpacked", "tar: x", "tar: x", "try again"),
        ("no-sbatch", "/usr/bin", "sbatch was not found on /usr/bin", "slurm_bin"),
    ],
)
def test_a_submission_that_our_own_script_refused(word: str, place: str, message: str, fix: str) -> None:
    with pytest.raises(MlmsubError) as raised:
        jobs.parse_submission(f"refused {word}\nat {place}\n")
    assert message in raised.value.message
    assert fix in raised.value.fix


def test_sbatchs_own_words_are_kept() -> None:
    with pytest.raises(SchedulerRefused) as raised:
        jobs.parse_submission("code 1\nrefused sbatch\nstderr sbatch: error: one\nstderr sbatch: error: two\n")
    assert raised.value.code == 1
    assert raised.value.stderr == "sbatch: error: one\nsbatch: error: two"
    assert "one two" in raised.value.message


@pytest.mark.parametrize("answer", ["", "\n", "hello\n"])
def test_no_answer_says_to_repeat_the_command(answer: str) -> None:
    with pytest.raises(SchedulerRefused, match="no answer") as raised:
        jobs.parse_submission(answer)
    assert "repeat" in raised.value.fix


# --- refusals (the texts are those of facts/slurm.md, and Slurm's own) --------------------------


@pytest.mark.parametrize(
    ("text", "meaning", "cure"),
    [
        ("invalid partition specified: nope\n"
         "sbatch: error: Batch job submission failed: Invalid partition name specified", "partition", "--partition"),
        ("Batch job submission failed: Requested node configuration is not available", "no such nodes", "--nodes"),
        ("Invalid --time specification", "time limit", "--time"),
        ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
         "time limit", "--time"),
        ("unrecognized option '--nope'", "does not know an option", "sbatch_args"),
        ("Batch job submission failed: Job dependency problem", "wait for", "--after"),
        ("Batch job submission failed: Invalid generic resource (gres) specification", "GPUs", "gpu_request"),
        ("Batch job submission failed: Invalid account or account/partition combination specified",
         "account", "--account"),
        ("Batch job submission failed: Invalid qos specification", "QOS", "qos"),
        ("Batch job submission failed: Requested reservation is invalid", "reservation", "reservation"),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)",
         "slurmctld does not answer", "later"),
        ("Batch job submission failed: Socket timed out on send/recv operation", "may exist", "repeat"),
        ("Batch job submission failed: Node count specification invalid", "no such nodes", "--nodes"),
        ("QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: "
         "Job violates accounting/QOS policy", "limit of your account or QOS", "squeue --me"),
    ],
)  # fmt: skip
def test_refusals_of_sbatch(text: str, meaning: str, cure: str) -> None:
    refused = refusals.sbatch(1, f"sbatch: error: {text}")
    assert meaning in refused.message
    assert cure in refused.fix
    assert text.splitlines()[-1].split("failed: ")[-1] in refused.message, "Slurm's own words are shown too"


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("Memory specification can not be satisfied\nsbatch: error: Batch job submission failed: "
         "Requested node configuration is not available", "memory"),
        ("Batch job submission failed: Job violates accounting/QOS policy "
         "(job submit limit, user's size and/or time limits)", "limit of your account or QOS"),
    ],
)  # fmt: skip
def test_refusals_that_hold_words_of_two(text: str, meaning: str) -> None:
    assert f"refused the job: {refusals.sbatch(1, 'sbatch: error: ' + text).message}".count(meaning)


def test_an_unknown_refusal_is_told_as_it_is() -> None:
    assert refusals.sbatch(1, "sbatch: error: Something new\n").message == "Slurm refused the job: Something new"
    assert "exit code 9 without a word" in refusals.sbatch(9, "").message


# --- states ---------------------------------------------------------------------------------


def state(*lines: str) -> JobState:
    """The state of job 7 by these lines of status.sh."""
    return jobs.parse_status("".join(f"{line}\n" for line in lines), ["7"])["7"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("PENDING", "pending"), ("CONFIGURING", "pending"), ("REQUEUED", "pending"),
        ("RUNNING", "running"), ("COMPLETING", "running"), ("SUSPENDED", "running"),
        ("COMPLETED", "succeeded"), ("FAILED", "failed"), ("OUT_OF_MEMORY", "out of memory"), ("BOOT_FAIL", "failed"),
        ("CANCELLED", "cancelled"), ("TIMEOUT", "timeout"), ("DEADLINE", "timeout"),
        ("PREEMPTED", "preempted"), ("NODE_FAIL", "node failure"),
        ("SOMETHING_NEW", "unknown"), ("", "unknown"),
    ],
)  # fmt: skip
def test_slurms_states(word: str, expected: str) -> None:
    assert state("queue-answers|yes", f"queue|7|{word}|None|1:00|2|2026-11-30T10:00:00").state == expected
    assert state(f"account|7|{word}|0:0|00:01:00|2|x").state == expected


def test_the_queue_says_all_it_knows() -> None:
    assert state("queue-answers|yes", "queue|7|PENDING|Dependency|0:00|2|N/A") == JobState(
        "pending", "PENDING", "Dependency", elapsed="0:00", nodes="2", start="N/A", source="queue"
    )


def test_the_queue_comes_before_accounting_and_files() -> None:
    told = state("queue-answers|yes", "queue|7|RUNNING|None|1:00|2|x", "account|7|COMPLETED|0:0|1|2|x", "end|7|0 7 0")
    assert (told.state, told.source) == ("running", "queue")


def test_accounting_speaks_when_the_queue_has_forgotten() -> None:
    told = state("queue-answers|yes", "account|7|CANCELLED by 1001|0:15|00:01:00|2|x")
    assert (told.state, told.exit_code, told.source) == ("cancelled", 0, "accounting")
    assert state("account|7|FAILED|7:0|1|2|x").exit_code == 7


def test_accounting_that_lags_behind_is_not_believed() -> None:
    assert state("queue-answers|yes", "account|7|RUNNING|0:0|1|2|x").state == "unknown"
    assert state("account|7|RUNNING|0:0|1|2|x").state == "running"


def test_where_slurm_has_forgotten_a_job_its_own_last_word_counts() -> None:
    """Accounting goes on to call it running: slurmctld was killed before it had written the job down."""
    told = state("queue-answers|yes", "account|7|RUNNING|0:0|1|2|x", "end|7|0 7 0")
    assert (told.state, told.source) == ("succeeded", "files")


def test_files_speak_when_slurm_does_not() -> None:
    assert (state("end|7|0 7 0").state, state("end|7|0 7 0").source) == ("succeeded", "files")
    assert state("end|7|7 7 0") == JobState("failed", exit_code=7, source="files")
    assert state("end|7|143 7 0").state == "cancelled"
    never = state("end|7|never 7 0")
    assert (never.state, never.reason) == ("cancelled", "not started: a run it waits for ended otherwise")


def test_a_living_process_runs() -> None:
    assert state("alive|7|01:02").state == "running"
    assert state("alive|7|01:02", "end|7|0 7 0").state == "succeeded"


def test_no_trace_is_unknown_and_never_success() -> None:
    assert state().state == "unknown"
    assert state("gone|7").reason == "its run directory is gone"
    assert state("queue-answers|yes").state == "unknown"


def test_the_jobs_own_code_counts_more_than_completed() -> None:
    assert state("queue-answers|yes", "queue|7|COMPLETED|None|1:00|2|x", "end|7|7 7 0").state == "failed"


def test_the_jobs_own_code_counts_more_than_completed_in_accounting() -> None:
    assert state("account|7|COMPLETED|0:0|1|2|x", "end|7|7 7 0").state == "failed"


def test_noise_and_other_jobs_are_passed_over() -> None:
    told = state("Welcome | to the cluster|!", "queue|8|FAILED|x|1|2|x", "", "|", "queue|7|RUNNING|None|1|2|x")
    assert told.state == "running"


@pytest.mark.parametrize("line", ["queue|7|RUNNING", "account|7", "account|7|FAILED|", "queue|7|PENDING|a|b|0|1|x"])
def test_a_line_that_was_cut_is_unknown(line: str) -> None:
    assert state(line).state == "unknown"


def test_several_jobs_are_told_apart() -> None:
    told = jobs.parse_status("end|1|0 1 0\nend|2|5 2 0\n", ["1", "2", "3"])
    assert [told[job].state for job in ("1", "2", "3")] == ["succeeded", "failed", "unknown"]


def test_a_script_gets_its_parameters_as_quoted_assignments() -> None:
    text = jobs.script("cancel", slurm_bin="/a b", clusters="", runs=jobs.run_lines([("1", "/r/x y")]))
    assert text.startswith("slurm_bin='/a b'\nclusters=''\nruns='1 /r/x y\n'\n# shellcheck")


def test_slurm_is_asked_for_the_link_that_the_run_is_at() -> None:
    link_1, link_2 = "queue|7|FAILED|None|1:00|2|x", "queue|8|RUNNING|None|0:10|2|x"
    told = state("queue-answers|yes", link_1, link_2, "job|7|8", "attempt|7|1|40|time limit")
    assert (told.state, told.job, told.elapsed, told.restart) == ("running", "8", "0:10", 1)
    waiting = state("queue-answers|yes", link_1, "queue|8|PENDING|Priority|0:00|2|x", "job|7|8", "attempt|7|0|40|x")
    assert (waiting.state, waiting.reason) == ("requeued", "Priority")


def test_the_links_of_others_are_not_mine() -> None:
    told = jobs.parse_status("job|1|2\njob|3|4\naccount|2|TIMEOUT|0:0|1|1|x\naccount|4|COMPLETED|0:0|1|1|x", ["1", "3"])
    assert (told["1"].state, told["3"].state) == ("timeout", "succeeded")


# --- what the run's own files add ---------------------------------------------------------------

PENDING = "queue|7|PENDING|BeginTime|0:00|2|2026-11-30T10:00:00"


def test_a_job_that_waits_for_its_next_attempt_is_requeued() -> None:
    told = state("queue-answers|yes", PENDING, "attempt|7|1|40|time limit")
    assert (told.state, told.restart, told.iteration, told.reason) == ("requeued", 1, "40", "BeginTime")
    assert state("queue-answers|yes", PENDING).state == "pending"


def test_a_running_job_tells_how_far_it_is() -> None:
    told = state("queue-answers|yes", "queue|7|RUNNING|None|1:00|2|x", "attempt|7|2|120|preempted")
    assert (told.state, told.restart, told.iteration) == ("running", 2, "120")


@pytest.mark.parametrize(
    ("cause", "expected"),
    [("time limit", "timeout"), ("preempted", "preempted"), ("node failure", "node failure"), ("failed", "failed"),
     ("", "failed")],
)  # fmt: skip
@pytest.mark.parametrize("end", ["end|7|75 7 0", ""])
@pytest.mark.parametrize("source", ["queue|7|FAILED|None|1:00|2|x", "account|7|FAILED|75:0|1|2|x", ""])
def test_a_run_that_saved_and_is_not_started_again_did_not_fail(
    source: str, end: str, cause: str, expected: str
) -> None:
    """Nor one whose next link was taken out of the queue: that has no last word."""
    if source or end:
        assert state("queue-answers|yes", source, end, f"attempt|7|0||{cause}").state == expected


def test_a_failure_names_the_rank_and_its_last_words() -> None:
    told = state(
        "account|7|FAILED|1:0|1|2|x", "end|7|1 7 0", "attempt|7|0||failed", "failure|7|1 by rank 3 on node2",
        "said|7|Traceback", "said|7|ValueError: a|b",
    )  # fmt: skip
    assert (told.failure, told.last_words) == ("1 by rank 3 on node2", ("Traceback", "ValueError: a|b"))
    assert state("queue-answers|yes", "queue|7|RUNNING|None|1|2|x", "failure|7|1 by rank 3 on node2").failure == ""


def test_a_run_can_have_advice() -> None:
    assert state("account|7|COMPLETED|0:0|1|2|x", "advice|7|--stop-before should be more").advice.endswith("be more")


def test_what_is_unknown_has_an_age() -> None:
    assert state("age|7|300").age == 300
    assert state("account|7|COMPLETED|0:0|1|2|x", "age|7|300").age is None


def test_completed_with_a_code_is_no_success() -> None:
    assert state("account|7|COMPLETED|3:0|1|2|x").state == "failed"
