"""What a person sees when an input is wrong or an output is not what was promised: one line, no traceback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rig import ROOT, Result, Runner, make_llama, session


def one_line(result: Result, *words: str, code: int = 2) -> None:
    assert result.code == code, result.out
    (line,) = [line for line in result.out.splitlines() if "ERROR" in line]
    for word in words:
        assert word in line
    assert "Traceback" not in result.out
    assert not (result.run_dir / "state" / "0" / "done.json").exists()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"TP": "4x"}, ("TP: '4x' is not an integer",)),
        ({"PP": "0"}, ("PP: '0'",)),
        ({"TP": "2"}, ("TP x PP x CP", "2 x 1 x 1 = 2", "1 processes")),
        ({"EP": "2"}, ("ETP x EP x PP",)),
        ({"HF_MODEL_CKPT": "/nowhere/model"}, ("HF_MODEL_CKPT: /nowhere/model does not exist",)),
        ({"MLM_MODEL_CKPT": "/nowhere/ckpt"}, ("MLM_MODEL_CKPT: /nowhere/ckpt does not exist",)),
        ({"MLM_MODEL_SAVE": ""}, ("MLM_MODEL_SAVE", "MLM_WORK_DIR")),
        ({"MLM_CALIB_DATA": "/nowhere/data.jsonl"}, ("--calib-data: /nowhere/data.jsonl",)),
        ({"MLM_EXTRA_ARGS": "--prompts"}, ("--prompts is not implemented",)),
        ({"MLM_EXTRA_ARGS": "--calib-sise 4"}, ("--calib-sise", "--calib-size")),
        ({"MLM_EXTRA_ARGS": "--calib-size 0"}, ("--calib-size", "'0'")),
        ({"MLM_EXTRA_ARGS": "--export-kv-cache-quant fp8"}, ("Transformer Engine",)),
        ({"MLM_EXTRA_ARGS": "--checkpoint-activations"}, ("MLM_EXTRA_ARGS: --checkpoint-activ", "no longer")),
        ({"MLM_EXTRA_ARGS": "--num-layers four"}, ("MLM_EXTRA_ARGS: --num-layers", "'four'", "Fix: correct --num-l")),
        ({"MLM_EXTRA_ARGS": "--num-layers"}, ("MLM_EXTRA_ARGS: --num-layers", "one argument", "Fix: correct --num-l")),
        ({"MLM_EXTRA_ARGS": "--position-embedding-type robe"}, ("--position-embedding-type", "'robe'", "Fix:")),
        ({"MLM_EXTRA_ARGS": "--fp16"}, ("MLM_EXTRA_ARGS: --fp16", "bf16", "Fix: leave it out")),
        ({"MLM_EXTRA_ARGS": "--save /x"}, ("MLM_EXTRA_ARGS: --save", "Fix: set MLM_MODEL_SAVE")),
        ({"MLM_EXTRA_ARGS": "--load=/x"}, ("MLM_EXTRA_ARGS: --load", "Fix: set MLM_MODEL_CKPT")),
        ({"MLM_EXTRA_ARGS": "--help"}, ("MLM_EXTRA_ARGS: --help", "Fix: leave it out")),
        ({"MLM_EXTRA_ARGS": "--lr 1e-5 --min-lr 1"}, ("MLM_EXTRA_ARGS: --min-lr, --lr", "args.min_lr <= args.lr")),
        ({"MLM_EXTRA_ARGS": "--seq-length 100000"}, ("MLM_EXTRA_ARGS: --seq-length", "max_position_embeddings")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_variable(variables: dict, words: tuple, stage: Runner, source: Path, tmp_path: Path) -> None:
    defaults = {"HF_MODEL_CKPT": source, "MLM_MODEL_SAVE": tmp_path / "out"}
    one_line(stage("quantize", "fp8", **{**defaults, **variables}), *words)
    assert not (tmp_path / "out").exists()


def test_unknown_format_names_the_nearest(stage: Runner, source: Path, tmp_path: Path) -> None:
    result = stage("quantize", "FP8_DEFAULT", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "out")
    one_line(result, "QFORMAT", "'FP8_DEFAULT'", "FP8_DEFAULT_CFG")


@pytest.mark.parametrize("name", ["convert", "eagle3", "finetune", "prune", "extract", "validate", "mmlu", "export"])
def test_a_word_that_a_stage_does_not_take(name: str, stage: Runner, source: Path, tmp_path: Path) -> None:
    result = stage(name, "fp8", HF_MODEL_CKPT=source, MLM_WORK_DIR=tmp_path)
    one_line(result, f"{name}: takes a model only, not 'fp8'")


def test_unset_source_that_no_hub_gives(stage: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = stage("quantize", "fp8", MLM_MODEL_SAVE=tmp_path / "out", HF_HUB_OFFLINE=1, HF_HOME=tmp_path / "cache")
    one_line(result, "HF_MODEL_CKPT: is not set", "test/tiny-llama")


def test_no_model_conf(stage: Runner, source: Path, tmp_path: Path) -> None:
    run_dir = stage.run_dir()
    (run_dir / "conf" / "model.yaml").unlink()
    one_line(stage("quantize", "fp8", run_dir=run_dir, HF_MODEL_CKPT=source), "model conf", "MODEL_ARGS")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("model: m\nmegatron_argz: {}\n", "megatron_args"),
        ("model: m\nmegatron_args: [1]\n", "is not a dict"),
        ("model: m\n", "required"),
        ("- a\n", "not a mapping"),
        ("model: m\nmegatron_args: {num-layers: 2}\nsource_format: fp9\n", "fp9"),
        ("model: test/tiny-llama\nmegatron_args: {a: 2}\nunsupported: {quantize: no rule for it}\n", "no rule for it"),
        ("a: [", "not YAML"),
    ],
)
def test_wrong_model_conf(text: str, word: str, stage: Runner, source: Path, tmp_path: Path) -> None:
    run_dir = stage.run_dir()
    (run_dir / "conf" / "model.yaml").write_text(text)
    result = stage("quantize", "fp8", run_dir=run_dir, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "out")
    assert result.code == 2 and word in result.out and "Traceback" not in result.out


def test_conf_of_another_model(stage: Runner, source: Path, tmp_path: Path) -> None:
    run_dir = stage.run_dir()
    file = run_dir / "conf" / "model.yaml"
    file.write_text(file.read_text().replace("ffn-hidden-size: 128", "ffn-hidden-size: 96"))
    result = stage("quantize", "fp8", run_dir=run_dir, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "out")
    one_line(result, "HF_MODEL_CKPT", "does not fit the model conf")


def test_a_conf_that_is_of_another_model_by_its_name(stage: Runner, source: Path, tmp_path: Path) -> None:
    run_dir = stage.run_dir()
    conf = run_dir / "conf" / "model.yaml"
    conf.write_text(conf.read_text().replace("test/tiny-llama", "test/other"))
    result = stage("quantize", "fp8", run_dir=run_dir, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "out")
    one_line(result, "MODEL: test/tiny-llama was asked for, and the model conf is of test/other", "Fix:")


def test_unknown_config_field(stage: Runner, source: Path, tmp_path: Path) -> None:
    run_dir = stage.run_dir()
    file = run_dir / "conf" / "model.yaml"
    file.write_text(file.read_text() + "config: {rotary_percnt: 1.0}\n")
    result = stage("quantize", "fp8", run_dir=run_dir, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "out")
    one_line(result, "config.rotary_percnt")


def test_the_output_is_an_input(stage: Runner, bf16: Path, source: Path) -> None:
    result = stage("quantize", "fp8", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=bf16, MLM_MODEL_SAVE=bf16)
    one_line(result, "MLM_MODEL_SAVE", "same folder as MLM_MODEL_CKPT")
    one_line(stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=bf16, EXPORT_DIR=source), "HF_MODEL_CKPT")


def test_an_output_of_another_run_is_kept(
    stage: Runner, fp8_export: Result, source: Path, folder: Path, tmp_path: Path
) -> None:
    variables = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": folder / "fp8", "EXPORT_DIR": tmp_path / "out"}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    one_line(stage("export", **variables), "EXPORT_DIR", "not empty", "MLM_OVERWRITE=1")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    asked = stage("export", **variables, MLM_OVERWRITE=1)
    assert asked.code == 0, asked.out
    assert not (tmp_path / "out" / "notes.txt").exists()
    # the same run directory may replace what it wrote itself, as a restart does
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    again = stage("export", run_dir=asked.run_dir, **variables)
    assert again.code == 0, again.out


@pytest.mark.parametrize("harm", ["tracker", "format", "plan", "shard", "short", "modelopt"])
def test_incomplete_checkpoint(
    harm: str, stage: Runner, fp8: Result, source: Path, folder: Path, tmp_path: Path
) -> None:
    ckpt = tmp_path / "ckpt"
    shutil.copytree(folder / "fp8", ckpt)
    files = {
        "tracker": ckpt / "latest_checkpointed_iteration.txt",
        "format": ckpt / "release" / "metadata.json",
        "plan": ckpt / "release" / ".metadata",
        "shard": next((ckpt / "release").glob("*.distcp")),
        "short": next((ckpt / "release").glob("*.distcp")),
        "modelopt": next((ckpt / "release" / "modelopt_state").glob("*.distcp")),
    }
    if harm == "short":
        os.truncate(files[harm], files[harm].stat().st_size - 100)
    else:
        files[harm].unlink()
    result = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=ckpt, EXPORT_DIR=tmp_path / "out")
    one_line(result, "MLM_MODEL_CKPT", "not a complete checkpoint")


def test_a_quantized_checkpoint_without_its_modelopt_state(
    stage: Runner, fp8: Result, source: Path, folder: Path, tmp_path: Path
) -> None:
    """It would load as a plain bf16 model."""
    shutil.copytree(folder / "fp8", tmp_path / "ckpt")
    shutil.rmtree(tmp_path / "ckpt" / "release" / "modelopt_state")
    result = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "ckpt", EXPORT_DIR=tmp_path / "out")
    one_line(result, "modelopt_state")


def test_a_checkpoint_of_another_model(
    stage: Runner, bf16: Path, source: Path, tied_source: Path, tmp_path: Path
) -> None:
    variables = {"MLM_MODEL_CKPT": bf16, "EXPORT_DIR": tmp_path / "out"}
    # the checkpoint has an output layer of its own, which this model would never load
    one_line(stage("export", HF_MODEL_CKPT=tied_source, **variables), "another model", "output_layer.weight")
    for changed in ("num-layers: 3", "num-layers: 4\n  qk-layernorm: true"):
        run_dir = stage.run_dir()
        file = run_dir / "conf" / "model.yaml"
        file.write_text(file.read_text().replace("num-layers: 4", changed))
        result = stage("export", run_dir=run_dir, HF_MODEL_CKPT=source, **variables)
        one_line(result, "MLM_MODEL_CKPT", "model conf")


def test_uncalibrated_model_is_not_exported(stage: Runner, source: Path, tmp_path: Path) -> None:
    import modelopt.torch.quantization as mtq

    from mlmsub.runtime.checkpoints import checkpoint, hf_import
    from mlmsub.runtime.models import model

    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    with session(stage, source) as opened:
        made = model.build(opened.args, opened.conf, "cpu")
        hf_import.import_weights(made, source, opened.conf, torch.bfloat16)
        mtq.quantize(made, mtq.FP8_DEFAULT_CFG, None)
        checkpoint.save(made, opened.args, ckpt)
    result = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=ckpt, EXPORT_DIR=tmp_path / "out")
    one_line(result, "no usable range", "input_quantizer", code=1)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_source_with_a_nan_weight_is_refused(stage: Runner, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = make_llama(tmp_path / "hf", tied=False)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 3] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    result = stage("quantize", "fp8", HF_MODEL_CKPT=broken, MLM_MODEL_SAVE=tmp_path / "out")
    one_line(result, "without finite weights", "decoder.layers.1.mlp.linear_fc2.weight", code=1)


def test_a_format_that_the_exporter_cannot_write(stage: Runner, source: Path, tmp_path: Path) -> None:
    quantized = stage("quantize", "int8", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "q")
    assert quantized.code == 0, quantized.out
    result = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "q", EXPORT_DIR=tmp_path / "out")
    assert "cannot write" in quantized.out
    one_line(result, "MLM_MODEL_CKPT", "int8", "not exported")


def test_quantizing_twice(stage: Runner, fp8: Result, source: Path, folder: Path, tmp_path: Path) -> None:
    result = stage(
        "quantize", "fp8", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=folder / "fp8", MLM_MODEL_SAVE=tmp_path / "out"
    )
    one_line(result, "quantized already")


@pytest.mark.parametrize("harm", ["cut", "plain", "scale", "index", "config"])
def test_an_export_that_is_not_what_it_says(
    harm: str, fp8_export: Result, source: Path, folder: Path, tmp_path: Path
) -> None:
    """The check reads the files: harm each of them, and it must notice."""
    from safetensors.torch import load_file, save_file

    from mlmsub.runtime.checkpoints import hf_check
    from mlmsub.runtime.errors import CheckFailed

    made = tmp_path / "out"
    shutil.copytree(folder / "fp8-hf", made)
    assert "FP8" in hf_check.check(made, source, True)
    file = sorted(made.glob("*.safetensors"))[1]
    weights = load_file(file)
    name = next(name for name, tensor in weights.items() if tensor.dtype == torch.float8_e4m3fn)
    if harm == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif harm == "plain":
        save_file({**weights, name: weights[name].to(torch.bfloat16)}, file)
    elif harm == "scale":
        save_file({key: value for key, value in weights.items() if key != f"{name}_scale"}, file)
        index = json.loads((made / "model.safetensors.index.json").read_text())
        del index["weight_map"][f"{name}_scale"]
        (made / "model.safetensors.index.json").write_text(json.dumps(index))
    elif harm == "index":
        file.unlink()
    else:
        (made / "hf_quant_config.json").unlink()
    with pytest.raises(CheckFailed):
        hf_check.check(made, source, True)


def test_help_is_light() -> None:
    code = (
        "import sys, runpy; sys.argv = ['x', '--help']\n"
        "try: runpy.run_module('mlmsub.runtime', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'yaml', 'transformers') if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "quantize MODEL [QFORMAT]" in shown.stdout and shown.stdout.endswith("[]\n")
