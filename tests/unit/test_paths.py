"""Run ids, run directories, job names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlmsub.core import paths, stages


def test_a_run_lies_in_the_month_of_its_submission() -> None:
    run = paths.RunPaths("/fsw/runs/", paths.run_id("20261130-235959", "quantize", "0a1b2c"))
    assert run.dir == "/fsw/runs/202611/20261130-235959-quantize-0a1b2c"


@pytest.mark.parametrize("stage", stages.STAGES)
def test_every_stage_makes_a_run_id(stage: str) -> None:
    assert paths.RunPaths("/r", paths.run_id("20261130-120000", stage, "ffffff")).run_id


@pytest.mark.parametrize("text", ["", "..", "x/../../etc", "20261130-120000-a/b-0a1b2c", "20261130-120000-a-0a1b2c\n"])
def test_what_is_no_run_id_makes_no_path(text: str) -> None:
    with pytest.raises(ValueError, match="not a run id"):
        paths.RunPaths("/r", text)


@given(st.lists(st.text(), max_size=3))
def test_any_name_becomes_one_that_can_stand_in_a_log_file_name(parts: list[str]) -> None:
    name = paths.job_name(*parts)
    assert re.fullmatch(r"[A-Za-z0-9_+][A-Za-z0-9._+-]*", name)
    assert len(name.encode()) <= 64
    assert paths.job_name(name) == name


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("quantize", "Llama-3.1-8B-Instruct"), "quantize-Llama-3.1-8B-Instruct"),
        (("eagle3", ""), "eagle3"),
        (("my job/№1",), "my-job-1"),
        (("a/b%j",), "a-b-j"),
        (("",), "mlmsub"),
        (("x" * 80,), "x" * 64),
    ],
)
def test_job_names(parts: tuple[str, ...], name: str) -> None:
    assert paths.job_name(*parts) == name
