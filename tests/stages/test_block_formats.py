"""Formats with two-dimensional blocks on weights that are smaller than one, and on weights that TP cuts."""

from pathlib import Path

import pytest
import torch
from rig import HIDDEN, LAYERS, Result, Runner, session

FORMAT = "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"  # blocks of 128 x 128; the model's weights have sides of 64 and 128


@pytest.fixture(scope="module")
def blocks(stage: Runner, source: Path, folder: Path) -> Result:
    return stage("quantize", FORMAT, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=folder / "blocks")


def test_weights_smaller_than_a_block_have_one_range_each(
    blocks: Result, stage: Runner, source: Path, folder: Path
) -> None:
    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.models import model

    assert blocks.code == 0, blocks.out
    with session(stage, source) as opened:
        made = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(made, folder / "blocks" / "release")
        for layer in made.decoder.layers:
            linear = layer.self_attention.linear_proj
            assert tuple(linear.weight.shape) == (HIDDEN, HIDDEN)
            want = linear.weight.float().abs().max()
            assert torch.equal(linear.weight_quantizer.amax.float().reshape(()), want)
        assert len(made.decoder.layers) == LAYERS


def test_the_blocks_can_be_exported(blocks: Result, stage: Runner, source: Path, folder: Path, tmp_path: Path) -> None:
    result = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=folder / "blocks", EXPORT_DIR=tmp_path / "hf")
    assert result.code == 0, result.out
    assert "FP8_PB_WO" in result.out


@pytest.mark.parametrize("stage_name", ["quantize", "convert"])
def test_a_layout_that_cuts_blocks_is_refused(
    stage_name: str, blocks: Result, stage: Runner, source: Path, folder: Path, tmp_path: Path
) -> None:
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_SAVE": tmp_path / "out", "TP": 2}
    words = [FORMAT] if stage_name == "quantize" else []
    if stage_name == "convert":  # what was quantized with whole blocks
        given |= {"MLM_MODEL_CKPT": folder / "blocks", "MLM_EXTRA_ARGS": ""}
    result = stage.ranks(stage_name, *words, **given)
    assert result.code == 2, result.out
    assert "TP: cuts the blocks of" in result.out
    assert "decoder.layers.0.mlp.linear_fc2 (64 columns per rank, blocks of 128)" in result.out
    assert "[save]" not in result.out
