"""Import of Hugging Face checkpoints: number formats against decoders written here, slices, counts, errors."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from rig import logits
from safetensors.torch import load_file, save_file
from test_twins import GPT_OSS, IDS, SMALL, V3, YARN, _store_as_mxfp4, make, opened

from mlmsub.runtime.checkpoints import hf_import
from mlmsub.runtime.checkpoints.hf_reader import Reader, Span
from mlmsub.runtime.checkpoints.hf_weights import Weights
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.models import model
from mlmsub.runtime.progress import Steps

LARGER = dict(
    V3, hidden_size=192, intermediate_size=320, moe_intermediate_size=160, n_routed_experts=4, rope_parameters=YARN
)
HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


# --- decoders of our own: loops over bits, as the formats are defined ---


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


VALUES = np.array([e4m3(byte) for byte in range(256)], np.float32)


def decode_fp8(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    codes, factors = weight.view(torch.uint8).numpy(), scales.float().numpy()
    out = np.empty(codes.shape, np.float32)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            out[row, column] = VALUES[codes[row, column]] * factors[row // block[0], column // block[1]]
    return torch.from_numpy(out)


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    codes, powers = blocks.numpy().reshape(-1, 16), scales.numpy().reshape(-1)
    out = np.empty((len(codes), 32), np.float32)
    for group, row in enumerate(codes):
        for place, byte in enumerate(row):
            for half, code in enumerate((int(byte) & 15, int(byte) >> 4)):
                sign = -1.0 if code & 8 else 1.0
                out[group, 2 * place + half] = sign * HALF[code & 7] * 2.0 ** (int(powers[group]) - 127)
    return torch.from_numpy(out.reshape(*blocks.shape[:-2], -1))


# --- checkpoint folders ---


def random_fp8(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 60).to(torch.float8_e4m3fn)


def random_scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 0.01 + 0.001


def write(folder: Path, tensors: dict, block: tuple[int, int] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}} if block else {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def split(folder: Path, parts: int) -> None:
    """Turn the single file of a folder into several and an index, as large checkpoints are."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, files = list(tensors), {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        mine = names[part * len(names) // parts : (part + 1) * len(names) // parts]
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def get(folder: Path, key: str, span: Span | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with Reader(folder) as reader:
        return Weights(reader, dtype).get(key, span)


# --- number formats ---


@pytest.mark.parametrize("block", [(128, 128), (48, 80)], ids=str)
def test_fp8_blocks_are_dequantized_in_fp32(block: tuple[int, int], tmp_path: Path) -> None:
    """Sides that are no multiples of the block; every slice of rows or columns is that slice of the whole."""
    weight = random_fp8(200, 300)
    scales = random_scales(-(-200 // block[0]), -(-300 // block[1]))
    plain = None if block == (128, 128) else block  # what a config that does not say it means
    folder = write(tmp_path / "hf", {"a.weight": weight, "a.weight_scale_inv": scales}, plain)
    want = decode_fp8(weight, scales, block)
    assert torch.equal(get(folder, "a.weight"), want)
    assert torch.equal(get(folder, "a.weight", dtype=torch.bfloat16), want.to(torch.bfloat16))
    for parts in (2, 4, 25):
        size = (200 // parts, 300 // parts)
        for part in range(parts):
            rows, columns = (Span(dim, part * size[dim], (part + 1) * size[dim]) for dim in (0, 1))
            assert torch.equal(get(folder, "a.weight", rows), want[rows.start : rows.stop])
            assert torch.equal(get(folder, "a.weight", columns), want[:, columns.start : columns.stop])


@pytest.mark.parametrize("shape", [(), (1,), (48,), (48, 1)], ids=str)
def test_fp8_scales_by_tensor_and_by_row(shape: tuple[int, ...], tmp_path: Path) -> None:
    weight, scale = random_fp8(48, 40), random_scales(*shape)
    folder = write(tmp_path / "hf", {"a.weight": weight, "a.weight_scale": scale.to(torch.bfloat16)})
    want = decode_fp8(weight, scale.bfloat16().reshape(-1, 1).expand(48, 1), (1, 40))
    assert torch.equal(get(folder, "a.weight"), want)
    assert torch.equal(get(folder, "a.weight", Span(0, 12, 36)), want[12:36])
    assert torch.equal(get(folder, "a.weight", Span(1, 10, 30)), want[:, 10:30])


def test_mxfp4_is_dequantized_expert_by_expert(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 200, (3, 10, 2), dtype=torch.uint8, generator=generator)
    scales[0, 0], scales[2, 0] = 0, 255
    folder = write(tmp_path / "hf", {"e_blocks": blocks, "e_scales": scales})
    with Reader(folder) as reader:
        got = [Weights(reader, torch.float32).expert("e", index) for index in range(3)]
    want = decode_mxfp4(blocks, scales)
    assert torch.equal(got[0], want[0]) and got[0][0].abs().max() > 0, "2^-127 is no zero"
    assert torch.equal(got[1], want[1])
    assert got[2][0].isnan().all() and torch.equal(got[2][1:], want[2][1:]), "255 is not a number"


# --- whole models ---


def make_fp8_twin(folder: Path) -> tuple[Path, Path]:
    """A DeepSeek-V3 in FP8 blocks, most of them cut by an edge, and in bf16 as the decoder above makes it."""
    make(folder / "fp8", "DeepseekV3Config", LARGER)
    shutil.copytree(folder / "fp8", folder / "bf16")
    low, plain = {}, {}
    for index, (name, tensor) in enumerate(load_file(folder / "fp8" / "model.safetensors").items()):
        if "e_score_correction_bias" in name:
            low[name] = plain[name] = tensor + 7.0  # DeepSeek-V3's are that large; bf16 would keep three digits
        elif "proj" in name and tensor.ndim == 2:
            low[name] = random_fp8(*tensor.shape, seed=index)
            scales = random_scales(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128))
            low[f"{name}_scale_inv"] = scales
            plain[name] = decode_fp8(low[name], scales, (128, 128)).to(torch.bfloat16)
        else:
            low[name] = plain[name] = tensor.to(torch.bfloat16)
    save_file(low, folder / "fp8" / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, folder / "bf16" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "fp8" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "fp8" / "config.json").write_text(json.dumps(config))
    return folder / "fp8", folder / "bf16"


@pytest.fixture(scope="module")
def fp8_twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_fp8_twin(tmp_path_factory.mktemp("fp8"))


def imported(
    tmp_path: Path, source: Path, steps: Steps | None = None, change: dict | None = None, **arguments: object
) -> dict:
    """All tensors of the Megatron model in bf16 that `source` makes, and its router dtype."""
    tmp_path.mkdir(exist_ok=True)
    with opened(tmp_path, source, change) as session:
        for name, value in arguments.items():
            setattr(session.args, name, value)
        made = model.build(session.args, session.conf, "cpu")
        hf_import.import_weights(made, source, session.conf, torch.bfloat16, steps)
        return {name: tensor for name, tensor in made.state_dict().items() if isinstance(tensor, torch.Tensor)}


@pytest.mark.parametrize("router", [None, "fp32"])
def test_fp8_model_is_bf16_of_the_fp32_product(router: str | None, fp8_twin: tuple, tmp_path: Path) -> None:
    low, plain = fp8_twin
    got = imported(tmp_path / "a", low, moe_router_dtype=router)
    want = imported(tmp_path / "b", plain, moe_router_dtype=router)
    assert got.keys() == want.keys()
    assert [name for name in got if not torch.equal(got[name], want[name])] == []
    source = load_file(low / "model.safetensors")
    for layer in (1, 2):
        bias = got[f"decoder.layers.{layer}.mlp.router.expert_bias"]
        assert torch.equal(bias, source[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"])
        assert bias.dtype == torch.float32 and not torch.equal(bias, bias.bfloat16().float())
        half = got[f"decoder.layers.{layer}.mlp.router.weight"]
        assert torch.equal(half.bfloat16(), source[f"model.layers.{layer}.mlp.gate.weight"])


def test_files_are_opened_once_and_the_event_says_so(fp8_twin: tuple, tmp_path: Path, capsys) -> None:
    low, _ = fp8_twin
    shutil.copytree(low, tmp_path / "hf")
    split(tmp_path / "hf", 5)
    want = imported(tmp_path / "a", low)
    steps = Steps(tmp_path / "events.jsonl")
    got = imported(tmp_path / "b", tmp_path / "hf", steps)
    assert all(torch.equal(got[name], want[name]) for name in want)
    event = json.loads((tmp_path / "events.jsonl").read_text())
    stored = load_file(low / "model.safetensors")
    assert event["event"] == "import" and event["files_opened"] == 5 and event["left"] == 0
    assert event["tensors"] == len(stored)
    assert event["bytes"] == sum(tensor.nbytes for tensor in stored.values())
    assert event["peak_host_gib"] > 0 and event["jumps_back"] < len(stored) / 2
    assert "5 files opened once each" in capsys.readouterr().out


@pytest.fixture
def torch_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks and windows are Transformer Engine's in mlmsub; Megatron's own local attention stands in for it."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from mlmsub.runtime.models import attention

    monkeypatch.setattr(attention, "TorchAttention", DotProductAttention)


@pytest.mark.usefixtures("torch_attention")
def test_gpt_oss_from_bf16_is_gpt_oss_from_mxfp4_and_returns_from_our_export(tmp_path: Path) -> None:
    from mlmsub.runtime.checkpoints import hf_export

    reference = make(tmp_path / "mxfp4", "GptOssConfig", GPT_OSS)
    _store_as_mxfp4(reference, tmp_path / "mxfp4" / "model.safetensors")
    reference.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")  # MXFP4's values are exact in it
    want = imported(tmp_path / "a", tmp_path / "mxfp4")
    got = imported(tmp_path / "b", tmp_path / "bf16")
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    assert want["decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"].std() > 0
    with opened(tmp_path, tmp_path / "bf16") as session:
        made = model.build(session.args, session.conf, "cpu")
        hf_import.import_weights(made, tmp_path / "bf16", session.conf, torch.bfloat16)
        (tmp_path / "out").mkdir()
        hf_export.export_weights(made, tmp_path / "bf16", session.conf, torch.bfloat16, tmp_path / "out")
    again = imported(tmp_path / "c", tmp_path / "out")
    assert [name for name in want if not torch.equal(again[name], want[name])] == []


# --- what the reader touches ---


def test_only_the_slice_is_read_and_no_page_is_kept(tmp_path: Path) -> None:
    """A file of 512 MiB read through in parts leaves nothing of itself in the process."""
    rows, columns, count = 4096, 8192, 8
    folder = write(
        tmp_path / "hf", {f"w{index}": torch.zeros(rows, columns, dtype=torch.bfloat16) for index in range(count)}
    )

    def mapped() -> int:  # KiB of files in this process's memory
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))

    with Reader(folder) as reader:
        before, most = mapped(), 0
        for index in range(count):
            assert reader.read(f"w{index}", Span(0, 0, rows // 2)).shape == (rows // 2, columns)
            assert reader.read(f"w{index}", Span(1, columns // 4, columns // 2)).shape == (rows, columns // 4)
            most = max(most, mapped() - before)
        assert reader.bytes_read == count * rows * columns * 2 * 3 // 4
        assert reader.opens == 1
    assert most < 32 * 1024


def test_jumps_back_between_files_are_counted(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", {name: torch.ones(2) for name in "abcd"})
    split(folder, 4)
    with Reader(folder) as reader:
        for name in "abadc":
            reader.read(name)
        assert (reader.opens, reader.jumps_back) == (4, 2)


# --- damaged and other checkpoints ---


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(StageError) as caught:
        get(folder, "a.weight")
    assert all(word in str(caught.value) for word in words), caught.value


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", {"a.weight": torch.ones(64, 64), "b.weight": torch.ones(64, 64)})
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        os.truncate(file, size)
        refused(folder, str(file))
        file.write_bytes(whole)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5135149760\n")
    refused(folder, str(file), "Git LFS")
    file.write_bytes(whole)
    split(folder, 2)
    second = "model-00002-of-00002.safetensors"
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace("model-00001-of-00002", "model-00002-of-00002"))
    refused(folder, "a.weight", second)
    index.write_text(text.replace('"a.weight"', '"c.weight"'))
    refused(folder, "a.weight", str(index))
    index.write_text(text[:-20])
    refused(folder, str(index))
    index.write_text(text)
    (folder / second).unlink()
    refused(folder, second)
    index.unlink()
    refused(folder, "neither model.safetensors nor")


def test_formats_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    weight = random_fp8(200, 300)
    refused(write(tmp_path / "a", {"a.weight": weight}), "a.weight", "model.safetensors", "weight_scale_inv")
    shape = {"a.weight": weight, "a.weight_scale_inv": random_scales(2, 2)}
    refused(write(tmp_path / "b", shape), "[2, 2]", "[2, 3]", "weight_block_size")
    odd = {"a.weight": weight, "a.weight_scale": random_scales(200, 10)}
    refused(write(tmp_path / "c", odd), "a.weight_scale")
    refused(write(tmp_path / "d", {"a.weight": torch.zeros(4, 4, dtype=torch.uint8)}), "a.weight", "uint8")


def test_another_model_is_refused(fp8_twin: tuple, tmp_path: Path) -> None:
    _, plain = fp8_twin
    source = tmp_path / "hf"
    shutil.copytree(plain, source)
    whole = load_file(source / "model.safetensors")

    def attempt(name: str, tensors: dict, *words: str) -> None:
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(StageError) as caught:
            imported(tmp_path / name, source)
        assert all(word in str(caught.value) for word in words), caught.value

    lost = "model.layers.2.mlp.experts.3.up_proj.weight"
    attempt("lost", {name: tensor for name, tensor in whole.items() if name != lost}, lost, "model.safetensors")
    more = {"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}
    attempt("more", whole | more, "model.layers.0.self_attn.o_proj.bias", "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["NobodysForCausalLM"]}))
    attempt("arch", whole, "NobodysForCausalLM")


def test_multi_token_prediction_is_left_and_said(fp8_twin: tuple, tmp_path: Path, capsys) -> None:
    source = tmp_path / "hf"
    shutil.copytree(fp8_twin[1], source)
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(4, 4), "model.layers.3.enorm.weight": torch.zeros(4)}
    save_file(load_file(source / "model.safetensors") | extra, source / "model.safetensors", metadata={"format": "pt"})
    imported(tmp_path / "a", source)
    assert "2 tensors of the source (model.layers.3.)" in capsys.readouterr().out


def test_the_reader_gives_what_modelopts_own_gives(tmp_path: Path) -> None:
    """On a plain source, where modelopt rounds nothing: the same model, logits and all."""
    from modelopt.torch.export import import_mcore_gpt_from_hf

    make(tmp_path / "hf", "Qwen2Config", SMALL)
    with opened(tmp_path, tmp_path / "hf") as session:
        ours, theirs = (model.build(session.args, session.conf, "cpu") for _ in range(2))
        hf_import.import_weights(ours, tmp_path / "hf", session.conf, torch.bfloat16)
        import_mcore_gpt_from_hf(theirs, str(tmp_path / "hf"), dtype=torch.bfloat16)
        assert torch.equal(logits(ours, IDS), logits(theirs, IDS))
