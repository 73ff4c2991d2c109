"""prune on a GPU: depth on any layers, width on Transformer Engine's, each exported and read by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpurig import Chain, cosine, have_te, megatron_logits, transformers_logits
from rig import Result

CALIBRATE = "--calib-size 16 --calib-max-sequence-length 128"


def prune(chain: Chain, folder: Path, flags: str = CALIBRATE, **variables: object) -> tuple[Result, dict]:
    """The result, and the event that tells what was pruned and the loss before and after."""
    variables = {"HF_MODEL_CKPT": chain.source, "MLM_MODEL_SAVE": folder / "pruned", **variables}
    result = chain.stage("prune", MLM_EXTRA_ARGS=flags, **variables)
    lines = (result.run_dir / "state" / "events.jsonl").read_text().splitlines()
    return result, next((event for event in map(json.loads, lines) if event["event"] == "prune"), {})


def exported(chain: Chain, folder: Path) -> dict:
    """Export the pruned model, compare it with Megatron's; its config.json."""
    out = folder / "hf"
    result = chain.stage("export", HF_MODEL_CKPT=chain.source, MLM_MODEL_CKPT=folder / "pruned", EXPORT_DIR=out)
    assert result.code == 0, result.out
    with chain.model(folder / "pruned") as model:
        want = megatron_logits(model)
    # bf16 on both sides: where experts nearly tie, a token may go to another one
    assert cosine(transformers_logits(out), want) > (0.98 if chain.experts else 0.999)
    return json.loads((out / "config.json").read_text())


def test_depth(chain: Chain, tmp_path: Path) -> None:
    result, told = prune(chain, tmp_path, TARGET_NUM_LAYERS=3)
    assert result.code == 0, result.out
    assert len(told["dropped"]) == 1 and told["parameters_after"] < told["parameters_before"]
    assert exported(chain, tmp_path)["num_hidden_layers"] == 3


def test_width_and_depth(llama: Chain, tmp_path: Path) -> None:
    variables = {"TARGET_HIDDEN_SIZE": 192, "TARGET_FFN_HIDDEN_SIZE": 384, "TARGET_NUM_ATTENTION_HEADS": 2}
    flags = f"{CALIBRATE} --pruning-scores-path {tmp_path / 'scores'}"
    result, told = prune(llama, tmp_path, flags, **variables, TARGET_NUM_LAYERS=3)
    if not have_te():
        assert result.code == 2 and "transformer_engine" in result.out, result.out
        assert not (tmp_path / "pruned").exists()
        return
    assert result.code == 0, result.out
    assert len(told["dropped"]) == 1 and told["loss_after"] > 0
    made = exported(llama, tmp_path)
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "head_dim")
    assert [made[name] for name in sizes] == [192, 384, 2, 3, 64]
    again, _ = prune(llama, tmp_path / "again", flags, TARGET_FFN_HIDDEN_SIZE=256)
    assert again.code == 0, again.out
    assert "from per-rank checkpoint" in again.out, "the scores of the first run"


def test_width_of_a_megatron_checkpoint(llama: Chain, tmp_path: Path) -> None:
    if not have_te():
        pytest.skip("modelopt prunes the width of Transformer Engine's layers")
    result, _ = prune(llama, tmp_path, MLM_MODEL_CKPT=llama.convert()[1], TARGET_FFN_HIDDEN_SIZE=256)
    assert result.code == 0, result.out
    assert exported(llama, tmp_path)["intermediate_size"] == 256


def test_experts(chains: dict[str, Chain], tmp_path: Path) -> None:
    if not have_te():
        pytest.skip("modelopt prunes the width of Transformer Engine's layers")
    chain = chains["qwen3-moe"]
    variables = {"TARGET_NUM_MOE_EXPERTS": 4, "TARGET_MOE_FFN_HIDDEN_SIZE": 64, "TARGET_HIDDEN_SIZE": 192}
    result, _ = prune(chain, tmp_path, **variables)
    assert result.code == 0, result.out
    made = exported(chain, tmp_path)
    experts = made.get("num_experts", made.get("num_local_experts"))
    assert (experts, made["moe_intermediate_size"], made["hidden_size"]) == (4, 64, 192)
