"""What a training goes on with, and what it refuses: another stage's folder, damage, another model or teacher."""

# ruff: noqa: F401, F811 (fixtures of another module)

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from rig import Result, Runner, rewrite
from test_eagle3 import draft, events, place, same, trained, variables

TRACKER = "latest_checkpointed_iteration.txt"
NO_EVAL = "--no-eval --save-interval 2 --log-interval 1"
PLAIN = {"MLM_EXTRA_ARGS": "--seq-length 64", "MLM_EVAL_ARGS": "--eval-iters 0 --save-interval 2 --log-interval 1"}


@pytest.fixture(scope="module")
def tuned(stage: Runner, source: Path, place: Path) -> Path:
    result = stage("finetune", HF_MODEL_CKPT=source, **variables(place, place / "tuned", **PLAIN))
    assert result.code == 0, result.out
    return place / "tuned"


@pytest.fixture(scope="module")
def other(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same sizes, with the tokenizer: one value of one weight is another."""
    made = Path(shutil.copytree(source, tmp_path_factory.mktemp("other") / "hf"))

    def change(found: dict) -> dict:
        found["model.layers.1.mlp.down_proj.weight"][3, 4] += 0.5
        return found

    rewrite(made, change)
    return made


def cut_off(folder: Path, target: Path, *names: str, tracker: str | None = "2") -> Path:
    """The folder as a kill after the second of four iterations leaves it."""
    for name in names or ("release", "iter_0000002"):
        shutil.copytree(folder / name, target / name)
    if tracker is not None:
        (target / TRACKER).write_text(tracker)
    return target


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def refused(result: Result, field: str, *said: str) -> None:
    """One line that names the field and a fix, and no traceback."""
    lines = [line for line in result.out.splitlines() if "ERROR: " in line]
    assert result.code == 2 and len(lines) == 1 and "Traceback" not in result.out, result.out
    assert f"ERROR: {field}: " in lines[0] and " Fix: " in lines[0], lines
    assert all(part in lines[0] for part in said), (said, lines)


# --- which stage -----------------------------------------------------------------------------------------------------


def test_finetune_refuses_a_model_with_a_draft(
    trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    given = variables(place, tmp_path / "out", HF_MODEL_CKPT=source, **PLAIN)
    result = stage("finetune", MLM_MODEL_CKPT=place / "trained", **given)
    refused(result, "MLM_MODEL_CKPT", "has a draft", "eagle3 trains drafts", "give the base")
    assert "[load]" not in result.out and not content(tmp_path / "out")
    result = stage("eagle3+finetune", **given)
    refused(result, "finetune", "eagle3 trains drafts", "finetune first")
    assert "[start]" not in result.out, "it is known before anything has worked"


def test_a_teacher_with_a_draft_is_refused(
    trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    given = {**PLAIN, "MLM_EXTRA_ARGS": f"--seq-length 64 --export-kd-teacher-load {place / 'trained'}"}
    result = stage("finetune", HF_MODEL_CKPT=source, **variables(place, tmp_path / "out", **given))
    refused(result, "--export-kd-teacher-load", "has a draft", "give its base")


def test_quantize_refuses_a_draft_before_it_calibrates(
    trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_SAVE": tmp_path / "q"}
    result = stage("quantize", "fp8", MLM_MODEL_CKPT=place / "trained", **given)
    refused(result, "MLM_MODEL_CKPT", "has a draft", "quantize the base")
    assert "[load]" not in result.out
    more = "--algorithm eagle3 --calib-size 8 --calib-max-sequence-length 64"
    refused(
        stage("convert+quantize", **given, MLM_WORK_DIR=tmp_path, MLM_EXTRA_ARGS=more), "MLM_MODEL_CKPT", "has a draft"
    )


@pytest.mark.parametrize("version", ["this", "an older one"])
def test_a_folder_of_another_stage_is_refused(
    version: str, trained: Result, tuned: Path, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    drafts = cut_off(place / "trained", tmp_path / "drafts")
    answers = cut_off(tuned, tmp_path / "answers", "iter_0000002")
    if version != "this":
        for folder in (drafts, answers):
            (folder / "iter_0000002" / "training.json").unlink()
    for name, folder, more, was in (("finetune", drafts, PLAIN, "eagle3"), ("eagle3", answers, {}, "finetune")):
        before = content(folder)
        result = stage(name, HF_MODEL_CKPT=source, **variables(place, folder, **more))
        if version == "this":
            refused(result, "MLM_MODEL_SAVE", f"training with {was}, and this is {name}")
            assert "[start]" not in result.out
        else:
            refused(result, "MLM_MODEL_SAVE", "has a draft" if was == "eagle3" else "without a draft")
        assert content(folder) == before


# --- damage ----------------------------------------------------------------------------------------------------------

NAMED = '"sha256": "' + "0" * 64 + '"'
REFERENCES = {
    "empty": "", "no JSON": "{", "a list": "[]", "a key too many": '{"folder": "release", "z": 1, ' + NAMED + "}",
    "no hash": '{"folder": "release"}', "numbers": '{"folder": 1, "sha256": 2}',
    "elsewhere": '{"folder": "../release", ' + NAMED + "}", "the same folder": '{"folder": ".", ' + NAMED + "}",
    "missing": None,
}  # fmt: skip


@pytest.mark.parametrize("text", REFERENCES.values(), ids=REFERENCES)
def test_a_damaged_reference_to_the_base_is_told(
    text: str | None, trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    folder = cut_off(place / "trained", tmp_path / "mlm")
    file = folder / "iter_0000002" / "base.json"
    file.unlink()
    if text is not None:
        file.write_text(text)
    before = content(folder)
    refused(stage("eagle3", HF_MODEL_CKPT=source, **variables(place, folder)), "MLM_MODEL_SAVE", str(file))
    given = {"MLM_MODEL_CKPT": folder, "VALIDATE_OUT": tmp_path / "out", "MLM_EXTRA_ARGS": ""}
    result = stage("validate", HF_MODEL_CKPT=source, **given)
    refused(result, "MLM_MODEL_CKPT", str(file), "name another iteration", "save it again")
    assert content(folder) == before


def test_all_ranks_end_alike_on_a_damaged_iteration(
    trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    folder = cut_off(place / "trained", tmp_path / "mlm")
    (folder / "iter_0000002" / "base.json").write_text("")
    given = variables(place, folder, HF_MODEL_CKPT=source, MLM_EVAL_ARGS=NO_EVAL)
    refused(stage.ranks("eagle3", **given), "MLM_MODEL_SAVE", "base.json is damaged")


def test_the_iteration_before_a_damaged_one_is_gone_on_from(
    trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    folder = cut_off(place / "trained", tmp_path / "mlm", "release", "iter_0000002", "iter_0000004", tracker="4")
    (folder / "iter_0000004" / "base.json").write_text("")
    result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, folder))
    assert result.code == 0 and "2 done" in result.out, result.out
    assert "iter_0000004 is ignored" in result.out and "base.json is damaged" in result.out
    assert same(draft(folder, "iter_0000004"), draft(place / "trained", "iter_0000004"))


@pytest.mark.parametrize("part", ["release", "iter_0000002"])
@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt", "modelopt_state/.metadata"])
@pytest.mark.parametrize("bytes_", [b"", b"\x80\x04garbage", None], ids=["empty", "garbage", "truncated"])
def test_a_damaged_part_of_a_checkpoint_is_named(
    bytes_: bytes | None, name: str, part: str, trained: Result, place: Path, tmp_path: Path
) -> None:
    from mlmsub.runtime.checkpoints import checkpoint

    here = Path(shutil.copytree(place / "trained" / part, tmp_path / part))
    assert checkpoint.incomplete_part(here) == ""
    whole = (here / name).read_bytes() if (here / name).exists() else b"\x80\x04" * 100
    (here / name).write_bytes(whole[: len(whole) // 2] if bytes_ is None else bytes_)
    reason = checkpoint.incomplete_part(here)
    assert f"{Path(part, name).name} is damaged (" in reason, reason


@pytest.mark.parametrize("part", ["release", "iter_0000002"])
def test_a_training_with_a_damaged_part_says_so(
    part: str, trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    folder = cut_off(place / "trained", tmp_path / "mlm")
    (folder / part / ".metadata").write_bytes(b"xx")
    result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, folder))
    if part == "release":
        refused(result, "MLM_MODEL_CKPT", "its base is not in", ".metadata is damaged", "put back the release")
        return
    refused(result, "MLM_MODEL_SAVE", "no complete iteration is there", ".metadata is damaged")
    given = {"MLM_MODEL_CKPT": folder, "VALIDATE_OUT": tmp_path / "out", "MLM_EXTRA_ARGS": ""}
    result = stage("validate", HF_MODEL_CKPT=source, **given)
    refused(result, "MLM_MODEL_CKPT", ".metadata is damaged", "name another iteration", "save it again")


def test_a_damaged_conversion_is_made_again(
    trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    folder = cut_off(place / "trained", tmp_path / "mlm", "release", tracker="release")
    (folder / "release" / ".metadata").write_bytes(b"")
    result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, folder))
    assert result.code == 0 and "converted again: release/.metadata is damaged" in result.out, result.out
    assert same(draft(folder, "iter_0000004"), draft(place / "trained", "iter_0000004"))


# --- the tracker -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["", "abc", "-1", "../trained/iter_0000002", "\udcff", "a folder", "²"])
def test_a_tracker_without_sense_is_refused(
    word: str, trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    folder = cut_off(place / "trained", tmp_path / "mlm", tracker=None)
    if word == "a folder":  # what root cannot read either
        (folder / TRACKER).mkdir()
    else:
        (folder / TRACKER).write_bytes(word.encode(errors="surrogateescape"))
    before = content(folder)
    result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, folder))
    said = "cannot be read" if word in ("a folder", "\udcff") else f"says {word!r}"
    refused(result, "MLM_MODEL_SAVE", str(folder / TRACKER), said, "the one that counts: 2 or release")
    assert content(folder) == before and "[start]" not in result.out
    given = {"MLM_MODEL_CKPT": folder, "VALIDATE_OUT": tmp_path / "out", "MLM_EXTRA_ARGS": ""}
    refused(stage("validate", HF_MODEL_CKPT=source, **given), "MLM_MODEL_CKPT", str(folder / TRACKER), said)


@pytest.mark.parametrize("word", ["99", "release", None])
def test_a_tracker_that_knows_less_is_said(
    word: str | None, trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    """It names what is not there, or does not know of an iteration that is whole: that is gone on from."""
    folder = cut_off(place / "trained", tmp_path / "mlm", tracker=word)
    given, run_dir = variables(place, folder, HF_MODEL_CKPT=source), stage.run_dir()
    (run_dir / "state").mkdir()  # the folder is this run's, before a restart: else one without a tracker is refused
    (run_dir / "state" / "outputs.json").write_text(json.dumps([str(folder)]))
    result = stage("eagle3", run_dir=run_dir, **given)
    assert result.code == 0 and "2 done" in result.out, result.out
    said = "is not there" if word is None else f"says {word}"
    assert f"WARNING: {folder / TRACKER} {said}; the newest whole iteration is 2" in result.out
    assert same(draft(folder, "iter_0000004"), draft(place / "trained", "iter_0000004"))


def test_a_tracker_that_names_nothing_is_refused(
    trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    folder = cut_off(place / "trained", tmp_path / "mlm", "release", tracker="99")
    (folder / "iter_backup").mkdir()
    result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, folder))
    refused(result, "MLM_MODEL_SAVE", f"{folder / TRACKER} says 99", "no complete iteration is there", "put one back")


# --- another training ------------------------------------------------------------------------------------------------


def test_an_iteration_says_what_the_training_is(trained: Result, tuned: Path, source: Path, place: Path) -> None:
    for folder, name in ((place / "trained", "eagle3"), (tuned, "finetune")):
        noted = json.loads((folder / "iter_0000004" / "training.json").read_text())
        assert noted["stage"] == name and noted["seed"] == 1234 and noted["global_batch_size"] == 4
        assert noted["source"]["path"] == str(source) and noted["source"]["is"].startswith("hf:")
        assert noted["data"]["path"] == str(place / "data.jsonl")
    assert json.loads((place / "trained" / "release" / "training.json").read_text())["stage"] == "eagle3"


@pytest.mark.parametrize("left", ["release", "iter_0000002"])
def test_another_model_is_refused_and_one_that_has_moved_is_not(
    left: str, trained: Result, stage: Runner, source: Path, other: Path, place: Path, tmp_path: Path
) -> None:
    word = "release" if left == "release" else "2"
    folder = cut_off(place / "trained", tmp_path / "mlm", *dict.fromkeys(("release", left)), tracker=word)
    before = content(folder)
    result = stage("eagle3", HF_MODEL_CKPT=other, **variables(place, folder))
    refused(result, "HF_MODEL_CKPT", f"{other} (hf ", f"{folder / left} has: {source} (hf ", "another MLM_MODEL_SAVE")
    assert content(folder) == before and "[load]" not in result.out
    moved = Path(shutil.copytree(source, tmp_path / "moved"))
    result = stage("eagle3", HF_MODEL_CKPT=moved, **variables(place, folder))
    assert result.code == 0, result.out
    assert same(draft(folder, "iter_0000004"), draft(place / "trained", "iter_0000004"))


def test_a_model_in_other_files_is_the_same(source: Path, tmp_path: Path) -> None:
    from test_reader import split

    from mlmsub.runtime.checkpoints import identity

    cut = Path(shutil.copytree(source, tmp_path / "cut"))
    split(cut, 3)
    assert len(list(cut.glob("*.safetensors"))) == 3 and identity.of_source(cut) == identity.of_source(source)


def test_finetune_refuses_another_checkpoint(
    stage: Runner, source: Path, bf16: Path, fp8: Result, folder: Path, place: Path, tmp_path: Path
) -> None:
    given = variables(place, tmp_path / "out", HF_MODEL_CKPT=source, **PLAIN)
    given["MLM_DATA_ARGS"] = str(given["MLM_DATA_ARGS"]).replace("16", "8")
    assert stage("finetune", MLM_MODEL_CKPT=bf16, **given).code == 0
    refused(stage("finetune", MLM_MODEL_CKPT=folder / "fp8", **given), "MLM_MODEL_CKPT", "fp8/release (megatron ")
    refused(stage("finetune", **given), "HF_MODEL_CKPT", str(source), str(bf16))
    moved = Path(shutil.copytree(bf16, tmp_path / "moved"))
    result = stage("finetune", MLM_MODEL_CKPT=moved, **given)
    assert result.code == 0 and "goes on after iteration 2" in result.out, result.out


def test_another_teacher_is_refused(
    tuned: Path, stage: Runner, source: Path, bf16: Path, place: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "kd.yaml"
    settings.write_text("logit_kl_temperature: 2.0\n")

    def run(extra: str, folder: Path = tmp_path / "out") -> Result:
        given = variables(place, folder, **{**PLAIN, "MLM_EXTRA_ARGS": f"--seq-length 64 {extra}"})
        return stage("finetune", HF_MODEL_CKPT=source, **given)

    taught = f"--export-kd-teacher-load {bf16}"
    assert run(taught).code == 0
    refused(run(f"--export-kd-teacher-load {tuned}"), "--export-kd-teacher-load", str(tuned), str(bf16))
    refused(run(""), "--export-kd-teacher-load", "nothing is not what the training in")
    refused(run(f"{taught} --export-kd-cfg {settings}"), "--export-kd-cfg", "2.0", "has: nothing")
    refused(run(taught, tuned), "--export-kd-teacher-load", "has: nothing")
    moved = Path(shutil.copytree(bf16, tmp_path / "moved"))
    assert run(f"--export-kd-teacher-load {moved}").code == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"MLM_OPTIM_ARGS": "--lr 5.0e-5 --min-lr 1.0e-7 --lr-decay-style cosine"}, "--use-distributed-optimizer"),
        ({"MLM_EXTRA_ARGS": "--seq-length 64 --train-samples 32"}, "MLM_DATA_ARGS"),
        ({"MLM_EXTRA_ARGS": "--seq-length 64 --lr 1e-3"}, "MLM_OPTIM_ARGS"),
    ],
)
def test_refusals_of_other_settings_name_them(
    change: dict, field: str, tuned: Path, stage: Runner, source: Path, place: Path
) -> None:
    result = stage("finetune", HF_MODEL_CKPT=source, **variables(place, tuned, **{**PLAIN, **change}))
    refused(result, field)


def test_an_iteration_of_an_older_version_is_gone_on_from(
    trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    """It has no note; what Megatron's arguments in it say is compared."""
    folder = cut_off(place / "trained", tmp_path / "mlm")
    for name in ("release", "iter_0000002"):
        (folder / name / "training.json").unlink()
    given = variables(place, folder, HF_MODEL_CKPT=source)
    refused(stage("eagle3", "--seed", "7", **given), "--seed", "7 is not what the training in", "has: 1234")
    result = stage("eagle3", **given)
    assert result.code == 0 and result.out.count("has no training.json") == 1, result.out
    assert same(draft(folder, "iter_0000004"), draft(place / "trained", "iter_0000004"))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"source": "x"}', '{"data": {"is": 1, "path": 2}}'])
def test_a_damaged_note_is_named(
    text: str, trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    folder = cut_off(place / "trained", tmp_path / "mlm")
    (folder / "iter_0000002" / "training.json").write_text(text)
    result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, folder))
    refused(result, "MLM_MODEL_SAVE", "training.json is damaged", "remove it")


def test_without_its_optimizer_a_training_goes_on_at_its_place(
    stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    """The schedule follows from the samples; Adam begins anew, and it is said."""
    given = variables(place, tmp_path / "mlm", HF_MODEL_CKPT=source, MLM_EVAL_ARGS=NO_EVAL)
    plain, given["MLM_TRAIN_ARGS"] = given["MLM_TRAIN_ARGS"], f"{given['MLM_TRAIN_ARGS']} --no-save-optim"
    whole = stage("eagle3", **given)
    assert whole.code == 0, whole.out
    rates = [event["lr"] for event in events(whole, "iteration")]
    for text in (given["MLM_TRAIN_ARGS"], plain):
        folder = cut_off(tmp_path / "mlm", tmp_path / f"again{len(str(text))}")
        result = stage("eagle3", **{**given, "MLM_MODEL_SAVE": folder, "MLM_TRAIN_ARGS": text})
        assert result.code == 0 and "the optimizer's state is not that of" in result.out, result.out
        assert [event["lr"] for event in events(result, "iteration")] == rates[2:]


def test_a_save_inside_of_its_input_is_refused(trained: Result, stage: Runner, source: Path, place: Path) -> None:
    given = variables(place, place / "trained" / "sub", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=place / "trained")
    refused(stage("eagle3", **given), "MLM_MODEL_SAVE", "inside of MLM_MODEL_CKPT")
    assert not (place / "trained" / "sub").exists()


# --- hidden states of another base -----------------------------------------------------------------------------------


def extract(stage: Runner, place: Path, target: Path, **given: object) -> Path:
    more = f"--eagle-config {place}/draft.json --seq-length 64"
    made = stage("extract", **{**variables(place, place, **given), "EXTRACT_DIR": target, "MLM_EXTRA_ARGS": more})
    assert made.code == 0, made.out
    return target


@pytest.fixture(scope="module")
def states(stage: Runner, source: Path, place: Path) -> Path:
    return extract(stage, place, place / "states", HF_MODEL_CKPT=source)


def offline(stage: Runner, place: Path, save: Path, states: Path, **given: object) -> Result:
    made = variables(place, save, EXTRACT_DIR=states, MLM_EVAL_ARGS=NO_EVAL, **given)
    return stage("eagle3", **{**made, "MLM_EXTRA_ARGS": f"{made['MLM_EXTRA_ARGS']} --export-offline-model"})


@pytest.mark.parametrize("what", ["one weight", "type", "quantization"])
def test_states_of_another_base_are_refused(
    what: str, states: Path, stage: Runner, source: Path, other: Path, fp8: Result, folder: Path, place: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    given: dict[str, object] = {"HF_MODEL_CKPT": source}
    if what == "one weight":
        given["HF_MODEL_CKPT"] = other
    elif what == "quantization":
        given["MLM_MODEL_CKPT"] = folder / "fp8"
    else:
        given["HF_MODEL_CKPT"] = made = Path(shutil.copytree(source, tmp_path / "fp32"))
        rewrite(made, lambda found: {name: tensor.float() for name, tensor in found.items()})
    result = offline(stage, place, tmp_path / "out", states, **given)
    refused(result, "EXTRACT_DIR", f"{states} has the states of another base, {source}", "extract again")
    assert not content(tmp_path / "out")


def test_states_of_a_base_that_has_moved_are_taken(
    states: Path, stage: Runner, source: Path, bf16: Path, place: Path, tmp_path: Path
) -> None:
    """Also of one that is a Megatron checkpoint by now, as far as embedding, final norm and output layer show it."""
    moved = Path(shutil.copytree(source, tmp_path / "moved"))
    for number, given in enumerate(({"HF_MODEL_CKPT": moved}, {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": bf16})):
        result = offline(stage, place, tmp_path / str(number), states, **given)
        assert result.code == 0, result.out
    assert same(draft(tmp_path / "0", "iter_0000004"), draft(tmp_path / "1", "iter_0000004"))


def test_states_are_the_bases_whatever_draft_lies_beside_it(
    trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    from mlmsub.runtime.data.hidden_states import Dataset

    known = []
    for name in ("release", "iter_0000004"):
        folder = cut_off(place / "trained", tmp_path / name, *dict.fromkeys(("release", name)))
        (folder / TRACKER).write_text("release" if name == "release" else "4")
        states = extract(stage, place, tmp_path / f"{name}-states", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=folder)
        known.append(Dataset(states).plan.identity)
    assert known[0] == known[1] and known[0]["source"].startswith("megatron:")


def test_states_of_a_quantized_base_train_a_draft_for_it(
    stage: Runner, source: Path, fp8: Result, folder: Path, place: Path, tmp_path: Path
) -> None:
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": folder / "fp8"}
    states = extract(stage, place, tmp_path / "states", **given)
    refused(offline(stage, place, tmp_path / "not", states, HF_MODEL_CKPT=source), "EXTRACT_DIR", "another base", "fp8")
    result = offline(stage, place, tmp_path / "out", states, **given)
    assert result.code == 0, result.out
    assert (tmp_path / "out" / "iter_0000004").is_dir()


def test_states_of_an_older_version_are_taken_and_it_is_said(
    states: Path, stage: Runner, other: Path, place: Path, tmp_path: Path
) -> None:
    old = Path(shutil.copytree(states, tmp_path / "old"))
    index = json.loads((old / "index.json").read_text())
    del index["identity"]
    (old / "index.json").write_text(json.dumps(index))
    result = offline(stage, place, tmp_path / "out", old, HF_MODEL_CKPT=other)
    assert result.code == 0 and result.out.count(f"{old} is of an older version") == 1, result.out


def test_an_extraction_is_gone_on_with_for_the_same_base_alone(
    states: Path, stage: Runner, source: Path, other: Path, place: Path, tmp_path: Path
) -> None:
    begun = Path(shutil.copytree(states, tmp_path / "begun"))
    before = content(begun)
    extract(stage, place, begun, HF_MODEL_CKPT=Path(shutil.copytree(source, tmp_path / "moved")))
    made = {"EXTRACT_DIR": begun, "MLM_EXTRA_ARGS": f"--eagle-config {place}/draft.json --seq-length 64"}
    result = stage("extract", **{**variables(place, place, HF_MODEL_CKPT=other), **made})
    refused(result, "EXTRACT_DIR", f"another base than {other}: {source}", "another folder")
    assert content(begun) == before


@pytest.mark.parametrize("left", ["release", "iter_0000002"])
def test_training_offline_is_not_mixed_with_training_online(
    left: str, states: Path, trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    parts, word = dict.fromkeys(("release", left)), "release" if left == "release" else "2"
    online = cut_off(place / "trained", tmp_path / "online", *parts, tracker=word)
    refused(offline(stage, place, online, states, HF_MODEL_CKPT=source), "--export-offline-model", "leave it out")
    assert offline(stage, place, tmp_path / "whole", states, HF_MODEL_CKPT=source).code == 0
    stored = cut_off(tmp_path / "whole", tmp_path / "stored", *parts, tracker=word)
    result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, stored))
    refused(result, "--export-offline-model", "is not given", "add it")


def test_a_draft_that_was_trained_offline_is_validated_beside_the_whole_base(
    states: Path, trained: Result, stage: Runner, source: Path, other: Path, place: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What is measured is the trained draft, and the base that a draft of an online training lies beside."""
    from rig import session

    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.generation import acceptance
    from mlmsub.runtime.models import model

    measured: dict = {}
    answers = acceptance.answers

    def look(found: object, *rest: object) -> object:
        measured.update({name: value for name, value in found.state_dict().items() if value is not None})
        return answers(found, *rest)

    monkeypatch.setattr(acceptance, "answers", look)
    folder = tmp_path / "mlm"
    assert offline(stage, place, folder, states, HF_MODEL_CKPT=source).code == 0
    given = {"MLM_MODEL_CKPT": folder, "PROMPTS_PATH": place / "prompts.jsonl", "MLM_EXTRA_ARGS": "", "OSL": 8}
    result = stage("validate", HF_MODEL_CKPT=source, VALIDATE_OUT=tmp_path / "out", **given)
    assert result.code == 0, result.out
    with session(stage, source) as opened:
        whole = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(whole, place / "trained" / "iter_0000004")
        checkpoint.load_draft(whole, folder / "iter_0000004")
        want = {name: value for name, value in whole.state_dict().items() if value is not None}
    assert same(measured, want)
    before, after = draft(place / "trained", "iter_0000004")["fc.weight"], draft(folder, "iter_0000004")["fc.weight"]
    assert (measured["eagle_module.fc.weight"] == after).all() and not (before == after).all()
    result = stage("validate", HF_MODEL_CKPT=other, VALIDATE_OUT=tmp_path / "not", **given)
    refused(result, "HF_MODEL_CKPT", f"{other} (hf ", "is not the base of", str(source))
    result = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=folder, EXPORT_DIR=tmp_path / "hf")
    refused(result, "MLM_MODEL_CKPT", "trained offline", "validate")


def test_the_draft_of_a_quantized_base_is_validated_beside_that(
    stage: Runner, source: Path, fp8: Result, folder: Path, place: Path, tmp_path: Path
) -> None:
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": folder / "fp8"}
    states = extract(stage, place, tmp_path / "states", **given)
    assert offline(stage, place, tmp_path / "mlm", states, **given).code == 0
    given = {"PROMPTS_PATH": place / "prompts.jsonl", "MLM_EXTRA_ARGS": "", "OSL": 8, "VALIDATE_OUT": tmp_path / "out"}
    result = stage("validate", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "mlm", **given)
    assert result.code == 0 and f"[load] from {folder / 'fp8' / 'release'}" in result.out, result.out


def test_extract_and_eagle3_are_one_run(states: Path, stage: Runner, source: Path, place: Path, tmp_path: Path) -> None:
    given = variables(place, tmp_path / "mlm", HF_MODEL_CKPT=source, EXTRACT_DIR=tmp_path / "states")
    given["MLM_EXTRA_ARGS"] = f"{given['MLM_EXTRA_ARGS']} --export-offline-model"
    result = stage("extract+eagle3", **{**given, "MLM_EVAL_ARGS": NO_EVAL})
    assert result.code == 0, result.out
    assert offline(stage, place, tmp_path / "alone", states, HF_MODEL_CKPT=source).code == 0
    assert same(draft(tmp_path / "mlm", "iter_0000004"), draft(tmp_path / "alone", "iter_0000004"))


def test_two_runs_in_one_folder_find_each_other(
    trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is at its third iteration the other saves its fourth."""
    from mlmsub.runtime.training import trainer

    folder, step = tmp_path / "mlm", trainer.Trainer.step

    def meanwhile(self: trainer.Trainer, *given: object) -> object:
        if self.iteration == 2:
            cut_off(place / "trained", folder, "iter_0000004", tracker="4")
        return step(self, *given)

    monkeypatch.setattr(trainer.Trainer, "step", meanwhile)
    result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, folder, MLM_EVAL_ARGS=NO_EVAL))
    assert result.code == 1 and f"MLM_MODEL_SAVE: another run is at work in {folder}" in result.out, result.out
    assert "says 4, and was 2" in result.out and "Traceback" not in result.out
    assert content(folder / "iter_0000004") == content(place / "trained" / "iter_0000004")


def test_an_iteration_as_the_model_is_refused_with_the_folder_above(
    trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    given = {"MLM_MODEL_CKPT": place / "trained" / "iter_0000002", "EXPORT_DIR": tmp_path / "hf"}
    result = stage("export", HF_MODEL_CKPT=source, **given)
    refused(result, "MLM_MODEL_CKPT", "is one iteration", f"give the folder above, {place / 'trained'}: its {TRACKER}")
