"""export of quantized models, against a dequantizer of the tests' own, in plain torch from the formats' definitions.

FP8: E4M3 times a scale. NVFP4: E2M1, two in a byte with the even element in the low nibble, times an E4M3 scale
for 16 values times an fp32 scale for the tensor.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rig import Result, Runner, in_bf16, logits, rewrite, session, tensors
from test_errors import one_line
from test_export import config
from test_twins import IDS, LLAMA4, SMALL, TWINS, cosine, make, opened

from mlmsub.runtime.checkpoints import hf_check, hf_export
from mlmsub.runtime.errors import CheckFailed
from mlmsub.runtime.quantization import formats

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
FAMILIES = ("llama", "qwen3-moe", "deepseek-v3")
BLOCKS = dict(SMALL, hidden_size=256, intermediate_size=384, head_dim=128)
OTHERS = {"llama4": ("Llama4Config", LLAMA4), "llama-blocks": ("LlamaConfig", BLOCKS)}
# the experts' and the attention's linears that are quantized: MLA's down projections are not
COUNT = {"llama": 3 * 7, "qwen3-moe": 3 * (4 + 8 * 3), "deepseek-v3": 3 * 3 + 3 + 2 * 9 * 3}


class Made(NamedTuple):
    folder: Path
    source: Path
    logits: torch.Tensor | None  # of Megatron's fake-quantized model


def quantized(tmp_path: Path, name: str, change: Any, dtype: torch.dtype = torch.bfloat16, after: Any = None) -> Made:
    """Quantize a twin with the config that ``change`` makes of modelopt's ``mtq`` module, and export it.

    In float32 Megatron's logits can be compared to the last digits.
    """
    import modelopt.torch.quantization as mtq

    from mlmsub.runtime.checkpoints import hf_import
    from mlmsub.runtime.models import model

    source = tmp_path / "hf"
    make(source, *OTHERS[name] if name in OTHERS else TWINS[name])
    if dtype == torch.bfloat16:
        in_bf16(source)
    (tmp_path / "out").mkdir()
    with opened(tmp_path, source) as session:
        session.args.bf16, session.args.params_dtype = dtype == torch.bfloat16, dtype
        made = model.build(session.args, session.conf, "cpu")
        hf_import.import_weights(made, source, session.conf, dtype)
        positions = torch.arange(IDS.shape[1]).expand(len(IDS), -1)
        mtq.quantize(made, change(mtq), lambda module: module(IDS, positions, None))
        formats.check_calibrated(made)
        got = (
            None
            if any(quantizer.num_bits == (2, 1) for _, quantizer in formats.quantizers(made))
            else logits(made, IDS)
        )
        if after is not None:
            after(made)
        hf_export.export_weights(made, source, session.conf, dtype, tmp_path / "out")
    return Made(tmp_path / "out", source, got)


def fp8(mtq: Any) -> dict:
    return copy.deepcopy(mtq.FP8_DEFAULT_CFG)


def fp8_weights(mtq: Any) -> dict:
    made = fp8(mtq)
    made["quant_cfg"].append({"quantizer_name": "*input_quantizer", "enable": False})
    return made


def mixed(mtq: Any) -> dict:
    """Attention in FP8, the MLP's second matrix in NVFP4, its first one as it was."""
    made = fp8(mtq)
    for kind in ("weight_quantizer", "input_quantizer"):
        made["quant_cfg"].append({"quantizer_name": f"*linear_fc2.{kind}", "cfg": FP4, "enable": True})
    made["quant_cfg"].append({"quantizer_name": "*linear_fc1*", "enable": False})
    return made


def dequantize(made: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The plain weights of an export, by the names of the source."""
    found = {}
    for name, tensor in made.items():
        if name.endswith(("scale", "scale_2")):
            continue
        join = "_" if name.endswith(".weight") else "_weight_"
        scale = made.get(f"{name}{join}scale")
        if tensor.dtype == torch.uint8:
            assert scale.dtype == torch.float8_e4m3fn
            nibbles = torch.stack([tensor & 15, tensor >> 4], -1).flatten(-2).long()
            values = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
            blocks = scale.float() * made[f"{name}{join}scale_2"]
            found[name] = (values.unflatten(-1, (-1, 16)) * blocks[..., None]).flatten(-2)
        elif scale is not None and scale.dim() == 4:  # blocks of 128 x 128
            wide = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
            found[name] = tensor.float() * wide[: tensor.shape[0], : tensor.shape[1]]
        else:
            found[name] = tensor.float() if scale is None else tensor.float() * scale
    return found


def reloaded(made: Made, tmp_path: Path) -> torch.nn.Module:
    """The dequantized export in transformers, in float32."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(made.folder, tmp_path / "plain", dirs_exist_ok=True)
    rewrite(tmp_path / "plain", dequantize)
    data = config(tmp_path / "plain")
    data.pop("quantization_config", None)
    (tmp_path / "plain" / "config.json").write_text(json.dumps(data))
    return AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, attn_implementation="eager"
    ).eval()


def quantize_inputs(model: torch.nn.Module, made: dict[str, torch.Tensor]) -> None:
    """Make every linear that has an input_scale round its input to E4M3 first, as an FP8 server does."""

    def hook(scale: torch.Tensor) -> Any:
        return lambda _module, inputs: ((inputs[0] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale,)

    for name, module in model.named_modules():
        if f"{name}.input_scale" in made:
            module.register_forward_pre_hook(hook(made[f"{name}.input_scale"]))


@pytest.mark.parametrize("name", FAMILIES)
def test_fp8_weights_compute_what_megatron_fakes(name: str, tmp_path: Path) -> None:
    made = quantized(tmp_path, name, fp8_weights, torch.float32)
    stored = tensors(made.folder)
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) == COUNT[name]
    model = reloaded(made, tmp_path)
    plain = reference(made)
    with torch.no_grad():
        got = model(IDS).logits
    assert cosine(got, made.logits) > 1 - 1e-5
    assert cosine(plain, made.logits) < 1 - 1e-4, "the quantizers change nothing"


def reference(made: Made) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(made.source, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(IDS).logits


def test_fp8_weights_and_inputs_compute_what_megatron_fakes(tmp_path: Path) -> None:
    made = quantized(tmp_path, "llama", fp8, torch.float32)
    model, stored = reloaded(made, tmp_path), tensors(made.folder)
    with torch.no_grad():
        without = cosine(model(IDS).logits, made.logits)
        quantize_inputs(model, stored)
        got = model(IDS).logits
    # an input on the edge between two FP8 numbers falls to either side
    assert 1 - cosine(got, made.logits) < 1e-3 < 1 - without


@pytest.mark.parametrize("name", FAMILIES)
def test_fp8_export_says_what_it_is(name: str, tmp_path: Path) -> None:
    made = quantized(tmp_path, name, fp8)
    stored, want = tensors(made.folder), tensors(made.source)
    low = {key for key, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert len(low) == COUNT[name]
    assert "FP8" in hf_check.check(made.folder, made.source, True)
    for key, weight in dequantize(stored).items():
        if key not in low:
            assert torch.equal(stored[key], want[key]), key
            continue
        # rounded once, to the nearest: e4m3 has 3 bits of mantissa, and steps of 2**-9 below 2**-6
        scale = stored[f"{key}_scale"]
        exact = want[key].float() / scale
        assert torch.equal(stored[key].float(), exact.to(torch.float8_e4m3fn).float()), key
        assert ((weight - want[key].float()).abs() <= torch.maximum(exact.abs() / 16, exact * 0 + 2**-10) * scale).all()
    note = json.loads((made.folder / "hf_quant_config.json").read_text())["quantization"]
    plain = {key.removesuffix(".weight") for key in want if key.endswith(".weight") and want[key].dim() == 2} - {
        key.removesuffix(".weight") for key in low
    }
    assert note["quant_algo"] == "FP8" and set(note["exclude_modules"]) == plain
    said = config(made.folder)["quantization_config"]
    assert said["quant_method"] == "modelopt" and said["quant_algo"] == "FP8" and set(said["ignore"]) == plain


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        *((name, "NVFP4_DEFAULT_CFG") for name in FAMILIES),
        ("llama", "W4A16_NVFP4_CFG"),
        ("llama", "NVFP4_MLP_ONLY_CFG"),
    ],
)
def test_nvfp4_export_is_the_nearest(name: str, format_name: str, tmp_path: Path) -> None:
    made = quantized(tmp_path, name, lambda mtq: copy.deepcopy(getattr(mtq, format_name)))
    stored, want = tensors(made.folder), tensors(made.source)
    plain = dequantize(stored)
    low = {key for key, tensor in stored.items() if tensor.dtype == torch.uint8}
    assert len(low) == (3 * 3 if "MLP_ONLY" in format_name else COUNT[name])
    assert set(plain) == set(want)
    for key in low:
        # Megatron's q, k, v and its gate, up are one tensor, with one scale: all 6 of E2M1 times all 448 of E4M3
        parts = next((part for part in FUSED if key.split(".")[-2] in part), (key.split(".")[-2],))
        amax = max(want[key.replace(key.split(".")[-2], part)].float().abs().max() for part in parts)
        assert torch.equal(stored[f"{key}_scale_2"], amax / (6 * 448)), key
        assert_nearest(plain[key], want[key].float(), stored, key)
        assert (f"{key.removesuffix('.weight')}.input_scale" in stored) == ("W4A16" not in format_name)
    text = hf_check.check(made.folder, made.source, True)
    note = json.loads((made.folder / "hf_quant_config.json").read_text())["quantization"]
    algorithm = "W4A16_NVFP4" if "W4A16" in format_name else "NVFP4"
    assert text.startswith(f"{algorithm}:") and note["quant_algo"] == algorithm and note["group_size"] == 16
    assert ("model.layers.1.self_attn.q_proj" in note["exclude_modules"]) == ("MLP_ONLY" in format_name)
    assert (
        cosine(plain_logits(made, tmp_path), reference(made)) > 0.85
    )  # of small random models; a rounded score picks another expert


def plain_logits(made: Made, tmp_path: Path) -> torch.Tensor:
    with torch.no_grad():
        return reloaded(made, tmp_path)(IDS).logits


def assert_nearest(got: torch.Tensor, weight: torch.Tensor, stored: dict, key: str) -> None:
    """Scales as NVFP4 defines them, and every value the nearest of the sixteen that its scale allows."""
    blocks = weight.unflatten(-1, (-1, 16))
    scale = stored[f"{key}_scale"].float() * stored[f"{key}_scale_2"]
    assert torch.allclose(scale, blocks.abs().amax(-1) / 6, rtol=1 / 15, atol=float(stored[f"{key}_scale_2"]) * 2**-9)
    signed = torch.cat([-E2M1, E2M1])
    best = (signed * scale[..., None, None] - blocks[..., None]).abs().amin(-1)
    off = (got.unflatten(-1, (-1, 16)) - blocks).abs()
    assert (off <= best * 1.001 + 1e-9).all(), key


def test_mixed_precision(tmp_path: Path) -> None:
    made = quantized(tmp_path, "llama", mixed)
    stored, want = tensors(made.folder), tensors(made.source)
    for key in want:
        kind = {"o_proj": torch.float8_e4m3fn, "q_proj": torch.float8_e4m3fn, "down_proj": torch.uint8}
        assert stored[key].dtype == kind.get(key.split(".")[-2], stored[key].dtype), key
    note = json.loads((made.folder / "hf_quant_config.json").read_text())["quantization"]
    assert note["quant_algo"] == "MIXED_PRECISION"
    assert note["quantized_layers"]["model.layers.1.self_attn.q_proj"] == {"quant_algo": "FP8"}
    assert note["quantized_layers"]["model.layers.1.mlp.down_proj"] == {"quant_algo": "NVFP4", "group_size": 16}
    # not as "model.layers.1.mlp", which would name the second matrix as well
    assert {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", "lm_head"} <= set(note["exclude_modules"])
    assert "model.layers.1.mlp" not in note["exclude_modules"]
    assert hf_check.check(made.folder, made.source, True).startswith("MIXED_PRECISION")
    assert cosine(plain_logits(made, tmp_path), reference(made)) > 0.97
    # one layer in the format of another
    note["quantized_layers"]["model.layers.1.self_attn.q_proj"] = {"quant_algo": "NVFP4", "group_size": 16}
    (made.folder / "hf_quant_config.json").write_text(json.dumps({"quantization": note}))
    with pytest.raises(CheckFailed, match=r"model.layers.1.self_attn.q_proj.weight is F8_E4M3, but .* NVFP4"):
        hf_check.check(made.folder, made.source, True)


def test_block_fp8(tmp_path: Path) -> None:
    """With heads and MLP a multiple of the block, the blocks are those that Megatron's fake quantizers have."""
    made = quantized(
        tmp_path, "llama-blocks", lambda mtq: copy.deepcopy(mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG), torch.float32
    )
    stored = tensors(made.folder)
    assert stored["model.layers.1.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert stored["model.layers.1.mlp.up_proj.weight_scale"].shape == (3, 1, 2, 1)
    assert "model.layers.1.mlp.up_proj.input_scale" not in stored
    note = json.loads((made.folder / "hf_quant_config.json").read_text())["quantization"]
    assert note["quant_algo"] == config(made.folder)["quantization_config"]["quant_algo"] == "FP8_PB_WO"
    assert note["exclude_modules"] == ["lm_head", "model.embed_tokens"]
    got = plain_logits(made, tmp_path)
    assert cosine(got, made.logits) > 1 - 1e-5
    assert cosine(reference(made), made.logits) < 1 - 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_block_fp8_of_parts_smaller_than_a_block(name: str, tmp_path: Path) -> None:
    made = quantized(tmp_path, name, lambda mtq: copy.deepcopy(mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG))
    stored, want = tensors(made.folder), tensors(made.source)
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) == COUNT[name]
    for key, weight in dequantize(stored).items():
        scale = stored.get(f"{key}_scale")
        allowed = 0 if scale is None else torch.maximum(want[key].float().abs() / 16, scale.max() * 2**-10)
        assert ((weight - want[key].float()).abs() <= allowed).all(), key
    assert hf_check.check(made.folder, made.source, True).startswith("FP8_PB_WO")


def test_packed_experts_share_a_scale(tmp_path: Path) -> None:
    """Llama 4: one FP8 scale for all experts of a layer; its vision tower is excluded from what is quantized."""
    made = quantized(tmp_path, "llama4", fp8)
    stored, want = tensors(made.folder), tensors(made.source)
    assert set(dequantize(stored)) == set(want)
    for key, weight in dequantize(stored).items():
        if stored[key].dtype == torch.float8_e4m3fn:
            assert cosine(weight, want[key].float()) > 0.999, key
        else:
            assert torch.equal(stored[key], want[key]), key
    assert stored["language_model.model.layers.1.feed_forward.experts.gate_up_proj"].dtype == torch.float8_e4m3fn
    note = json.loads((made.folder / "hf_quant_config.json").read_text())["quantization"]
    assert {"vision_model*", "multi_modal_projector*"} <= set(note["exclude_modules"])
    assert hf_check.check(made.folder, made.source, True).startswith("FP8")


def test_packed_experts_in_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"layers.0.feed_forward.experts.gate_up_proj: .* not for nvfp4"):
        quantized(tmp_path, "llama4", lambda mtq: copy.deepcopy(mtq.NVFP4_DEFAULT_CFG))


def test_fp8_of_weights_alone_is_no_format_of_servers(tmp_path: Path) -> None:
    made = quantized(tmp_path, "llama", fp8_weights)
    with pytest.raises(CheckFailed, match=r"no \['input_scale'\]. .*--weight-only"):
        hf_check.check(made.folder, made.source, True)


@pytest.mark.parametrize("bad", ["nan", "zero", "shape", "exclude", "format", "config"])
def test_a_quantized_export_that_is_not_what_it_says(
    bad: str, fp8_export: Result, source: Path, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(folder / "fp8-hf", out)
    name = "model.layers.1.mlp.up_proj"
    value = {"nan": torch.nan, "zero": 0.0}.get(bad)

    def change(found: dict) -> dict:
        if value is not None:
            found[f"{name}.input_scale"] = torch.full((1,), value)
        return found

    rewrite(out, change)
    note = json.loads((out / "hf_quant_config.json").read_text())
    if bad == "exclude":
        note["quantization"]["exclude_modules"].remove("lm_head")
        name = "lm_head"
    elif bad in ("shape", "format"):
        note["quantization"]["quant_algo"] = "NVFP4" if bad == "shape" else "FP8_PB_WO"
    elif bad == "config":
        data = config(out)
        del data["quantization_config"]
        name = "quantization_config"
        (out / "config.json").write_text(json.dumps(data))
    (out / "hf_quant_config.json").write_text(json.dumps(note))
    index = {"weight_map": dict.fromkeys(tensors(out), "model.safetensors")}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckFailed) as told:
        hf_check.check(out, source, True)
    assert (name if bad not in ("shape", "format") else "model.layers.0") in str(told.value)


@pytest.mark.parametrize("name", ["llama", "kimi-k2"])
def test_kv_cache_scales(name: str, tmp_path: Path) -> None:
    """Quantizers of keys and values as Transformer Engine's attention would have them: latent attention's are lost."""
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

    def with_quantizers(module: torch.nn.Module) -> None:
        for layer in module.decoder.layers:
            for kind in ("k_bmm_quantizer", "v_bmm_quantizer"):
                quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=(4, 3)), amax=torch.tensor(900.0))
                setattr(layer.self_attention.core_attention, kind, quantizer)
        assert hf_export.has_kv_cache(module)

    made = quantized(tmp_path, name, fp8, after=with_quantizers)
    if name == "kimi-k2":
        with pytest.raises(CheckFailed, match=r"0 of their 6 scales"):
            hf_check.check(made.folder, made.source, True, kv_cache=True)
        return
    assert hf_check.check(made.folder, made.source, True, kv_cache=True).startswith("FP8")
    assert tensors(made.folder)["model.layers.2.self_attn.k_scale"] == 900 / 448
    note = json.loads((made.folder / "hf_quant_config.json").read_text())["quantization"]
    assert note["kv_cache_quant_algo"] == "FP8"
    assert config(made.folder)["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8


def test_kv_cache_scales_that_were_not_written(fp8_export: Result, source: Path, folder: Path) -> None:
    """They need Transformer Engine's attention; here the check alone: it wants two for each layer."""
    with pytest.raises(CheckFailed, match="0 of their 8 scales"):
        hf_check.check(folder / "fp8-hf", source, True, kv_cache=True)


def test_export_of_a_checkpoint_that_lost_its_ranges(
    stage: Runner, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import modelopt.torch.quantization as mtq

    from mlmsub.runtime.checkpoints import checkpoint, hf_import
    from mlmsub.runtime.models import model
    from mlmsub.runtime.quantization import calibration

    (tmp_path / "ckpt").mkdir()
    kept, lost = checkpoint._sharded_state, "linear_fc2.weight_quantizer._amax"
    with session(stage, source) as started:
        made = model.build(started.args, started.conf, "cpu")
        hf_import.import_weights(made, source, started.conf, torch.bfloat16)
        mtq.quantize(made, fp8(mtq), calibration.forward_loop(torch.arange(16).view(1, 16), 1, "cpu"))
        monkeypatch.setattr(
            checkpoint,
            "_sharded_state",
            lambda m: {k: v for k, v in kept(m).items() if not k.endswith("fc2.weight_quantizer._amax")},
        )
        checkpoint.save(made, started.args, tmp_path / "ckpt")
    monkeypatch.undo()
    result = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "ckpt", EXPORT_DIR=tmp_path / "out")
    one_line(result, "MLM_MODEL_CKPT", "lacks 4 tensors", lost)
    assert not (tmp_path / "out" / "config.json").exists()


# --- weights quantized and dequantized, for vLLM with modelopt's fake quantizers ---


def test_export_for_vllm_fake_quantization(
    stage: Runner, fp8: Result, fp8_export: Result, source: Path, folder: Path, tmp_path: Path
) -> None:
    result = stage(
        "export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=folder / "fp8", EXPORT_DIR=tmp_path / "out",
        MLM_EXTRA_ARGS="--export-vllm-fq",
    )  # fmt: skip
    assert result.code == 0, result.out
    made, real = tensors(tmp_path / "out"), tensors(folder / "fp8-hf")
    assert set(made) == set(tensors(source)) and all(t.dtype == torch.bfloat16 for t in made.values())
    for key, weight in dequantize(real).items():
        # the same numbers, but where one lies half way between two of FP8's
        same = (made[key].float() - weight.bfloat16().float()).abs() <= weight.abs() * 2**-7
        assert same.float().mean() > 0.97, key
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert "quantization_config" not in config(tmp_path / "out")
    ranges = torch.load(tmp_path / "out" / "quantizer_state.pth")
    assert f"{len(ranges)} ranges in quantizer_state.pth" in result.out
    for key, value in ranges.items():
        module = key.removesuffix(".input_quantizer._amax")
        assert torch.allclose(value.float(), real[f"{module}.input_scale"] * 448, rtol=1e-6), key
    assert len(ranges) == sum(key.endswith("input_scale") for key in real)

    ranges[key] = torch.tensor(torch.nan)
    torch.save(ranges, tmp_path / "out" / "quantizer_state.pth")
    with pytest.raises(CheckFailed, match=key):
        hf_check.check_ranges(tmp_path / "out" / "quantizer_state.pth")


def test_fake_quantization_of_an_unquantized_checkpoint(
    stage: Runner, bf16: Path, source: Path, tmp_path: Path
) -> None:
    result = stage(
        "export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=bf16, EXPORT_DIR=tmp_path / "out",
        MLM_EXTRA_ARGS="--export-vllm-fq",
    )  # fmt: skip
    one_line(result, "--export-vllm-fq", "is not quantized")
