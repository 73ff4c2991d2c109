"""The scripts that run on the cluster, and what their answers mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal

from mlmsub.core.errors import SchedulerRefused
from mlmsub.core.quoting import assignment
from mlmsub.slurm import refusals

State = Literal[
    "pending", "running", "requeued", "succeeded", "failed", "out of memory", "cancelled", "timeout", "preempted",
    "node failure", "unknown",
]  # fmt: skip

# Slurm's state -> ours. A state that is not here is unknown, never success.
_STATES: dict[str, State] = {
    "PENDING": "pending", "CONFIGURING": "pending", "REQUEUED": "pending", "REQUEUE_HOLD": "pending",
    "REQUEUE_FED": "pending", "SPECIAL_EXIT": "pending", "RESV_DEL_HOLD": "pending",
    "RUNNING": "running", "COMPLETING": "running", "STAGE_OUT": "running", "SIGNALING": "running",
    "STOPPED": "running", "SUSPENDED": "running", "RESIZING": "running",
    "COMPLETED": "succeeded",
    "FAILED": "failed", "BOOT_FAIL": "failed", "OUT_OF_MEMORY": "out of memory", "LAUNCH_FAILED": "failed",
    "CANCELLED": "cancelled", "REVOKED": "cancelled",
    "TIMEOUT": "timeout", "DEADLINE": "timeout",
    "PREEMPTED": "preempted", "NODE_FAIL": "node failure",
}  # fmt: skip
_CALLS_SLURM = ("doctor", "find", "cancel", "log", "status", "submit", "workflow")
AT_WORK: tuple[State, ...] = ("pending", "running", "requeued")
LIVE: tuple[State, ...] = (*AT_WORK, "unknown")
RECENT = 300  # seconds; a run of unknown state whose last sign is younger may be at work
# A run that saved and is not started again ends with this code; what ended its last attempt -> the run's state.
_STOPPED = 75
_CAUSES: dict[str, State] = {"time limit": "timeout", "preempted": "preempted", "node failure": "node failure"}


@dataclass(frozen=True)
class JobState:
    """What is known of a run's job. `source` is queue, accounting, files, or none."""

    state: State
    slurm_state: str = ""
    reason: str = ""
    exit_code: int | None = None
    elapsed: str = ""
    nodes: str = ""
    start: str = ""
    job: str = ""  # where the run is at another than was asked for: a later link, or what a late sbatch made
    source: str = "none"
    restart: int = 0  # number of the latest attempt, from 0 on
    iteration: str = ""  # that it has reached
    failure: str = ""  # such as "7 by rank 1 on node1"
    last_words: tuple[str, ...] = ()  # of that rank
    advice: str = ""  # what to submit otherwise next time
    age: int | None = None  # seconds since the run's last sign, where its state is unknown

    def may_be_at_work(self, within: int = RECENT) -> bool:
        """Whether the run is at work, as far as anybody knows; `within` is in seconds."""
        return self.state in AT_WORK or (self.state == "unknown" and self.age is not None and self.age < within)


@cache
def _remote(name: str) -> str:
    return (files("mlmsub.slurm") / "remote" / name).read_text()


def assignments(**parameters: str) -> str:
    """Parameters as a shell program takes them."""
    return "".join(f"{assignment(key, value)}\n" for key, value in parameters.items())


def program(name: str) -> str:
    """The shell program `name` alone."""
    return _remote(f"{name}.sh")


def script(name: str, **parameters: str) -> str:
    """The shell program `name` with its parameters in front, each as a quoted assignment."""
    parts = [assignments(**parameters)]
    parts += [_remote("environment.sh")] if name in _CALLS_SLURM else []
    return "".join((*parts, _remote(f"{name}.sh")))


def run_lines(jobs: Sequence[tuple[str, str]]) -> str:
    """(job id, run directory) pairs as the scripts read them."""
    return "".join(f"{job} {directory}\n" for job, directory in jobs)


def parse_submission(answer: str, stderr: str = "") -> tuple[tuple[str, ...], bool]:
    """(the ids of the run's jobs, whether it existed already); raises SchedulerRefused.

    `stderr` is what the profile's prelude said.
    """
    pairs = [line.partition(" ")[::2] for line in answer.splitlines() if line]
    values = dict(reversed(pairs))
    if "job" in values:
        return tuple(values["job"].split()), False
    if found := values.get("existing") or values.get("twin"):
        return tuple(found.split()), True
    if values.get("refused") == "sbatch":
        raise refusals.sbatch(int(values["code"]), "\n".join(v for k, v in pairs if k == "stderr"))
    if "refused" in values:
        raise refusals.ours(values["refused"], values.get("at", ""), stderr)
    raise SchedulerRefused(
        "the cluster gave no answer to the submission", stderr=answer, may_exist=True, fix="repeat the same command"
    )


def by_run(answer: str) -> dict[str, str]:
    """What workflow.sh answered for each run, by run id."""
    found: dict[str, str] = {}
    for part in f"\n{answer}".split("\nrun ")[1:]:
        run_id, _, said = part.partition("\n")
        found[run_id] = said
    return found


def parse_status(answer: str, jobs: Sequence[str]) -> dict[str, JobState]:
    """The state of each job, from the queue, else from accounting, else from the run's own files."""
    told: dict[str, dict[str, list[str]]] = {}
    queue_answers = False
    for line in answer.splitlines():
        kind, _, rest = line.partition("|")
        job, *fields = rest.split("|")
        queue_answers |= kind == "queue-answers"
        facts = told.setdefault(job, {})
        if kind == "said":
            facts.setdefault(kind, []).append("|".join(fields))
        else:
            facts[kind] = fields
    return {job: _state(job, told, queue_answers) for job in jobs}


def _state(job: str, told: dict[str, dict[str, list[str]]], queue_answers: bool) -> JobState:
    files = told.get(job, {})
    at = "".join(files.get("job", ())) or job
    slurm = {kind: fields for kind, fields in told.get(at, {}).items() if kind in ("queue", "account")}
    facts = {kind: fields for kind, fields in files.items() if kind not in ("queue", "account")} | slurm
    return _with_details(_judge(facts, queue_answers), facts)


def _with_details(state: JobState, facts: dict[str, list[str]]) -> JobState:
    """What the run's own files add to its state."""
    state = replace(state, job="".join(facts.get("job", ())), advice="".join(facts.get("advice", ())))
    if len(attempt := facts.get("attempt", [])) == 3 and attempt[0].isdigit():
        restart, iteration, cause = attempt
        state = replace(state, restart=int(restart), iteration=iteration)
        if state.state == "pending":
            state = replace(state, state="requeued")
        elif state.state == "failed" and state.exit_code in (_STOPPED, None) and cause in _CAUSES:
            state = replace(state, state=_CAUSES[cause], reason="saved, and not started again: see its log")
    if state.state == "failed" and "failure" in facts:
        state = replace(state, failure=facts["failure"][0], last_words=tuple(facts.get("said", ())))
    if state.state == "unknown" and (age := "".join(facts.get("age", ()))).isdigit():
        state = replace(state, age=int(age))
    return state


def _judge(facts: dict[str, list[str]], queue_answers: bool) -> JobState:
    end = facts["end"][0].split() if "end" in facts else []
    exit_code = int(end[0]) if end and end[0].isdigit() else None
    if end and end[0] == "never":
        return JobState("cancelled", reason="not started: a run it waits for ended otherwise", source="files")
    if end[1:2] == ["none"]:
        return JobState("cancelled", exit_code=exit_code, reason="before it began", source="files")
    if len(facts.get("queue", ())) == 5:
        word, reason, elapsed, nodes, start = facts["queue"]
        state = _settle(_STATES.get(word, "unknown"), exit_code)
        if word == "COMPLETING" and "cancelled" in facts and exit_code in (None, 143):
            state = "cancelled"
        reason = "" if reason == "None" else reason
        return JobState(state, word, reason, exit_code, elapsed, nodes, start, source="queue")
    if len(facts.get("account", ())) == 5:
        word, code, elapsed, nodes, start = facts["account"]
        if exit_code is None and code.partition(":")[0].isdigit():
            exit_code = int(code.partition(":")[0])  # sacct shows a code from 128 on less 128; the run's own is whole
        state = _settle(_STATES.get(word.split(" ")[0], "unknown"), exit_code)  # "CANCELLED by 1001"
        lost = state in ("pending", "running") and queue_answers  # accounting lags behind, or never heard of the end
        if not (lost and end):
            state = "unknown" if lost else state
            return JobState(state, word, "", exit_code, elapsed, nodes, start, source="accounting")
    if facts.get("alive") and not end:
        return JobState("running", elapsed=facts["alive"][0], nodes="1", source="files")
    if end:
        state = "cancelled" if exit_code == 143 else "succeeded" if exit_code == 0 else "failed"
        return JobState(state, exit_code=exit_code, source="files")
    reason = "its run directory is gone" if "gone" in facts else "neither squeue, sacct nor its own files know it"
    return JobState("unknown", reason=reason)


def _settle(state: State, exit_code: int | None) -> State:
    """A job whose own last word was a failure did not succeed, whatever the queue says."""
    return "failed" if state == "succeeded" and exit_code not in (0, None) else state
