"""A disk that is full: one sentence with the path, an exit code, and what was there before is as it was.

A limit on the size of a file stands in for the full disk: the kernel refuses the write in the same way.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from rig import Result, Runner
from test_eagle3 import place, variables
from test_saves import longest_file

__all__ = ["place"]


def told(result: Result, field: str, path: Path) -> None:
    assert result.code == 1, result.out
    (line,) = [line for line in result.out.splitlines() if "ERROR" in line]
    assert f"{field}: {path}" in line and "cannot be written: " in line and "Fix: make room" in line
    assert "Traceback" not in result.out
    assert not (result.run_dir / "state" / "0" / "done.json").exists()


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def converted(stage: Runner, source: Path, place: Path) -> Path:
    words = ("--algorithm", "eagle3", "--eagle-config", str(place / "draft.json"))
    result = stage("convert", *words, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=place / "mlm", MLM_EXTRA_ARGS="")
    assert result.code == 0, result.out
    return place / "mlm"


def test_an_export_of_a_draft(stage: Runner, source: Path, converted: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": converted, "EXPORT_DIR": out, "MLM_OVERWRITE": 1}
    assert stage("export", "--export-extra-modules", **given).code == 0
    before = files(out)
    with longest_file(20_000):
        result = stage("export", "--export-extra-modules", **given)
    told(result, "EXPORT_DIR", out)
    after = files(out)
    assert {name: after[name] for name in before} == before
    assert stage("export", "--export-extra-modules", **given).code == 0, "and again, once there is room"
    assert files(out) == before


def test_an_export_of_a_model(stage: Runner, source: Path, converted: Path, tmp_path: Path) -> None:
    with longest_file(20_000):
        result = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=converted, EXPORT_DIR=tmp_path / "hf")
    told(result, "EXPORT_DIR", tmp_path / "hf")


def test_a_file_beside_the_weights(stage: Runner, source: Path, converted: Path, tmp_path: Path) -> None:
    """modelopt leaves out what it cannot copy, with a warning: an export without its tokenizer would count."""
    larger = shutil.copytree(source, tmp_path / "larger")
    (larger / "notes.txt").write_bytes(bytes(2**22))
    with longest_file(2**21):
        result = stage("export", HF_MODEL_CKPT=larger, MLM_MODEL_CKPT=converted, EXPORT_DIR=tmp_path / "hf")
    told(result, "EXPORT_DIR", tmp_path / "hf")


def test_the_answers_of_validate(stage: Runner, source: Path, converted: Path, place: Path, tmp_path: Path) -> None:
    out = tmp_path / "v"
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": converted, "VALIDATE_OUT": out, "MLM_OVERWRITE": 1, "OSL": 200}
    given |= {"PROMPTS_PATH": place / "prompts.jsonl", "MLM_EXTRA_ARGS": ""}
    assert stage("validate", **given).code == 0
    before = files(out)
    size = len(before["answers.jsonl"])
    with longest_file(size - 1):
        result = stage("validate", **given)
    told(result, "VALIDATE_OUT", out)
    after = files(out)
    assert {name: after[name] for name in before} == before


def test_the_cache_of_the_data(stage: Runner, source: Path, place: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    given = variables(place, tmp_path / "mlm", HF_MODEL_CKPT=source)
    given["MLM_DATA_ARGS"] = f"{given['MLM_DATA_ARGS']} --data-cache-path {cache}"
    with longest_file(3_000):
        result = stage("eagle3", "--no-eval", **given)
    told(result, "--data-cache-path", cache)
    assert not list(cache.iterdir()), "no half of it is left"


def test_the_run_directory(stage: Runner, source: Path, tmp_path: Path) -> None:
    run_dir = stage.run_dir()
    events = run_dir / "state" / "events.jsonl"
    events.parent.mkdir()
    events.write_text(json.dumps({"event": "old"}) + "\n")
    with longest_file(events.stat().st_size):
        result = stage("convert", run_dir=run_dir, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path, MLM_EXTRA_ARGS="")
    told(result, "MLMSUB_RUN_DIR", events)
