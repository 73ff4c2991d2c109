"""`mlmsub submit`."""

from __future__ import annotations

from pathlib import Path

from mlmsub.app import config, runs
from mlmsub.app import submit as app
from mlmsub.app.records import Record, Records
from mlmsub.app.resolve import Resolved, public_values, reload, resolve
from mlmsub.app.sources import Request as Options
from mlmsub.cli import connect, output
from mlmsub.core.errors import JobFailed, UsageError
from mlmsub.core.issues import Issue

__all__ = ["Options", "run"]


def run(
    options: Options, trust: connect.Trust, *, from_file: str, new: bool, dry_run: bool, watch: bool, as_json: bool
) -> None:
    user = config.User.current()
    records = Records(user.records_dir)
    with connect.Connections(trust) as connections:
        if options.stage and not dry_run:
            connections.begin(config.load_profile(user, options.profile).place)  # while all is resolved and built
        resolved = _resolve(options, user, records, from_file)
        if dry_run:
            _show(app.prepare(resolved, records, new=new), as_json)
            return
        if as_json and any(issue.severity == "error" for issue in resolved.issues):
            output.print_json({"run_id": None, "job_id": None, "issues": _data(resolved.issues)})
        app.checked(resolved)
        if not as_json:
            output.print_issues(resolved.issues)
        place = resolved.profile.place
        with records.one_at_a_time(app.identity(resolved)):
            prepared = app.prepare(resolved, records, new=new)
            record, existed = app.send(prepared, records, lambda: connections.to(place))
        if as_json:
            output.print_json({
                "run_id": record.run_id, "job_id": record.job_id, "run_dir": record.run_dir, "existed": existed,
                "outputs": record.outputs, "issues": _data(resolved.issues),
            })  # fmt: skip
        else:
            _announce(record, existed)
        if watch:
            _watch(record, records, connections)


def _resolve(options: Options, user: config.User, records: Records, from_file: str) -> Resolved:
    if from_file:
        if options != Options(stage="", args=(), profile=options.profile):
            raise UsageError("--from takes everything but --profile from the file", fix="leave the other options out")
        return reload(user, Path(from_file), options.profile)
    if not options.stage:
        raise UsageError("which stage?", fix="mlmsub submit STAGE MODEL, see `mlmsub submit --help`")
    return resolve(user, records, options)


def _announce(record: Record, existed: bool) -> None:
    done = "was submitted already as" if existed else "submitted as"
    what = "process" if record.scheduler == "local" else "job"
    print(f"{output.styled(record.run_id, 'bold')} {done} {what} {record.job_id}")
    for name, path in record.outputs.items():
        print(f"  {name}  {path}")
    print(f"  mlmsub logs -f {record.run_id}")


def _watch(record: Record, records: Records, connections: connect.Connections) -> None:
    printer = output.LogPrinter()
    runs.log(record, connections.to(record.place), printer.feed, output.note, follow=True)
    printer.close()
    state = runs.settled(record, records, lambda r: connections.to(r.place))
    if state.state != "succeeded":
        code = f" with exit code {state.exit_code}" if state.exit_code else ""
        raise JobFailed(f"{record.run_id}: {state.state}{code}", fix=f"see mlmsub status {record.run_id}")


def _show(prepared: app.Prepared, as_json: bool) -> None:
    resolved, record = prepared.resolved, prepared.record
    files = {path: content for path, content in prepared.bundle.files.items() if not path.startswith("runtime/")}
    if as_json:
        output.print_json({
            "run_id": record.run_id, "run_dir": record.run_dir, "content_hash": record.content_hash,
            "issues": _data(resolved.issues), "origins": resolved.spec.origins,
            "values": {name: value for name, value, _ in public_values(resolved)},
            "variable_origins": {name: origin for name, _, origin in public_values(resolved)},
            "files": {path: content.decode(errors="replace") for path, content in files.items()},
            "secret_files": sorted(prepared.bundle.secrets),
            "runtime_files": len(prepared.bundle.files) - len(files),
        })  # fmt: skip
        return
    spec = resolved.spec
    shape = f"{_count(spec.nodes, 'node')} x {_count(spec.tasks_per_node, 'task')}"
    print(
        f"{output.styled(record.job_name, 'bold')}  {shape}, {_count(spec.gpus_per_node, 'GPU')} each, {spec.launcher}"
    )
    print(f"run directory  {record.run_dir}")
    rows = public_values(resolved)
    output.print_table(("variable", "value", "from"), [(n, _short(v), o) for n, v, o in sorted(rows)])
    print()
    for path in (
        "job.sbatch",
        "env/command.sh",
        "env/profile.sh",
        "env/setup.sh",
        "env/overrides.sh",
        "env/defaults.sh",
    ):
        if content := files[path].decode(errors="replace").strip("\n"):
            print(output.styled(f"--- {path}", "dim"))
            print(content)
    rest = sorted(set(files) - {"job.sbatch"} - {p for p in files if p.startswith("env/")})
    runtime = len(prepared.bundle.files) - len(files)
    print(output.styled(f"--- and {', '.join(rest)}" + (f", runtime/ ({runtime} files)" if runtime else ""), "dim"))
    output.print_issues(resolved.issues)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _short(value: str) -> str:
    text = " ".join(value.split())
    return text if len(text) <= 70 else text[:67] + "..."


def _data(issues: tuple[Issue, ...]) -> list[dict[str, str]]:
    return [vars(issue) for issue in issues]
