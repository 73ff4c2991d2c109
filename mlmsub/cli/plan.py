"""`mlmsub plan`: one screen about a submission that is not sent."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from textwrap import wrap

from mlmsub.app import config
from mlmsub.app import plan as app
from mlmsub.app.plan import Plan, Stretch
from mlmsub.app.records import Records
from mlmsub.app.resolve import public_values, resolve
from mlmsub.app.sources import Request as Options
from mlmsub.cli import output
from mlmsub.core.errors import ChecksFailed, UsageError
from mlmsub.core.facts import Facts
from mlmsub.core.issues import Issue
from mlmsub.core.layout import Pipeline

__all__ = ["Options", "run"]

WIDTH = max(76, min(shutil.get_terminal_size((100, 24)).columns, 120))
SHOWN = 12  # suggestions
ROWS = 6  # kinds of pipeline stages
_ORDER = {"error": 0, "warning": 1, "info": 2}


def run(options: Options, *, suggest: bool, as_json: bool) -> None:
    """Print the plan; exit 3 where a submission would be refused."""
    if not options.stage:
        raise UsageError("which stage?", fix="mlmsub plan STAGE MODEL, see `mlmsub plan --help`")
    user = config.User.current()
    resolved = resolve(user, Records(user.records_dir), options)
    plan = app.make(resolved, with_suggestions=suggest, free_nodes=not options.nodes)
    if as_json:
        output.print_json(app.data(plan))
    else:
        _show(plan)
    if plan.failed:
        sys.exit(ChecksFailed.exit_code)


def _show(plan: Plan) -> None:
    spec, facts = plan.resolved.spec, plan.facts
    title, about = f"{spec.stage} {spec.model or ' '.join(spec.args)}", _about(facts)
    gap = "  " if len(title) + 2 + len(about) <= WIDTH else "\n  "
    print(output.styled(title, "bold") + (gap + about if about else ""))
    if plan.suggestions is not None:
        _suggestions(plan)
        _issues(plan.issues)
        return
    _stages(plan)
    _values(plan)
    _job(plan)
    if facts:
        _layout(facts)
        _memory(facts, facts.stage if plan.parts else "")
    _issues(plan.resolved.issues)


def _about(facts: Facts | None) -> str:
    if not facts or not facts.arch:
        return ""
    arch = facts.arch
    active = f", {_count(arch.active_parameters)} active" if arch.experts else ""
    rows = "" if arch.vocab else ", embedding not counted"
    return f"{_count(arch.parameters)} parameters{active}{rows}; {app.layer_kinds(facts)} layers"


def _stages(plan: Plan) -> None:
    """Of a run of several stages: what each starts from and makes."""
    if plan.parts:
        _title("stages, in one run; a model is handed on in memory where the layouts agree")
    for part in plan.parts:
        _row(part.stage.name, f"{part.source} -> {part.target}")


def _values(plan: Plan) -> None:
    _title("values")
    for name, value, origin in public_values(plan.resolved):
        text = " ".join(value.split())
        room = WIDTH - 2 - 20 - 2 - len(origin) - 2
        text = text if len(text) <= room else text[: room - 3] + "..."
        print(f"  {name:20}  {text:{room}}  {output.styled(origin, 'dim')}".rstrip())


def _job(plan: Plan) -> None:
    spec = plan.resolved.spec
    _title("job")
    gpu = plan.resolved.profile.profile.gpu_type
    where = ", ".join(f"{name} {spec.sbatch[name]}" for name in ("partition", "account", "time") if name in spec.sbatch)
    nodes = f"{output.count(spec.nodes, 'node')} x {spec.gpus_per_node} {gpu or 'GPU'}{'' if gpu else 's'}"
    _row("where", f"{nodes}  profile {plan.resolved.profile.name}  {where if spec.scheduler == 'slurm' else ''}")
    if spec.image:
        _row("image", spec.image)
    for index, mount in enumerate(spec.mounts):
        source, target, *flags = mount.split(":")
        _row("" if index else "mounts", f"{source} -> {target} {' '.join(flags)}")
    if spec.native and plan.facts and (who := app.remote_code(plan.facts)):
        _row("code", f"the checkpoint's own Python code is run (trust_remote_code: {who})")


def _layout(facts: Facts) -> None:
    at = facts.layout
    _title("layout")
    _row("world", f"{at.world} ranks")
    if facts.stage == "export":
        _row("export", f"PP {at.pp}, one rank a stage; TP, CP, EP and ETP are 1")
    else:
        _row("dense", _groups(("TP", at.tp), ("CP", at.cp), ("DP", at.dp), ("PP", at.pp)))
        if facts.experts:
            each = facts.experts / at.ep
            groups = _groups(("ETP", at.expert_tp), ("EP", at.ep), ("EDP", at.edp), ("PP", at.pp))
            _row("experts", f"{groups}   {each:g} of {facts.experts} a rank")
    if isinstance(facts.pipeline, Pipeline) and at.pp > 1:
        _row("layers", f"{facts.pipeline.render()} on {at.pp} pipeline stages")


def _groups(*sizes: tuple[str, int]) -> str:
    return " x ".join(f"{name} {size or '?'}" for name, size in sizes)


def _memory(facts: Facts, of: str) -> None:
    found = app.stretches(facts)
    if not any(one.memory for one in found):
        return
    gpu = f" of {facts.gpu_gib:.0f}" if facts.gpu_gib else "; set the profile's gpu_type to compare"
    _title(f"memory of one GPU{f' in {of}' if of else ''}, estimated, GiB{gpu}")
    memories = [one.memory for one in found if one.memory]
    names = [name for name in memories[0].parts() if any(memory.parts()[name] > 0.005 for memory in memories)]
    many, host = facts.layout.pp > 1, any(memory.host for memory in memories)
    header = (["stages", "layers"] if many else []) + names + ["total"] + (["host"] if host else [])
    shown = found if len(found) <= ROWS else [*found[: ROWS - 1], found[-1]]
    rows = [_cells(one, names, many=many, host=host) for one in shown]
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    print("  " + output.styled("  ".join(n.rjust(w) for n, w in zip(header, widths, strict=True)), "dim"))
    room = WIDTH - 2 - sum(widths) - 2 * len(widths)
    for one, row in zip(shown, rows, strict=True):
        if one is shown[-1] and len(found) > len(shown):
            print(f"  {'...':>{widths[0]}}")
        line = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print(f"  {line}  {_bar(one, facts.gpu_gib, room)}".rstrip())


def _cells(one: Stretch, names: Iterable[str], *, many: bool, host: bool) -> list[str]:
    assert one.memory
    cells = [_range(one.first, one.last), _range(*one.layers)] if many else []
    cells += [f"{one.memory.parts()[name]:.1f}" for name in names]
    return [*cells, f"{one.memory.total:.1f}", *([f"{one.memory.host:.0f}"] if host else [])]


def _bar(one: Stretch, gpu: float | None, room: int) -> str:
    if not gpu or not one.memory:
        return ""
    share = one.memory.total / gpu
    style = "error" if share > 1 else "warning" if share > 0.85 else "succeeded"
    filled = min(10, round(share * 10))
    bar = f"[{'#' * filled}{'.' * (10 - filled)}] " if room >= 17 else ""
    return output.styled(f"{bar}{share:.0%}", style)


def _suggestions(plan: Plan) -> None:
    found = plan.suggestions or ()
    if not found:
        print(f"  no layout: {_nothing(plan)}")
        return
    at, gpu = found[0].layout, plan.facts.gpu_gib if plan.facts else None
    _title(f"layouts on {output.count(at.nodes, 'node')} x {at.gpus_per_node} GPUs, best first")
    common = set.intersection(*(set(one.arguments.items()) for one in found))
    if common:
        print(f"  all with {_words(dict(sorted(common)))}")
    for index, one in enumerate(found[:SHOWN], 1):
        sizes = " ".join(f"{name}={value}" for name, value in one.variables().items() if name != "MLM_EXTRA_ARGS")
        share = f" {one.memory.total / gpu:4.0%}" if gpu else ""
        print(f"  {index:2}  {output.styled(f'{sizes:24}', 'bold')}  {one.memory.total:4.0f} GiB{share}  {one.reason}")
        own = {name: value for name, value in one.arguments.items() if (name, value) not in common}
        for line in wrap(_words(own), WIDTH - 6, break_on_hyphens=False):
            print(f"      {output.styled(line, 'dim')}")
    if len(found) > SHOWN:
        print(f"  and {len(found) - SHOWN} more with --json")


def _words(arguments: dict[str, str]) -> str:
    return " ".join(f"--{name}" if value == "true" else f"--{name} {value}" for name, value in arguments.items())


def _nothing(plan: Plan) -> str:
    spec = plan.resolved.spec
    if not plan.facts or not plan.facts.arch:
        return "the model's dimensions are not known here"
    return f"none satisfies the rules and fits memory on {spec.nodes} x {spec.gpus_per_node} GPUs; leave out --nodes"


def _issues(issues: Iterable[Issue]) -> None:
    found = sorted(issues, key=lambda issue: _ORDER[issue.severity])
    _title("issues" if found else "no issues")
    for issue in found:
        lines = wrap(f"{issue.field}: {issue.message} [{issue.code}]", WIDTH - 10, break_on_hyphens=False)
        for index, line in enumerate(lines):
            word = output.styled(f"{issue.severity:7}", issue.severity) if not index else " " * 7
            print(f"  {word} {line}")
        for line in wrap(f"fix: {issue.fix}", WIDTH - 14, break_on_hyphens=False) if issue.fix else ():
            print(f"{'':14}{line}")
    if counts := [output.count(n, word) for word in _ORDER if (n := sum(i.severity == word for i in found))]:
        print(output.styled(f"  {', '.join(counts)}", "dim"))


def _title(text: str) -> None:
    print("\n" + output.styled(text, "bold"))


def _row(name: str, text: str) -> None:
    for line in wrap(text, WIDTH - 24, break_long_words=False, break_on_hyphens=False) or [""]:
        print(f"  {name:20}  {line}".rstrip())
        name = ""


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _count(number: int) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
