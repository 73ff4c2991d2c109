"""The validate stage on a tiny base with an untrained draft: what it writes, compares and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rig import Runner


@pytest.fixture(scope="module")
def base_and_draft(stage: Runner, source: Path, folder: Path) -> Path:
    target = folder / "eagle-for-validate"
    made = stage("convert", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=target, MLM_EXTRA_ARGS="--algorithm eagle3")
    assert made.code == 0, made.out
    return target


def test_validate(stage: Runner, source: Path, base_and_draft: Path, folder: Path) -> None:
    """Answers are kept, and compared in the next run; a bound that is missed fails, and the result is there."""
    prompts, truth = folder / "asked.jsonl", folder / "kept" / "truth.jsonl"
    prompts.write_text('{"category": "some", "prompt": "The sky is"}\n{"prompt": 7}\n{"prompt": "One and two"}\n')
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": base_and_draft, "PROMPTS_PATH": prompts, "OSL": 6, "STEPS": 2}
    first = stage("validate", VALIDATE_OUT=folder / "v1", SAVE_GT_PATH=truth, MLM_EXTRA_ARGS="", **given)
    assert first.code == 0, first.out
    assert "1 of 3 prompts are left out; record 1" in first.out
    result = json.loads((folder / "v1" / "acceptance.json").read_text())
    assert (result["prompts"], result["tokens"], list(result["categories"])) == (2, 12, ["some", "all"])
    events = [json.loads(line) for line in (first.run_dir / "state" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "acceptance"]
    assert event["acceptance_length"] == result["acceptance_length"]
    assert (event["steps"], event["osl"]) == (2, 6)

    lines = [json.loads(line) for line in truth.read_text().splitlines()]
    lines[1]["tokens"][2] += 1
    truth.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = stage(
        "validate", VALIDATE_OUT=folder / "v2", GT_PATH=truth, MLM_EXTRA_ARGS="--lower-bound 2.9 --osl 4", **given
    )
    assert again.code == 1
    assert "MLM_LOWER_BOUND: the acceptance length 1." in again.out
    assert f"1 of 2 answers are those of {truth}; the first that differs: prompt 2" in again.out
    assert (folder / "v2" / "acceptance.json").is_file()

    truth.write_text(json.dumps(lines[0]) + "\n")
    other = stage("validate", VALIDATE_OUT=folder / "v3", GT_PATH=truth, MLM_EXTRA_ARGS="", **given)
    assert other.code == 2
    assert "has no answer to prompt 2" in other.out
    assert not (folder / "v3" / "acceptance.json").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "MLM_MODEL_CKPT: is not set"),
        ({"PP": 2, "WORLD_SIZE": 2}, "set PP=1"),
        ({"MLM_LOWER_BOUND": "0.4"}, "no acceptance length"),
        ({"PROMPTS_PATH": "missing.jsonl"}, "PROMPTS_PATH"),
    ],
)
def test_inputs_of_validate_are_read_first(
    stage: Runner, source: Path, base_and_draft: Path, folder: Path, given: dict, said: str
) -> None:
    rest = {"MLM_MODEL_CKPT": base_and_draft} if given else {}
    made = stage("validate", HF_MODEL_CKPT=source, VALIDATE_OUT=folder / "v4", **rest, **given)
    assert (made.code, said in made.out) == (2, True), made.out
