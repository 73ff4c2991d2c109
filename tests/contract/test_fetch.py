"""What `mlmsub fetch` makes of an answer, however the connection cuts it."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from fake_transport import FakeTransport
from specs import record

from mlmsub.app.fetch import fetch
from mlmsub.transport import Result


@pytest.mark.parametrize("size", [b"123456789\n", b"\n"], ids=["known", "unknown"])
def test_files_arrive_whole(tmp_path: Path, size: bytes) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as members:
        member = tarfile.TarInfo("logs/a.log")
        member.size = 5
        members.addfile(member, io.BytesIO(b"a\nlog"))
    told: list[tuple[int, int]] = []
    transport = FakeTransport(lambda _: Result(0, size + archive.getvalue(), b""))
    (file,) = fetch(record(), [], tmp_path, transport, lambda done, total: told.append((done, total)))
    assert file.read_bytes() == b"a\nlog" and told[-1][1] == int(size.strip() or 0)
