"""A teacher of another size: the loss against an independent one, the ways to say its conf, and what is refused."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml
from rig import MODEL, Runner, make_tokenizer
from test_calibration import events
from training_rig import iterations, variables

SIZES = {"num_layers": 3, "hidden_size": 96, "ffn_hidden_size": 160, "kv_channels": 24}


def make_teacher(folder: Path, vocabulary: int) -> Path:
    """A Llama with other sizes than the student's, whose output layer is its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    make_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.15, eos_token_id=0, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(5)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def conf_of(student: Path, file: Path) -> Path:
    conf = yaml.safe_load(student.read_text())
    conf["megatron_args"] |= {name.replace("_", "-"): size for name, size in SIZES.items()}
    file.write_text(yaml.safe_dump(conf))
    return file


@pytest.fixture(scope="module")
def teacher(fp32: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder: hf, conf.yaml and the Megatron checkpoint mlm."""
    folder = tmp_path_factory.mktemp("teacher")
    convert(fp32, folder, 512)
    return folder


def convert(fp32: Runner, folder: Path, vocabulary: int) -> None:
    source = make_teacher(folder / "hf", vocabulary)
    runner = Runner(folder / "runs", conf_of(fp32.conf, folder / "conf.yaml"))
    made = runner("convert", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=folder / "mlm", MLM_EXTRA_ARGS="")
    assert made.code == 0, made.out


def given(source: Path, save: Path, data: Path, teacher: Path, extra: str = "") -> dict[str, object]:
    return variables(source, save, data, extra=f"--export-kd-teacher-load {teacher / 'mlm'} {extra}")


def distance(source: Path, teacher: Path, folder: Path) -> float:
    """Of the first global batch: the mean over the learned tokens of KL(teacher || student), by transformers."""
    from transformers import LlamaForCausalLM

    from mlmsub.runtime.data.packing import Order, PackedDataset

    packed = PackedDataset(folder)
    rows = packed.rows("train")
    order = Order(len(rows), 1234)  # Megatron's default seed
    models = [LlamaForCausalLM.from_pretrained(one, dtype=torch.float32).eval() for one in (source, teacher)]
    total, count = 0.0, 0
    for sample in range(8):
        for tokens, learned in packed.row(rows[order[sample]]):
            ids = torch.tensor(tokens.astype("int64"))[None]
            with torch.no_grad():
                own, other = (model(ids).logits[0, :-1].log_softmax(-1) for model in models)
            mask = torch.tensor(learned[1:].astype("float32"))
            total += float(((other.exp() * (other - own)).sum(-1) * mask).sum())
            count += int(mask.sum())
    return total / count


@pytest.mark.parametrize("way", ["what differs", "a conf", "beside the checkpoint"])
def test_a_larger_teacher_is_learned_from(
    way: str, fp32: Runner, source: Path, data: Path, teacher: Path, tmp_path: Path
) -> None:
    file = tmp_path / "teacher.yaml"
    file.write_text(yaml.safe_dump({**SIZES, "share_embeddings_and_output_weights": True}))
    folder, extra = teacher, f"--export-kd-teacher-model-config {file}"
    if way == "a conf":
        extra = f"--export-kd-teacher-model-config {teacher / 'conf.yaml'}"
    elif way == "beside the checkpoint":
        folder, extra = tmp_path / "copy", ""
        shutil.copytree(teacher / "mlm", folder / "mlm")
        shutil.copy(file, folder / "mlm" / "model_config.yaml")
    result = fp32("finetune", **given(source, tmp_path / "out", data, folder, extra))
    assert result.code == 0, result.out
    losses = iterations(result, "logits_loss")
    want = distance(source, teacher / "hf", Path(events(result, "data")[0]["folder"]))
    assert losses[0] == pytest.approx(want, rel=1e-4)
    assert losses[-1] < losses[0]
    exported = fp32("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "out", EXPORT_DIR=tmp_path / "hf")
    assert exported.code == 0, exported.out


def test_another_vocabulary_is_refused(fp32: Runner, source: Path, data: Path, teacher: Path, tmp_path: Path) -> None:
    convert(fp32, tmp_path / "other", 520)
    extra = f"--export-kd-teacher-model-config {teacher / 'conf.yaml'}"
    result = fp32("finetune", **given(source, tmp_path / "out", data, tmp_path / "other", extra))
    assert result.code == 2, result.out
    assert "--export-kd-teacher-load: " in result.out and "has 520 tokens, and the student 512" in result.out


def test_states_of_other_widths_are_not_compared(
    fp32: Runner, source: Path, data: Path, teacher: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "kd.yaml"
    settings.write_text("intermediate_layer_pairs:\n  - [decoder.final_layernorm, decoder.final_layernorm]\n")
    extra = f"--export-kd-teacher-model-config {teacher / 'conf.yaml'} --export-kd-cfg {settings}"
    result = fp32("finetune", **given(source, tmp_path / "out", data, teacher, extra))
    assert result.code == 2 and "--export-kd-cfg: intermediate_layer_pairs compare states of 64 and 96" in result.out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("num_layers: 3\nhiden_size: 96\n", "hiden-size"),
        ("- 3\n", "is not a mapping"),
        ("{", "cannot be read"),
        ("megatron_args: {}\nmodel: x\n", "model and megatron_args are required"),
        ("num_layers: 3\n", "does not fit the model conf"),
    ],
)
def test_a_conf_that_is_wrong_is_told(
    text: str, told: str, fp32: Runner, source: Path, data: Path, teacher: Path, tmp_path: Path
) -> None:
    (tmp_path / "teacher.yaml").write_text(text)
    extra = f"--export-kd-teacher-model-config {tmp_path / 'teacher.yaml'}"
    result = fp32("finetune", **given(source, tmp_path / "out", data, teacher, extra))
    assert result.code == 2 and told in result.out, result.out


def test_a_conf_needs_a_teacher(fp32: Runner, source: Path, data: Path, teacher: Path, tmp_path: Path) -> None:
    extra = f"--export-kd-teacher-model-config {teacher / 'conf.yaml'}"
    result = fp32("finetune", **variables(source, tmp_path / "out", data, extra=extra))
    assert result.code == 2 and "add --export-kd-teacher-load" in result.out


def test_the_teacher_of_a_pruned_student_is_as_it_was(tmp_path: Path) -> None:
    """The sizes of pruning are those of a checkpoint, not of the conf that both have."""
    from mlmsub.runtime.modelconf import ModelConf
    from mlmsub.runtime.training import distill

    conf = ModelConf(MODEL, megatron_args={"num-layers": 4}, pruned={"num-layers": 2})
    args = Namespace(export_kd_teacher_load=tmp_path, export_kd_teacher_model_config=None)
    assert distill._conf(Namespace(conf=conf, args=args)).arguments() == ["--num-layers", "4"]
    (tmp_path / "pruned.json").write_text(json.dumps({"num-layers": 3}))
    assert distill._conf(Namespace(conf=conf, args=args)).arguments() == ["--num-layers", "3"]
