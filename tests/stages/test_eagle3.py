"""eagle3: two phases in one run, a resume from either, and the same gradients at every layout."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rig import MODEL, ROOT, Result, Runner, free_port, make_tokenizer
from test_twins import TWINS, make

IN_FLOAT32 = """
import sys
import torch
from mlmsub.runtime import __main__, megatron_args

parse = megatron_args.parse

def in_float32(*given, **named):
    args = parse(*given, **named)
    args.bf16, args.params_dtype = False, torch.float32
    return args

megatron_args.parse = in_float32
raise SystemExit(__main__.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data.jsonl: short documents, so that a row has several; and with a draft's config."""
    made = tmp_path_factory.mktemp("eagle3")
    choose = random.Random(3)
    words = ("the", "model", "reads", "a", "row", "of", "tokens", "and", "learns", "what", "comes", "next")
    lines = [" ".join(choose.choices(words, k=choose.randint(3, 25))) for _ in range(80)]
    (made / "data.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (made / "draft.json").write_text('{"initializer_range": 0.2, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}')
    (made / "prompts.jsonl").write_text('{"text": "the model reads"}\n{"text": "a row"}\n')
    return made


def variables(place: Path, save: Path, **changes: object) -> dict[str, object]:
    """Eight rows for four iterations, in micro-batches of two."""
    return {
        "MLM_MODEL_SAVE": save,
        "MLM_WORK_DIR": place,
        "PROMPTS_PATH": place / "prompts.jsonl",
        "MLM_EXTRA_ARGS": f"--eagle-config {place}/draft.json --seq-length 64 --draft-vocab-size 100",
        "MLM_DATA_ARGS": f"--train-samples 16 --split 90,10,0 --finetune-hf-dataset {place}/data.jsonl",
        "MLM_TRAIN_ARGS": "--micro-batch-size 2 --global-batch-size 4 --attention-dropout 0 --hidden-dropout 0",
        "MLM_EVAL_ARGS": "--eval-iters 1 --eval-interval 4 --save-interval 2 --log-interval 1",
        **changes,
    }


def draft(folder: Path, iteration: str) -> dict[str, torch.Tensor]:
    """The whole tensors of a saved draft."""
    from mlmsub.runtime.checkpoints import draft_export

    return draft_export._read(folder / iteration)


def base_is_as_it_was(folder: Path, iteration: str) -> None:
    """Its weights, and the buffers that Megatron moves while a model trains, such as a router's bias."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    def base(here: Path) -> dict:
        plan = FileSystemReader(here).read_metadata().state_dict_metadata
        state = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in plan.items()
            if key.startswith(("decoder.", "embedding.", "output_layer.")) and isinstance(entry, TensorStorageMetadata)
        }
        load(state, storage_reader=FileSystemReader(here), no_dist=True)
        return state

    before, after = base(folder / "release"), base(folder / iteration)
    assert len(after) > 5 and same({name: before[name] for name in after}, after)


def events(result: Result, kind: str) -> list[dict]:
    lines = (result.run_dir / "state" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture(scope="module")
def trained(stage: Runner, source: Path, place: Path) -> Result:
    """Both phases without a break."""
    result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, place / "trained"))
    assert result.code == 0, result.out
    return result


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- the phases ----------------------------------------------------------------------------------------------------


def test_a_run_converts_and_trains(trained: Result, place: Path) -> None:
    folder = place / "trained"
    assert trained.done["outputs"] == {"MLM_MODEL_SAVE": str(folder)}
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert sorted(entry.name for entry in folder.glob("iter_*")) == ["iter_0000002", "iter_0000004"]
    iterations = events(trained, "iteration")
    assert [event["iteration"] for event in iterations] == [1, 2, 3, 4]
    assert {"lm_loss", "loss_0", "loss_2", "top1_0", "grad_norm"} <= iterations[0].keys()
    assert events(trained, "evaluation")[-1]["acceptance_length"] >= 1


def test_the_drafts_vocabulary_is_what_the_data_has_most_of(trained: Result, place: Path) -> None:
    from mlmsub.runtime.data.packing import PackedDataset

    counts = torch.from_numpy(PackedDataset(Path(events(trained, "data")[0]["folder"])).counts)
    kept = draft(place / "trained", "release")["d2t"] + torch.arange(100)
    assert set(counts.nonzero().flatten().tolist()) <= set(kept.tolist()), "the data has less than 100 tokens"
    assert events(trained, "draft_vocabulary")[0] | {"time": 0} == {
        "time": 0, "event": "draft_vocabulary", "tokens": 100, "coverage": 1.0, "stage": "eagle3",
    }  # fmt: skip


def test_the_draft_changes(trained: Result, place: Path) -> None:
    before, after = draft(place / "trained", "release"), draft(place / "trained", "iter_0000004")
    assert all(not torch.equal(before[name], after[name]) for name in before if name != "d2t" and before[name].ndim > 1)


@pytest.mark.parametrize("left", ["converted", "half converted", "trained for 2"])
def test_a_run_that_was_cut_off_ends_the_same(
    left: str, trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    """The folder as a kill leaves it: between the phases, inside of the first, and inside of the second."""
    folder = place / "trained"
    shutil.copytree(folder / "release", tmp_path / "release")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    if left == "half converted":
        (tmp_path / "release" / ".metadata").unlink()
    elif left == "converted":
        tracker.write_text("release")
    else:
        shutil.copytree(folder / "iter_0000002", tmp_path / "iter_0000002")
        tracker.write_text("2")
    result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, tmp_path))
    assert result.code == 0, result.out
    assert ("[import]" in result.out) == (left == "half converted")
    assert same(draft(tmp_path, "iter_0000004"), draft(folder, "iter_0000004"))


def test_a_wish_to_stop_during_the_conversion_is_heard_after_it(
    trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No iteration is begun; started again, the run goes on from the converted model to the same end."""
    from mlmsub.runtime.models import eagle

    run_dir, add = stage.run_dir(), eagle.add

    def asked(*given: object) -> int:
        (run_dir / "state" / "0").mkdir(parents=True, exist_ok=True)
        (run_dir / "state" / "0" / "stop").touch()
        return add(*given)

    monkeypatch.setattr(eagle, "add", asked)
    given = variables(place, tmp_path / "mlm", HF_MODEL_CKPT=source)
    result = stage("eagle3", run_dir=run_dir, **given)
    assert result.code == 0 and "stopped after iteration 0" in result.out, result.out
    assert json.loads((run_dir / "state" / "0" / "saved").read_text()) == {"iteration": 0}
    assert not (run_dir / "state" / "0" / "done.json").exists() and not events(result, "iteration")
    assert (tmp_path / "mlm" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert not list((tmp_path / "mlm").glob("iter_*"))
    again = stage("eagle3", run_dir=run_dir, MLMSUB_RESTART=1, **given)
    assert again.code == 0 and "[import]" not in again.out, again.out
    assert same(draft(tmp_path / "mlm", "iter_0000004"), draft(place / "trained", "iter_0000004"))


def test_a_folder_of_another_run_is_kept(stage: Runner, source: Path, place: Path, bf16: Path, tmp_path: Path) -> None:
    shutil.copytree(bf16, tmp_path / "mlm")
    result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, tmp_path / "mlm"))
    assert result.code == 2 and "a model without a draft" in result.out
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, tmp_path / "full"))
    assert result.code == 2 and "not empty" in result.out


def test_it_starts_from_a_megatron_checkpoint(
    stage: Runner, source: Path, place: Path, bf16: Path, trained: Result, tmp_path: Path
) -> None:
    result = stage("eagle3", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=bf16, **variables(place, tmp_path))
    assert result.code == 0, result.out
    assert same(draft(tmp_path, "iter_0000004"), draft(place / "trained", "iter_0000004"))


def test_evaluations_can_be_left_out(stage: Runner, source: Path, place: Path, tmp_path: Path) -> None:
    given = variables(place, tmp_path)
    result = stage("eagle3", "--no-eval", HF_MODEL_CKPT=source, **given)
    assert result.code == 0, result.out
    assert not events(result, "evaluation")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"WORLD_SIZE": 2, "PP": 2}, "set PP=1"),
        ({"WORLD_SIZE": 2, "CP": 2}, "set CP=1"),
        ({"PROMPTS_PATH": "/nowhere.jsonl"}, "nowhere.jsonl"),
        ({"MLM_EXTRA_ARGS": "--eagle-config /nowhere.json"}, "/nowhere.json"),
    ],
)
def test_wrong_inputs_are_told_before_anything_is_loaded(
    changes: dict[str, object], problem: str, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    result = stage("eagle3", HF_MODEL_CKPT=source, **variables(place, tmp_path / "out", **changes))
    assert result.code == 2 and problem in result.out
    assert "[import]" not in result.out and "[data]" not in result.out


# --- layouts -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kimi(place: Path) -> tuple[Runner, Path]:
    """Kimi-K2's twin: latent attention, one dense layer, then shared and routed experts, YaRN."""
    from mlmsub.core import hf_config, modelconf

    made = place / "kimi"
    make(made, *TWINS["kimi-k2"])
    make_tokenizer(made)
    conf = hf_config.convert(json.loads((made / "config.json").read_text()), MODEL)
    # the last ones are training defaults of the emblem's conf: they must not touch a frozen base
    conf.megatron_args.update({
        "seq-length": "64", "moe-token-dispatcher-type": "allgather",
        "moe-router-load-balancing-type": "seq_aux_loss", "moe-aux-loss-coeff": "0.1",
        "moe-router-bias-update-rate": "0.1", "recompute-activations": "true", "moe-layer-recompute": "true",
    })  # fmt: skip
    file = place / "kimi.yaml"
    file.write_text(modelconf.render(conf))
    assert yaml.safe_load(file.read_text())["config"]["beta_fast"]
    return Runner(place / "kimi-runs", file), made


def one_step(runner: Runner, source: Path, place: Path, ranks: int, **layout: object) -> dict[str, torch.Tensor]:
    """The draft's gradients, whole: what one iteration of plain gradient descent with rate 1 changes, in float32."""
    save = place / f"{source.name}-{ranks}-{'-'.join(f'{name}{size}' for name, size in layout.items())}"
    given = variables(
        place, save, HF_MODEL_CKPT=source, WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", PYTHONPATH=ROOT,
        MLM_OPTIM_ARGS="--optimizer sgd --lr 1.0 --min-lr 1.0 --lr-decay-style constant --clip-grad 0 --weight-decay 0",
        MLM_EVAL_ARGS="--eval-iters 1 --eval-interval 1 --save-interval 1 --log-interval 1", **layout,
    )  # fmt: skip
    given["MLM_TRAIN_ARGS"] = "--micro-batch-size 1 --global-batch-size 2 --no-save-optim"
    given["MLM_DATA_ARGS"] = str(given["MLM_DATA_ARGS"]).replace("16", "2")
    more = ["--sequence-parallel"] * (layout.get("TP") == 2) + ["--no-eval"] * ("kimi" not in source.name)
    given["MLM_EXTRA_ARGS"] = " ".join([str(given["MLM_EXTRA_ARGS"]), "--save-base", *more])
    run_dir = runner.run_dir()
    given["MASTER_PORT"] = free_port()
    command = [sys.executable, "-c", IN_FLOAT32, "eagle3", MODEL]
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=runner.environment(run_dir, {**given, "RANK": rank, "LOCAL_RANK": rank}),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    outs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "".join(outs)
    base_is_as_it_was(save, "iter_0000001")
    before, after = draft(save, "release"), draft(save, "iter_0000001")
    return {name: before[name] - after[name] for name in before if name != "d2t"}


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Within 1e-3 of a tensor's norm: float32, and other orders of sums."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert tensor.norm() > 1e-6, name
        assert float((got[name] - tensor).norm() / tensor.norm()) < 1e-3, name


@pytest.fixture(scope="module")
def alone(stage: Runner, source: Path, place: Path) -> dict[str, torch.Tensor]:
    return one_step(stage, source, place, 1)


@pytest.mark.parametrize("layout", [{"TP": 2}, {}], ids=["TP", "DP"])
def test_two_processes_have_the_gradients_of_one(
    layout: dict[str, int], alone: dict, stage: Runner, source: Path, place: Path
) -> None:
    close(one_step(stage, source, place, 2, **layout), alone)


@pytest.fixture(scope="module")
def kimi_alone(kimi: tuple[Runner, Path], place: Path) -> dict[str, torch.Tensor]:
    return one_step(*kimi, place, 1)


@pytest.mark.parametrize("layout", [{"EP": 2}, {"TP": 2, "ETP": 1}], ids=["EP", "TP"])
def test_a_kimi_shaped_model_trains_at_the_emblems_layouts(
    layout: dict[str, int], kimi_alone: dict, kimi: tuple[Runner, Path], place: Path
) -> None:
    close(one_step(*kimi, place, 2, **layout), kimi_alone)


# --- offline -------------------------------------------------------------------------------------------------------


def test_a_draft_trains_on_stored_hidden_states(
    trained: Result, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    """As on the base's own; what differs is that documents were read apart, in another order of bfloat16 sums."""
    given = variables(place, tmp_path / "mlm", EXTRACT_DIR=tmp_path / "states", HF_MODEL_CKPT=source)
    made = stage("extract", **{**given, "MLM_EXTRA_ARGS": f"--eagle-config {place}/draft.json --seq-length 64"})
    assert made.code == 0, made.out
    given["MLM_EXTRA_ARGS"] = f"{given['MLM_EXTRA_ARGS']} --export-offline-model"
    refused = stage("eagle3", **given)
    assert refused.code == 2 and "--no-eval" in refused.out
    result = stage("eagle3", "--no-eval", **given)
    assert result.code == 0, result.out
    online, offline = ([event["lm_loss"] for event in events(one, "iteration")] for one in (trained, result))
    assert offline == pytest.approx(online, rel=5e-3)
    want, got = draft(place / "trained", "iter_0000004"), draft(tmp_path / "mlm", "iter_0000004")
    assert torch.equal(want["d2t"], got["d2t"])
