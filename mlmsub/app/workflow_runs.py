"""The runs of a workflow: decide what is missing, and submit it in one exec."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mlmsub.app import submit as single
from mlmsub.app.records import Record, Records
from mlmsub.app.resolve import Resolved
from mlmsub.app.workflow import Plan, Planned
from mlmsub.core import bundle
from mlmsub.core.errors import MlmsubError, UsageError
from mlmsub.core.spec import Parent
from mlmsub.slurm import jobs
from mlmsub.slurm.jobs import AT_WORK, LIVE, JobState, State
from mlmsub.transport import Transport
from mlmsub.transport.errors import CommandTimeout, ConnectionLost, TransportError


@dataclass(frozen=True)
class Entry:
    """A step's run, and what it was made of."""

    run_id: str
    content: str
    needs: dict[str, str] = field(default_factory=dict)  # step -> condition
    cell: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Submitted:
    """What is kept of a workflow beside the records of its runs. Its steps stand in the order of submission."""

    name: str
    file: str
    profile: str
    variables: tuple[str, ...]
    steps: dict[str, Entry]


@dataclass(frozen=True)
class Decision:
    """What is done about a step: its run is sent, or is left as it is."""

    planned: Planned
    record: Record
    sends: bool
    why: str

    @property
    def name(self) -> str:
        return self.planned.step.name


def load(records: Records, name: str) -> Submitted | None:
    """The workflow of this name, if it was submitted."""
    try:
        data = json.loads(_file(records, name).read_text())
        steps = {step: Entry(**entry) for step, entry in data.pop("steps").items()}
        return Submitted(**{**data, "variables": tuple(data["variables"])}, steps=steps)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"cannot read {_file(records, name)}: {error}") from None


def known(records: Records) -> list[str]:
    """The names of the workflows that were submitted."""
    return sorted(path.stem for path in (records.folder.parent / "workflows").glob("*.json"))


def _file(records: Records, name: str) -> Path:
    return records.folder.parent / "workflows" / f"{name}.json"


def find_runs(submitted: Submitted, records: Records) -> dict[str, Record]:
    """step -> the record of its run; a step whose run was refused has none."""
    by_id = {record.run_id: record for record in records.all()}
    return {step: by_id[entry.run_id] for step, entry in submitted.steps.items() if entry.run_id in by_id}


# --- what is to be done ------------------------------------------------------------------------


def given_up(plan: Plan, submitted: Submitted, runs: Mapping[str, Record], *, new: bool) -> dict[str, Record]:
    """step -> the submitted run that the workflow would not know any longer: all if `new`, else of steps that are gone.

    Where a submission was cut off, `new` goes on with that one.
    """
    cut_off = any(not run.job_id for run in runs.values())
    kept = {planned.step.name for planned in plan.steps} if not new or cut_off else set()
    return {name: run for name, run in runs.items() if name not in kept}


def require_ended(submitted: Submitted, states: Mapping[str, JobState]) -> None:
    """UsageError where a run that is to be given up may be at work: nobody would know of it."""
    for name, state in states.items():
        if state.may_be_at_work():
            raise UsageError(
                f"{name} of the workflow {submitted.name} is {state.state}, and would be forgotten",
                fix=f"mlmsub workflow cancel {submitted.name}, or give this file another `name`",
            )


def first_time(plan: Plan, submitted: Submitted | None, records: Records) -> list[Decision]:
    """Every step once. UsageError where one was submitted with other inputs, or the record of its run is gone."""
    if submitted:
        _same_profile(plan, submitted)
    runs = find_runs(submitted, records) if submitted else {}
    found = []
    for planned in plan.steps:
        name = planned.step.name
        run = runs.get(name)
        if run is None and submitted and name in submitted.steps:
            raise UsageError(
                f"the record of {submitted.steps[name].run_id}, the run of {name}, is gone",
                fix=f"see `mlmsub list --profile {submitted.profile}`; `mlmsub workflow resume` makes another run",
            )
        if run is None:
            found.append(Decision(planned, planned.record, True, "new"))
        elif submitted and submitted.steps[name].content != planned.content:
            raise UsageError(
                f"{plan.path}: steps.{name} is not what was submitted as {run.run_id}",
                fix="`mlmsub workflow resume` runs what has changed; `submit --new` runs all again",
            )
        else:
            why = "submitted already" if run.job_id else "taken up again"
            found.append(Decision(planned, run, not run.job_id, why))
    return found


def again(plan: Plan, submitted: Submitted, states: Mapping[str, JobState], records: Records) -> list[Decision]:
    """What is missing, has failed or has other inputs, and what depends on such a step; the rest is left as it is.

    UsageError where a step that must run again is still at work.
    """
    _same_profile(plan, submitted)
    runs = find_runs(submitted, records)
    found: dict[str, Decision] = {}
    for planned in plan.steps:
        found[planned.step.name] = _decide(planned, submitted, runs.get(planned.step.name), states, found)
    return list(found.values())


def _same_profile(plan: Plan, submitted: Submitted) -> None:
    if submitted.profile != plan.profile.name:
        raise UsageError(
            f"the workflow {submitted.name} was submitted by the profile {submitted.profile}, not {plan.profile.name}",
            fix=f"give --profile {submitted.profile}, or start anew: `mlmsub workflow submit --new`",
        )


def _decide(
    planned: Planned,
    submitted: Submitted,
    run: Record | None,
    states: Mapping[str, JobState],
    found: Mapping[str, Decision],
) -> Decision:
    name = planned.step.name
    state = states.get(name, JobState("unknown"))
    before = [need.step for need in planned.step.needs if found[need.step].sends]
    why = _reason(planned, submitted.steps.get(name), state, before, run)
    if run is None:
        return Decision(planned, planned.record, True, why)
    if not why:
        return Decision(planned, run, not run.job_id, state.state if run.job_id else "taken up again")
    if state.may_be_at_work():
        known = f"is {state.state}" if state.state != "unknown" else f"may be at work ({state.reason})"
        raise UsageError(
            f"{name} {known}, and must run again: {why}",
            fix=f"wait for its end, or: mlmsub workflow cancel {submitted.name}",
        )
    if not before and (reason := _never(planned, states)):
        return Decision(planned, run, False, reason)
    return Decision(planned, planned.record, True, why)


def _reason(planned: Planned, entry: Entry | None, state: JobState, before: Sequence[str], run: Record | None) -> str:
    """Why a step must have a new run, or ""."""
    if entry is None or run is None:
        return "not submitted"
    if entry.content != planned.content:
        return "its inputs changed"
    if before:
        return f"{', '.join(before)} runs again" if len(before) < 3 else f"{len(before)} steps before it run again"
    if not run.job_id or state.state == "succeeded":
        return ""
    if state.state == "unknown":
        return "its job is lost"
    return "" if state.state in AT_WORK else state.state


def never(condition: str, state: State) -> bool:
    """Whether what waits for a run under this condition will not start."""
    return condition != "afterany" and state not in LIVE and (state == "succeeded") == (condition == "afternotok")


def _never(planned: Planned, states: Mapping[str, JobState]) -> str:
    """Why what a step waits for cannot come any more, or ""."""
    known = [(need, states.get(need.step, JobState("unknown")).state) for need in planned.step.needs]
    return next((f"not needed: {need.step} {state}" for need, state in known if never(need.condition, state)), "")


# --- one exec ----------------------------------------------------------------------------------


def send(
    plan: Plan,
    decisions: Sequence[Decision],
    records: Records,
    connect: Callable[[], Transport],
    variables: Sequence[str],
) -> list[Decision]:
    """Submit what is to be sent; the same decisions, with their runs' jobs.

    The answer of each run is recorded as it stands in the reply. Raises the first refusal: the runs after it were not
    tried, and what was submitted before as the same step stays known. After a connection was lost the same command
    takes all up again.
    """
    runs = {one.name: one.record for one in decisions}
    before = load(records, plan.workflow.name)
    sending = [one for one in decisions if one.sends]
    if not sending:
        _save(plan, decisions, records, variables)
        return list(decisions)
    archive = _archive([(one.record, _final(one.planned, runs)) for one in sending])
    transport = connect()
    taken_up = {one.name for one in sending if records.holds(one.record)}
    for one in sending:
        records.save(one.record)
    _save(plan, decisions, records, variables)
    first = sending[0].planned.resolved.spec
    script = jobs.script(
        "workflow", slurm_bin=first.slurm_bin, prelude=first.prelude, pass_env=" ".join(first.pass_env),
        runs_root=first.runs_root, order=" ".join(one.record.run_id for one in sending),
    )  # fmt: skip
    try:
        result = transport.run(script, stdin=archive)
    except TransportError as error:
        if isinstance(error, ConnectionLost | CommandTimeout):
            error.fix = "give the same command again: each step is submitted once"
        else:  # the script never started
            for one in sending:
                if one.name not in taken_up:
                    records.forget(one.record)
            _take_back(before, plan, decisions, records)
        raise
    refusal = _answered(sending, jobs.by_run(result.stdout.decode(errors="replace")), result.stderr, taken_up, records)
    runs = {run.run_id: run for run in records.all()}
    done = [replace(one, record=runs.get(one.record.run_id, one.record)) for one in decisions]
    if refusal:
        _take_back(before, plan, decisions, records)
        count = sum(bool(one.record.job_id) for one in done)
        so_far = f"the same command goes on; {count} of {len(done)} steps are submitted"
        refusal.fix = f"{refusal.fix}; then {so_far}" if refusal.fix else so_far
        raise refusal
    return done


def _answered(
    sending: Sequence[Decision], answers: Mapping[str, str], stderr: bytes, taken_up: set[str], records: Records
) -> MlmsubError | None:
    """Record the runs' jobs, and forget what came to nothing. Returns the first refusal, after which none was tried."""
    refusal: MlmsubError | None = None
    for one in sorted(sending, key=lambda one: one.record.run_id not in answers):  # the refused is the last answered
        may_exist = one.name in taken_up
        if not refusal:
            try:
                ids, _ = jobs.parse_submission(answers.get(one.record.run_id, ""), stderr.decode(errors="replace"))
                records.submitted(one.record, *ids)
                continue
            except MlmsubError as error:
                refusal = error
                refusal.message = f"{one.name}: {refusal.message}"
                may_exist = False
        if not may_exist and not getattr(refusal, "may_exist", False):
            records.forget(one.record)
    return refusal


def _take_back(before: Submitted | None, plan: Plan, decisions: Sequence[Decision], records: Records) -> None:
    """After a failure: a step whose run came to nothing is again what it was before; where none came, all is."""
    path = _file(records, plan.workflow.name)
    nothing = {one.name: one.record.run_id for one in decisions if one.sends and not records.holds(one.record)}
    old = before.steps if before else {}
    # a run that was taken up again, and is forgotten now, was the step's before, too
    back = {name: entry for name, entry in old.items() if entry.run_id != nothing.get(name)}
    kept = replace(before, steps=back) if before else None
    if len(nothing) < sum(one.sends for one in decisions):
        made = load(records, plan.workflow.name)
        assert made
        steps = {name: back.get(name) if name in nothing else entry for name, entry in made.steps.items()}
        kept = replace(made, steps={name: entry for name, entry in steps.items() if entry})
    if kept and kept.steps:
        records.write(path, asdict(kept))
    else:
        path.unlink()


def _save(plan: Plan, decisions: Sequence[Decision], records: Records, variables: Sequence[str]) -> None:
    steps = {
        one.name: Entry(
            one.record.run_id,
            one.planned.content,
            {need.step: need.condition for need in one.planned.step.needs},
            one.planned.step.cell,
        )
        for one in decisions
    }
    made = Submitted(plan.workflow.name, str(plan.path), plan.profile.name, tuple(variables), steps)
    records.write(_file(records, made.name), asdict(made))


def _final(planned: Planned, runs: Mapping[str, Record]) -> Resolved:
    """The step as it is sent: with the runs that it waits for."""
    parents = tuple(
        Parent(runs[need.step].run_id, runs[need.step].run_dir, need.condition) for need in planned.step.needs
    )
    return replace(planned.resolved, spec=replace(planned.resolved.spec, parents=parents))


def _archive(runs: Sequence[tuple[Record, Resolved]]) -> bytes:
    """What slurm/remote/workflow.sh unpacks; the files that all runs have stand in it once."""
    bundles = [single.build(resolved, record) for record, resolved in runs]
    common = bundle.in_all(bundles)
    files = {"submit.sh": jobs.program("submit").encode(), "common.tar": common.tar()}
    for (record, resolved), one in zip(runs, bundles, strict=True):
        parameters = single.parameters(resolved.spec, record) | {"unpack": "cat"}
        files[f"{record.run_id}.sh"] = jobs.assignments(**parameters).encode(errors="surrogateescape")
        files[f"{record.run_id}.tar"] = one.tar(without=common.files)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(single.small_enough(buffer.getvalue(), files), mtime=0)
