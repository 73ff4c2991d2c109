"""Submit a run: build the bundle here, then one exec over one connection; nothing is submitted twice."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from mlmsub.app import resources
from mlmsub.app.records import Record, Records
from mlmsub.app.resolve import Resolved
from mlmsub.core import bundle, paths
from mlmsub.core.errors import ChecksFailed, SchedulerRefused
from mlmsub.core.spec import RunSpec
from mlmsub.slurm import jobs
from mlmsub.transport import Transport


@dataclass(frozen=True)
class Prepared:
    """A run that could be sent: its record (without a job id) and its bundle."""

    record: Record
    bundle: bundle.Bundle
    resolved: Resolved


def prepare(resolved: Resolved, records: Records, *, new: bool = False) -> Prepared:
    """Name the run and build its bundle.

    A submission of the same content that never heard an answer is taken up again under its own id, unless `new`:
    the cluster is asked first whether it knows that run.
    """
    spec, named = resolved.spec, resolved.profile
    own = resources.for_bundle()
    content_hash = bundle.content_hash(spec, own)
    record = None if new else records.unfinished(content_hash, named.name)
    if record is None:
        stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
        run = paths.RunPaths(spec.runs_root, paths.run_id(stamp, spec.stage, secrets.token_hex(3)))
        record = Record(
            run_id=run.run_id, profile=named.name, scheduler=spec.scheduler, host=named.profile.host,
            runs_root=spec.runs_root, run_dir=run.dir, stage=spec.stage, model=spec.model, job_name=spec.job_name,
            nodes=spec.nodes, stamp=stamp, content_hash=content_hash, slurm_bin=spec.slurm_bin,
            cluster=spec.sbatch.get("clusters", ""),
            outputs={name: resolved.values[name] for name in spec.outputs},
        )  # fmt: skip
    run = paths.RunPaths(record.runs_root, record.run_id)
    return Prepared(record, bundle.build(spec, run, record.stamp, own, resolved.secrets), resolved)


def send(prepared: Prepared, records: Records, connect: Callable[[], Transport]) -> tuple[Record, bool]:
    """Submit. Returns the record with its job id, and whether the cluster had the run already.

    Raises ChecksFailed before anything is sent, SchedulerRefused when no job was made, TransportError when it is not
    known: the record then stays, and the same command takes the submission up again.
    """
    if any(issue.severity == "error" for issue in prepared.resolved.issues):
        raise ChecksFailed(prepared.resolved.issues)
    records.save(prepared.record)
    script = jobs.script("submit", **_parameters(prepared.resolved.spec, prepared.record))
    try:
        transport = connect()
    except Exception:  # nothing was sent
        records.forget(prepared.record)
        raise
    with transport:
        result = transport.run(script, stdin=prepared.bundle.tar())
    try:
        job_id, existed = jobs.parse_submission(result.stdout.decode(errors="replace"))
    except SchedulerRefused as refused:
        if not refused.may_exist:
            records.forget(prepared.record)
        raise
    return records.submitted(prepared.record, job_id), existed


def _parameters(spec: RunSpec, record: Record) -> Mapping[str, str]:
    return {
        "run_dir": record.run_dir,
        "scheduler": spec.scheduler,
        "slurm_bin": spec.slurm_bin,
        "clusters": spec.sbatch.get("clusters", ""),
        "pass_env": " ".join(spec.pass_env),
        "image": spec.image if spec.image.startswith("/") else "",
        "sources": "".join(f"{mount.split(':')[0]}\n" for mount in spec.mounts),
        "ntasks": str(spec.ntasks),
        "job_name": spec.job_name,
        "stamp": record.stamp,
        "parents": " ".join(parent.run_dir for parent in spec.parents),
    }
