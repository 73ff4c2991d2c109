"""The ways to say what is quantized: formats and their flags, recipes, the search, layer by layer, compression."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rig import ENOUGH, LAYERS, MODEL, ROOT, Result, Runner, logits, session, tensors
from test_calibration import built, events

IDS = torch.arange(1, 49).view(2, 24)
SEARCH = f"{ENOUGH} --no-perplexity --auto-quantize-formats FP8_DEFAULT_CFG INT8_DEFAULT_CFG"


def quantized(stage: Runner, source: Path, folder: Path, word: str, extra: str = "", **variables: object) -> Result:
    return stage(
        "quantize", word, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=folder, MLM_EXTRA_ARGS=f"{ENOUGH} {extra}", **variables
    )


def loaded(stage: Runner, source: Path, ckpt: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The ranges of the enabled quantizers of a checkpoint in one process, and the logits of IDS."""
    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.models import model
    from mlmsub.runtime.quantization import formats

    with session(stage, source) as opened:
        made = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(made, checkpoint.folder(ckpt))
        return {name: quantizer._amax for name, quantizer in formats.quantizers(made)}, logits(made, IDS)


def refused(result: Result, *words: str, code: int = 2) -> None:
    assert result.code == code, result.out
    (line,) = [line for line in result.out.splitlines() if "ERROR" in line]
    assert all(word in line for word in words), line
    assert "Traceback" not in result.out
    assert not (result.run_dir / "state" / "0" / "done.json").exists()


def test_perplexity_is_told_and_right(stage: Runner, source: Path, fp8: Result) -> None:
    from transformers import AutoModelForCausalLM

    from mlmsub.runtime.checkpoints import hf
    from mlmsub.runtime.quantization import calibration_data

    (event,) = events(fp8, "perplexity")
    assert f"perplexity of the fixed text: {event['before']:.4g} before" in fp8.out
    with session(stage, source) as opened:
        chunks = calibration_data.chunks([calibration_data.BUILT_IN], lambda: hf.tokenizer(source, opened.conf), 512, 8)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        want = torch.stack([theirs(one[None], labels=one[None]).loss.float() for one in chunks]).mean().exp()
    assert event["before"] == pytest.approx(float(want), rel=0.01)
    assert event["after"] == pytest.approx(event["before"], rel=0.1) and event["after"] != event["before"]


def test_flags_choose_what_is_quantized(stage: Runner, source: Path, tmp_path: Path) -> None:
    flags = "--num-first-layers-to-skip-quant 1 --num-last-layers-to-skip-quant 1 --disable-qkv-quant --no-perplexity"
    result = quantized(stage, source, tmp_path / "q", "fp8", flags)
    assert result.code == 0, result.out
    ranges, _ = loaded(stage, source, tmp_path / "q")
    assert {name.rpartition(".")[0] for name in ranges} == {
        f"decoder.layers.{layer}.mlp.linear_{kind}" for layer in (1, 2) for kind in ("fc1", "fc2")
    }


def test_a_recipe_by_path_and_by_name(stage: Runner, source: Path, fp8: Result, folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mlp.yaml"
    recipe.write_text(
        "metadata:\n  recipe_type: ptq\nquantize:\n  algorithm: max\n  quant_cfg:\n"
        "    - {quantizer_name: '*', enable: false}\n"
        "    - {quantizer_name: '*mlp*weight_quantizer', cfg: {num_bits: e4m3}}\n"
        "    - {quantizer_name: '*mlp*input_quantizer', cfg: {num_bits: e4m3}}\n"
    )
    result = quantized(stage, source, tmp_path / "q", str(recipe))
    assert result.code == 0, result.out
    got, _ = loaded(stage, source, tmp_path / "q")
    want, _ = loaded(stage, source, folder / "fp8")
    assert set(got) == {name for name in want if ".mlp." in name}
    assert all(torch.equal(got[name], want[name]) for name in got)

    named = quantized(stage, source, tmp_path / "r", "fp8", "--recipe general/ptq/int4_blockwise_weight_only")
    assert named.code == 0, named.out
    assert "general/ptq/int4_blockwise_weight_only, weights only, no samples" in named.out


@pytest.fixture(scope="module")
def searched(stage: Runner, source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("search")
    extra = f"{SEARCH} --auto-quantize-bits 11 --auto-quantize-score-size 8 --auto-quantize-checkpoint {folder}/s.pth"
    return quantized(stage, source, folder / "q", "auto", extra), folder


def test_a_search_keeps_its_budget_and_comes_back(stage: Runner, source: Path, searched: tuple[Result, Path]) -> None:
    result, folder = searched
    assert result.code == 0, result.out
    (event,) = events(result, "auto_quantize")
    assert 8 <= event["bits"] <= 11
    kinds = event["layers"]
    assert set(kinds.values()) >= {"NONE", "FP8_DEFAULT_CFG"} and kinds["output_layer"] == "NONE"
    ranges, _ = loaded(stage, source, folder / "q")
    assert {name.rpartition(".")[0] for name in ranges} == {name for name, kind in kinds.items() if kind != "NONE"}
    assert all(torch.isfinite(amax).all() for amax in ranges.values())


def test_a_search_goes_on_from_its_file(
    stage: Runner, source: Path, searched: tuple[Result, Path], tmp_path: Path
) -> None:
    first, folder = searched
    extra = f"{SEARCH} --auto-quantize-score-size 8 --auto-quantize-checkpoint {folder}/s.pth --auto-quantize-bits "
    again = quantized(stage, source, tmp_path / "q", "auto", f"{extra} 11")
    assert again.code == 0, again.out
    assert events(again, "auto_quantize")[0]["layers"] == events(first, "auto_quantize")[0]["layers"]
    assert "Estimating auto_quantize scores" in first.out and "Estimating auto_quantize scores" not in again.out
    fewer = quantized(stage, source, tmp_path / "r", "auto", f"{extra} 10")  # another budget, the same scores
    assert fewer.code == 0 and events(fewer, "auto_quantize")[0]["bits"] <= 10, fewer.out
    other = extra.replace("FP8_DEFAULT_CFG ", "") + " 9"
    refused(
        quantized(stage, source, tmp_path / "s", "auto", other),
        "--auto-quantize-checkpoint",
        "another model, format or data",
    )


def test_a_search_by_divergence(stage: Runner, source: Path, tmp_path: Path) -> None:
    extra = f"{SEARCH} --auto-quantize-bits 12 --auto-quantize-method kl_div --auto-quantize-score-size 2"
    with torch.compiler.set_stance("force_eager"):  # modelopt compiles its loss, half a minute on a CPU
        result = quantized(stage, source, tmp_path / "q", "auto", extra)
    assert result.code == 0, result.out
    assert 8 <= events(result, "auto_quantize")[0]["bits"] <= 12


def test_layer_by_layer_gives_the_same_ranges(
    stage: Runner, source: Path, fp8: Result, folder: Path, tmp_path: Path
) -> None:
    from modelopt.torch.quantization.utils import layerwise_calib

    saved = tmp_path / "progress"
    extra = f"--layerwise-checkpoint {saved} --no-perplexity"
    result = quantized(stage, source, tmp_path / "q", "fp8", extra)
    assert result.code == 0, result.out
    want, _ = loaded(stage, source, folder / "fp8")

    def check(ckpt: Path) -> None:
        got, _ = loaded(stage, source, ckpt)
        assert set(got) == set(want)
        assert all(torch.equal(got[name], want[name]) for name in want)

    check(tmp_path / "q")
    # as if it had been cut off after the second layer
    manifest = json.loads((saved / "manifest.json").read_text())
    layerwise_calib._write_manifest(str(saved), 1, manifest["num_layers"], 1, manifest["calib_mutates_weights"])
    again = quantized(stage, source, tmp_path / "r", "fp8", extra)
    assert again.code == 0 and "resuming layerwise calibration from layer 2/" in again.out, again.out
    check(tmp_path / "r")
    other = quantized(stage, source, tmp_path / "s", "fp8", extra.replace("--no", "--calib-size 4 --no"))
    refused(other, "--layerwise-checkpoint", "another model, format or data")


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_compressed_weights_come_back(
    name: str, stage: Runner, source: Path, fp8: Result, folder: Path, tmp_path: Path
) -> None:
    from modelopt.torch.quantization.qtensor import QTensorWrapper

    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.models import model

    result = quantized(stage, source, tmp_path / "q", name, "--compress")
    assert result.code == 0, result.out
    assert f"{LAYERS * 4} weights are stored in low precision" in result.out
    with session(stage, source) as opened:
        made = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(made, checkpoint.folder(tmp_path / "q"))
        low = [weight for weight in made.parameters() if isinstance(weight, QTensorWrapper)]
        assert len(low) == LAYERS * 4
        plain = built(opened, source)
        for got, want in zip(made.decoder.layers, plain.decoder.layers, strict=True):
            layer = got.mlp.linear_fc2
            restored = layer.weight_quantizer(layer.weight).float()
            original = want.mlp.linear_fc2.weight.float()
            assert torch.nn.functional.cosine_similarity(restored.flatten(), original.flatten(), dim=0) > 0.98
        if name == "fp8":  # NVFP4's fake-quantized inputs need a GPU
            got, want = logits(made, IDS), logits(plain, IDS)
            assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.95
    # 2 bytes of each linear weight become 1 or less
    linear = sum(tensor.nbytes for key, tensor in tensors(source).items() if "_proj" in key)
    sizes = [
        sum(file.stat().st_size for file in (made_by / "release").glob("*.distcp"))
        for made_by in (tmp_path / "q", folder / "fp8")
    ]
    assert sizes[0] < sizes[1] - 0.3 * linear


def test_experts_may_share_a_weight_range(tmp_path: Path) -> None:
    from rig import make_latent, make_latent_conf

    source = make_latent(tmp_path / "hf")
    stage = Runner(tmp_path / "runs", make_latent_conf(tmp_path / "model.yaml"))
    own = quantized(stage, source, tmp_path / "own", "fp8", "--no-perplexity")
    one = quantized(stage, source, tmp_path / "one", "fp8", "--no-perplexity --sync-expert-weight-amax")
    assert own.code == one.code == 0, own.out + one.out
    kinds = {}
    for name in ("own", "one"):
        ranges, _ = loaded(stage, source, tmp_path / name)
        weights = [
            float(amax) for key, amax in ranges.items() if "layers.1." in key and "fc1.weight_quantizer" in key
            and ".experts." in key
        ]  # fmt: skip
        assert len(weights) == 4
        kinds[name] = weights
    assert len(set(kinds["own"])) > 1 and set(kinds["one"]) == {max(kinds["own"])}


@pytest.mark.parametrize(
    ("word", "extra", "words"),
    [
        ("auto", "", ("--auto-quantize-bits", "needs the bits")),
        ("auto", f"{SEARCH} --auto-quantize-bits 0", ("--auto-quantize-bits", "0 is not above 0")),
        ("auto", f"{SEARCH} --auto-quantize-bits 17", ("17 is not above 0 and at most 16",)),
        ("auto", f"{SEARCH} --auto-quantize-bits 5", ("--auto-quantize-bits", "effective_bits 5")),
        ("auto", f"{SEARCH} --auto-quantize-bits 9 --auto-quantize-score-size 0", ("--auto-quantize-score-size",)),
        ("auto", "--auto-quantize-bits 9 --auto-quantize-formats", ("--auto-quantize-formats",)),
        ("auto", "--auto-quantize-bits 9 --auto-quantize-formats FP9", ("--auto-quantize-formats", "'FP9'")),
        ("auto", "--auto-quantize-bits 9", ("--auto-quantize-formats", "GPU")),
        ("auto", f"{SEARCH} --auto-quantize-bits 9 --weight-only", ("--weight-only", "automatic quantization")),
        ("no/such_recipe", "", ("recipe", "no/such_recipe")),
        ("general/ptq/fp8_default-kv_fp8", "", ("general/ptq/fp8_default-kv_fp8", "Transformer Engine")),
        ("general/speculative_decoding/eagle3", "", ("recipe", "not for quantization")),
        ("general/ptq/int4_blockwise_weight_only", "--weight-only", ("--weight-only", "has no effect")),
        ("NVFP4_AWQ_LITE_CFG", "", ("NVFP4_AWQ_LITE_CFG", "needs a GPU")),
        ("int4_awq", "--sync-expert-weight-amax", ("--sync-expert-weight-amax", "awq_lite")),
        ("MXFP8_DEFAULT_CFG", "--layerwise", ("--layerwise",)),
        ("fp8", "--num-first-layers-to-skip-quant 3 --num-last-layers-to-skip-quant 1", ("none of 4 is left",)),
        ("fp8", "--export-real-quant-cfg fp8_real_quant", ("--export-real-quant-cfg", "--compress")),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(
    word: str, extra: str, words: tuple, stage: Runner, source: Path, tmp_path: Path
) -> None:
    refused(quantized(stage, source, tmp_path / "q", word, extra), *words)


def recipe_of(folder: Path, *entries: str, algorithm: str = "max") -> str:
    file = folder / "recipe.yaml"
    lines = "".join(f"    - {entry}\n" for entry in entries)
    file.write_text(
        f"metadata:\n  recipe_type: ptq\nquantize:\n  algorithm: {algorithm}\n  quant_cfg:\n"
        f"    - {{quantizer_name: '*', enable: false}}\n{lines}"
    )
    return str(file)


def test_recipes_that_would_quantize_nothing(stage: Runner, source: Path, tmp_path: Path) -> None:
    refused(quantized(stage, source, tmp_path / "q", recipe_of(tmp_path)), "enables no quantizer")
    nothing = recipe_of(tmp_path, "{quantizer_name: '*gate_proj*weight_quantizer', cfg: {num_bits: e4m3}}")
    refused(quantized(stage, source, tmp_path / "q", nothing), "enabled no quantizer in this model", code=1)
    inputs = recipe_of(
        tmp_path,
        "{quantizer_name: '*gate_proj*weight_quantizer', cfg: {num_bits: e4m3}}",
        "{quantizer_name: '*input_quantizer', cfg: {num_bits: e4m3}}",
    )
    refused(quantized(stage, source, tmp_path / "q", inputs), "patterns match none", code=1)
    both = (
        "{quantizer_name: '*weight_quantizer', cfg: {num_bits: e4m3}}",
        "{quantizer_name: '*input_quantizer', cfg: {num_bits: e4m3}}",
    )
    uncalibrated = recipe_of(tmp_path, *both, algorithm="null")
    refused(quantized(stage, source, tmp_path / "q", uncalibrated), "no usable range", code=1)
    assert not (tmp_path / "q" / "release").exists()


def test_a_checkpoint_with_a_nan_weight(stage: Runner, source: Path, tmp_path: Path) -> None:
    from mlmsub.runtime.checkpoints import checkpoint

    (tmp_path / "ckpt").mkdir()
    with session(stage, source) as opened:
        made = built(opened, source)
        with torch.no_grad():
            made.decoder.layers[2].mlp.linear_fc1.weight[3, 3] = torch.nan
        checkpoint.save(made, opened.args, tmp_path / "ckpt")
    result = quantized(stage, source, tmp_path / "q", "fp8", MLM_MODEL_CKPT=tmp_path / "ckpt")
    refused(result, "NaN", "decoder.layers.2.mlp.linear_fc1.weight", code=1)


@pytest.fixture(scope="module")
def overflowing(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finite weights whose activations are not."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("overflow")
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].fill_(3e38)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_model_that_computes_nan(stage: Runner, overflowing: Path, tmp_path: Path) -> None:
    refused(quantized(stage, overflowing, tmp_path / "q", "fp8"), "before anything is quantized", code=1)


def test_nan_in_a_calibration_forward_ends_the_process(stage: Runner, overflowing: Path, tmp_path: Path) -> None:
    """In a process of its own: modelopt leaves torch's functions patched after an error inside a forward."""
    run_dir = stage.run_dir()
    variables = {
        "HF_MODEL_CKPT": overflowing, "MLM_MODEL_SAVE": tmp_path / "q", "MLM_EXTRA_ARGS": f"{ENOUGH} --no-perplexity",
        "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "mlmsub.runtime", "quantize", MODEL, "fp8"],
        env=stage.environment(run_dir, variables), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    refused(Result(ended.returncode, ended.stdout + ended.stderr, run_dir), "calibration", "NaN", code=1)
    assert [path.name for path in (tmp_path / "q").iterdir()] == [".part"]
