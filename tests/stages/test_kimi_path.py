"""Kimi-K2's real path, on a tiny folder as its publisher's: remote code, tiktoken, FP8 blocks, YaRN, router bias."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kimi_folder import make_kimi
from rig import MODEL, Result, Runner, logits, session, tensors

from mlmsub.core import hf_config, modelconf

IDS = torch.randint(0, 256, (2, 160), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache for remote code of these tests' own; transformers names its own when it is imported."""
    from transformers import dynamic_module_utils

    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        patch.syspath_prepend(str(folder))
        yield folder


def make_conf(source: Path, file: Path, **changes: Any) -> Path:
    """The conf that `mlmsub conf from-hf` makes of the folder's config.json."""
    conf = hf_config.convert(json.loads((source / "config.json").read_text()), MODEL)
    conf.megatron_args.update({"seq-length": "512", "moe-token-dispatcher-type": "allgather"})
    file.write_text(modelconf.render(replace(conf, **changes)))
    return file


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("kimi")
    made = make_kimi(folder / "hf")
    return Runner(folder / "runs", make_conf(folder / "hf", folder / "model.yaml")), folder / "hf", made


@pytest.fixture(scope="module")
def converted(kimi: tuple[Runner, Path, torch.nn.Module]) -> Path:
    stage, source, _ = kimi
    made = source.parent / "mlm"
    result = stage("convert", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=made, MLM_EXTRA_ARGS="")
    assert result.code == 0, result.out
    return made


def reference(made: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return made(IDS).logits.float()


def ours(stage: Runner, source: Path, folder: Path) -> torch.Tensor:
    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.models import model

    with session(stage, source) as opened:
        read = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(read, checkpoint.folder(folder))
        return logits(read, IDS)


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0))


def test_the_folder_is_what_it_should_be(kimi: tuple[Runner, Path, torch.nn.Module]) -> None:
    _, source, _ = kimi
    stored = tensors(source)
    kinds = {tensor.dtype for tensor in stored.values()}
    assert kinds == {torch.float8_e4m3fn, torch.bfloat16, torch.float32}
    assert all(name.endswith(("_scale_inv", "correction_bias"))
               for name, tensor in stored.items() if tensor.dtype == torch.float32)  # fmt: skip
    config = json.loads((source / "config.json").read_text())
    assert config["model_type"] == "kimi_k2" and config["rope_scaling"]["beta_fast"] == 1.0
    assert config["routed_scaling_factor"] == 2.827


def test_converted_kimi_computes_what_transformers_does(
    kimi: tuple[Runner, Path, torch.nn.Module], converted: Path
) -> None:
    """In bf16, so by rounding alone it may choose other experts: transformers in bf16 is as far from its float32."""
    stage, source, made = kimi
    want = reference(made)
    got = ours(stage, source, converted)
    rounded = cosine(reference(made.to(torch.bfloat16)), want)
    made.to(torch.float32)
    assert want.std() > 0.2, "flat logits compare nothing"
    assert 1 - cosine(got, want) < max(1e-3, 1.5 * (1 - rounded))


def test_the_routers_bias_stays_in_float32(kimi: tuple[Runner, Path, torch.nn.Module], converted: Path) -> None:
    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.models import model

    stage, source, _ = kimi
    with session(stage, source) as opened:
        read = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(read, checkpoint.folder(converted))
        got = read.decoder.layers[1].mlp.router.expert_bias
    want = tensors(source)["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert got.dtype == torch.float32 and torch.equal(got, want) and bool(want.abs().max() > 0.1)


def test_quantize_and_export(kimi: tuple[Runner, Path, torch.nn.Module], converted: Path, tmp_path: Path) -> None:
    """The tokenizer, remote code on tiktoken with the old import, reads the calibration text."""
    stage, source, _ = kimi
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": converted, "MLM_MODEL_SAVE": tmp_path / "q"}
    quantized = stage("quantize", "fp8", **given)
    assert quantized.code == 0, quantized.out
    exported = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "q", EXPORT_DIR=tmp_path / "out")
    assert exported.code == 0, exported.out
    made = tensors(tmp_path / "out")
    assert made["model.layers.1.mlp.experts.0.down_proj.weight"].dtype == torch.float8_e4m3fn
    assert not any(name.endswith("_scale_inv") for name in made), "the source's block scales are gone"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tiktoken.model", "tokenization_kimi.py", "configuration_deepseek.py"} <= names
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "modelopt"
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert torch.equal(made[bias], tensors(source)[bias])


def test_deepseek_with_expert_groups(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    made = make_kimi(source, n_group=4, topk_group=2, num_experts_per_tok=4, routed_scaling_factor=2.5)
    stage = Runner(tmp_path / "runs", make_conf(source, tmp_path / "model.yaml"))
    result = stage("convert", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "mlm", MLM_EXTRA_ARGS="")
    assert result.code == 0, result.out
    want = reference(made)
    got = ours(stage, source, tmp_path / "mlm")
    rounded = cosine(reference(made.to(torch.bfloat16)), want)
    assert 1 - cosine(got, want) < max(1e-3, 1.5 * (1 - rounded))


# --- remote code runs when someone has said so ----------------------------------------------


def ran(*places: Path) -> bool:
    """Whether the folder's configuration code was executed, in its place or in transformers' cache."""
    return any(list(place.rglob("configuration_deepseek.ran")) for place in places)


def test_untrusted_code_is_not_run(
    kimi: tuple[Runner, Path, torch.nn.Module], converted: Path, modules: Path, tmp_path: Path
) -> None:
    _, source, _ = kimi
    assert ran(modules), "trusted, it leaves a trace"
    for trace in modules.rglob("configuration_deepseek.ran"):
        trace.unlink()
    stage = Runner(tmp_path / "runs", make_conf(source, tmp_path / "model.yaml", trust_remote_code=False))
    result: Result = stage("convert", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "out", MLM_EXTRA_ARGS="")
    assert result.code == 2
    last = result.out.strip().splitlines()[-1]
    assert "trust_remote_code" in last and "configuration_deepseek" in last
    assert "--trust-remote-code to MLM_EXTRA_ARGS" in last
    assert not ran(source, modules) and not (tmp_path / "out").exists()


def test_the_user_can_trust_it(kimi: tuple[Runner, Path, torch.nn.Module], tmp_path: Path) -> None:
    _, source, _ = kimi
    stage = Runner(tmp_path / "runs", make_conf(source, tmp_path / "model.yaml", trust_remote_code=False))
    result = stage("convert", "--trust-remote-code", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "out",
                   MLM_EXTRA_ARGS="")  # fmt: skip
    assert result.code == 0, result.out
