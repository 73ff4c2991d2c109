"""export of unquantized models: for every family bit-equal to the source, with a config.json that says so.

The twins are those of test_twins.py, in bf16 with a router bias in fp32 as DeepSeek and Kimi publish theirs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rig import Result, Runner, in_bf16, logits, rewrite, tensors
from test_errors import one_line
from test_twins import GPT_OSS, IDS, TWINS, V3, _store_as_mxfp4, make, opened

from mlmsub.runtime.checkpoints import hf_check, hf_export, mtp
from mlmsub.runtime.errors import CheckFailed

FAMILIES = {**TWINS, "gpt-oss": ("GptOssConfig", GPT_OSS)}
MTP = dict(V3, n_group=2, topk_group=1, num_nextn_predict_layers=1)


@pytest.fixture(autouse=True)
def _local_attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss has sinks and windows: Megatron's local attention stands in for Transformer Engine's."""
    if "gpt" in request.node.name:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        from mlmsub.runtime.models import attention

        monkeypatch.setattr(attention, "TorchAttention", DotProductAttention)


@contextmanager
def imported(tmp_path: Path, source: Path) -> Iterator:
    """A session and the Megatron model of ``source`` in it."""
    from mlmsub.runtime.checkpoints import hf_import
    from mlmsub.runtime.models import model

    with opened(tmp_path, source) as session:
        made = model.build(session.args, session.conf, "cpu")
        hf_import.import_weights(made, source, session.conf, torch.bfloat16)
        yield session, made


def export(tmp_path: Path, source: Path, out: str = "out") -> Path:
    """Import ``source`` and export it again, without a Megatron checkpoint between."""
    (tmp_path / out).mkdir()
    with imported(tmp_path, source) as (session, made):
        hf_export.export_weights(made, source, session.conf, torch.bfloat16, tmp_path / out)
    return tmp_path / out


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", FAMILIES)
def test_export_is_the_source(name: str, tmp_path: Path) -> None:
    make(tmp_path / "hf", *FAMILIES[name])
    source = in_bf16(tmp_path / "hf")
    out = export(tmp_path, source)
    made, want = tensors(out), tensors(source)
    assert set(made) == set(want)
    for key, tensor in want.items():
        assert made[key].dtype == tensor.dtype, key
        assert torch.equal(made[key], tensor), key
    biases = [made[key] for key in made if key.endswith("e_score_correction_bias")]
    assert all(bias.dtype == torch.float32 and bias.abs().min() > 0 for bias in biases)
    assert bool(biases) == (FAMILIES[name][0] == "DeepseekV3Config")
    says, said = config(out), config(source)
    if "num_nextn_predict_layers" in said:  # transformers' default is 1, and writes no tensor of it
        assert says.pop("num_nextn_predict_layers") == 0 and said.pop("num_nextn_predict_layers") == 1
    assert says == said
    assert "not quantized" in hf_check.check(out, source, False)


def test_export_of_gpt_oss_from_mxfp4(tmp_path: Path) -> None:
    """transformers reads it as the same model, and so does our own import."""
    from transformers import AutoModelForCausalLM

    reference = make(tmp_path / "hf", "GptOssConfig", GPT_OSS)
    source = tmp_path / "hf"
    _store_as_mxfp4(reference, source / "model.safetensors")
    rewrite(source, lambda found: {key: t if t.dtype == torch.uint8 else t.bfloat16() for key, t in found.items()})
    text = config(source) | {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    (source / "config.json").write_text(json.dumps(text))
    (tmp_path / "one").mkdir()
    with imported(tmp_path, source) as (session, made):
        want = logits(made, IDS)
        hf_export.export_weights(made, source, session.conf, torch.bfloat16, tmp_path / "one")
    assert "not quantized" in hf_check.check(tmp_path / "one", source, False)
    assert "quantization_config" not in config(tmp_path / "one")

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "one", attn_implementation="eager").eval()
    assert theirs.dtype == torch.bfloat16
    for layer, layer_want in zip(theirs.model.layers, reference.model.layers, strict=True):
        for kind in ("gate_up_proj", "down_proj"):  # MXFP4 values are bf16 numbers
            assert torch.equal(getattr(layer.mlp.experts, kind).float(), getattr(layer_want.mlp.experts, kind))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
        assert torch.equal(theirs.float()(IDS).logits, reference(IDS).logits)
    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "one", tmp_path / "again" / "hf")
    with imported(tmp_path / "again", tmp_path / "again" / "hf") as (_, ours):
        assert torch.equal(logits(ours, IDS), want)


def test_export_of_an_fp8_block_source(tmp_path: Path) -> None:
    """As DeepSeek and Kimi publish theirs: the export holds their weights in bf16, and says nothing of FP8."""
    source = in_bf16(make_twin(tmp_path / "hf"))

    def in_blocks(found: dict) -> dict:
        made = dict(found)
        for key, tensor in found.items():
            if ".layers." in key and tensor.dim() == 2 and not key.endswith("gate.weight"):
                made[key], scale = exporters.fp8_blocks(tensor)
                made[f"{key}_scale_inv"] = scale[:, 0, :, 0]
        return made

    from mlmsub.runtime.checkpoints import exporters

    rewrite(source, in_blocks)
    data = config(source) | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (source / "config.json").write_text(json.dumps(data))
    out = export(tmp_path, source)
    made, want = tensors(out), tensors(source)
    assert set(made) == {key for key in want if not key.endswith("_scale_inv")}
    for key, tensor in made.items():
        scale = want.get(f"{key}_scale_inv")
        if scale is not None:  # each twin's weight is one block wide or two
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
            assert torch.equal(tensor, (want[key].float() * wide).bfloat16()), key
        else:
            assert torch.equal(tensor, want[key]) and tensor.dtype == want[key].dtype, key
    assert "quantization_config" not in config(out) and config(out)["dtype"] == "bfloat16"
    assert "not quantized" in hf_check.check(out, source, False)
    # what the check is for
    (out / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckFailed, match=r"config.json has a quantization_config"):
        hf_check.check(out, source, False)


@pytest.fixture
def drafting(tmp_path: Path) -> Path:
    """A DeepSeek twin with one MTP layer behind its decoder, as published: another layer, and what joins it on."""
    make(tmp_path / "hf", "DeepseekV3Config", MTP)

    def with_mtp(found: dict) -> dict:
        layer = {k.replace("layers.2.", "layers.3."): t * 2 for k, t in found.items() if "layers.2." in k}
        joint = {f"model.layers.3.{name}.weight": torch.randn(64, 64) for name in ("eh_proj", "shared_head.head")}
        return {**found, **layer, **joint}

    rewrite(tmp_path / "hf", with_mtp)
    return in_bf16(tmp_path / "hf")


def test_export_copies_mtp_layers(drafting: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = export(tmp_path, drafting)
    made, want = tensors(out), tensors(drafting)
    assert set(made) == set(want) and all(torch.equal(made[key], want[key]) for key in want)
    assert config(out)["num_nextn_predict_layers"] == 1
    count = sum(".layers.3." in key for key in want)
    assert f"MTP: {count} tensors copied from the source" in capsys.readouterr().out
    assert f"({count} of MTP layers)" in hf_check.check(out, drafting, False)


def test_export_leaves_quantized_mtp_layers_out(drafting: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rewrite(drafting, lambda found: {
        key: t.to(torch.float8_e4m3fn) if "layers.3.mlp.experts" in key else t for key, t in found.items()
    })  # fmt: skip
    out = export(tmp_path, drafting)
    assert not [key for key in tensors(out) if ".layers.3." in key]
    assert config(out)["num_nextn_predict_layers"] == 0
    assert "MTP: left out and set to 0" in capsys.readouterr().out
    hf_check.check(out, drafting, False)
    # what the check is for
    data = config(out) | {"num_nextn_predict_layers": 1}
    (out / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckFailed, match="1 MTP layers, and there are 0"):
        hf_check.check(out, drafting, False)


def test_mtp_layers_of_a_model_with_fewer_layers(drafting: Path) -> None:
    assert mtp.plan(drafting, 3).copied and not mtp.plan(drafting, 2).copied


def test_config_keeps_the_source_s_words(tmp_path: Path) -> None:
    """Its keys are those of the transformers that the server has; only what is no longer so changes."""
    source = in_bf16(make_twin(tmp_path / "hf"))
    data = config(source)
    theta = data.pop("rope_parameters")
    data |= {"rope_theta": theta["rope_theta"], "rope_scaling": {**theta, "type": "yarn"}}
    data["torch_dtype"] = data.pop("dtype")
    data["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(data))
    (tmp_path / "out").mkdir()
    shutil.copy(source / "config.json", tmp_path / "out")
    sizes = {"num_hidden_layers": 2, "head_dim": 3, "num_attention_heads": 4, "hidden_size": 64}
    hf_export.write_config(tmp_path / "out", source, torch.bfloat16, sizes, False)
    del data["quantization_config"]
    assert config(tmp_path / "out") == data | sizes | {"num_nextn_predict_layers": 0}


def make_twin(folder: Path) -> Path:
    make(folder, *TWINS["kimi-k2"])
    return folder


def test_other_weights_beside_the_source_s_are_not_copied(tmp_path: Path) -> None:
    make(tmp_path / "hf", *TWINS["llama"])
    source = in_bf16(tmp_path / "hf")
    for name in ("pytorch_model.bin", "consolidated.00.pth", "hf_quant_config.json", "tokenization_mine.py"):
        (source / name).write_text("{}")
    out = export(tmp_path, source)
    assert {"pytorch_model.bin", "consolidated.00.pth", "hf_quant_config.json"}.isdisjoint(
        path.name for path in out.iterdir()
    )
    assert (out / "tokenization_mine.py").is_file()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda key, t: t.half() if "o_proj" in key else t, "o_proj.weight is F16"),
        (lambda key, t: t.bfloat16() if "correction" in key else t, "e_score_correction_bias is BF16"),
        (lambda key, t: t.to(torch.float8_e4m3fn) if "o_proj" in key else t, "o_proj.weight is F8_E4M3"),
        (lambda key, t: None if "layers.1.mlp.experts.3.up" in key else t, "experts.3.up_proj.weight"),
    ],
    ids=["rounded", "bias", "quantized", "missing"],
)
def test_an_export_with_other_types_than_the_source(change, word: str, tmp_path: Path) -> None:
    source = in_bf16(make_twin(tmp_path / "hf"))
    out = export(tmp_path, source)
    hf_check.check(out, source, False)
    rewrite(out, lambda found: {key: new for key, t in found.items() if (new := change(key, t)) is not None})
    names = {"weight_map": dict.fromkeys(tensors(out), "model.safetensors")}
    (out / "model.safetensors.index.json").write_text(json.dumps(names))
    with pytest.raises(CheckFailed) as told:
        hf_check.check(out, source, False)
    assert word in str(told.value)


# --- errors and layouts, through the stage ---


def test_export_of_an_unknown_architecture(stage: Runner, bf16: Path, source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "hf")
    data = config(source) | {"architectures": ["PhiForCausalLM"]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(data))
    result = stage("export", HF_MODEL_CKPT=tmp_path / "hf", MLM_MODEL_CKPT=bf16, EXPORT_DIR=tmp_path / "out")
    one_line(result, "HF_MODEL_CKPT", "no rules for 'PhiForCausalLM'")


def test_export_of_a_nan_names_its_tensor(stage: Runner, source: Path, tmp_path: Path) -> None:
    from rig import session

    from mlmsub.runtime.checkpoints import checkpoint, hf_import
    from mlmsub.runtime.models import model

    (tmp_path / "ckpt").mkdir()
    with session(stage, source) as started:
        made = model.build(started.args, started.conf, "cpu")
        hf_import.import_weights(made, source, started.conf, torch.bfloat16)
        with torch.no_grad():
            made.decoder.layers[2].mlp.linear_fc1.weight[130, 5] = torch.nan
        checkpoint.save(made, started.args, tmp_path / "ckpt")
    result = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "ckpt", EXPORT_DIR=tmp_path / "out")
    one_line(result, "model.layers.2.mlp.up_proj.weight has a NaN", code=1)
    assert not (tmp_path / "out" / "config.json").exists()


def test_export_in_two_pipeline_stages_is_the_same_bytes(
    stage: Runner, fp8: Result, source: Path, folder: Path, tmp_path: Path
) -> None:
    """Stages of 1 and 3 layers; also through the meta device. FP8 has files that know of all layers."""
    common = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": folder / "fp8"}
    one = stage("export", EXPORT_DIR=tmp_path / "one", **common)
    meta = "--init-model-with-meta-device --use-cpu-initialization"
    other = stage("export", EXPORT_DIR=tmp_path / "meta", MLM_EXTRA_ARGS=meta, **common)
    uneven = "--decoder-first-pipeline-num-layers 1 --use-cpu-initialization"
    two = stage.ranks("export", PP=2, EXPORT_DIR=tmp_path / "two", MLM_EXTRA_ARGS=uneven, **common)
    assert (one.code, other.code, two.code) == (0, 0, 0), one.out + other.out + two.out
    want = files(tmp_path / "one")
    assert len([name for name in want if name.endswith(".safetensors")]) == 4
    assert "hf_quant_config.json" in want and files(tmp_path / "two") == want
    assert files(tmp_path / "meta") == want


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
