"""What the exporters mend in modelopt's exporters: each fails when modelopt no longer needs it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rig import in_bf16, rewrite, tensors
from test_export import MTP, config, imported
from test_twins import IDS, LLAMA4, TWINS, make

from mlmsub.runtime.checkpoints import hf_check
from mlmsub.runtime.errors import CheckFailed


def as_shipped(tmp_path: Path, source: Path, quantize: Any = None) -> Path:
    """What modelopt's own exporter makes of ``source``."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_mcore_gpt_to_hf

    (tmp_path / "shipped").mkdir()
    with imported(tmp_path, source) as (_, made):
        if quantize is not None:
            positions = torch.arange(IDS.shape[1]).expand(len(IDS), -1)
            mtq.quantize(made, quantize(mtq), lambda module: module(IDS, positions, None))
        export_mcore_gpt_to_hf(
            made, str(source), export_dir=str(tmp_path / "shipped"), moe_router_dtype=made.config.moe_router_dtype
        )
    return tmp_path / "shipped"


def test_modelopt_forgets_mtp_layers_and_makes_the_router_fp32(tmp_path: Path) -> None:
    make(tmp_path / "hf", "DeepseekV3Config", MTP)
    rewrite(tmp_path / "hf", lambda found: found | {"model.layers.3.eh_proj.weight": torch.ones(64, 64)})
    source = in_bf16(tmp_path / "hf")
    out = as_shipped(tmp_path, source)
    made = tensors(out)
    assert "model.layers.3.eh_proj.weight" not in made and config(out)["num_nextn_predict_layers"] == 1
    assert made["model.layers.1.mlp.gate.weight"].dtype == torch.float32
    assert config(out)["head_dim"] == 24 != config(source)["head_dim"] == 16
    with pytest.raises(CheckFailed, match=r"gate.weight is F32, and should be BF16"):
        hf_check.check(out, source, False)


def test_modelopt_rounds_the_router_s_bias() -> None:
    from modelopt.torch.export.unified_export_megatron import GPTModelExporter

    router = SimpleNamespace(weight=torch.ones(2, 2), expert_bias=torch.full((2,), 0.1))
    found = GPTModelExporter._get_weight_bias(None, router, torch.bfloat16)
    assert found["expert_bias"].dtype == torch.bfloat16


def test_modelopt_rounds_fp8_twice() -> None:
    from modelopt.torch.export.quant_utils import to_quantized_weight

    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = weight.abs().max().float() / 448
    once = (weight.float() / scale).to(torch.float8_e4m3fn).float()
    assert (to_quantized_weight(weight, scale, "fp8").float() != once).float().mean() > 0.02
    assert torch.equal(to_quantized_weight(weight.float(), scale, "fp8").float(), once)


def test_modelopt_excludes_a_whole_mlp(tmp_path: Path) -> None:
    def second_matrix_only(mtq: Any) -> dict:
        made = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
        made["quant_cfg"].append({"quantizer_name": "*linear_fc1*", "enable": False})
        return made

    make(tmp_path / "hf", *TWINS["llama"])
    out = as_shipped(tmp_path, in_bf16(tmp_path / "hf"), second_matrix_only)
    note = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert "model.layers.0.mlp" in note["exclude_modules"]
    assert "model.layers.0.mlp.gate_proj" not in note["exclude_modules"]


def test_modelopt_cannot_export_llama_4_with_its_vision_tower(tmp_path: Path) -> None:
    make(tmp_path / "hf", "Llama4Config", LLAMA4)
    with pytest.raises(RuntimeError, match=r"dropped .* tensor.*vision_model"):
        as_shipped(tmp_path, in_bf16(tmp_path / "hf"))


def test_modelopt_makes_blocks_of_packed_experts_along_the_wrong_axis(tmp_path: Path) -> None:
    make(tmp_path / "hf", "Llama4Config", LLAMA4)
    with pytest.raises(RuntimeError, match="must match the size"):
        as_shipped(tmp_path, in_bf16(tmp_path / "hf"), lambda mtq: copy.deepcopy(mtq.NVFP4_DEFAULT_CFG))


def test_modelopt_rounds_ranges_for_vllm() -> None:
    from modelopt.torch.export.plugins.vllm_fakequant_megatron import VllmFqGPTModelExporter
    from modelopt.torch.quantization.nn import TensorQuantizer

    linear = torch.nn.Linear(2, 2)
    linear.input_quantizer = TensorQuantizer(amax=torch.tensor(0.1))
    exporter = SimpleNamespace(
        exclude_modules=[], _get_quantization_format=lambda _m: None,
        _get_weight_bias=lambda m, _d, _n: {"weight": m.weight},
    )  # fmt: skip
    state, *_ = VllmFqGPTModelExporter._get_quantized_state(exporter, linear, torch.bfloat16)
    assert state["input_quantizer._amax"].dtype == torch.bfloat16
