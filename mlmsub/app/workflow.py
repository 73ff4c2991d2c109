"""A workflow: plan all its steps, then submit them in one exec. Each step is an ordinary run."""

from __future__ import annotations

import functools
import hashlib
import json
import posixpath
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlmsub.app import envfile, resources
from mlmsub.app.config import NamedProfile, User, load_profile, read_yaml
from mlmsub.app.records import Record, Records, Snapshot
from mlmsub.app.resolve import Resolved, resolve_from
from mlmsub.app.sources import Request, Sources
from mlmsub.app.submit import named_run, now
from mlmsub.core import paths, workflow
from mlmsub.core.errors import UsageError
from mlmsub.core.issues import Issue, error
from mlmsub.core.spec import RunSpec
from mlmsub.core.stages import SCRIPT, STAGES
from mlmsub.core.strict import nearest
from mlmsub.core.workflow import Step, Workflow

# what of a spec says how a run queues, and not what it computes
_QUEUEING = (
    "job_name", "sbatch", "sbatch_args", "srun", "srun_args", "prelude", "slurm_bin", "pass_env", "runs_root",
    "parents", "chain", "max_restarts", "max_total_time", "allow", "origins",
)  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A step as it would be submitted. `content` is what it computes: a change of inputs changes it."""

    step: Step
    resolved: Resolved
    record: Record  # of a run that does not exist yet
    issues: tuple[Issue, ...]
    content: str

    @property
    def failed(self) -> bool:
        return any(issue.severity == "error" for issue in self.issues)


@dataclass(frozen=True)
class Plan:
    """A workflow, understood and checked. Its steps stand in the order of submission."""

    workflow: Workflow
    path: Path
    profile: NamedProfile
    steps: tuple[Planned, ...]

    @property
    def identity(self) -> str:
        """What makes two submissions the same workflow."""
        return _digest(self.workflow.name)

    @property
    def issues(self) -> list[tuple[str, Issue]]:
        """(step, issue) of all steps."""
        return [(planned.step.name, issue) for planned in self.steps for issue in planned.issues]

    @property
    def failed(self) -> bool:
        return any(planned.failed for planned in self.steps)


def names() -> list[str]:
    """The workflows that come with mlmsub."""
    return sorted(path.stem for path in (resources.root() / "workflows").glob("*.yaml"))


def find(user: User, word: str) -> Path:
    """The file of a path, or of a workflow that comes with mlmsub."""
    if word.endswith((".yaml", ".yml")):
        if not (user.cwd / word).is_file():
            raise UsageError(f"the workflow file {word} does not exist")
        return user.cwd / word
    if word not in names():
        raise UsageError(
            f"there is no workflow {word!r}{nearest(word, names())}",
            fix=f"give a .yaml file, or one that comes with mlmsub: {', '.join(names())}",
        )
    return resources.root() / "workflows" / f"{word}.yaml"


def read(user: User, word: str, variables: Sequence[str] = ()) -> tuple[Workflow, Path]:
    """Read a workflow; `variables` are NAME=VALUE and replace values of its `vars`."""
    path, given = find(user, word), {}
    for text in variables:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--var {text!r}: write NAME=VALUE")
        given[name] = value
    return workflow.parse(read_yaml(path), str(path), path.stem, given), path


def plan(user: User, records: Records, word: str, *, profile: str = "", variables: Sequence[str] = ()) -> Plan:
    """Resolve and check every step, each with the outputs of those before it. Sends nothing.

    Raises UsageError naming file and step for what cannot be understood; what cannot work comes back as issues.
    """
    flow, path = read(user, word, variables)
    named = load_profile(user, profile or flow.profile)
    planner = _Planner(user, Snapshot(records), flow, named, f"{path}: steps")
    made = [planner.step(step) for step in flow.steps]
    _refuse_secrets(made, variables)
    found = _together(flow, made)
    return Plan(flow, path, named, tuple(replace(p, issues=(*p.issues, *found[p.step.name])) for p in made))


def together(user: User, word: str, earlier: Sequence[str], given: Sequence[str]) -> list[str]:
    """The variables of an earlier command that the file still has, and those given now, which win; as NAME=VALUE."""
    flow, _ = read(user, word)
    values = dict(text.partition("=")[::2] for text in earlier)
    kept = {name: value for name, value in values.items() if name in flow.variables}
    return [*(f"{name}={value}" for name, value in kept.items()), *given]


def _refuse_secrets(made: Sequence[Planned], variables: Sequence[str]) -> None:
    """What is given as a variable is kept beside the workflow, so that `resume` knows it."""
    for text in variables:
        name, _, value = text.partition("=")
        for planned in made:
            for secret, hidden in planned.resolved.secrets.items():
                if hidden and hidden in value:
                    raise UsageError(
                        f"--var {name}: in {planned.step.name} it is {secret}, a secret, and variables are recorded",
                        fix=f"export {secret} in your environment instead",
                    )


class _Planner:
    """Plans one step after the other, and remembers what the later ones need."""

    def __init__(self, user: User, records: Snapshot, flow: Workflow, named: NamedProfile, where: str) -> None:
        self._user, self._records, self._flow, self._named, self._where = user, records, flow, named, where
        self._planned: dict[str, Planned] = {}
        self._stamp, self._token = now(), secrets.randbelow(16**6)
        self._read = functools.cache(lambda path, given, static: envfile.read(path, dict(given), static=static))

    def step(self, step: Step) -> Planned:
        where = f"{self._where}.{step.name}"
        text = workflow.fill(step, lambda name, variable: self._output(name, variable, where))
        if text.stage == SCRIPT and text.model:
            raise UsageError(f"{where}: model: a script takes none", fix="write it among `args`")
        request = Request(
            stage=text.stage, args=(*((text.model,) if text.model else ()), *text.args), profile=self._named.name,
            env_setup=text.env_setup, overrides=tuple(f"{name}={value}" for name, value in text.set.items()),
            nodes=text.nodes, time=text.time, partition=text.partition, account=text.account,
            job_name=paths.job_name(self._flow.name, step.name), sbatch_args=text.sbatch_args, requeue=text.requeue,
            stop_before=text.stop_before, chain=text.chain, install=text.install, static=text.static, allow=text.allow,
        )  # fmt: skip
        parents = [self._planned[need.step].record for need in step.needs if need.condition == "afterok"]
        try:
            resolved = resolve_from(Sources(self._user, self._named, request), self._records, parents, self._setup)
        except UsageError as problem:
            raise UsageError(f"{where}: {problem.message}", fix=problem.fix) from None
        content = _content(resolved.spec, step)
        token = f"{(self._token + len(self._planned)) % 16**6:06x}"  # none twice
        record = named_run(resolved, _digest(self._flow.name, content), self._stamp, token)
        issues = (*resolved.issues, *_ambiguous(resolved, parents))
        self._records.add(record)
        self._planned[step.name] = Planned(step, resolved, record, issues, content)
        return self._planned[step.name]

    def _setup(self, path: Path, given: Mapping[str, str], *, static: bool) -> envfile.ReadSetup:
        return self._read(path, frozenset(given.items()), static)

    def _output(self, name: str, variable: str, where: str) -> str:
        """The path that a step promises to fill; a script promises what the file sets for it."""
        maker = self._planned[name]
        spec = maker.resolved.spec
        made = {key: maker.resolved.values[key] for key in spec.outputs} if spec.native else spec.overrides
        if variable in spec.secret_names:
            raise UsageError(
                f"{where}: {variable} is a secret, which no other step's text may hold", fix="read it there"
            )
        if variable not in made:
            known = f"it makes {', '.join(made)}" if made else "it makes nothing that has a name; set one in its `set`"
            raise UsageError(f"{where}: {name} makes no {variable}{nearest(variable, made)}", fix=known)
        return made[variable]


def _content(spec: RunSpec, step: Step) -> str:
    data = {key: value for key, value in spec.to_data().items() if key not in _QUEUEING}
    return _digest(json.dumps(data, sort_keys=True), str(sorted((need.step, need.condition) for need in step.needs)))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogateescape")).hexdigest()


# --- what only all steps together show -----------------------------------------------------------


def _ambiguous(resolved: Resolved, parents: Sequence[Record]) -> Iterator[Issue]:
    """Of several steps that make a checkpoint, none is the one to start from."""
    name = "MLM_MODEL_CKPT"
    made = dict.fromkeys(parent.outputs["MLM_MODEL_SAVE"] for parent in parents if "MLM_MODEL_SAVE" in parent.outputs)
    if len(made) > 1 and resolved.values.get(name) == resolved.spec.defaults.get(name):
        message = f"which checkpoint? the steps that it needs make {' and '.join(made)}"
        yield error("workflow-input", name, message, f"set {name} to one of them: ${{steps.NAME.MLM_MODEL_SAVE}}")


def _together(flow: Workflow, made: Sequence[Planned]) -> dict[str, list[Issue]]:
    """For each step: another one writes the same path, or what it reads is not made yet when it starts."""
    found: dict[str, list[Issue]] = {planned.step.name: [] for planned in made}
    ancestors = flow.ancestors()
    writers: dict[str, str] = {}
    for planned in made:
        name = planned.step.name
        for variable, path in _written(planned).items():
            other = writers.setdefault(path, name)
            if other != name and not (planned.resolved.spec.stage == SCRIPT and other in ancestors[name]):
                fix = "set another, or another MLM_WORK_DIR; in a sweep with ${matrix.NAME} in it"
                found[name].append(error("workflow-path", variable, f"{other} writes {path} too", fix))
    for planned in made:
        name = planned.step.name
        for variable, path in _written(planned).items():
            for around in _around(path):
                if writers.get(around, name) != name:
                    message = f"{path} lies inside {around}, which {writers[around]} writes"
                    found[name].append(error("workflow-path", variable, message, "give each a folder of its own"))
    for planned in made:
        name = planned.step.name
        for variable, value in planned.resolved.values.items():
            maker = writers.get(posixpath.normpath(value)) if value.startswith("/") else None
            if maker in (None, name) or maker in ancestors[name] or variable in _written(planned):
                continue
            message = f"{maker} makes {value}, and is not waited for"
            found[name].append(error("workflow-order", variable, message, f"write ${{steps.{maker}.VARIABLE}}"))
    return found


def _written(planned: Planned) -> dict[str, str]:
    """variable -> path of what a step makes; a script makes what the file sets of a stage's output variables."""
    spec, names = planned.resolved.spec, {stage.writes for stage in STAGES.values()} - {""}
    made = {key: value for key, value in spec.overrides.items() if key in names and value.startswith("/")}
    return {key: posixpath.normpath(path) for key, path in (planned.record.outputs or made).items()}


def _around(path: str) -> Iterator[str]:
    """The folders that a path lies in."""
    while path not in ("", "/"):
        path = posixpath.dirname(path)
        yield path
