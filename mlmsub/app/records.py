"""One JSON record per run on the client's side, written atomically; no other database."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from mlmsub.app.config import Place
from mlmsub.core.errors import UsageError


@dataclass(frozen=True)
class Record:
    """What the client must know to find a run again. `job_id` is empty while a submission is under way."""

    run_id: str
    profile: str
    scheduler: str
    host: str
    transport: Literal["auto", "paramiko", "openssh"]
    ssh_config: str
    runs_root: str
    run_dir: str
    stage: str
    model: str
    job_name: str
    nodes: int
    stamp: str
    content_hash: str
    job_id: str = ""
    links: tuple[str, ...] = ()  # of a chain, the jobs that follow this one
    slurm_bin: str = ""
    prelude: str = ""
    cluster: str = ""
    outputs: dict[str, str] = field(default_factory=dict)  # as the job sees them
    layout: dict[str, str] = field(default_factory=dict)  # TP, PP, EP, ETP, and how the optimizer's state was saved
    outputs_at: dict[str, str] = field(default_factory=dict)  # the same on the cluster

    @property
    def jobs(self) -> tuple[str, ...]:
        return (self.job_id, *self.links) if self.job_id else ()

    @property
    def place(self) -> Place:
        """Where the run is; never another host than the one that it was submitted to."""
        return Place(self.host, self.transport, self.ssh_config)


def shared(record: Record) -> bytes:
    """What goes into the run directory, so that another machine can find the run: all but this machine's own view."""
    data = asdict(record)
    for name in (*_OWN_VIEW, *_JOBS):
        del data[name]
    return json.dumps(data, indent=1).encode() + b"\n"


_OWN_VIEW = ("profile", "host", "transport", "ssh_config")  # this machine's, not the run's
_JOBS = ("job_id", "links")  # not known yet


class Records:
    """The records in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, record: Record) -> None:
        self.write(self.folder / f"{record.run_id}.json", asdict(record))

    def write(self, path: Path, data: dict[str, Any]) -> None:
        """Put a JSON file in its place, whole or not at all."""
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.write_text(json.dumps(data, indent=1) + "\n")
            part.replace(path)
        except OSError as error:
            raise self._not_writable(error) from None

    def holds(self, record: Record) -> bool:
        return (self.folder / f"{record.run_id}.json").exists()

    def submitted(self, record: Record, job_id: str, *links: str) -> Record:
        done = replace(record, job_id=job_id, links=links)
        self.save(done)
        return done

    def adopt(self, data: dict[str, Any], place: Place, profile: str, job_id: str, *links: str) -> Record:
        """A run that another machine submitted, from what it left in the run directory."""
        view = dict(zip(_OWN_VIEW, (profile, *astuple(place)), strict=True))
        record = _record(data | view | {"job_id": job_id, "links": links})
        self.save(record)
        return record

    def forget(self, record: Record) -> None:
        (self.folder / f"{record.run_id}.json").unlink(missing_ok=True)

    def all(self) -> list[Record]:
        """All records, newest first; one that cannot be read is left out."""
        found = []
        for path in self.folder.glob("*.json") if self.folder.is_dir() else ():
            try:
                found.append((path.stat().st_mtime_ns, _record(json.loads(path.read_text()))))
            except (OSError, ValueError, TypeError, AttributeError):  # not ours, or not whole
                continue
        return [record for _, record in sorted(found, key=lambda pair: (pair[1].stamp, pair[0]), reverse=True)]

    def unfinished(self, content_hash: str, profile: str) -> Record | None:
        """The last submission of the same content that never heard the cluster's answer."""
        return next(
            (r for r in self.all() if not r.job_id and r.content_hash == content_hash and r.profile == profile),
            None,
        )

    @contextmanager
    def one_at_a_time(self, content_hash: str) -> Iterator[None]:
        """Of two commands of the same content, started together, the second waits and finds the first one's run."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (self.folder / f".{content_hash[:16]}.lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise self._not_writable(error) from None
        with lock:
            yield

    def _not_writable(self, error: OSError) -> UsageError:
        return UsageError(f"cannot write to {self.folder}: {error.strerror}", fix="set XDG_STATE_HOME elsewhere")

    def twins(self, content_hash: str, profile: str) -> tuple[Record, ...]:
        """The last runs of the same content that were submitted, newest first."""
        return tuple(r for r in self.all() if r.job_id and (r.content_hash, r.profile) == (content_hash, profile))[:10]

    def writer_of(self, path: str, profile: str) -> Record | None:
        """The last run that was to write this checkpoint."""
        return next((r for r in self.all() if path in r.outputs.values() and r.profile == profile), None)

    def find(self, word: str) -> Record:
        """The run with this id, beginning of an id, or id of one of its jobs; `last` is the newest. Else UsageError."""
        records = self.all()
        if word == "last":
            if not records:
                raise UsageError("no runs yet", fix="`mlmsub submit` makes one")
            return records[0]
        exact = [r for r in records if word in (r.run_id, *r.jobs)]
        found = exact or [r for r in records if r.run_id.startswith(word)]
        if len(found) == 1:
            return found[0]
        if len(found) > 1:
            raise UsageError(f"{word!r} fits {len(found)} runs", fix=f"such as {found[0].run_id} and {found[1].run_id}")
        raise UsageError(f"there is no run {word!r}", fix="see `mlmsub list`")


class Snapshot(Records):
    """The records as they are now, read once, with runs that are only planned before them."""

    def __init__(self, records: Records) -> None:
        super().__init__(records.folder)
        self._all = records.all()

    def all(self) -> list[Record]:
        return self._all

    def add(self, record: Record) -> None:
        self._all.insert(0, record)


def _record(data: dict[str, Any]) -> Record:
    known = {f.name for f in fields(Record)}
    data = data | {"links": tuple(data.get("links", ()))}
    return Record(
        **{"transport": "auto", "ssh_config": ""} | {key: value for key, value in data.items() if key in known}
    )
