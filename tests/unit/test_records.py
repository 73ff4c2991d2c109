"""The client's records of its runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from specs import record

from mlmsub.app.records import Record, Records, shared
from mlmsub.core.errors import UsageError


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "state" / "runs")


def saved(records: Records, *made: Record) -> None:
    for seconds, one in enumerate(made):
        records.save(one)
        os.utime(records.folder / f"{one.run_id}.json", (seconds, seconds))


def test_a_record_comes_back_as_it_was(records: Records) -> None:
    saved(records, record("20261130-120000-quantize-aaaaaa"))
    assert records.all() == [record("20261130-120000-quantize-aaaaaa")]


def test_nothing_is_left_beside_a_record(records: Records) -> None:
    records.save(record("a"))
    records.submitted(record("a"), "9")
    assert [path.name for path in records.folder.iterdir()] == ["a.json"]
    assert records.find("a").job_id == "9"


def test_a_save_that_breaks_off_leaves_the_old_record(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(records, record("a", job_id=""))

    def full(self: Path, text: str) -> int:
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UsageError, match="No space"):
        records.submitted(record("a"), "9")
    assert records.all() == [record("a", job_id="")]


def test_the_folder_is_the_users_alone(records: Records) -> None:
    records.save(record("a"))
    assert records.folder.stat().st_mode & 0o777 == 0o700


def test_runs_are_found_by_id_beginning_and_job(records: Records) -> None:
    one = record("20261130-120000-quantize-aaaaaa", job_id="11")
    two = record("20261130-130000-export-bbbbbb", job_id="12")
    saved(records, one, two)
    assert records.find(one.run_id) == one
    assert records.find("20261130-13") == two
    assert records.find("11") == one
    assert records.find("last") == two
    assert records.all() == [two, one]


def test_any_job_of_a_chain_finds_its_run(records: Records) -> None:
    records.submitted(record("a", job_id=""), "11", "12", "13")
    assert [records.find(word).jobs for word in ("a", "11", "13")] == [("11", "12", "13")] * 3
    assert b'"1' not in shared(records.find("a")), "the run directory is made before its jobs"


def test_a_word_that_fits_two_runs_names_them(records: Records) -> None:
    saved(records, record("20261130-a"), record("20261130-b"))
    with pytest.raises(UsageError, match="fits 2 runs") as raised:
        records.find("2026")
    assert "20261130-a" in raised.value.fix
    assert "20261130-b" in raised.value.fix


def test_a_whole_id_counts_more_than_a_beginning(records: Records) -> None:
    saved(records, record("a", job_id="1"), record("ab", job_id="2"))
    assert records.find("a").job_id == "1"


def test_a_run_that_is_not_there(records: Records) -> None:
    with pytest.raises(UsageError, match="no runs yet"):
        records.find("last")
    saved(records, record("a"))
    with pytest.raises(UsageError, match="there is no run 'x'") as raised:
        records.find("x")
    assert "mlmsub list" in raised.value.fix


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"{}", b'{"run_id": "x"}', b'"x"x'])
def test_a_record_that_cannot_be_read_is_left_out(records: Records, content: bytes) -> None:
    saved(records, record("a"))
    (records.folder / "bad.json").write_bytes(content)
    assert [found.run_id for found in records.all()] == ["a"]


@pytest.mark.parametrize("content", ["[]", "null", "3"])
def test_a_record_that_is_no_mapping_is_left_out(records: Records, content: str) -> None:
    saved(records, record("a"))
    (records.folder / "bad.json").write_text(content)
    assert [found.run_id for found in records.all()] == ["a"]


def test_a_record_of_a_newer_version_is_read(records: Records) -> None:
    saved(records, record("a"))
    path = records.folder / "a.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"new_key": 1}))
    assert records.all() == [record("a")]


def test_an_unfinished_submission_of_the_same_content_is_found(records: Records) -> None:
    saved(
        records, record("a", job_id="", content_hash="h"), record("b", job_id="", content_hash="other"),
        record("c", job_id="", content_hash="h", profile="prod"), record("d", job_id="3", content_hash="h"),
    )  # fmt: skip
    found = records.unfinished("h", "lab")
    assert found is not None
    assert found.run_id == "a"
    assert records.unfinished("none", "lab") is None


def test_a_forgotten_record_is_gone(records: Records) -> None:
    saved(records, record("a"))
    records.forget(record("a"))
    records.forget(record("a"))
    assert records.all() == []
