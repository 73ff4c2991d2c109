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

State = Literal["pending", "running", "succeeded", "failed", "cancelled", "timeout", "preempted", "lost", "unknown"]

# Slurm's state -> ours. A state that is not here is unknown, never success.
_STATES: dict[str, State] = {
    "PENDING": "pending", "CONFIGURING": "pending", "REQUEUED": "pending", "REQUEUE_HOLD": "pending",
    "REQUEUE_FED": "pending", "SPECIAL_EXIT": "pending", "RESV_DEL_HOLD": "pending",
    "RUNNING": "running", "COMPLETING": "running", "STAGE_OUT": "running", "SIGNALING": "running",
    "STOPPED": "running", "SUSPENDED": "running", "RESIZING": "running",
    "COMPLETED": "succeeded",
    "FAILED": "failed", "BOOT_FAIL": "failed", "OUT_OF_MEMORY": "failed", "LAUNCH_FAILED": "failed",
    "CANCELLED": "cancelled", "REVOKED": "cancelled",
    "TIMEOUT": "timeout", "DEADLINE": "timeout",
    "PREEMPTED": "preempted", "NODE_FAIL": "lost",
}  # fmt: skip
_CALLS_SLURM = ("doctor", "find", "cancel", "log", "status", "submit")
LIVE: tuple[State, ...] = ("pending", "running", "unknown")


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
    claimed_by: str = ""  # the job that runs it; another one than the record's, if an sbatch arrived late
    source: str = "none"


@cache
def _remote(name: str) -> str:
    return (files("mlmsub.slurm") / "remote" / name).read_text()


def script(name: str, **parameters: str) -> str:
    """The shell program `name` with its parameters in front, each as a quoted assignment."""
    parts = ["".join(f"{assignment(key, value)}\n" for key, value in parameters.items())]
    parts += [_remote("environment.sh")] if name in _CALLS_SLURM else []
    return "".join((*parts, _remote(f"{name}.sh")))


def run_lines(jobs: Sequence[tuple[str, str]]) -> str:
    """(job id, run directory) pairs as the scripts read them."""
    return "".join(f"{job} {directory}\n" for job, directory in jobs)


def parse_submission(answer: str, stderr: str = "") -> tuple[str, bool]:
    """(job id, whether it existed already); raises SchedulerRefused. `stderr` is what the profile's prelude said."""
    pairs = [line.partition(" ")[::2] for line in answer.splitlines() if line]
    values = dict(reversed(pairs))
    if "job" in values:
        return values["job"], False
    if found := values.get("existing") or values.get("twin"):
        return found, True
    if values.get("refused") == "sbatch":
        raise refusals.sbatch(int(values["code"]), "\n".join(v for k, v in pairs if k == "stderr"))
    if "refused" in values:
        raise refusals.ours(values["refused"], values.get("at", ""), stderr)
    raise SchedulerRefused(
        "the cluster gave no answer to the submission", stderr=answer, may_exist=True, fix="repeat the same command"
    )


def parse_status(answer: str, jobs: Sequence[str]) -> dict[str, JobState]:
    """The state of each job, from the queue, else from accounting, else from the run's own files."""
    told: dict[str, dict[str, list[str]]] = {job: {} for job in jobs}
    queue_answers = False
    for line in answer.splitlines():
        kind, _, rest = line.partition("|")
        job, *fields = rest.split("|")
        queue_answers |= kind == "queue-answers"
        if job in told:
            told[job][kind] = fields
    return {
        job: replace(_judge(facts, queue_answers), claimed_by="".join(facts.get("claim", ())))
        for job, facts in told.items()
    }


def _judge(facts: dict[str, list[str]], queue_answers: bool) -> JobState:
    end = facts["end"][0].split() if "end" in facts else []
    exit_code = int(end[0]) if end and end[0].isdigit() else None
    if len(facts.get("queue", ())) == 5:
        word, reason, elapsed, nodes, start = facts["queue"]
        state = _settle(_STATES.get(word, "unknown"), exit_code)
        reason = "" if reason == "None" else reason
        return JobState(state, word, reason, exit_code, elapsed, nodes, start, source="queue")
    if len(facts.get("account", ())) == 5:
        word, code, elapsed, nodes, start = facts["account"]
        state = _settle(_STATES.get(word.split(" ")[0], "unknown"), exit_code)  # "CANCELLED by 1001"
        if exit_code is None and code.partition(":")[0].isdigit():
            exit_code = int(code.partition(":")[0])  # sacct shows a code from 128 on less 128; the run's own is whole
        if state in ("pending", "running") and queue_answers:
            state = "unknown"  # accounting lags behind, or lost the end
        return JobState(state, word, "", exit_code, elapsed, nodes, start, source="accounting")
    if facts.get("alive") and not end:
        return JobState("running", elapsed=facts["alive"][0], nodes="1", source="files")
    if end:
        never = end[0] == "never"
        state = "cancelled" if never or exit_code == 143 else "succeeded" if exit_code == 0 else "failed"
        return JobState(state, "", "a run it waits for failed" if never else "", exit_code, source="files")
    reason = "its run directory is gone" if "gone" in facts else "neither squeue, sacct nor its own files know it"
    return JobState("unknown", reason=reason)


def _settle(state: State, exit_code: int | None) -> State:
    """A job whose own last word was a failure did not succeed, whatever the queue says."""
    return "failed" if state == "succeeded" and exit_code not in (0, None) else state
