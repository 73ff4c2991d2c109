"""The verbs on runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mlmsub.app import config, runs
from mlmsub.app.fetch import fetch as fetch_files
from mlmsub.app.records import Record, Records
from mlmsub.cli import output
from mlmsub.cli.connect import Connections, Trust
from mlmsub.core.errors import UsageError
from mlmsub.slurm.jobs import LIVE, JobState
from mlmsub.transport.errors import ConnectionLost, TransportError

RECONNECTS = 5  # how often in a row `logs -f` goes on after a lost connection


def _records() -> Records:
    return Records(config.User.current().records_dir)


def status(words: list[str], trust: Trust, *, as_json: bool) -> None:
    records = _records()
    with Connections(trust) as connections:
        _print_states([records.find(word) for word in words], records, connections, as_json)


def list_runs(profile: str, limit: int, trust: Trust, *, as_json: bool) -> None:
    user, records = config.User.current(), _records()
    with Connections(trust) as connections:
        if profile:
            named = config.load_profile(user, profile)
            there = runs.discover(user, named, records, connections.to(named.place), limit)
            own = [run for run in records.all() if run.profile == named.name and run not in there]
            found = sorted([*there, *own], key=lambda run: run.stamp, reverse=True)[:limit]
        else:
            found = records.all()[:limit]
        if not found and not as_json:
            print("no runs yet; `mlmsub submit` makes one")
            return
        _print_states(found, records, connections, as_json)


def _print_states(found: list[Record], records: Records, connections: Connections, as_json: bool) -> None:
    failures: list[TransportError] = []
    states = runs.status(found, records, lambda run: connections.to(run.place), failures)
    now = {run.run_id: run for run in records.all()}  # status may have put a job id right
    found = [now[run.run_id] for run in found]
    if as_json:
        output.print_json([asdict(run) | {"status": asdict(states[run.run_id])} for run in found])
    else:
        _table(found, states)
    if failures:  # what was reached is shown first
        raise failures[0]


def _table(found: list[Record], states: dict[str, JobState]) -> None:
    rows = [_row(run, states[run.run_id]) for run in found]
    styles = [states[run.run_id].state for run in found]
    output.print_table(("run", "state", "job", "name", "nodes", "elapsed", "exit", "reason"), rows, styles)


def _row(run: Record, state: JobState) -> tuple[str, ...]:
    over = state.exit_code is not None and state.state not in LIVE
    code = str(state.exit_code) if over else ""
    job = state.job or run.job_id
    return (run.run_id, state.state, job, run.job_name, str(run.nodes), state.elapsed, code, _notes(run, state))


def _notes(run: Record, state: JobState) -> str:
    """What else a person wants to know of this state, in a few words."""
    waits = state.state in ("pending", "requeued")
    at = run.jobs.index(state.job) if state.job in run.jobs else 0
    notes = [
        f"link {at + 1} of {len(run.jobs)}" if run.links else "",
        state.reason,
        f"starts about {state.start}" if waits and state.start[:1].isdigit() else "",
        f"iteration {state.iteration}" if state.iteration and state.state != "succeeded" else "",
        f"restart {state.restart}" if state.restart else "",
        f"exit code {state.failure}" if state.failure else "",
        state.advice,
        f"last sign {_age(state.age)} ago" if state.age is not None else "",
    ]
    return ", ".join(filter(None, notes))


def jobs_of(run: Record) -> str:
    """Such as `job 7`, `jobs 7, 8, 9`."""
    what = "process" if run.scheduler == "local" else "jobs" if run.links else "job"
    return f"{what} {', '.join(run.jobs)}"


def _age(seconds: int) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def show(word: str, trust: Trust, *, as_json: bool) -> None:
    records = _records()
    run = records.find(word)
    with Connections(trust) as connections:
        state = runs.status([run], records, lambda r: connections.to(r.place))[run.run_id]
    run = records.find(run.run_id)  # status may have put its job id right
    if as_json:
        output.print_json(asdict(run) | {"status": asdict(state)})
        return
    state_word = output.styled(state.state, state.state)
    print(f"{output.styled(run.run_id, 'bold')}  {state_word}  {_notes(run, state)}".rstrip())
    rows = {
        "stage": run.stage, "model": run.model, "job": f"{state.job or run.job_id}  {run.job_name}",
        "links": " ".join(run.jobs) if run.links else "", "nodes": str(run.nodes),
        "elapsed": state.elapsed, "exit code": "" if state.exit_code is None else str(state.exit_code),
        "profile": run.profile, "host": run.host or "this machine", "run directory": run.run_dir,
        "log": f"{run.run_dir}/logs/{run.job_name}_{run.job_id}_{run.stamp}.log", **run.outputs_at,
    }  # fmt: skip
    for name, value in rows.items():
        if value:
            print(f"  {name:14} {value}")
    for line in state.last_words:
        print(f"  {'said last':14} {output.printable(line)}")


def logs(word: str, trust: Trust, *, follow: bool, raw: bool, rank: int | None) -> None:
    if raw and rank is not None:
        raise UsageError("--raw prints the log as it is; --rank picks lines from it", fix="give one of them")
    records = _records()
    run = records.find(word)
    printer = output.RawPrinter() if raw else output.LogPrinter(rank)
    with Connections(trust) as connections:
        print_log(run, records, connections, printer, follow=follow)
    if not printer.received and not follow:
        print(f"{run.run_id} has written no log yet", file=sys.stderr)


def print_log(
    run: Record,
    records: Records,
    connections: Connections,
    printer: output.RawPrinter | output.LogPrinter,
    *,
    follow: bool,
) -> None:
    """Print a run's log. Where it is followed, a lost connection is opened anew, some times."""
    failures = 0
    while True:
        before = printer.received
        try:
            (run,) = runs.finish([run], records, lambda r: connections.to(r.place))
            runs.log(run, connections.to(run.place), printer.feed, output.note, follow=follow, offset=before)
            break
        except ConnectionLost:
            failures = 1 if printer.received > before else failures + 1
            if not follow or failures > RECONNECTS:
                raise
        connections.close()
        time.sleep(min(2.0**failures, 30))
    printer.close()


def cancel(words: list[str], trust: Trust) -> None:
    records = _records()
    found = [records.find(word) for word in words]
    with Connections(trust) as connections:
        ended = runs.cancel(found, records, lambda run: connections.to(run.place))
    for run in (records.find(run.run_id) for run in found):  # its job may be known by now
        print(f"{run.run_id}: {'had ended already' if run.run_id in ended else f'cancelled {jobs_of(run)}'}")


def fetch(word: str, patterns: Sequence[str], target: str, trust: Trust) -> None:
    run = _records().find(word)
    folder = Path(target or run.run_id)
    with Connections(trust) as connections, output.Progress(run.run_id) as progress:
        found = fetch_files(run, list(patterns), folder, connections.to(run.place), progress)
    for path in found:
        print(output.printable(str(path)))
