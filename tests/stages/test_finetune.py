"""finetune: what it learns, from what, and what it leaves alone."""

import json
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from rig import Result, Runner, in_bf16, logits, make_latent, make_latent_conf
from test_calibration import events
from training_rig import ITERATIONS, in_fp32, iterations, stopping, training_session, variables

YARN = {"rope-type": "yarn", "rotary-scaling-factor": 4.0, "mscale": 1.0, "mscale-all-dim": 1.0}
LLAMA3 = {"use-rope-scaling": True, "rope-scaling-factor": 8.0}


def with_arguments(conf: Path, file: Path, **changes: object) -> Path:
    import yaml

    found = yaml.safe_load(in_fp32(conf, file).read_text())
    found["megatron_args"] |= changes
    if "rope-type" in changes:
        found["config"]["original_max_position_embeddings"] = 32  # no argument sets it
    file.write_text(yaml.safe_dump(found))
    return file


@pytest.mark.parametrize("scaling", [{}, LLAMA3, YARN], ids=["rope", "llama3", "latent-yarn"])
def test_a_document_in_a_packed_row_is_as_if_alone(
    scaling: dict, stage: Runner, source: Path, data: Path, tmp_path: Path
) -> None:
    """Also where the frequencies of the rotary embedding are scaled: what counts is the distance in the document."""
    from mlmsub.runtime.checkpoints import hf_import
    from mlmsub.runtime.data import packing
    from mlmsub.runtime.models import model

    conf = stage.conf
    if "rope-type" in scaling:
        source, conf = in_bf16(make_latent(tmp_path / "hf")), make_latent_conf(tmp_path / "latent.yaml")
    elif scaling:
        source = Path(shutil.copytree(source, tmp_path / "hf"))
        config = json.loads((source / "config.json").read_text())
        config["rope_parameters"] |= {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
        (source / "config.json").write_text(json.dumps(config))
    runner = Runner(tmp_path / "runs", with_arguments(conf, tmp_path / "model.yaml", **scaling))
    draw = torch.Generator().manual_seed(1)
    parts = [torch.randint(1, 500, (length,), generator=draw) for length in (20, 5, 31)]
    batch = packing.collate([[(part.numpy(), torch.ones(len(part)).numpy()) for part in parts]], 64, 0)
    with training_session(runner, variables(source, tmp_path / "out", data)) as opened:
        made = model.build(opened.args, opened.conf, "cpu")
        hf_import.import_weights(made, source, opened.conf, torch.float32)
        with torch.no_grad():
            mask = packing.attention_mask(batch.document_ids)
            packed = made(batch.tokens, batch.position_ids, mask, runtime_gather_output=True)[0]
        start = 0
        for part in parts:
            alone = logits(made, part[None])[0]
            torch.testing.assert_close(packed[start : start + len(part)], alone, rtol=1e-4, atol=1e-4)
            start += len(part)


def test_losses_are_those_of_a_plain_loop(fp32: Runner, source: Path, data: Path, tmp_path: Path) -> None:
    """transformers' model and torch's AdamW on the same rows, in the same order, in float32."""
    from transformers import LlamaForCausalLM

    from mlmsub.runtime.data.packing import Order, PackedDataset

    optim = "--lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95"
    result = fp32("finetune", **variables(source, tmp_path / "out", data, optim, "--lr-warmup-iters 0"))
    assert result.code == 0, result.out
    (told,) = events(result, "data")
    packed = PackedDataset(Path(told["folder"]))
    rows = packed.rows("train")
    order = Order(len(rows), 1234)  # Megatron's default seed
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").train()
    decayed = [{"params": [p for p in model.parameters() if (p.ndim > 1) is large], "weight_decay": 0.1 * large}
               for large in (True, False)]  # fmt: skip
    adam = torch.optim.AdamW(decayed, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(ITERATIONS):
        total, count = torch.zeros(()), 0
        for sample in range(step * 8, step * 8 + 8):
            for tokens, learned in packed.row(rows[order[sample]]):
                ids = torch.tensor(tokens.astype("int64"))
                mask = torch.tensor(learned[1:].astype("float32"))
                found = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
                total, count = total + (found * mask).sum(), count + int(mask.sum())
        adam.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        losses.append(float(total / count))
    assert iterations(result) == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0] - 0.1


def test_answers_alone_are_learned_unless_all_is_asked_for(
    stage: Runner, source: Path, tmp_path: Path, data: Path
) -> None:
    lines = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": text, "completion": " yes"}) + "\n" for text in lines))
    learned = {}
    for choice in ("answers", "all"):
        given = variables(source, tmp_path / choice, pairs, extra=f"--loss-on {choice}")
        result = stage("finetune", **given)
        assert result.code == 0, result.out
        learned[choice] = events(result, "data")[0]["learned"]
    assert 0 < learned["answers"] < learned["all"] / 4


def test_evaluation_is_on_the_validation_split(fp32: Runner, source: Path, data: Path, tmp_path: Path) -> None:
    result = fp32("finetune", **variables(source, tmp_path / "out", data))
    assert [event["iteration"] for event in events(result, "evaluation")] == [4, 8]
    assert "validation loss at iteration 4 | lm loss value: " in result.out
    without = variables(source, tmp_path / "without", data)
    without["MLM_DATA_ARGS"] = str(without["MLM_DATA_ARGS"]).replace("90,10,0", "100,0,0")
    result = fp32("finetune", **without)
    assert result.code == 0 and "no validation loss" in result.out and not events(result, "evaluation")


def test_a_group_that_is_set_replaces_its_defaults_alone(stage: Runner, source: Path, data: Path) -> None:
    given = variables(source, data.parent / "group", data)
    given.pop("MLM_OPTIM_ARGS")
    with training_session(stage, given) as opened:
        args = opened.args
        assert (args.lr, args.min_lr, args.weight_decay, args.adam_beta2) == (5e-5, 1e-7, 0.0, 0.95)
        assert args.use_distributed_optimizer and args.global_batch_size == 8
    with training_session(stage, {**given, "MLM_OPTIM_ARGS": "--lr 2e-4"}) as opened:
        assert opened.args.lr == 2e-4 and not opened.args.use_distributed_optimizer


@pytest.fixture(scope="module")
def trained(stage: Runner, source: Path, fp8: Result, folder: Path, data: Path) -> Result:
    """QAT: training through the quantizers of a quantized checkpoint."""
    given = variables(source, folder / "qat", data)
    return stage("finetune", MLM_MODEL_CKPT=folder / "fp8", **given)


def test_quantizers_are_trained_through_and_saved(
    trained: Result, stage: Runner, source: Path, folder: Path, tmp_path: Path
) -> None:
    assert trained.code == 0 and "training through 32 quantizers" in trained.out, trained.out
    losses = iterations(trained)
    assert losses[-1] < losses[0]
    again = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=folder / "qat", EXPORT_DIR=tmp_path / "hf")
    assert again.code == 0, again.out
    quantized = json.loads((tmp_path / "hf" / "hf_quant_config.json").read_text())
    assert quantized["quantization"]["quant_algo"] == "FP8"


@pytest.mark.parametrize("intermediate", [False, True], ids=["logits", "intermediate"])
def test_a_quantized_student_comes_closer_to_its_teacher(
    intermediate: bool, stage: Runner, source: Path, bf16: Path, fp8: Result, folder: Path, data: Path, tmp_path: Path
) -> None:
    """QAD; stopped once, the losses are the same, and the checkpoint is the student's alone."""
    extra = f"--export-kd-teacher-load {bf16} --lr 3e-4"
    if intermediate:
        settings = tmp_path / "kd.yaml"
        settings.write_text("intermediate_layer_pairs:\n  - [decoder.final_layernorm, decoder.final_layernorm]\n")
        extra += f" --export-kd-cfg {settings}"
    whole = stage("finetune", MLM_MODEL_CKPT=folder / "fp8", **variables(source, tmp_path / "whole", data, extra=extra))
    assert whole.code == 0, whole.out
    losses = iterations(whole, "logits_loss")
    assert losses[-1] < losses[0] and (iterations(whole, "intermediate_loss")[0] > 0) is intermediate
    given = variables(source, tmp_path / "stopped", data, extra=extra)
    run_dir = stage.run_dir()
    with stopping(3):
        stage("finetune", run_dir=run_dir, MLM_MODEL_CKPT=folder / "fp8", **given)
    again = stage("finetune", run_dir=run_dir, MLMSUB_RESTART=1, MLM_MODEL_CKPT=folder / "fp8", **given)
    assert again.code == 0, again.out
    assert iterations(again, "logits_loss") == losses
    result = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "whole", EXPORT_DIR=tmp_path / "hf")
    assert result.code == 0, result.out


def test_the_input_is_left_alone_unless_in_place_is_asked_for(
    stage: Runner, source: Path, bf16: Path, data: Path, tmp_path: Path
) -> None:
    import shutil

    mine = shutil.copytree(bf16, tmp_path / "ckpt")
    given = variables(source, mine, data)
    refused = stage("finetune", MLM_MODEL_CKPT=mine, **given)
    assert refused.code == 2 and "MLM_MODEL_SAVE: is the same folder as MLM_MODEL_CKPT" in refused.out
    assert (mine / "latest_checkpointed_iteration.txt").read_text() == "release"
    given.pop("MLM_MODEL_SAVE")
    result = stage("finetune", "--in-place", MLM_MODEL_CKPT=mine, **given)
    assert result.code == 0, result.out
    assert (mine / "latest_checkpointed_iteration.txt").read_text() == str(ITERATIONS)
    assert (mine / "release").is_dir() and (mine / "iter_0000008").is_dir()


def test_what_another_run_made_is_not_overwritten(stage: Runner, source: Path, data: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes.txt").write_text("precious")
    refused = stage("finetune", **variables(source, target, data))
    assert refused.code == 2 and "MLM_OVERWRITE=1" in refused.out and (target / "notes.txt").exists()


def test_an_optimizer_cut_by_rank_is_not_resumed_in_another_layout(
    fp32: Runner, source: Path, data: Path, tmp_path: Path
) -> None:
    from argparse import Namespace

    from mlmsub.runtime.errors import StageError
    from mlmsub.runtime.training import state

    sizes = dict.fromkeys(state.SIZES.values(), 1)
    was = Namespace(**sizes, global_batch_size=8, seed=1, mlmsub_data="x")
    now = Namespace(**{**vars(was), "tensor_model_parallel_size": 2})
    with pytest.raises(StageError, match=r"TP: .* saved with TP=1.*--dist-ckpt-optim-fully-reshardable"):
        state._check(now, was, {"distrib_optim_sharding_type": "dp_reshardable"}, tmp_path)
    assert state._check(now, was, {}, tmp_path) is False


def test_a_full_disk_leaves_the_last_checkpoint(stage: Runner, source: Path, data: Path, tmp_path: Path) -> None:
    from mlmsub.runtime.checkpoints import checkpoint

    make = checkpoint._make_empty

    def full(here: Path) -> None:
        if here.name == "iter_0000004":
            raise checkpoint.CheckFailed("checkpoint", "No space left on device")
        make(here)

    with mock.patch.object(checkpoint, "_make_empty", full):
        result = stage("finetune", **variables(source, tmp_path / "out", data, extra="--save-interval 2"))
    assert result.code == 1 and "No space left" in result.out
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_tensorboard_and_wandb_get_what_the_log_has(
    stage: Runner, source: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for both packages, which take what the real ones do."""
    written: list[tuple[str, int, float]] = []
    board = mock.Mock(add_scalar=lambda name, value, step: written.append((name, step, value)))
    run = mock.Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", mock.Mock(SummaryWriter=lambda *_a, **_k: board))
    monkeypatch.setitem(sys.modules, "wandb", mock.Mock(init=lambda **_k: run))
    asked = f"--tensorboard-dir {tmp_path / 'tb'} --wandb-project p --wandb-exp-name e --log-interval 4"
    result = stage("finetune", **variables(source, tmp_path / "out", data, extra=asked))
    assert result.code == 0, result.out
    losses = [(step, value) for name, step, value in written if name == "lm_loss"]
    assert losses == [(event["iteration"], event["lm_loss"]) for event in events(result, "iteration")]
    assert [step for name, step, _ in written if name == "valid_lm_loss"] == [4, 8]
    assert {call.kwargs["step"] for call in run.log.call_args_list} == {4, 8} and run.finish.called


def test_a_missing_writer_is_told_before_the_training(
    stage: Runner, source: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    asked = "--wandb-project p --wandb-exp-name e"
    result = stage("finetune", **variables(source, tmp_path / "out", data, extra=asked))
    assert result.code == 2 and "--wandb-project: wandb is not installed here" in result.out
    assert "[data]" not in result.out
