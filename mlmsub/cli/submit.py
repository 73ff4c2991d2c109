"""`mlmsub submit`."""

from __future__ import annotations

from pathlib import Path

from mlmsub.app import config, runs
from mlmsub.app import submit as app
from mlmsub.app.records import Record, Records
from mlmsub.app.resolve import Resolved, public_values, reload, resolve
from mlmsub.app.sources import Request as Options
from mlmsub.cli import connect, output
from mlmsub.cli.runs import jobs_of, print_log
from mlmsub.core.errors import JobFailed, UsageError
from mlmsub.core.issues import Issue, warning

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
        later = _short_chain(record, resolved)
        if as_json:
            output.print_json({
                "run_id": record.run_id, "job_id": record.job_id, "links": record.links, "run_dir": record.run_dir,
                "existed": existed, "outputs": record.outputs, "issues": _data((*resolved.issues, *later)),
            })  # fmt: skip
        else:
            _announce(record, existed)
            output.print_issues(later)
        if watch:
            _watch(record, records, connections)


def _resolve(options: Options, user: config.User, records: Records, from_file: str) -> Resolved:
    if from_file:
        if options != Options(profile=options.profile):
            raise UsageError("--from takes everything but --profile from the file", fix="leave the other options out")
        return reload(user, Path(from_file), options.profile)
    if not options.stage:
        raise UsageError("which stage?", fix="mlmsub submit STAGE MODEL, see `mlmsub submit --help`")
    return resolve(user, records, options)


def _short_chain(record: Record, resolved: Resolved) -> list[Issue]:
    if len(record.jobs) > resolved.spec.chain:
        return []
    text = f"{len(record.jobs)} of {resolved.spec.chain + 1} jobs: Slurm refused the next, or the run was over by then"
    return [warning("chain", "chain", text, f"see mlmsub status {record.run_id}")]


def _announce(record: Record, existed: bool) -> None:
    done = "was submitted already as" if existed else "submitted as"
    print(f"{output.styled(record.run_id, 'bold')} {done} {jobs_of(record)}")
    for name, path in record.outputs.items():
        print(f"  {name}  {path}")
    print(f"  mlmsub logs -f {record.run_id}")


def _watch(record: Record, records: Records, connections: connect.Connections) -> None:
    print_log(record, records, connections, output.LogPrinter(), follow=True)
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
    shape = f"{output.count(spec.nodes, 'node')} x {output.count(spec.tasks_per_node, 'task')}"
    gpus = output.count(spec.gpus_per_node, "GPU")
    print(f"{output.styled(record.job_name, 'bold')}  {shape}, {gpus} each, {spec.launcher}")
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


def _short(value: str) -> str:
    text = " ".join(value.split())
    return text if len(text) <= 70 else text[:67] + "..."


def _data(issues: tuple[Issue, ...]) -> list[dict[str, str]]:
    return [vars(issue) for issue in issues]
