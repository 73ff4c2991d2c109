"""Several stages in one run: the same results as one run for each, with less written and read."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from importlib import import_module
from itertools import combinations
from pathlib import Path

import pytest
import torch
from rig import ENOUGH, LAYERS, MODEL, ROOT, Result, Runner, make_llama, tensors
from test_errors import one_line
from test_mmlu import teach_letters, write_csv

from mlmsub.core import stages
from mlmsub.runtime import driver
from mlmsub.runtime.__main__ import STAGES
from mlmsub.runtime.env import Env

WORDS = ("fp8", "The river", "Tea is made of leaves")
TEXT = "--osl 6 --ignore-eos"
FLAGS = f"{ENOUGH} {TEXT}"


def digests(folder: Path) -> dict[str, str]:
    """The files of a Hugging Face checkpoint, by content."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def events(result: Result) -> list[dict]:
    return [json.loads(line) for line in (result.run_dir / "state" / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def apart(stage: Runner, source: Path, fp8: Result, fp8_export: Result, folder: Path) -> Path:
    """A run for each stage: the folder of the completions; fp8 and fp8-hf are the other outputs."""
    made = stage(
        "generate", *WORDS[1:], HF_MODEL_CKPT=source, MLM_MODEL_CKPT=folder / "fp8", GENERATE_OUT=folder / "apart",
        MLM_EXTRA_ARGS=TEXT,
    )  # fmt: skip
    assert made.code == 0 and fp8_export.code == 0, made.out + fp8_export.out
    return folder / "apart"


def test_three_stages_make_what_three_runs_do(
    stage: Runner, source: Path, apart: Path, folder: Path, tmp_path: Path
) -> None:
    """export stands before generate: it leaves the model as it was."""
    variables = {"HF_MODEL_CKPT": source, "MLM_WORK_DIR": tmp_path, "MLM_EXTRA_ARGS": FLAGS}
    made = stage("quantize+export+generate", *WORDS, **variables)
    assert made.code == 0, made.out
    assert "[load]" not in made.out and "[save]" not in made.out
    assert "no checkpoint is written" in made.out and not (tmp_path / "test" / "tiny-llama_quant").exists()
    exported, answers = tmp_path / "test" / "tiny-llama_export", tmp_path / "test" / "tiny-llama_generate"
    assert digests(exported) == digests(folder / "fp8-hf")
    assert lines(answers) == lines(apart)
    done = made.done
    assert done["stage"] == "quantize+export+generate"
    assert done["outputs"] == {"EXPORT_DIR": str(exported), "GENERATE_OUT": str(answers)}
    assert list(done["seconds"]) == ["quantize", "export", "generate"] and min(done["seconds"].values()) > 0
    assert [part["stage"] for part in done["stages"]] == ["quantize", "export", "generate"]
    assert "calibrate" in done["stages"][0]["seconds"] and "export" in done["stages"][1]["seconds"]
    seen = [(event["stage"], event["event"]) for event in events(made) if event["event"] in ("start", "done")]
    assert seen[1:] == [(name, what) for name in made.done["seconds"] for what in ("start", "done")]


def test_a_checkpoint_that_was_asked_for_is_saved(
    stage: Runner, source: Path, apart: Path, folder: Path, tmp_path: Path
) -> None:
    asked = {"MLM_MODEL_SAVE": tmp_path / "q", "EXPORT_DIR": tmp_path / "hf", "GENERATE_OUT": tmp_path / "text"}
    made = stage("quantize+generate+export", *WORDS, HF_MODEL_CKPT=source, MLM_EXTRA_ARGS=FLAGS, **asked)
    assert made.code == 0, made.out
    assert "[save]" in made.out and "[load]" not in made.out
    assert made.done["outputs"] == {name: str(path) for name, path in asked.items()}
    assert (tmp_path / "q" / "latest_checkpointed_iteration.txt").is_file()
    assert digests(tmp_path / "hf") == digests(folder / "fp8-hf") and lines(tmp_path / "text") == lines(apart)


def test_groups_are_formed_anew_where_layouts_differ(stage: Runner, source: Path, tmp_path: Path) -> None:
    """Two tensor-parallel ranks, then one that exports while the other waits, then two again."""
    variables = {"HF_MODEL_CKPT": source, "MLM_WORK_DIR": tmp_path, "MLM_EXTRA_ARGS": FLAGS, "TP": 2}
    made = stage.ranks("quantize+export+generate", *WORDS, **variables)
    assert made.code == 0, made.out
    assert "rank 1: export uses 1 of 2 processes; not this one" in made.out
    assert made.out.count("[load] from") == 2 and "[save] to" in made.out
    apart = stage(
        "export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "test" / "tiny-llama_quant",
        EXPORT_DIR=tmp_path / "apart",
    )  # fmt: skip
    assert apart.code == 0, apart.out
    assert digests(tmp_path / "test" / "tiny-llama_export") == digests(tmp_path / "apart")
    assert len(lines(tmp_path / "test" / "tiny-llama_generate")) == 2


def test_scores_before_and_after(stage: Runner, tmp_path: Path) -> None:
    """A stage that comes twice has two folders; the second reads the model that was quantized in between."""
    source = teach_letters(make_llama(tmp_path / "hf", tied=False))
    given = {"HF_MODEL_CKPT": source, "MLM_WORK_DIR": tmp_path, "MMLU_DATA": write_csv(tmp_path / "data")}
    made = stage("mmlu+quantize+mmlu", "fp8", **given, MLM_EXTRA_ARGS=f"{ENOUGH} --few-shots 1")
    assert made.code == 0, made.out
    assert made.out.count("[import] from") == 1 and "[load]" not in made.out
    before, after = (
        json.loads((tmp_path / "test" / name / "mmlu.json").read_text())
        for name in ("tiny-llama_mmlu", "tiny-llama_mmlu-2")
    )
    assert before["source"] == str(source) and after["source"] == "the model of quantize"
    logits = [
        (tmp_path / "test" / name / "answers.jsonl").read_text() for name in ("tiny-llama_mmlu", "tiny-llama_mmlu-2")
    ]
    assert logits[0] != logits[1]


def test_a_pruned_model_keeps_its_size_through_the_stages_after(stage: Runner, source: Path, tmp_path: Path) -> None:
    """prune hands no live model on; quantize learns the sizes from its checkpoint, and export from quantize."""
    given = {"HF_MODEL_CKPT": source, "MLM_WORK_DIR": tmp_path, "MLM_EXTRA_ARGS": f"{ENOUGH} --layers-to-drop 2"}
    made = stage("prune+quantize+export", "fp8", **given)
    assert made.code == 0, made.out
    assert made.out.count("[load] from") == 1 and list(made.done["outputs"]) == ["MLM_MODEL_SAVE", "EXPORT_DIR"]
    exported = tmp_path / "test" / "tiny-llama_export"
    assert json.loads((exported / "config.json").read_text())["num_hidden_layers"] == LAYERS - 1
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in tensors(exported).values()) == (LAYERS - 1) * 7


@pytest.mark.parametrize("count", [1, 2])
def test_a_stage_that_fails_leaves_what_was_made(count: int, stage: Runner, source: Path, tmp_path: Path) -> None:
    """int8 is quantized and saved, and cannot be exported; with two ranks, one of them waits for the other's error."""
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_SAVE": tmp_path / "q", "MLM_WORK_DIR": tmp_path, "TP": count}
    run = stage if count == 1 else stage.ranks
    made = run("quantize+export+generate", "int8", "The river", MLM_EXTRA_ARGS=FLAGS, **given)
    one_line(made, "export: ERROR: MLM_MODEL_CKPT", "int8", "not exported")
    assert (tmp_path / "q" / "latest_checkpointed_iteration.txt").is_file()
    assert not (tmp_path / "test" / "tiny-llama_export" / "config.json").exists()
    assert [event["stage"] for event in events(made) if event["event"] == "done"] == ["quantize"]


@pytest.mark.parametrize(
    ("name", "words", "variables", "said"),
    [
        ("quantize+export", ("fp8", "more"), {}, ("export: ERROR: export", "takes a model only", "more")),
        ("quantize+export", ("fp8",), {"EXPORT_DIR": "/dev/null"}, ("export: ERROR: EXPORT_DIR",)),
        ("quantize+generate", ("fp8",), {"PROMPTS_PATH": "/nowhere.txt"}, ("generate: ERROR: PROMPTS_PATH",)),
        ("quantize+mmlu", ("fp8",), {"MLM_EXTRA_ARGS": "--prompts x"}, ("quantize: ERROR", "--prompts")),
        ("quantize+generate", ("fp8", "a", "--calib-sise", "4"), {}, ("--calib-sise", "--calib-size")),
    ],
)
def test_a_wrong_input_of_any_stage_is_told_before_the_first_works(
    name: str, words: tuple, variables: dict, said: tuple, stage: Runner, source: Path, tmp_path: Path
) -> None:
    result = stage(name, *words, HF_MODEL_CKPT=source, **{"MLM_WORK_DIR": tmp_path / "work", **variables})
    one_line(result, *said)
    assert not (tmp_path / "work").exists()


def test_an_unknown_stage_among_others(stage: Runner, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as left:
        stage("quantize+exprot")
    assert left.value.code == 2


# --- what the frame decides --------------------------------------------------------------------


def kinds(name: str) -> list:
    return [import_module(f"mlmsub.runtime.stages.{part}").Stage for part in name.split("+")]


@pytest.mark.parametrize(
    ("name", "variables", "live", "saves"),
    [
        ("quantize+export", {}, "01", "01"),
        ("quantize+export", {"TP": "2"}, "00", "11"),
        ("quantize+export", {"PP": "2", "WORLD_SIZE": "2"}, "01", "01"),
        ("quantize+export", {"PP": "2", "WORLD_SIZE": "4"}, "00", "11"),
        ("quantize+export", {"MLM_MODEL_SAVE": "/q"}, "01", "11"),
        ("quantize+generate+export", {"TP": "2"}, "010", "111"),
        ("convert+quantize", {"MLM_MODEL_SAVE": "/q"}, "01", "01"),
        ("convert+quantize+export", {}, "011", "001"),
        ("generate+mmlu", {}, "01", "11"),
        ("quantize+finetune+export", {}, "001", "111"),
    ],
)
def test_what_is_handed_over_and_what_is_saved(name: str, variables: dict, live: str, saves: str) -> None:
    steps = driver.plan(name.split("+"), kinds(name), Env({"WORLD_SIZE": "1", **variables}))
    assert "".join(str(int(step.live)) for step in steps) == live
    assert "".join(str(int(step.saves)) for step in steps) == saves


def flags(name: str) -> dict:
    kind = import_module(f"mlmsub.runtime.stages.{name}").Stage
    parser = ArgumentParser(add_help=False)
    kind.add_arguments(kind.__new__(kind), parser)
    return {flag: action for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize(("one", "other"), combinations(STAGES, 2))
def test_flags_of_any_two_stages_stand_on_one_line(one: str, other: str) -> None:
    """A flag that both have is read by both, so it has the same shape."""
    left, right = flags(one), flags(other)
    for flag in set(left) & set(right):
        assert type(left[flag]) is type(right[flag]) and left[flag].nargs == right[flag].nargs, flag


def test_a_stage_sees_its_own_flags_and_defaults() -> None:
    parser = ArgumentParser(add_help=False)
    generate, mmlu = (kind.__new__(kind) for kind in kinds("generate+mmlu"))
    mmlu.add_arguments(parser)
    driver._add_unseen(parser, generate, "other")
    read = parser.parse_args(["--fraction", "0.5", "--osl", "9"])
    assert read.fraction == 0.5 and not hasattr(read, "max_new_tokens")
    assert not hasattr(parser.parse_args([]), "prompts") and parser.parse_args([]).few_shots == 0


def test_the_table_of_the_submit_side_says_what_the_runtime_does() -> None:
    for name in STAGES:
        (kind,), told = kinds(name), stages.find(name)
        assert (kind.makes, kind.words) == (told.writes, told.words), name


def test_three_stages_by_mlmsub_submit(stage: Runner, source: Path, apart: Path, folder: Path, tmp_path: Path) -> None:
    """Under the profile `local`: the job script, the entrypoint, and the stages as real processes."""
    variables = {"HOME": tmp_path, "USER_FSW": tmp_path, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1}
    given = {"HF_MODEL_CKPT": source, "LAUNCH_SCRIPT": sys.executable, "MLM_EXTRA_ARGS": FLAGS}
    sets = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    conf = tmp_path / "tiny.yaml"
    conf.write_text(f"{stage.conf.read_text()}tokenizer: {MODEL}\n")
    words = ["submit", "quantize+export+generate", str(conf), *WORDS, "--profile", "local", "--json", "--watch"]
    done = subprocess.run(
        [sys.executable, "-m", "mlmsub.cli.main", *words, *sets],
        env={"PATH": os.environ["PATH"], **{name: str(value) for name, value in variables.items()}},
        cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = json.JSONDecoder().raw_decode(done.stdout)[0]["outputs"]
    assert list(outputs) == ["EXPORT_DIR", "GENERATE_OUT"]
    assert digests(Path(outputs["EXPORT_DIR"])) == digests(folder / "fp8-hf")
    assert lines(Path(outputs["GENERATE_OUT"])) == lines(apart)
