"""Runs that were submitted: their state, their logs, their end. One exec for any number of runs of a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from mlmsub.app.records import Record
from mlmsub.core.errors import SchedulerRefused, UsageError
from mlmsub.slurm import jobs
from mlmsub.slurm.jobs import JobState
from mlmsub.transport import Transport

Connect = Callable[[Record], Transport]


def status(records: Sequence[Record], connect: Connect) -> dict[str, JobState]:
    """The state of each run by run id; a run whose submission was not finished is unknown."""
    found = {record.run_id: JobState("unknown", reason="submission not finished") for record in records}
    for group in _by_cluster(record for record in records if record.job_id):
        script = jobs.script(
            "status",
            slurm_bin=group[0].slurm_bin,
            clusters=group[0].cluster,
            jobs=",".join(record.job_id for record in group if record.scheduler == "slurm"),
            runs=jobs.run_lines([(record.job_id, record.run_dir) for record in group]),
        )
        with connect(group[0]) as transport:
            answer = transport.run(script).stdout.decode(errors="replace")
        states = jobs.parse_status(answer, [record.job_id for record in group])
        found |= {record.run_id: states[record.job_id] for record in group}
    return found


def settled(record: Record, connect: Connect, timeout: float = 30.0) -> JobState:
    """The state of a run that has just ended: waits until Slurm says so too."""
    deadline = time.monotonic() + timeout
    while (state := status([record], connect)[record.run_id]).state in jobs.LIVE and time.monotonic() < deadline:
        time.sleep(0.5)
    return state


def cancel(records: Sequence[Record], connect: Connect) -> None:
    """Cancel the runs and remove their secrets. Raises SchedulerRefused with what scancel said."""
    for group in _by_cluster(records):
        script = jobs.script(
            "cancel",
            slurm_bin=group[0].slurm_bin,
            clusters=group[0].cluster,
            runs=jobs.run_lines([(_job(record), record.run_dir) for record in group]),
        )
        with connect(group[0]) as transport:
            answer = transport.run(script).stdout.decode(errors="replace")
        refused = [line.partition("|") for line in answer.splitlines() if line.partition("|")[2]]
        if refused:
            raise SchedulerRefused("; ".join(f"job {job}: {said}" for job, _, said in refused), command="scancel")


def log(record: Record, transport: Transport, on_output: Callable[[bytes], None], *, follow: bool) -> None:
    """Hand on the run's log as it is; with `follow` until the run has ended."""
    script = jobs.script(
        "log",
        slurm_bin=record.slurm_bin,
        clusters=record.cluster,
        run_dir=record.run_dir,
        job=_job(record),
        follow="1" if follow else "",
        offset="0",
    )
    if transport.stream(script, on_output) == 3:
        raise UsageError(f"the run directory {record.run_dir} is gone, and its log with it")


def _job(record: Record) -> str:
    if not record.job_id:
        raise UsageError(f"the submission of {record.run_id} was not finished", fix="repeat its command")
    return record.job_id


def _by_cluster(records: Iterator[Record] | Sequence[Record]) -> Iterator[list[Record]]:
    def place(record: Record) -> tuple[str, ...]:
        return (record.host, record.scheduler, record.cluster, record.slurm_bin)

    for _, group in groupby(sorted(records, key=place), key=place):
        yield list(group)
