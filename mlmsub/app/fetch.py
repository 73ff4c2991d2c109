"""Bring files of a run back: its logs, and small outputs."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from mlmsub.app.records import Record
from mlmsub.core.errors import UsageError
from mlmsub.slurm import jobs
from mlmsub.transport import Transport

Progress = Callable[[int, int], None]  # bytes so far, bytes in all


def fetch(run: Record, patterns: list[str], target: Path, transport: Transport, progress: Progress) -> list[Path]:
    """Copy what matches into `target` and return the files.

    A pattern is relative to the run directory (`logs/*`, `state/*`), or starts with one of the run's outputs
    (`EXPORT_DIR/*.json`). `*` also matches `/`.
    """
    found: list[Path] = []
    for folder, wanted in _by_folder(run, patterns).items():
        with tempfile.TemporaryFile() as archive:
            head, total, received = b"", -1, 0

            def write(data: bytes) -> None:
                nonlocal head, total, received
                if total < 0:
                    head += data  # called within the loop's turn, as are these
                    size, newline, data = head.partition(b"\n")
                    if not newline:
                        return
                    total = int(size or 0)
                received += archive.write(data)
                progress(min(received, total), total)

            left_out: list[bytes] = []
            script = jobs.script("fetch", folder=folder, patterns="\n".join(wanted))
            code = transport.stream(script, write, left_out.append)
            if code == 3:
                raise UsageError(f"{folder} is not there")
            if code == 4:
                raise UsageError(f"nothing in {folder} matches {', '.join(wanted)}")
            if code:
                said = b"".join(left_out).decode(errors="replace").strip()
                raise UsageError(
                    f"some files of {folder} could not be read: {said}", fix="ask for the others by pattern"
                )
            archive.seek(0)
            found += _unpack(archive, target)  # type: ignore[arg-type]
    return found


def _by_folder(run: Record, patterns: list[str]) -> dict[str, list[str]]:
    folders: dict[str, list[str]] = {}
    for pattern in patterns or ["logs/*"]:
        first, _, rest = pattern.partition("/")
        folder, wanted = (run.outputs_at[first], rest or "*") if first in run.outputs_at else (run.run_dir, pattern)
        folders.setdefault(folder, []).append(wanted)
    return folders


def _unpack(archive: tempfile.SpooledTemporaryFile[bytes], target: Path) -> list[Path]:
    """Plain files only, and none outside `target`: the archive comes from another machine."""
    found = []
    with tarfile.open(fileobj=archive) as members:
        for member in members:
            parts = [part for part in PurePosixPath(member.name).parts if part != "."]
            source = members.extractfile(member) if member.isreg() else None
            if source is None or ".." in parts or member.name.startswith("/"):
                continue
            path = target.joinpath(*parts)
            if path.exists():
                raise UsageError(f"{path} is there already", fix="move it, or give another folder by --to")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                shutil.copyfileobj(source, file)
            found.append(path)
    return found
