"""What the verbs on workflows do and show."""

from __future__ import annotations

import csv
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace

from mlmsub.app import config, runs, workflow, workflow_report, workflow_runs
from mlmsub.app.records import Record, Records
from mlmsub.app.workflow import Plan, Planned
from mlmsub.app.workflow_report import Results, Row
from mlmsub.app.workflow_runs import Decision, Submitted
from mlmsub.cli import output
from mlmsub.cli.connect import Connections, Trust
from mlmsub.core.errors import ChecksFailed, JobFailed, UsageError
from mlmsub.core.issues import Issue
from mlmsub.core.strict import nearest
from mlmsub.slurm.jobs import JobState

INTERVAL = 5.0  # seconds between two looks of --watch
SETTLES = 60  # seconds: what Slurm does not know for so long after a run's last sign may only be late


def plan(word: str, profile: str, variables: list[str], *, as_json: bool) -> None:
    user = config.User.current()
    found = workflow.plan(user, Records(user.records_dir), word, profile=profile, variables=variables)
    if as_json:
        output.print_json({
            "name": found.workflow.name, "file": str(found.path), "profile": found.profile.name,
            "steps": [_planned_data(planned) for planned in found.steps],
        })  # fmt: skip
    else:
        _show_plan(found)
    if found.failed:
        sys.exit(ChecksFailed.exit_code)


def submit(word: str, profile: str, variables: list[str], trust: Trust, *, new: bool, as_json: bool) -> None:
    user = config.User.current()
    records = Records(user.records_dir)
    with Connections(trust) as connections:
        found = workflow.plan(user, records, word, profile=profile, variables=variables)
        _checked(found, as_json)
        with records.one_at_a_time(found.identity):
            submitted = workflow_runs.load(records, found.workflow.name)
            if submitted and _give_up(found, submitted, records, connections, new=new):
                submitted = None
            decisions = workflow_runs.first_time(found, submitted, records)
            _send(found, decisions, records, connections, variables, as_json)


def resume(word: str, profile: str, variables: list[str], trust: Trust, *, as_json: bool) -> None:
    user = config.User.current()
    records = Records(user.records_dir)
    submitted = _submitted(user, records, word)
    word = word if word.endswith((".yaml", ".yml")) else submitted.file
    variables = workflow.together(user, word, submitted.variables, variables)
    with Connections(trust) as connections:
        found = workflow.plan(user, records, word, profile=profile or submitted.profile, variables=variables)
        _checked(found, as_json)
        with records.one_at_a_time(found.identity):
            submitted = _submitted(user, records, word)  # as another command may have left it
            _give_up(found, submitted, records, connections, new=False)
            _, states = _states(submitted, records, connections)
            decisions = workflow_runs.again(found, submitted, states, records)
            _send(found, decisions, records, connections, variables, as_json)


def status(word: str, trust: Trust, *, watch: bool, as_json: bool) -> None:
    user = config.User.current()
    records = Records(user.records_dir)
    submitted = _submitted(user, records, word)
    with Connections(trust) as connections:
        while True:
            found, states = _states(submitted, records, connections)
            told = workflow_report.results(found, lambda run: connections.to(run.place), sizes=False)
            at_work = any(state.may_be_at_work(SETTLES) for state in states.values())
            if as_json and not (watch and at_work):
                output.print_json(_status_data(submitted, found, states, told))
            elif not as_json:
                if watch and sys.stdout.isatty():
                    print("\x1b[H\x1b[2J", end="")
                _show_status(submitted, found, states, told)
            if not watch or not at_work:
                break
            time.sleep(INTERVAL)
    idle = workflow_report.blocked(submitted, states)  # by a failure, which is told itself; or by a success
    failed = [name for name, state in states.items() if state.state != "succeeded" and name not in idle]
    if watch and failed:
        raise JobFailed(f"{submitted.name}: {_some(failed, 0)} did not succeed", fix=f"mlmsub workflow resume {word}")


def cancel(word: str, trust: Trust) -> None:
    user = config.User.current()
    records = Records(user.records_dir)
    submitted = _submitted(user, records, word)
    found = workflow_runs.find_runs(submitted, records)
    with Connections(trust) as connections:
        last_first = list(found.values())[::-1]
        ended = runs.cancel(last_first, records, lambda run: connections.to(run.place))
    if not found:
        print(f"{submitted.name}: no step was submitted")
    for name, run in found.items():
        print(f"{name}: {'had ended already' if run.run_id in ended else 'cancelled'}")


def report(word: str, trust: Trust, *, as_json: bool, as_csv: bool) -> None:
    user = config.User.current()
    records = Records(user.records_dir)
    submitted = _submitted(user, records, word)
    with Connections(trust) as connections:
        found, states = _states(submitted, records, connections)
        told = workflow_report.results(found, lambda run: connections.to(run.place), sizes=True)
    rows = workflow_report.compare(submitted, states, told)
    if as_json:
        output.print_json([asdict(row) for row in rows])
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([field.name for field in fields(Row)])
        writer.writerows([list(asdict(row).values()) for row in rows])
    else:
        header = ("", "state", "size GB", "perplexity", "MMLU", "questions", "time")
        output.print_table(header, [_cells(row) for row in rows], [row.state for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name, row.state, "" if row.bytes is None else f"{row.bytes / 1e9:.3g}",
        "" if row.perplexity is None else f"{row.perplexity:.2f}", "" if row.mmlu is None else f"{row.mmlu:.1%}",
        row.questions, _duration(row.seconds),
    )  # fmt: skip


# --- what several verbs do -----------------------------------------------------------------------


def _submitted(user: config.User, records: Records, word: str) -> Submitted:
    """The workflow of this name, or of this file, as it was submitted."""
    name = workflow.read(user, word)[0].name if word.endswith((".yaml", ".yml")) else word
    found = workflow_runs.load(records, name)
    if found is None:
        known = workflow_runs.known(records)
        raise UsageError(f"no workflow {name!r} was submitted{nearest(name, known)}", fix="mlmsub workflow submit FILE")
    return found


def _states(
    submitted: Submitted, records: Records, connections: Connections
) -> tuple[dict[str, Record], dict[str, JobState]]:
    """The runs as they are recorded now, and their states, by step."""
    found = workflow_runs.find_runs(submitted, records)
    states = runs.status(list(found.values()), records, lambda run: connections.to(run.place))
    return workflow_runs.find_runs(submitted, records), {name: states[run.run_id] for name, run in found.items()}


def _give_up(found: Plan, submitted: Submitted, records: Records, connections: Connections, *, new: bool) -> bool:
    """Whether all that was submitted may be forgotten. UsageError where a run that would be may be at work."""
    known = workflow_runs.find_runs(submitted, records)
    gone = workflow_runs.given_up(found, submitted, known, new=new)
    states = runs.status(list(gone.values()), records, lambda run: connections.to(run.place)) if gone else {}
    workflow_runs.require_ended(submitted, {name: states[run.run_id] for name, run in gone.items()})
    return new and len(gone) == len(known)


def _checked(found: Plan, as_json: bool) -> None:
    """Print the issues, those of several steps once. Raises ChecksFailed where one is an error."""
    if found.failed:
        if as_json:
            output.print_json({"steps": None, "issues": [vars(issue) | {"step": step} for step, issue in found.issues]})
        raise ChecksFailed(_merged(found))
    if not as_json:
        output.print_issues(_merged(found))


def _merged(found: Plan) -> list[Issue]:
    steps: dict[Issue, list[str]] = {}
    for step, issue in found.issues:
        steps.setdefault(issue, []).append(step)
    return [replace(issue, field=f"{_some(names, len(found.steps))}: {issue.field}") for issue, names in steps.items()]


def _some(names: Sequence[str], of: int) -> str:
    if len(names) == of > 1:
        return "all steps"
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _send(
    found: Plan,
    decisions: Sequence[Decision],
    records: Records,
    connections: Connections,
    variables: Sequence[str],
    as_json: bool,
) -> None:
    place = found.profile.place
    done = workflow_runs.send(found, decisions, records, lambda: connections.to(place), variables)
    if as_json:
        output.print_json({"name": found.workflow.name, "steps": {
            one.name: {"run_id": one.record.run_id, "job_id": one.record.job_id, "run_dir": one.record.run_dir,
                       "submitted": one.sends, "why": one.why, "outputs": one.record.outputs}
            for one in done
        }})  # fmt: skip
        return
    rows = [
        (one.name, "submitted" if one.sends else "left", one.record.job_id, one.record.run_id, one.why) for one in done
    ]
    output.print_table(("step", "", "job", "run", "why"), rows, ["succeeded" if one.sends else "dim" for one in done])
    print(
        f"{sum(one.sends for one in done)} of {len(done)} steps submitted; mlmsub workflow status {found.workflow.name}"
    )


# --- what is shown -------------------------------------------------------------------------------


def tree(needs: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """(branches, name) of each step, in the order of a tree: a step hangs on the last of those that it needs."""
    below: dict[str, list[str]] = {"": []}
    for name, others in needs.items():
        below.setdefault(others[-1] if others else "", []).append(name)
    found: list[tuple[str, str]] = []
    waiting = [("", "", name) for name in reversed(below[""])]
    while waiting:
        before, branch, name = waiting.pop()
        found.append((before + branch, name))
        inner = before + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        children = below.get(name, [])
        last = children[-1:]
        waiting += [(inner, "└─ " if [child] == last else "├─ ", child) for child in reversed(children)]
    return found


def _show_plan(found: Plan) -> None:
    shown = {planned.step.name: planned for planned in found.steps}
    steps = output.count(len(shown), "step")
    print(f"{output.styled(found.workflow.name, 'bold')}  {steps}, profile {found.profile.name}")
    rows = []
    for branches, name in tree({name: [need.step for need in p.step.needs] for name, p in shown.items()}):
        spec = shown[name].resolved.spec
        words = (spec.stage, spec.model.rpartition("/")[2], *spec.args[1:]) if spec.native else spec.args
        shape = f"{spec.nodes} x {spec.gpus_per_node}"
        rows.append((branches + name, " ".join(words), shape, spec.sbatch.get("time", ""), _plan_notes(shown[name])))
    styles = ["error" if shown[row[0].lstrip("│├└─ ")].failed else "" for row in rows]
    _table(("step", "what", "nodes x GPUs", "time", ""), rows, styles, cut=(1, 4))
    made = [(p.step.name, *one) for p in found.steps for one in p.record.outputs.items()]
    if made:
        print()
        _table(("step", "writes", "to"), made, (), cut=(2,))
    issues = _merged(found)
    output.print_issues(issues)
    counts = Counter(issue.severity for issue in issues)
    said = [output.count(counts[word], word) for word in ("error", "warning", "info") if counts[word]]
    print(f"{', '.join(said) or 'no issues'}; nothing was submitted")


def _plan_notes(planned: Planned) -> str:
    errors = sum(issue.severity == "error" for issue in planned.issues)
    others = [need.step for need in planned.step.needs[:-1]]
    after = [f"{need.condition} {need.step}" for need in planned.step.needs if need.condition != "afterok"]
    also = f"also needs {_some(others, 0)}" if others else ""
    return ", ".join(filter(None, (output.count(errors, "error") if errors else "", *after, also)))


def _show_status(
    submitted: Submitted, found: Mapping[str, Record], states: Mapping[str, JobState], told: Mapping[str, Results]
) -> None:
    blocked = workflow_report.blocked(submitted, states)
    rows, styles = [], []
    for branches, name in tree({name: list(entry.needs) for name, entry in submitted.steps.items()}):
        run, state = found.get(name), states.get(name, JobState("unknown", reason="not submitted"))
        why = blocked.get(name) or (f"exit code {state.failure}" if state.failure else state.reason)
        notes = ", ".join(filter(None, (why, _went(told[name]) if name in told else "")))
        restarts, job = str(state.restart or ""), run.job_id if run else ""
        rows.append((branches + name, state.state, str(run.nodes if run else ""), state.elapsed, restarts, job, notes))
        styles.append(state.state)
    print(output.styled(submitted.name, "bold"))
    header = ("step", "state", "nodes", "elapsed", "restarts", "job", "notes")
    _table(header, rows, styles, cut=(6,))
    counts = Counter(styles)
    total = sum(workflow_report.seconds(state.elapsed) for state in states.values())
    print(f"{', '.join(f'{count} {word}' for word, count in counts.items())}; {_duration(total)} in all")


def _went(results: Results) -> str:
    """The two longest parts of the work."""
    parts = results.seconds()
    total = sum(parts.values())
    longest = list(parts.items())[:2] if total else []
    return ", ".join(f"{name} {_duration(seconds)} ({seconds / total:.0%})" for name, seconds in longest)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str], cut: Sequence[int]) -> None:
    """A table that fits the terminal: the columns `cut` give way, the last one first."""
    if sys.stdout.isatty() and rows:
        room = shutil.get_terminal_size((100, 24)).columns
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        for column in reversed(cut):
            excess = sum(widths) + 2 * (len(widths) - 1) - room
            if excess > 0:
                widths[column] = max(8, widths[column] - excess)
        rows = [[_short(cell, width) for cell, width in zip(row, widths, strict=True)] for row in rows]
        header = [_short(cell, width) for cell, width in zip(header, widths, strict=True)]
    output.print_table(header, rows, styles)


def _short(text: str, width: int) -> str:
    """Its beginning, or of a path its end."""
    if len(text) <= width:
        return text
    return f"…{text[1 - width :]}" if text.startswith("/") else f"{text[: width - 1]}…"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}" if whole >= 60 else f"{whole} s"


def _planned_data(planned: Planned) -> dict[str, object]:
    spec = planned.resolved.spec
    return {
        "name": planned.step.name, "cell": planned.step.cell, "stage": spec.stage, "model": spec.model,
        "args": list(spec.args), "nodes": spec.nodes, "gpus_per_node": spec.gpus_per_node, "sbatch": spec.sbatch,
        "needs": {need.step: need.condition for need in planned.step.needs}, "outputs": planned.record.outputs,
        "content": planned.content, "issues": [vars(issue) for issue in planned.issues],
    }  # fmt: skip


def _status_data(
    submitted: Submitted, found: Mapping[str, Record], states: Mapping[str, JobState], told: Mapping[str, Results]
) -> dict[str, object]:
    blocked = workflow_report.blocked(submitted, states)
    return {"name": submitted.name, "file": submitted.file, "profile": submitted.profile, "steps": {
        name: {
            "run_id": entry.run_id, "job_id": found[name].job_id if name in found else "", "needs": entry.needs,
            "nodes": found[name].nodes if name in found else None, "blocked_by": blocked.get(name, ""),
            "status": asdict(states.get(name, JobState("unknown", reason="not submitted"))),
            "seconds": told[name].seconds() if name in told else {},
        }
        for name, entry in submitted.steps.items()
    }}  # fmt: skip
