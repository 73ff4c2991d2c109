"""What a stage prints is its own: no line of a library's that says nothing to the user, and none from a second rank."""

import re
from pathlib import Path

from rig import Result, Runner

OURS = re.compile(
    r"\[\w+\]|WARNING: no calibration data|\d+ processes on|read at most|\d+ quantizers calibrated|calibration: |FP8: "
    r"|perplexity of the fixed text|[\d.]+ GiB per process|(quantize|export): done|  \w+(\.json)? = "
)


def _others(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not OURS.match(line)]


def test_of_one_process(fp8: Result, fp8_export: Result) -> None:
    assert _others(fp8.out) == []
    assert _others(fp8_export.out) == []


def test_of_two_processes(stage: Runner, source: Path, tmp_path: Path) -> None:
    """As real processes, so that warnings and progress bars are seen too, and each line once."""
    result = stage.ranks("quantize", "fp8", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "q")
    assert result.code == 0, result.out
    assert _others(result.out) == []
    assert len(re.findall(r"^\[calibrate\] FP8", result.out, re.MULTILINE)) == 1


def test_an_error_that_all_ranks_raise_is_told_once(stage: Runner, source: Path, tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("release")
    result = stage.ranks(
        "quantize", "fp8", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "ckpt", MLM_MODEL_SAVE=tmp_path / "q"
    )
    assert result.code == 2, result.out
    assert result.out.count("is not a complete checkpoint") == 1
