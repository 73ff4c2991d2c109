"""What the runs of a workflow found out: where their time went, and a sweep side by side."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlmsub.app.records import Record
from mlmsub.app.workflow_runs import Submitted, never
from mlmsub.slurm import jobs
from mlmsub.slurm.jobs import JobState
from mlmsub.transport import Transport


@dataclass(frozen=True)
class Results:
    """What a run told: its events, and the bytes of each output."""

    events: list[dict[str, Any]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    def last(self, event: str) -> dict[str, Any]:
        """The last event of this kind; empty if there is none."""
        return next((one for one in reversed(self.events) if one.get("event") == event), {})

    def seconds(self) -> dict[str, float]:
        """Seconds of each step of the work, over all attempts, the longest first."""
        found: dict[str, float] = {}
        for one in self.events:
            if one.get("event") == "step":
                found[one["name"]] = found.get(one["name"], 0.0) + float(one["seconds"])
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))


@dataclass(frozen=True)
class Row:
    """One line of a comparison: a cell of a sweep, or a step that stands alone."""

    name: str
    state: Literal["succeeded", "incomplete"]
    bytes: int | None
    perplexity: float | None
    mmlu: float | None
    questions: str  # "12 of 14042"
    seconds: int

    @property
    def measured(self) -> bool:
        return (self.bytes, self.perplexity, self.mmlu) != (None, None, None)


def results(runs: Mapping[str, Record], connect: Callable[[Record], Transport], *, sizes: bool) -> dict[str, Results]:
    """What the runs of each step told, in one exec. `sizes` looks at every file of their outputs."""
    found = {step: Results() for step in runs}
    of_run = {record.run_id: found[step] for step, record in runs.items()}
    if not runs:
        return found
    outputs = [(r.run_id, name, path) for r in runs.values() for name, path in r.outputs_at.items() if sizes]
    script = jobs.script(
        "results",
        runs=jobs.run_lines([(record.run_id, record.run_dir) for record in runs.values()]),
        outputs="".join(f"{' '.join(line)}\n" for line in outputs),
    )
    answer = connect(next(iter(runs.values()))).run(script).stdout.decode(errors="replace")
    for line in answer.splitlines():
        kind, run_id, rest = (*line.split("|", 2), "", "")[:3]
        if run_id not in of_run:
            continue
        if kind == "bytes" and rest.rpartition("|")[2].isdigit():
            variable, _, number = rest.rpartition("|")
            of_run[run_id].sizes[variable] = int(number)
        elif kind == "event" and (event := _event(rest)):
            of_run[run_id].events.append(event)
    return found


def _event(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError:  # cut off while it was written
        return {}
    return data if isinstance(data, dict) else {}


def seconds(elapsed: str) -> int:
    """Of a time as Slurm and ps show it: `[D-][H:]M:S`; 0 for anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", elapsed)
    days, hours, minutes, rest = (int(number or 0) for number in match.groups()) if match else (0, 0, 0, 0)
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def compare(submitted: Submitted, states: Mapping[str, JobState], told: Mapping[str, Results]) -> list[Row]:
    """A row for each cell of the sweep, from all its steps, and for each other step that measured something."""
    groups: dict[str, list[str]] = {}
    for step, entry in submitted.steps.items():
        groups.setdefault(", ".join(entry.cell.values()) or step, []).append(step)
    rows = [_row(name, steps, states, told) for name, steps in groups.items()]
    in_sweep = {", ".join(entry.cell.values()) for entry in submitted.steps.values()}
    return [row for row in rows if row.name in in_sweep or row.measured]


def _row(name: str, steps: Sequence[str], states: Mapping[str, JobState], told: Mapping[str, Results]) -> Row:
    all_told = [told.get(step, Results()) for step in steps]
    sizes = [one.sizes["EXPORT_DIR"] for one in all_told if "EXPORT_DIR" in one.sizes]
    perplexity = [one.last("perplexity")["after"] for one in all_told if one.last("perplexity")]
    mmlu = next((one.last("mmlu") for one in all_told if one.last("mmlu")), {})
    whole = all(step in states and states[step].state == "succeeded" for step in steps)
    return Row(
        name=name,
        state="succeeded" if whole else "incomplete",
        bytes=sizes[0] if sizes else None,
        perplexity=perplexity[0] if perplexity else None,
        mmlu=mmlu.get("accuracy"),
        questions=f"{mmlu['questions']} of {mmlu['available']}" if mmlu else "",
        seconds=sum(seconds(states[step].elapsed) for step in steps if step in states),
    )


def blocked(submitted: Submitted, states: Mapping[str, JobState]) -> dict[str, str]:
    """For each step that did not start since another ended otherwise than it needed: which one, and how it ended."""
    found: dict[str, str] = {}
    for step, entry in submitted.steps.items():
        if step in states and states[step].state in ("cancelled", "pending"):
            for name, condition in entry.needs.items():
                state = states.get(name, JobState("unknown")).state
                if name in found or never(condition, state):
                    found[step] = f"{name} {state}"
                    break
    return found
