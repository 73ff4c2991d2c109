"""Submit a run: build the bundle here, then one exec over one connection; nothing is submitted twice."""

from __future__ import annotations

import gzip
import secrets
from collections.abc import Callable, Mapping
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
    twin: Record | None = None  # a run of the same content, which is the answer while it is queued or at work


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
    twin = None if new or record else records.twin(content_hash, named.name)
    if record is None:
        stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
        run = paths.RunPaths(spec.runs_root, paths.run_id(stamp, spec.stage, secrets.token_hex(3)))
        record = Record(
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
    run = paths.RunPaths(record.runs_root, record.run_id)
    return Prepared(
        record, bundle.build(spec, run, record.stamp, own, resolved.secrets, shared(record)), resolved, twin
    )


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
    archive = _small_enough(prepared.bundle)
    transport = connect()
    taken_up = records.holds(record)
    records.save(record)
    try:
        script = jobs.script("submit", **_parameters(spec, record, prepared.twin))
        result = transport.run(script, stdin=gzip.compress(archive, mtime=0))
    except TransportError as error:
        if not taken_up and not isinstance(error, ConnectionLost | CommandTimeout):
            records.forget(record)  # the script never started
        raise
    try:
        job_id, existed = jobs.parse_submission(
            *(said.decode(errors="replace") for said in (result.stdout, result.stderr))
        )
    except MlmsubError as refused:
        if not getattr(refused, "may_exist", False):
            records.forget(record)
        raise
    if prepared.twin and existed and job_id == prepared.twin.job_id:
        records.forget(record)
        return prepared.twin, True
    return records.submitted(record, job_id), existed


def _small_enough(made: bundle.Bundle) -> bytes:
    """The archive; UsageError naming the largest files where it is no longer a thing to send with every run."""
    archive = made.tar()
    if len(archive) > SIZE_LIMIT:
        files = {**made.files, **made.secrets}
        # run.yaml only repeats what the others hold
        sizes = sorted(((len(files[path]), path) for path in files if path != paths.SPEC), reverse=True)
        largest = ", ".join(f"{path} ({size / 2**20:.0f} MiB)" for size, path in sizes[:5])
        raise UsageError(
            f"the run would take {len(archive) / 2**20:.0f} MiB along, more than {SIZE_LIMIT / 2**20:.0f}: {largest}",
            fix="put large files on the cluster, and name their path there",
        )
    return archive


def _parameters(spec: RunSpec, record: Record, twin: Record | None) -> Mapping[str, str]:
    return {
        "run_dir": record.run_dir,
        "scheduler": spec.scheduler,
        "slurm_bin": spec.slurm_bin,
        "prelude": spec.prelude,
        "clusters": spec.sbatch.get("clusters", ""),
        "pass_env": " ".join(spec.pass_env),
        "twin_dir": twin.run_dir if twin else "",
        "twin_job": twin.job_id if twin else "",
        "image": spec.image if spec.image.startswith("/") else "",
        "sources": "".join(f"{mount.split(':')[0]}\n" for mount in spec.mounts),
        "cluster_setup": spec.setup.on_cluster,
        "ntasks": str(spec.ntasks),
        "job_name": spec.job_name,
        "stamp": record.stamp,
        "parents": "".join(f"{parent.run_dir}\n" for parent in spec.parents),
        "script": spec.script_file,
        "unpack": "gzip -dc",
    }
