"""Submit a run: build the bundle here, then one exec over one connection; nothing is submitted twice."""

from __future__ import annotations

import gzip
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from mlmsub.app import resources
from mlmsub.app.records import Record, Records, shared
from mlmsub.app.resolve import Resolved
from mlmsub.core import bundle, checks, paths
from mlmsub.core.errors import ChecksFailed, MlmsubError, UsageError
from mlmsub.core.spec import RunSpec
from mlmsub.slurm import jobs
from mlmsub.transport import Transport
from mlmsub.transport.errors import CommandTimeout, ConnectionLost, TransportError

SIZE_LIMIT = 64 * 2**20  # bytes


@dataclass(frozen=True)
class Prepared:
    """A run that could be sent: its record (without a job id) and its bundle."""

    record: Record
    bundle: bundle.Bundle
    resolved: Resolved
    twins: tuple[Record, ...] = ()  # runs of the same content; one that is queued or at work is the answer


def identity(resolved: Resolved) -> str:
    """What makes two submissions the same, whenever and under whatever id."""
    return bundle.content_hash(resolved.spec, resources.for_bundle())


def prepare(resolved: Resolved, records: Records, *, new: bool = False) -> Prepared:
    """Name the run and build its bundle.

    A submission of the same content that never heard an answer is taken up again under its own id, unless `new`:
    the cluster is asked first whether it knows that run.
    """
    spec, named = resolved.spec, resolved.profile
    own = resources.for_bundle()
    content_hash = bundle.content_hash(spec, own)
    record = None if new else records.unfinished(content_hash, named.name)
    twins = () if new else records.twins(content_hash, named.name)
    if record is None:
        record = named_run(resolved, content_hash, now(), secrets.token_hex(3))
    return Prepared(record, build(resolved, record), resolved, twins)


def now() -> str:
    """The UTC time as run ids have it."""
    return datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")


def named_run(resolved: Resolved, content_hash: str, stamp: str, token: str) -> Record:
    """The record of a run that is not sent yet; `token`, six hex digits, tells runs of one second apart."""
    spec, named = resolved.spec, resolved.profile
    run = paths.RunPaths(spec.runs_root, paths.run_id(stamp, spec.stage, token))
    return Record(
        run_id=run.run_id,
        profile=named.name,
        scheduler=spec.scheduler,
        host=named.profile.host,
        transport=named.profile.transport,
        ssh_config=named.profile.ssh_config,
        runs_root=spec.runs_root,
        run_dir=run.dir,
        stage=spec.stage,
        model=spec.model,
        job_name=spec.job_name,
        nodes=spec.nodes,
        stamp=stamp,
        content_hash=content_hash,
        slurm_bin=spec.slurm_bin,
        prelude=spec.prelude,
        cluster=spec.sbatch.get("clusters", ""),
        outputs={name: resolved.values[name] for name in spec.outputs},
        layout=checks.saved_layout(resolved.values),
        outputs_at={name: _on_cluster(resolved.values[name], spec) for name in spec.outputs},
    )


def build(resolved: Resolved, record: Record) -> bundle.Bundle:
    """The contents of the run's directory."""
    run = paths.RunPaths(record.runs_root, record.run_id)
    own = resources.for_bundle()
    return bundle.build(resolved.spec, run, record.stamp, own, resolved.secrets, shared(record))


def _on_cluster(path: str, spec: RunSpec) -> str:
    """A path of the container as the cluster knows it: through the innermost mount."""
    mounts = [text.split(":")[:2] for text in spec.mounts]
    inner = [(target, source) for source, target in mounts if f"{path}/".startswith(f"{target.rstrip('/')}/")]
    if not inner:
        return path
    target, source = max(inner, key=lambda pair: len(pair[0]))
    return source.rstrip("/") + path[len(target.rstrip("/")) :]


def checked(resolved: Resolved) -> None:
    """Raises ChecksFailed where an issue is an error."""
    if any(issue.severity == "error" for issue in resolved.issues):
        raise ChecksFailed(resolved.issues)


def send(prepared: Prepared, records: Records, connect: Callable[[], Transport]) -> tuple[Record, bool]:
    """Submit: one exec. Returns the record with its job id, and whether the cluster had the run already.

    Raises SchedulerRefused when no job was made, and TransportError. Where it is not known whether a job was made, the
    record stays, and the same command takes the submission up again.
    """
    record, spec = prepared.record, prepared.resolved.spec
    made = prepared.bundle
    archive = small_enough(made.tar(), {**made.files, **made.secrets})
    transport = connect()
    taken_up = records.holds(record)
    records.save(record)
    try:
        script = jobs.script("submit", **parameters(spec, record, prepared.twins))
        result = transport.run(script, stdin=gzip.compress(archive, mtime=0))
    except TransportError as error:
        if not taken_up and not isinstance(error, ConnectionLost | CommandTimeout):
            records.forget(record)  # the script never started
        raise
    try:
        ids, existed = jobs.parse_submission(
            *(said.decode(errors="replace") for said in (result.stdout, result.stderr))
        )
    except MlmsubError as refused:
        if not getattr(refused, "may_exist", False):
            records.forget(record)
        raise
    for twin in prepared.twins if existed else ():
        if ids[0] == twin.job_id:
            records.forget(record)
            return twin, True
    return records.submitted(record, *ids), existed


def small_enough(archive: bytes, files: Mapping[str, bytes]) -> bytes:
    """The archive; UsageError naming the largest files where it is no longer a thing to send with every run."""
    if len(archive) > SIZE_LIMIT:
        # run.yaml only repeats what the others hold
        sizes = sorted(((len(files[path]), path) for path in files if path != paths.SPEC), reverse=True)
        largest = ", ".join(f"{path} ({size / 2**20:.0f} MiB)" for size, path in sizes[:5])
        raise UsageError(
            f"the run would take {len(archive) / 2**20:.0f} MiB along, more than {SIZE_LIMIT / 2**20:.0f}: {largest}",
            fix="put large files on the cluster, and name their path there",
        )
    return archive


def parameters(spec: RunSpec, record: Record, twins: Sequence[Record] = ()) -> dict[str, str]:
    """What slurm/remote/submit.sh is told of a run."""
    return {
        "run_dir": record.run_dir,
        "scheduler": spec.scheduler,
        "slurm_bin": spec.slurm_bin,
        "prelude": spec.prelude,
        "clusters": spec.sbatch.get("clusters", ""),
        "pass_env": " ".join(spec.pass_env),
        "twins": "".join(f"{twin.run_dir}\n" for twin in twins),
        "image": spec.image if spec.image.startswith("/") else "",
        "sources": "".join(f"{mount.split(':')[0]}\n" for mount in spec.mounts),
        "cluster_setup": spec.setup.on_cluster,
        "ntasks": str(spec.ntasks),
        "job_name": spec.job_name,
        "stamp": record.stamp,
        "chain": str(spec.chain),
        "parents": spec.parent_lines,
        "script": spec.script_file,
        "unpack": "gzip -dc",
    }
