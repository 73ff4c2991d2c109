"""Runs that were submitted: their state, their logs, their end. One exec for any number of runs of a cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from mlmsub.app import container
from mlmsub.app.config import NamedProfile, User
from mlmsub.app.records import Record, Records
from mlmsub.app.sources import Request, Sources
from mlmsub.core.errors import SchedulerRefused, UsageError
from mlmsub.slurm import jobs
from mlmsub.slurm.jobs import JobState
from mlmsub.transport import Transport
from mlmsub.transport.errors import TransportError

Connect = Callable[[Record], Transport]


def status(
    runs: Sequence[Record], records: Records, connect: Connect, failures: list[TransportError] | None = None
) -> dict[str, JobState]:
    """The state of each run by run id; a run whose submission made no job is unknown.

    A cluster that is not reached raises TransportError; with `failures` its runs are unknown, and the error is there.

    Where another job than the record's does a run (an sbatch that arrived late), the record is put right.
    """
    found: dict[str, JobState] = {}
    for group in _by_cluster(runs):
        try:
            found |= _status_of(group, records, connect)
        except TransportError as error:
            if failures is None:
                raise
            failures.append(error)
            found |= {run.run_id: JobState("unknown", reason=f"{run.host} was not reached") for run in group}
    return found


def _status_of(group: list[Record], records: Records, connect: Connect) -> dict[str, JobState]:
    nothing = JobState("unknown", reason="submission not finished: repeat its command")
    found = {run.run_id: nothing for run in group}
    group = [run for run in finish(group, records, connect) if run.job_id]
    if group:
        states = _ask(group, connect)
        found |= {run.run_id: states[run.job_id] for run in group}
        for run in group:
            if (job := states[run.job_id].job) and not run.links:
                records.submitted(run, job)
    return found


def finish(runs: Sequence[Record], records: Records, connect: Connect) -> list[Record]:
    """The same runs; where a submission was cut off before it was answered, with the job that the cluster knows."""
    found = {run.run_id: run for run in runs}
    for group in _by_cluster(run for run in runs if not run.job_id):
        script = jobs.script("find", **_slurm(group[0]), runs=jobs.run_lines([("-", run.run_dir) for run in group]))
        answer = connect(group[0]).run(script).stdout.decode(errors="replace")
        known = {place: ids.split() for ids, _, place in (line.partition("|") for line in answer.splitlines())}
        found |= {run.run_id: records.submitted(run, *ids) for run in group if (ids := known.get(run.run_dir, []))}
    return [found[run.run_id] for run in runs]


def _ask(group: Sequence[Record], connect: Connect) -> dict[str, JobState]:
    script = jobs.script(
        "status",
        **_slurm(group[0]),
        jobs=",".join(run.job_id for run in group if run.scheduler == "slurm"),
        runs=jobs.run_lines([(run.job_id, run.run_dir) for run in group]),
    )
    answer = connect(group[0]).run(script).stdout.decode(errors="replace")
    return jobs.parse_status(answer, [run.job_id for run in group])


def settled(run: Record, records: Records, connect: Connect, timeout: float = 30.0) -> JobState:
    """The state of a run that has just ended: waits until Slurm says so too."""
    deadline = time.monotonic() + timeout
    while (state := status([run], records, connect)[run.run_id]).state in jobs.LIVE and time.monotonic() < deadline:
        time.sleep(0.5)
    return state


def discover(user: User, named: NamedProfile, records: Records, transport: Transport, limit: int) -> list[Record]:
    """The newest runs in a profile's runs_root, also those that another machine submitted; these get a record here."""
    root = container.runs_root(Sources(user, named, Request()))
    answer = transport.run(jobs.script("list", runs_root=root, limit=str(limit))).stdout.decode(errors="replace")
    known = {record.run_id: record for record in records.all()}
    found = []
    for line in reversed(answer.splitlines()):  # the newest last, as if submitted here
        ids, _, text = line.partition("|")
        try:
            data = json.loads(text)
            record = known.get(data["run_id"]) or records.adopt(data, named.place, named.name, *ids.split())
        except (ValueError, TypeError, KeyError):
            continue  # another version's, or not whole
        found.append(record)
    return found[::-1]


def cancel(runs: Sequence[Record], records: Records, connect: Connect) -> set[str]:
    """Cancel the runs, remove their secrets, and return the ids of those that had ended already.

    Raises SchedulerRefused with what scancel said.
    """
    ended: set[str] = set()
    for group in _by_cluster(finish(runs, records, connect)):
        keys = {run.job_id or f"none{index}": run for index, run in enumerate(group)}
        lines = jobs.run_lines([(key, run.run_dir) for key, run in keys.items()])
        script = jobs.script("cancel", **_slurm(group[0]), runs=lines)
        answer = connect(group[0]).run(script).stdout.decode(errors="replace")
        said = {key: text for key, _, text in (line.partition("|") for line in answer.splitlines())}
        ended |= {run.run_id for key, run in keys.items() if said.get(key) == "ended"}
        finish(group, records, connect)  # a submission that was cut off is over with it
        if refused := {job: text for job, text in said.items() if text not in ("", "ended")}:
            raise SchedulerRefused("; ".join(f"job {j}: {text}" for j, text in refused.items()), command="scancel")
    return ended


def log(
    run: Record,
    transport: Transport,
    on_output: Callable[[bytes], None],
    on_note: Callable[[bytes], None],
    *,
    follow: bool,
    offset: int = 0,
) -> None:
    """Hand on the run's log as it is, from byte `offset` on; with `follow` until the run has ended.

    `on_note` gets what is not of the log: that the job has not started yet.
    """
    script = jobs.script(
        "log",
        **_slurm(run),
        run_dir=run.run_dir,
        job=_job(run),
        follow="1" if follow else "",
        offset=str(offset),
    )
    if transport.stream(script, on_output, on_note) == 3:
        raise UsageError(f"the run directory {run.run_dir} is gone, and its log with it")


def _slurm(run: Record) -> dict[str, str]:
    """Where Slurm's commands are, as the scripts take it."""
    return {"slurm_bin": run.slurm_bin, "prelude": run.prelude, "clusters": run.cluster}


def _job(run: Record) -> str:
    if not run.job_id:
        raise UsageError(f"the submission of {run.run_id} was not finished", fix="repeat its command")
    return run.job_id


def _by_cluster(runs: Iterator[Record] | Sequence[Record]) -> Iterator[list[Record]]:
    def place(run: Record) -> tuple[str, ...]:
        return (run.host, run.transport, run.ssh_config, run.scheduler, run.cluster, run.slurm_bin, run.prelude)

    for _, group in groupby(sorted(runs, key=place), key=place):
        yield list(group)
