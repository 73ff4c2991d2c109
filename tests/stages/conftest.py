"""Fixtures of the stage tests; what they stand on is in rig.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("megatron") and importlib.util.find_spec("modelopt"):
    from rig import Result, Runner, make_conf, make_llama, session
    from training_rig import in_fp32, write_data
else:  # the submit side alone is installed: tests/bootstrap.sh has said why
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="session")
def source(folder: Path) -> Path:
    """The tiny model with an output layer of its own."""
    return make_llama(folder / "hf", tied=False)


@pytest.fixture(scope="session")
def tied_source(folder: Path) -> Path:
    """The tiny model whose output layer is its embedding."""
    return make_llama(folder / "hf-tied", tied=True)


@pytest.fixture(scope="session")
def stage(folder: Path) -> Runner:
    return Runner(folder / "runs", make_conf(folder / "model.yaml"))


@pytest.fixture(scope="module")
def fp32(stage: Runner, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """The same stages on the same model, computed in float32."""
    folder = tmp_path_factory.mktemp("fp32")
    return Runner(folder / "runs", in_fp32(stage.conf, folder / "model.yaml"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts to train on."""
    return write_data(tmp_path_factory.mktemp("data") / "texts.jsonl")


@pytest.fixture(scope="session")
def fp8(stage: Runner, source: Path, folder: Path) -> Result:
    """The tiny model quantized to FP8 by one process."""
    return stage("quantize", "FP8_DEFAULT_CFG", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=folder / "fp8")


@pytest.fixture(scope="session")
def fp8_export(stage: Runner, fp8: Result, source: Path, folder: Path) -> Result:
    return stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=folder / "fp8", EXPORT_DIR=folder / "fp8-hf")


@pytest.fixture(scope="session")
def bf16(stage: Runner, source: Path, folder: Path) -> Path:
    """The tiny model as an unquantized Megatron checkpoint."""
    import torch

    from mlmsub.runtime.checkpoints import checkpoint, hf_import
    from mlmsub.runtime.models import model

    part = folder / "bf16"
    part.mkdir()
    with session(stage, source) as opened:
        made = model.build(opened.args, opened.conf, "cpu")
        hf_import.import_weights(made, source, opened.conf, torch.bfloat16)
        checkpoint.save(made, opened.args, part)
    return part
