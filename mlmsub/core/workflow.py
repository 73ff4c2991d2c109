"""A workflow file: named steps, what each waits for, and sweeps. From its text to the steps in order of submission."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import Literal

from mlmsub.core.errors import UsageError
from mlmsub.core.quoting import is_name
from mlmsub.core.strict import build, nearest

Condition = Literal["afterok", "afterany", "afternotok"]
CONDITIONS: tuple[Condition, ...] = ("afterok", "afterany", "afternotok")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_REFERENCE = re.compile(r"\$(\$?)\{([^{}]*)\}")  # $${x} is a plain ${x}
_STEP_REFERENCE = re.compile(r"steps\.(.+)\.([^.]*)")


@dataclass(frozen=True)
class Text:
    """What the file says of one step; the fields are its keys. Empty means: not said."""

    stage: str
    model: str = ""
    args: tuple[str, ...] = ()
    env_setup: str = ""
    set: dict[str, str] = field(default_factory=dict)
    nodes: str = ""
    time: str = ""
    needs: tuple[str, ...] = ()
    matrix: dict[str, object] = field(default_factory=dict)
    partition: str = ""
    account: str = ""
    sbatch_args: tuple[str, ...] = ()
    chain: str = ""
    requeue: Literal["", "true", "false"] = ""
    stop_before: str = ""
    install: str = ""
    static: bool = False
    allow: tuple[str, ...] = ()


@dataclass(frozen=True)
class _File:
    steps: dict[str, Text]
    name: str = ""
    profile: str = ""
    vars: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Need:
    """A step that must have ended, and how, in Slurm's words."""

    step: str
    condition: Condition = "afterok"


@dataclass(frozen=True)
class Step:
    """One run of a workflow: a step of the file, or one cell of its matrix.

    Of the references in `text` only those to other steps' outputs are left, each to one run by its name.
    """

    name: str
    text: Text
    cell: dict[str, str]  # axis -> the cell's name on it
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True)
class Workflow:
    """`steps` stand in an order in which each comes after those that it needs."""

    name: str
    profile: str
    steps: tuple[Step, ...]
    variables: tuple[str, ...] = ()  # the names of its `vars`

    def ancestors(self) -> dict[str, frozenset[str]]:
        """For each step all that it waits for, directly or not."""
        found: dict[str, frozenset[str]] = {}
        for step in self.steps:
            direct = [need.step for need in step.needs]
            found[step.name] = frozenset(direct).union(*(found[name] for name in direct))
        return found


def parse(data: object, where: str, default_name: str, variables: Mapping[str, str]) -> Workflow:
    """The workflow of a file's YAML (all scalars strings); `variables` replace values of its `vars`.

    Raises UsageError naming the file, the step and the field.
    """
    file = build(_File, data, where)
    if not file.steps:
        raise UsageError(f"{where}: steps: there are none")
    names = _variables(file.vars, variables, where)
    runs = [run for name, text in file.steps.items() for run in _cells(name, text, names, f"{where}: steps.{name}")]
    known: dict[str, list[Step]] = {}
    for step, run in runs:
        for name in dict.fromkeys((step, run.name)):
            known.setdefault(name, []).append(run)
        if len(known[run.name]) > 1 or (run.name != step and run.name in file.steps):
            raise UsageError(f"{where}: steps.{step}: two runs are called {run.name!r}", fix="rename a step or a cell")
    linked = {run.name: _linked(run, known, f"{where}: steps.{step}") for step, run in runs}
    name = _checked_name(file.name or default_name, where)
    return Workflow(name, file.profile, _ordered(linked, where), tuple(file.vars))


def fill(step: Step, output: Callable[[str, str], str]) -> Text:
    """What a step says when `output(step, variable)` is known of those before it."""

    def replaced(match: re.Match[str]) -> str:
        if match[1]:
            return match[0][1:]
        name, variable = match[2].removeprefix("steps.").rsplit(".", 1)
        return output(name, variable)

    return _map(step.text, lambda _, text: _REFERENCE.sub(replaced, text))


def _checked_name(name: str, where: str) -> str:
    if not _NAME.fullmatch(name) or len(name) > 100:
        fix = "rename it; at most 100 letters, digits, _ . and -"
        raise UsageError(f"{where}: {name[:120]!r} is no name", fix=fix)
    return name


# --- references --------------------------------------------------------------------------------


def _variables(said: Mapping[str, str], given: Mapping[str, str], where: str) -> dict[str, str]:
    """`vars.NAME` -> value; a later one may use an earlier one."""
    for name in given:
        if name not in said:
            fix = f"the variables are: {', '.join(said)}" if said else "the file has no `vars`"
            raise UsageError(f"{where}: vars: there is no {name!r}{nearest(name, said)}", fix=fix)
    found: dict[str, str] = {}
    for name, value in said.items():
        found[f"vars.{name}"] = _substitute(given.get(name, value), found, f"{where}: vars.{name}")
    return found


def _substitute(text: str, names: Mapping[str, str], where: str, *, outputs: bool = False) -> str:
    """Replace what is known; where `outputs` may stand, references to them are left."""

    def replaced(match: re.Match[str]) -> str:
        word = match[2].strip()
        if match[1] or (outputs and _STEP_REFERENCE.fullmatch(word)):
            return f"${match[1]}{{{word}}}"
        if word in names:
            return names[word]
        if word.startswith("steps."):
            raise UsageError(f"{where}: ${{{word}}} may stand in `set` and `args` only, as ${{steps.NAME.VARIABLE}}")
        raise UsageError(
            f"{where}: ${{{word}}} is unknown{nearest(word, names)}",
            fix=f"known are: {', '.join((*names, 'steps.NAME.VARIABLE'))}; for a plain ${{ write $${{",
        )

    if "\0" in text:
        raise UsageError(f"{where}: a NUL byte can stand in no value", fix="leave it out")
    return _REFERENCE.sub(replaced, text)


def _map(text: Text, change: Callable[[str, str], str]) -> Text:
    """The same with each string changed by `change(field, string)`; `needs` and `matrix` stay."""

    def changed(name: str, value: object) -> object:
        if isinstance(value, str):
            return change(name, value)
        if isinstance(value, tuple):
            return tuple(changed(name, item) for item in value)
        if isinstance(value, dict):
            return {key: changed(f"{name}.{key}", item) for key, item in value.items()}
        return value

    kept = ("needs", "matrix")
    return replace(text, **{f.name: changed(f.name, getattr(text, f.name)) for f in fields(text) if f.name not in kept})  # type: ignore[arg-type]


# --- sweeps ------------------------------------------------------------------------------------


def _cells(name: str, text: Text, names: Mapping[str, str], where: str) -> Iterator[tuple[str, Step]]:
    """(the step's name, the run) for each cell of its matrix; a step without one is a single run."""
    _checked_name(name, where)
    for variable in text.set:
        if not is_name(variable):
            raise UsageError(f"{where}: set: {variable!r} is not a variable's name")
    axes = [_axis(axis, value, names, f"{where}: matrix.{axis}") for axis, value in text.matrix.items()]
    for chosen in product(*axes):
        cell = {axis: label for axis, label, _ in chosen}
        known = {**names, **{key: value for _, _, values in chosen for key, value in values.items()}}
        own = _map(text, functools.partial(_in_cell, known, where))
        yield name, Step("-".join((name, *(_label(axis, label) for axis, label in cell.items()))), own, cell)


def _in_cell(known: Mapping[str, str], where: str, key: str, text: str) -> str:
    return _substitute(text, known, f"{where}: {key}", outputs=key.partition(".")[0] in ("set", "args"))


def _axis(axis: str, value: object, names: Mapping[str, str], where: str) -> list[tuple[str, str, dict[str, str]]]:
    """(axis, cell's name on it, what it sets) for each entry: a list of values, or name -> variable -> value."""
    if isinstance(value, list):
        entries: list[tuple[object, object]] = [(item, {}) for item in value]
    elif isinstance(value, Mapping):
        entries = list(value.items())
    else:
        raise UsageError(f"{where}: expected a list of values, or a mapping of names, not {value!r}")
    found = []
    for label, values in entries:
        if not isinstance(label, str) or not isinstance(values, Mapping):
            raise UsageError(f"{where}: write a list of single values, or NAME: {{VARIABLE: VALUE}}")
        if not all(isinstance(item, str) for item in values.values()):
            raise UsageError(f"{where}.{label}: each variable has a single value")
        label = _substitute(label, names, where)
        own = {f"matrix.{axis}": label}
        own |= {
            f"matrix.{axis}.{key}": _substitute(item, names, f"{where}.{label}.{key}") for key, item in values.items()
        }
        found.append((axis, label, own))
    if not found:
        raise UsageError(f"{where}: there are no values")
    return found


def _label(axis: str, label: str) -> str:
    """How a cell is called: a number gets its axis before it (tp2)."""
    text = re.sub(r"[^A-Za-z0-9_.]+", "_", label).strip("_.") or "_"
    return f"{axis}{text}" if re.fullmatch(r"[0-9._]+", text) else text


# --- what waits for what -----------------------------------------------------------------------


def _linked(run: Step, known: Mapping[str, list[Step]], where: str) -> Step:
    """The run with its needs; a reference to another step's output is one, too."""
    needs: dict[str, Condition] = {}
    for entry in run.text.needs:
        condition, colon, name = entry.rpartition(":")
        if colon and condition not in CONDITIONS:
            raise UsageError(
                f"{where}: needs: {condition!r} is no condition{nearest(condition, CONDITIONS)}",
                fix=f"write NAME, or one of {', '.join(CONDITIONS)} and :NAME",
            )
        for other in _meant(run, name.strip(), known, f"{where}: needs"):
            if needs.setdefault(other.name, condition or "afterok") != (condition or "afterok"):  # type: ignore[arg-type]
                raise UsageError(f"{where}: needs: {other.name} stands there in two ways", fix="leave one out")

    def bound(key: str, text: str) -> str:
        def one(match: re.Match[str]) -> str:
            if match[1]:
                return match[0]
            name, variable = match[2].removeprefix("steps.").rsplit(".", 1)
            others = _meant(run, name, known, f"{where}: {key}")
            if len(others) > 1:
                raise UsageError(
                    f"{where}: {key}: ${{{match[2]}}} could be each of {len(others)} runs of {name}",
                    fix=f"name one, such as ${{steps.{others[0].name}.{variable}}}, or use the same matrix",
                )
            needs.setdefault(others[0].name, "afterok")
            return f"${{steps.{others[0].name}.{variable}}}"

        return _REFERENCE.sub(one, text)

    text = _map(run.text, bound)
    return replace(run, text=text, needs=tuple(Need(name, condition) for name, condition in needs.items()))


def _meant(run: Step, name: str, known: Mapping[str, list[Step]], where: str) -> list[Step]:
    """The runs that a name means: of a sweep, those cells that are like the asking run on the axes of both."""
    if name not in known:
        raise UsageError(f"{where}: there is no step {name!r}{nearest(name, known)}", fix="name a step of the file")
    cells = known[name]
    if len(cells) == 1:
        return cells
    found = [one for one in cells if all(one.cell.get(axis, value) == value for axis, value in run.cell.items())]
    if not found:
        raise UsageError(f"{where}: {name} has no run for {run.name}: its matrix differs", fix="use the same matrix")
    return found


def _ordered(runs: Mapping[str, Step], where: str) -> tuple[Step, ...]:
    graph = {name: [need.step for need in run.needs] for name, run in runs.items()}
    try:
        return tuple(runs[name] for name in TopologicalSorter(graph).static_order())
    except CycleError as error:
        circle = " -> ".join(error.args[1])
        raise UsageError(
            f"{where}: steps wait for each other: {circle}", fix="take one of these needs or references out"
        ) from None
