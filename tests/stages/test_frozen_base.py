"""eagle3's checkpoints without their base: what they hold, how they are read again, and what happens to the base."""

# ruff: noqa: F401, F811 (fixtures of another module)

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from rig import Result, Runner, session, tensors
from test_eagle3 import draft, events, place, same, trained, variables

BASE = ("embedding.", "decoder.", "output_layer.")


def keys(here: Path) -> list[str]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return list(FileSystemReader(here).read_metadata().state_dict_metadata)


def size(here: Path) -> int:
    return sum(file.stat().st_size for file in here.rglob("*") if file.is_file())


def weights(stage: Runner, source: Path, here: Path) -> dict[str, torch.Tensor]:
    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.models import model

    with session(stage, source) as opened:
        made = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(made, here)
        return {name: value for name, value in made.state_dict().items() if value is not None}


@pytest.fixture(scope="module")
def full(stage: Runner, source: Path, place: Path) -> Path:
    """The same training with the base in every iteration."""
    result = stage("eagle3", "--save-base", HF_MODEL_CKPT=source, **variables(place, place / "full"))
    assert result.code == 0, result.out
    return place / "full"


def copy(folder: Path, target: Path, iteration: int, *names: str) -> Path:
    for name in names:
        shutil.copytree(folder / name, target / name)
    (target / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return target


def test_an_iteration_refers_to_its_base(trained: Result, full: Path, place: Path) -> None:
    from mlmsub.runtime.checkpoints import frozen_base

    folder = place / "trained"
    here = folder / "iter_0000004"
    assert not [key for key in keys(here) if key.startswith(BASE)]
    assert {"rng_state/shard_0.0_1.1", "eagle_module.fc.weight"} <= set(keys(here)), keys(here)
    assert any(key.startswith("optimizer.") for key in keys(here)) and (here / "modelopt_state").is_dir()
    noted = json.loads((here / "base.json").read_text())
    assert noted == {"folder": "release", "sha256": frozen_base.digest(folder / "release")}
    assert [key for key in keys(full / "iter_0000004") if key.startswith(BASE)]
    assert not (full / "iter_0000004" / "base.json").exists()
    assert frozen_base.digest(full / "iter_0000004") == noted["sha256"], "a full one holds the same base"
    assert size(here) < size(full / "iter_0000004") - 0.9 * size(folder / "release") / 2


def test_both_together_are_the_full_checkpoint(
    trained: Result,
    full: Path,
    stage: Runner,
    source: Path,
    place: Path,
    tmp_path: Path,
) -> None:
    """Also where the folder has moved as a whole."""
    moved = copy(place / "trained", tmp_path / "elsewhere", 4, "release", "iter_0000004")
    got, want = weights(stage, source, moved / "iter_0000004"), weights(stage, source, full / "iter_0000004")
    assert got.keys() == want.keys() and same(got, want)


def test_stages_read_both(
    trained: Result,
    full: Path,
    stage: Runner,
    source: Path,
    place: Path,
    tmp_path: Path,
) -> None:
    lengths = []
    for folder in (place / "trained", full):
        given = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": folder, "PROMPTS_PATH": place / "prompts.jsonl"}
        result = stage("validate", VALIDATE_OUT=tmp_path / folder.name, MLM_EXTRA_ARGS="", OSL=8, **given)
        assert result.code == 0, result.out
        lengths.append((tmp_path / folder.name / "answers.jsonl").read_text())
    assert lengths[0] == lengths[1]
    given = {"MLM_MODEL_CKPT": place / "trained", "MLM_MODEL_SAVE": tmp_path / "one", "MLM_EXTRA_ARGS": ""}
    result = stage("convert", HF_MODEL_CKPT=source, **given)
    assert result.code == 0, result.out
    assert same(draft(tmp_path / "one", "release"), draft(full, "iter_0000004"))
    result = stage("export", EXPORT_DIR=tmp_path / "hf", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=place / "trained")
    assert result.code == 0, result.out


def test_a_quantized_base_comes_back_with_its_ranges(
    stage: Runner, source: Path, fp8: Result, folder: Path, place: Path, tmp_path: Path
) -> None:
    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.models import model

    given = variables(place, tmp_path / "mlm", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=folder / "fp8")
    given["MLM_EVAL_ARGS"] = "--no-eval --save-interval 2 --log-interval 1"
    result = stage("eagle3", **given)
    assert result.code == 0, result.out
    found = []
    for name in ("release", "iter_0000004"):
        with session(stage, source) as opened:
            made = model.build(opened.args, opened.conf, "cpu")
            checkpoint.load(made, tmp_path / "mlm" / name)
            ranges = {key: value for key, value in made.state_dict().items() if key.endswith("_amax")}
            base = made._base_model_forward(torch.arange(20)[None], torch.arange(20)[None], None)[0]
            found.append((ranges, base))
    assert len(found[0][0]) == 32 and same(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    asked = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": tmp_path / "mlm", "EXPORT_DIR": tmp_path / "draft"}
    result = stage("export", **asked, MLM_EXTRA_ARGS="--export-extra-modules")
    assert result.code == 0, result.out
    served, mlp = tensors(tmp_path / "draft"), made.eagle_module.decoder.layers[0].mlp
    projections = torch.cat([served[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(projections, mlp.linear_fc1.weight)
    copy(tmp_path / "mlm", tmp_path / "again", 2, "release", "iter_0000002")
    result = stage("eagle3", **{**given, "MLM_MODEL_SAVE": tmp_path / "again"})
    assert result.code == 0, result.out
    assert same(draft(tmp_path / "again", "iter_0000004"), draft(tmp_path / "mlm", "iter_0000004"))


def test_a_full_checkpoint_is_gone_on_with(
    trained: Result,
    full: Path,
    stage: Runner,
    source: Path,
    place: Path,
    tmp_path: Path,
) -> None:
    """As those of before: where its base is that of ``release``, what follows refers to it, and else holds its own."""
    for name, parts in (("with", ("release", "iter_0000002")), ("without", ("iter_0000002",))):
        folder = copy(full, tmp_path / name, 2, *parts)
        result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, folder))
        assert result.code == 0, result.out
        assert same(draft(folder, "iter_0000004"), draft(full, "iter_0000004"))
        assert (folder / "iter_0000004" / "base.json").is_file() is (name == "with")
        assert ("the base is saved with every iteration" in result.out) is (name == "without")


@pytest.mark.parametrize("what", ["gone", "cut off", "another"])
def test_a_base_that_is_not_the_one_is_refused(
    what: str,
    trained: Result,
    stage: Runner,
    source: Path,
    place: Path,
    tmp_path: Path,
) -> None:
    folder = copy(place / "trained", tmp_path / "mlm", 2, "release", "iter_0000002")
    if what == "gone":
        shutil.rmtree(folder / "release")
    elif what == "cut off":
        largest = max((folder / "release").glob("*.distcp"), key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:1000])
    else:
        other(stage, source, folder)
    for name, given in (
        ("eagle3", variables(place, folder)),
        ("validate", {"MLM_MODEL_CKPT": folder, "VALIDATE_OUT": tmp_path / "out", "MLM_EXTRA_ARGS": ""}),
    ):
        result = stage(name, HF_MODEL_CKPT=source, **given)
        assert result.code == 2, result.out
        told = "holds another" if what == "another" else "its base is not in"
        assert f"{folder / 'iter_0000002'}" in result.out and told in result.out
        assert "put back the release" in result.out
    if what == "another":
        noted = json.loads((folder / "iter_0000002" / "base.json").read_text())["sha256"][:16]
        assert f"trained on the base {noted}, and {folder / 'release'} holds another, " in result.out
    # the draft needs no base
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": folder, "EXPORT_DIR": tmp_path / "draft"}
    result = stage("export", **given, MLM_EXTRA_ARGS="--export-extra-modules")
    assert result.code == 0, result.out


def other(stage: Runner, source: Path, folder: Path) -> None:
    """Put a base into ``release`` that differs in one value of one tensor."""
    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.models import model

    with session(stage, source) as opened:
        made = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(made, folder / "release")
        made.decoder.layers[2].mlp.linear_fc2.weight.data[5, 7] += 0.5
        checkpoint.save(made, opened.args, folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")


def test_a_base_that_is_converted_again_is_the_same(
    trained: Result,
    stage: Runner,
    source: Path,
    place: Path,
    tmp_path: Path,
) -> None:
    folder = copy(place / "trained", tmp_path / "mlm", 2, "iter_0000002")
    again = f"--algorithm eagle3 {variables(place, folder)['MLM_EXTRA_ARGS']}"
    made = stage("convert", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "again", MLM_EXTRA_ARGS=again)
    assert made.code == 0, made.out
    shutil.move(tmp_path / "again" / "release", folder / "release")
    result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, folder))
    assert result.code == 0, result.out
    assert same(draft(folder, "iter_0000004"), draft(place / "trained", "iter_0000004"))


def test_ranks_refer_to_their_base_too(stage: Runner, source: Path, place: Path, tmp_path: Path) -> None:
    """At TP=2: interrupted after two of four iterations it ends the same; one process reads what two have saved."""
    given = variables(place, tmp_path / "whole", HF_MODEL_CKPT=source, TP=2)
    given["MLM_EVAL_ARGS"] = "--no-eval --save-interval 2 --log-interval 1"
    result = stage.ranks("eagle3", **given)
    assert result.code == 0, result.out
    folder = copy(tmp_path / "whole", tmp_path / "again", 2, "release", "iter_0000002")
    result = stage.ranks("eagle3", **{**given, "MLM_MODEL_SAVE": folder})
    assert result.code == 0 and "2 done" in result.out, result.out
    assert same(draft(folder, "iter_0000004"), draft(tmp_path / "whole", "iter_0000004"))
    assert not [key for key in keys(folder / "iter_0000004") if key.startswith(BASE)]
    got, want = (weights(stage, source, tmp_path / "whole" / name) for name in ("iter_0000004", "release"))
    assert same(*({key: one[key] for key in one if "eagle_module" not in key} for one in (got, want)))


def test_keep_last_keeps_the_base(stage: Runner, source: Path, place: Path, tmp_path: Path) -> None:
    given = variables(place, tmp_path / "mlm")
    given["MLM_EVAL_ARGS"] = "--no-eval --save-interval 1 --log-interval 1"
    result = stage("eagle3", "--keep-last", "1", HF_MODEL_CKPT=source, **given)
    assert result.code == 0, result.out
    assert sorted(path.name for path in (tmp_path / "mlm").iterdir() if path.is_dir()) == ["iter_0000004", "release"]
    weights(stage, source, tmp_path / "mlm" / "iter_0000004")
    assert len(events(result, "iteration")) == 4
