"""quantize and export on a tiny model: right results, in one process and in two."""

import json
from pathlib import Path

import pytest
import torch
from rig import ENOUGH, LAYERS, MODEL, Result, Runner, logits, make_latent, make_latent_conf, session, tensors

IDS = torch.arange(1, 49).view(2, 24)
QUANTIZED = LAYERS * 7  # q, k, v, o, gate, up, down


def test_imported_model_computes_what_transformers_does(stage: Runner, source: Path) -> None:
    from transformers import AutoModelForCausalLM

    from mlmsub.runtime.checkpoints import hf_import
    from mlmsub.runtime.models import model

    with session(stage, source) as opened:
        ours = model.build(opened.args, opened.conf, "cpu")
        hf_import.import_weights(ours, source, opened.conf, torch.bfloat16)
        got = logits(ours, IDS)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        want = theirs(IDS).logits.float()
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.999
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.9


def test_quantize_tells_what_it_did(fp8: Result, folder: Path) -> None:
    assert fp8.code == 0, fp8.out
    assert (folder / "fp8" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert not (folder / "fp8" / ".part").exists()
    done = fp8.done
    assert done["stage"] == "quantize" and done["model"] == MODEL
    assert done["outputs"] == {"MLM_MODEL_SAVE": str(folder / "fp8")}
    assert {"import", "calibrate", "save"} <= set(done["seconds"])
    assert f"{LAYERS * 4 * 2} quantizers calibrated" in fp8.out


def test_quantized_checkpoint_reloads_bit_equal(stage: Runner, source: Path, tmp_path: Path) -> None:
    import modelopt.torch.quantization as mtq

    from mlmsub.runtime.checkpoints import checkpoint, hf_import
    from mlmsub.runtime.models import model
    from mlmsub.runtime.quantization import calibration

    with session(stage, source) as opened:
        first = model.build(opened.args, opened.conf, "cpu")
        hf_import.import_weights(first, source, opened.conf, torch.bfloat16)
        plain = logits(first, IDS)
        mtq.quantize(first, mtq.FP8_DEFAULT_CFG, calibration.forward_loop(IDS, 1, "cpu"))
        want = logits(first, IDS)
        checkpoint.save(first, opened.args, tmp_path)
        second = model.build(opened.args, opened.conf, "cpu")
        with torch.no_grad():  # what uninitialised memory may hold
            for parameter in second.parameters():
                parameter.fill_(torch.nan)
        checkpoint.load(second, checkpoint.folder(tmp_path))
        got = logits(second, IDS)
    assert torch.equal(got, want)
    assert not torch.equal(got, plain), "the fake quantizers change nothing"
    assert torch.nn.functional.cosine_similarity(got.flatten(), plain.flatten(), dim=0) > 0.95


def test_fp8_export_holds_the_source_weights(fp8_export: Result, source: Path, folder: Path) -> None:
    assert fp8_export.code == 0, fp8_export.out
    made, want = tensors(folder / "fp8-hf"), tensors(source)
    seen = 0
    for name, weight in want.items():
        if made[name].dtype == torch.bfloat16:
            assert torch.equal(made[name], weight), name
            continue
        seen += 1
        assert made[name].dtype == torch.float8_e4m3fn
        scale = made[name.replace(".weight", ".weight_scale")]
        restored = made[name].float() * scale
        # e4m3: 3 mantissa bits, so half a step is 1/16 of the value; below 2**-6 the step is 2**-9
        allowed = torch.maximum(weight.float().abs() / 16, scale * 2**-10) * 1.01
        assert ((restored - weight.float()).abs() <= allowed).all(), name
        assert torch.isfinite(made[name.replace(".weight", ".input_scale")]).all()
    assert seen == QUANTIZED
    index = json.loads((folder / "fp8-hf" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(made)
    assert json.loads((folder / "fp8-hf" / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "FP8"
    assert "quantization_config" in json.loads((folder / "fp8-hf" / "config.json").read_text())
    assert (folder / "fp8-hf" / "tokenizer.json").is_file()


def test_bf16_export_is_the_source(stage: Runner, bf16: Path, source: Path, tmp_path: Path) -> None:
    result = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=bf16, EXPORT_DIR=tmp_path / "out", TP=2)
    assert result.code == 0, result.out
    assert "TP=1" in result.out, "forcing TP to 1 is said"
    made, want = tensors(tmp_path / "out"), tensors(source)
    assert set(made) == set(want)
    assert all(torch.equal(made[name], want[name]) for name in want)
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


def test_export_through_the_meta_device(stage: Runner, bf16: Path, source: Path, tmp_path: Path) -> None:
    result = stage(
        "export",
        HF_MODEL_CKPT=source,
        MLM_MODEL_CKPT=bf16,
        EXPORT_DIR=tmp_path / "out",
        MLM_EXTRA_ARGS="--init-model-with-meta-device --use-cpu-initialization",
    )
    assert result.code == 0, result.out
    made, want = tensors(tmp_path / "out"), tensors(source)
    assert all(torch.equal(made[name], want[name]) for name in want)


def test_quantize_from_a_megatron_checkpoint(
    stage: Runner, bf16: Path, source: Path, fp8_export: Result, folder: Path, tmp_path: Path
) -> None:
    quantized = stage("quantize", "fp8", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=bf16, MLM_MODEL_SAVE=tmp_path / "q")
    assert quantized.code == 0, quantized.out
    assert "[load]" in quantized.out and "[import]" not in quantized.out
    exported = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "q", EXPORT_DIR=tmp_path / "out")
    assert exported.code == 0, exported.out
    _assert_same(tensors(tmp_path / "out"), tensors(folder / "fp8-hf"))


def test_nvfp4_calibrates_and_exports(stage: Runner, source: Path, tmp_path: Path) -> None:
    quantized = stage("quantize", "nvfp4", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "q")
    assert quantized.code == 0, quantized.out
    exported = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "q", EXPORT_DIR=tmp_path / "out")
    assert exported.code == 0, exported.out
    made = tensors(tmp_path / "out")
    assert sum(tensor.dtype == torch.uint8 for tensor in made.values()) == QUANTIZED


def test_latent_attention_and_experts(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from mlmsub.runtime.checkpoints import hf_import
    from mlmsub.runtime.models import model

    source = make_latent(tmp_path / "hf")
    stage = Runner(tmp_path / "runs", make_latent_conf(tmp_path / "model.yaml"))
    with session(stage, source) as opened:
        ours = model.build(opened.args, opened.conf, "cpu")
        hf_import.import_weights(ours, source, opened.conf, torch.bfloat16)
        assert all(layer.mlp.router.expert_bias.dtype == torch.float32 for layer in ours.decoder.layers[1:])
        got = logits(ours, IDS)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        want = theirs(IDS).logits.float()
    # in bf16 a near tie picks another expert now and then, in transformers against itself too
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.995

    quantized = stage("quantize", "fp8", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "q")
    assert quantized.code == 0, quantized.out
    exported = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "q", EXPORT_DIR=tmp_path / "out")
    assert exported.code == 0, exported.out
    made = tensors(tmp_path / "out")
    low = {name for name, tensor in made.items() if tensor.dtype == torch.float8_e4m3fn}
    # q_b, kv_b, o of 3 layers; dense gate, up, down; 4 experts and the shared one in 2 layers
    assert len(low) == 3 * 3 + 3 + 2 * 5 * 3


def test_weight_only_has_no_input_scales(stage: Runner, source: Path, tmp_path: Path) -> None:
    quantized = stage(
        "quantize", "fp8", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "q", MLM_EXTRA_ARGS="--weight-only"
    )
    assert quantized.code == 0, quantized.out
    assert f"{LAYERS * 4} quantizers calibrated" in quantized.out


def test_tensor_parallel_quantize_gives_the_same_weights(
    stage: Runner, source: Path, fp8_export: Result, folder: Path, tmp_path: Path
) -> None:
    quantized = stage.ranks("quantize", "fp8", TP=2, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "q")
    assert quantized.code == 0, quantized.out
    exported = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "q", EXPORT_DIR=tmp_path / "out")
    assert exported.code == 0, exported.out
    made, want = tensors(tmp_path / "out"), tensors(folder / "fp8-hf")
    # activations are summed in another order over two ranks
    close = {name for name in want if name.endswith("input_scale")}
    _assert_same(made, want, close)


def test_uneven_pipeline_gives_the_same_export(stage: Runner, tied_source: Path, tmp_path: Path) -> None:
    uneven = f"{ENOUGH} --decoder-first-pipeline-num-layers 3"
    quantized = stage.ranks(
        "quantize", "fp8", PP=2, HF_MODEL_CKPT=tied_source, MLM_MODEL_SAVE=tmp_path / "q", MLM_EXTRA_ARGS=uneven
    )
    assert quantized.code == 0, quantized.out
    single = stage("quantize", "fp8", HF_MODEL_CKPT=tied_source, MLM_MODEL_SAVE=tmp_path / "q1")
    assert single.code == 0, single.out
    common = {"HF_MODEL_CKPT": tied_source, "MLM_MODEL_CKPT": tmp_path / "q"}
    two = stage.ranks(
        "export", PP=2, EXPORT_DIR=tmp_path / "two", MLM_EXTRA_ARGS="--decoder-first-pipeline-num-layers 1", **common
    )
    assert two.code == 0, two.out
    one = stage("export", EXPORT_DIR=tmp_path / "one", **common)
    assert one.code == 0, one.out
    whole = stage("export", EXPORT_DIR=tmp_path / "whole", **{**common, "MLM_MODEL_CKPT": tmp_path / "q1"})
    assert whole.code == 0, whole.out
    _assert_same(tensors(tmp_path / "two"), tensors(tmp_path / "one"))
    _assert_same(tensors(tmp_path / "one"), tensors(tmp_path / "whole"))
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in tensors(tmp_path / "one").values()) == QUANTIZED


def test_data_parallel_ranks_share_the_samples(
    stage: Runner, source: Path, fp8_export: Result, folder: Path, tmp_path: Path
) -> None:
    quantized = stage.ranks("quantize", "fp8", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "q")
    assert quantized.code == 0, quantized.out
    # more processes than pipeline stages: the others have nothing to do
    exported = stage.ranks("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "q", EXPORT_DIR=tmp_path / "out")
    assert exported.code == 0, exported.out
    assert "export uses 1 of 2 processes" in exported.out
    _assert_same(tensors(tmp_path / "out"), tensors(folder / "fp8-hf"))


def _assert_same(made: dict, want: dict, close: set[str] = frozenset()) -> None:
    assert set(made) == set(want)
    for name in want:
        if name in close:
            torch.testing.assert_close(made[name], want[name], rtol=0.02, atol=0)
        else:
            assert made[name].dtype == want[name].dtype, name
            assert torch.equal(made[name].float(), want[name].float()), name


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_calibration_files(kind: str, stage: Runner, source: Path, tmp_path: Path) -> None:
    text = "One line of calibration text, long enough for a sample or two. " * 20
    file = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        chat = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]}
        file.write_text(json.dumps({"text": text}) + "\n" + json.dumps(chat) + "\n")
    elif kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": [text, text]}), file)
    else:
        file.write_text(f"{text}\n\n{text}")
    result = stage(
        "quantize", "fp8", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "q",
        MLM_EXTRA_ARGS=f"--calib-data {file} --calib-max-sequence-length 32 --calib-size 4 --calib-batch-size 3",
    )  # fmt: skip
    assert result.code == 0, result.out
    assert "4 samples of 32 tokens, batches of 3" in result.out
    assert "built-in" not in result.out
