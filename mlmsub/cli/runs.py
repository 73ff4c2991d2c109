"""The verbs on runs and profiles that look and print."""

from __future__ import annotations

import sys
from dataclasses import asdict

from mlmsub.app import config, runs
from mlmsub.app.records import Record, Records
from mlmsub.cli import connect, output
from mlmsub.core.errors import UsageError
from mlmsub.transport import Transport


def _records() -> Records:
    return Records(config.User.current().records_dir)


def _connect(record: Record) -> Transport:
    return connect.to(record.host)


def status(words: list[str], *, as_json: bool) -> None:
    records = _records()
    _print_states([records.find(word) for word in words], as_json)


def list_runs(profile: str, limit: int, *, as_json: bool) -> None:
    found = [record for record in _records().all() if profile in ("", record.profile)][:limit]
    if not found and not as_json:
        print("no runs yet; `mlmsub submit` makes one")
        return
    _print_states(found, as_json)


def _print_states(records: list[Record], as_json: bool) -> None:
    states = runs.status(records, _connect)
    if as_json:
        output.print_json([asdict(record) | {"status": asdict(states[record.run_id])} for record in records])
        return
    rows, styles = [], []
    for record in records:
        state = states[record.run_id]
        code = "" if state.exit_code is None or state.state in ("pending", "running") else str(state.exit_code)
        rows.append((record.run_id, state.state, record.job_id, record.profile, str(record.nodes), state.elapsed, code,
                     state.reason))  # fmt: skip
        styles.append(state.state)
    output.print_table(("run", "state", "job", "profile", "nodes", "elapsed", "exit", "reason"), rows, styles)


def logs(word: str, *, follow: bool, raw: bool, rank: int | None) -> None:
    if raw and rank is not None:
        raise UsageError("--raw prints the log as it is; --rank picks lines from it", fix="give one of them")
    record = _records().find(word)
    printer = output.LogPrinter(rank)

    def as_it_is(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    with _connect(record) as transport:
        runs.log(record, transport, as_it_is if raw else printer.feed, follow=follow)
    printer.close()


def cancel(words: list[str]) -> None:
    records = _records()
    found = [records.find(word) for word in words]
    runs.cancel(found, _connect)
    for record in found:
        print(f"{record.run_id}: cancelled job {record.job_id}")


def list_profiles(*, as_json: bool) -> None:
    user = config.User.current()
    found = [config.load_profile(user, name) for name in config.profile_names(user)]
    if as_json:
        output.print_json([{"name": p.name, "source": p.source, "host": p.profile.host} for p in found])
        return
    rows = [(p.name, p.profile.host or "this machine", p.profile.scheduler, p.source) for p in found]
    output.print_table(("profile", "where", "scheduler", "source"), rows)


def show_profile(name: str, *, as_json: bool) -> None:
    found = config.load_profile(config.User.current(), name)
    if as_json:
        output.print_json({"name": found.name, "source": found.source} | asdict(found.profile))
        return
    print(f"{output.styled(found.name, 'bold')}  {found.source}")
    for key, value in found.profile.said().items():
        shown = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"  {key}: {', '.join(shown) if isinstance(shown, tuple) else shown}")
