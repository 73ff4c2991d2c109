"""A conf that contradicts the source's config.json where no shape shows it, and broken files of a source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from rig import Runner


@pytest.mark.parametrize(
    ("name", "value"),
    [("rotary-base", 500000), ("norm-epsilon", 0.01), ("rotary-percent", 0.5), ("use-rope-scaling", True),
     ("position-embedding-type", "none")],
)  # fmt: skip
def test_a_conf_of_another_model_is_refused(
    name: str, value: object, stage: Runner, source: Path, tmp_path: Path
) -> None:
    conf = yaml.safe_load(stage.conf.read_text())
    conf["megatron_args"][name] = value
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(conf))
    run_dir = stage.run_dir(tmp_path / "model.yaml")
    result = stage("quantize", run_dir=run_dir, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "made")
    assert result.code == 2
    assert f"model conf: contradicts the source: {name} is" in result.out


def test_heads_of_another_width_are_refused(stage: Runner, source: Path, tmp_path: Path) -> None:
    conf = yaml.safe_load(stage.conf.read_text())
    conf["megatron_args"] |= {"num-attention-heads": 2, "num-query-groups": 1, "kv-channels": 32}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(conf))
    run_dir = stage.run_dir(tmp_path / "model.yaml")
    result = stage("quantize", run_dir=run_dir, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "made")
    assert result.code == 2
    assert "num-attention-heads is 2 in the conf and 4 in config.json" in result.out


LFS = "version https://git-lfs.github.com/spec/v1\n"


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("config.json", LFS, "config.json cannot be read"),
        ("config.json", "", "config.json cannot be read"),
        ("config.json", "[]", "config.json is not a JSON object"),
        ("config.json", '{"hidden_size": 64}', "says no vocab_size"),
        ("tokenizer_config.json", LFS, "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", '{"auto_map": "x"}', "auto_map is not a mapping"),
        ("model.safetensors.index.json", '{"weight_map": []}', "cannot be read"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', "cannot be read"),
        ("tokenizer.json", '{"a": 1}', "no usable tokenizer"),
    ],
)  # fmt: skip
def test_a_broken_file_of_the_source_is_named(
    file: str, text: str, said: str, stage: Runner, source: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "hf"
    shutil.copytree(source, broken)
    if file.endswith("index.json"):
        (broken / "model.safetensors").unlink()
    (broken / file).write_text(text)
    result = stage("quantize", HF_MODEL_CKPT=broken, MLM_MODEL_SAVE=tmp_path / "made")
    assert result.code == 2
    assert said in result.out
    assert "Traceback" not in result.out


def test_a_decoder_layer_that_config_json_does_not_count_is_refused(
    stage: Runner, source: Path, tmp_path: Path
) -> None:
    from rig import rewrite

    shutil.copytree(source, tmp_path / "hf")
    rewrite(
        tmp_path / "hf",
        lambda found: found | {name.replace("layers.3.", "layers.4."): found[name] for name in found if ".3." in name},
    )
    result = stage("quantize", HF_MODEL_CKPT=tmp_path / "hf", MLM_MODEL_SAVE=tmp_path / "made")
    assert result.code == 2
    assert "has 9 tensors that the model conf has no place for" in result.out


@pytest.mark.parametrize("other", [False, True])
def test_an_output_layer_of_its_own_beside_tied_embeddings(
    other: bool, stage: Runner, tied_source: Path, tmp_path: Path
) -> None:
    from rig import rewrite

    shutil.copytree(tied_source, tmp_path / "hf")
    shift = 0.5 if other else 0.0
    rewrite(tmp_path / "hf", lambda found: found | {"lm_head.weight": found["model.embed_tokens.weight"] + shift})
    result = stage("convert", HF_MODEL_CKPT=tmp_path / "hf", MLM_MODEL_SAVE=tmp_path / "made", MLM_EXTRA_ARGS="")
    if other:
        assert result.code == 2, result.out
        assert "lm_head.weight in" in result.out
        assert "is not the embedding, though config.json says" in result.out
        assert "tie_word_embeddings: false" in result.out
        assert not list((tmp_path / "made").glob("release"))
    else:
        assert result.code == 0, result.out
        assert "not part of the model" not in result.out


@pytest.mark.parametrize("kind", ["source", "run directory"])
def test_an_output_round_an_input_is_refused(kind: str, stage: Runner, source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "hf")
    run_dir = stage.run_dir()
    target = tmp_path if kind == "source" else run_dir.parent
    result = stage("quantize", run_dir=run_dir, HF_MODEL_CKPT=tmp_path / "hf", MLM_MODEL_SAVE=target, MLM_OVERWRITE=1)
    assert result.code == 2
    assert f"{target} holds " in result.out
    assert json.loads((tmp_path / "hf" / "config.json").read_text())


ROWS = {
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say three numbers."}]}]},
    "nothing": {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": None}]},
    "half a pair": {"text": "a \ud800 b"},
}


@pytest.mark.parametrize("row", ROWS)
def test_calibration_rows_as_real_data_has_them(row: str, stage: Runner, source: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text((json.dumps(ROWS[row]) + "\n") * 200)
    result = stage(
        "quantize", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "made", MLM_CALIB_DATA=tmp_path / "data.jsonl"
    )
    assert result.code == 0, result.out


@pytest.mark.parametrize("name", ["data.jsonl", "data.txt"])
def test_calibration_data_that_is_not_utf8_is_named(name: str, stage: Runner, source: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b'{"text": "ok"}\n' + bytes(range(128, 256)))
    result = stage("quantize", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "made", MLM_CALIB_DATA=tmp_path / name)
    assert result.code == 2
    assert f"{name}, after line" in result.out
    assert "not UTF-8" in result.out


def test_what_cannot_be_exported_is_said_when_it_is_made(stage: Runner, source: Path, tmp_path: Path) -> None:
    extra = "--calib-size 8 --calib-max-sequence-length 64 --weight-only"
    made = stage("quantize", "fp8", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "a", MLM_EXTRA_ARGS=extra)
    assert made.code == 0
    assert "cannot write it as a Hugging Face checkpoint" in made.out
    result = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "a", EXPORT_DIR=tmp_path / "b")
    assert result.code == 2
    assert "fp8 of the weights alone" in result.out


def test_a_compressed_checkpoint_is_refused_by_its_cause(stage: Runner, source: Path, tmp_path: Path) -> None:
    extra = "--calib-size 8 --calib-max-sequence-length 64 --compress"
    made = stage("quantize", "fp8", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "a", MLM_EXTRA_ARGS=extra)
    assert made.code == 0
    result = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "a", EXPORT_DIR=tmp_path / "b")
    assert result.code == 2
    assert "was made with --compress" in result.out


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "5"}, "RANK: 5 is not below WORLD_SIZE=2"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT: 'abc' is not an integer"),
    ],
)
def test_a_place_that_is_no_place_is_told(
    variables: dict, said: str, stage: Runner, source: Path, tmp_path: Path
) -> None:
    given = {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12", **variables}
    result = stage("quantize", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "a", **given)
    assert result.code == 2
    assert said in result.out
