"""--eagle-config: each field of a draft is trained and exported as it is said, or refused before anything is loaded."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import HIDDEN, LAYERS, Runner, session, tensors

from mlmsub.runtime.errors import StageError
from mlmsub.runtime.models import eagle, eagle_config

IDS = "eagle_aux_hidden_state_layer_ids"
# what is said in the file -> words of the refusal
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    *(({IDS: value}, (IDS, "3 different layers")) for value in (
        [], [0, 1], [1, 1, 1], [0, 1, 2, 3], [0, 1, LAYERS], [-1, 0, 1], ["a"], ["0", "1", "2"], [0.5, 1, 2],
        [True, 0, 2], 3, "0,1,2", None, {}, [[0], [1], [2]],
    )),
    *(({name: value}, (name, "whole number")) for name in (
        "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"
    ) for value in (0, -4, 1.5, "4", None, True, [4], 10**12)),
    *(({"draft_vocab_size": value}, ("draft_vocab_size",)) for value in (0, -5, "x", 100.5, 99999, True)),
    *(({name: value}, (name, "number above 0")) for name in ("initializer_range", "rms_norm_eps", "rope_theta")
      for value in (0, -1, "a", None, float("nan"), float("inf"), 10**400, True)),
    ({"num_key_value_heads": 3}, ("num_key_value_heads 3", "num_attention_heads 4")),
    ({"head_dim": 7}, ("head_dim is 7", "even")),
    *((own, (next(iter(own)),)) for own in (
        {"hidden_act": "gelu"}, {"hidden_act": None}, {"attention_bias": True}, {"mlp_bias": True},
        {"attention_dropout": 0.1}, {"num_hidden_layers": 2}, {"num_hidden_layers": 0}, {"has_lm_head": True},
        {"position_embedding_type": "yarn"}, {"use_last_layernorm": False}, {"use_aux_hidden_state": False},
        {"use_mtp_layernorm": True}, {"use_input_layernorm_in_first_layer": None}, {"parallel_draft_step": 2},
        {"parallel_draft_heads_num_layers": 4}, {"torch_dtype": "float16"}, {"hidden_size": "64"},
        {"hidden_size": 32}, {"vocab_size": 7}, {"tie_word_embeddings": True}, {"model_type": "kimi_k2"},
        {"pretraining_tp": 2},
    )),
    ({"dtype": "float16"}, ("torch_dtype",)),
    *(({"rope_scaling": value}, ("rope_scaling",)) for value in (
        {"rope_type": "foo"}, {"type": "yarn", "factor": 4.0}, {"rope_type": ["llama3"]}, "yarn", 4, [],
        {"rope_type": "default", "factor": 4.0}, {"factor": 4.0}, {"rope_type": "llama3", "factor": 4.0, "mscale": 1},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2.0},
    )),
    *(({"rope_scaling": {"rope_type": "llama3", "factor": value}}, ("factor",)) for value in (None, 0, "4", -1)),
    ({"rope_scaling": {"rope_type": "default", "rope_theta": 500}, "rope_theta": 600}, ("rope_theta", "500")),
    ({"rope_scaling": None, "rope_parameters": {"rope_type": "llama3"}}, ("rope_parameters", "say it once")),
    ({"intermediate_sise": 8}, ("intermediate_sise", "did you mean intermediate_size")),
    ({"eagle_config": [1]}, ("eagle_config",)),
    ({"eagle_config": {"use_mtp_layernorm": True}}, ("use_mtp_layernorm",)),
]  # fmt: skip
TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({IDS: [3, 0, 2]}, {IDS: [0, 2, 3]}),
    ({"draft_vocab_size": None}, {"draft_vocab_size": 512}),
    ({"rope_scaling": None}, {"rope_scaling": {"rope_type": "default", "rope_theta": 10000}}),
    ({"rope_scaling": {}}, {"rope_scaling": {"rope_type": "default", "rope_theta": 10000}}),
    ({"rope_theta": 500}, {"rope_theta": 500, "rope_scaling": {"rope_type": "default", "rope_theta": 500}}),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 500}}, {"rope_theta": 500}),
    ({"rope_scaling": {"type": "llama3", "factor": 4}}, {"rope_scaling": {
        "rope_type": "llama3", "rope_theta": 10000, "factor": 4, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }}),
    ({"dtype": "bfloat16", "hidden_size": HIDDEN, "attention_dropout": 0, "use_cache": True}, {}),
]  # fmt: skip
HONOURED = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 96, "rms_norm_eps": 0.25,
    "initializer_range": 0.5, "rope_theta": 700, "draft_vocab_size": 50, IDS: [0, 1, 3],
}  # fmt: skip


@pytest.fixture(scope="module")
def base(stage: Runner, source: Path) -> Namespace:
    """The arguments of the tiny model, in bfloat16, with a draft asked for."""
    with session(stage, source) as opened:
        given = Namespace(algorithm="eagle3", draft_vocab_size=None, extra_model_path=None, export_offline_model=False)
        return Namespace(**{**vars(opened.args), **vars(given), "conf": opened.conf})


def asked(base: Namespace, file: Path, text: str) -> eagle.Draft:
    file.write_text(text)
    made = eagle.asked(Namespace(**{**vars(base), "eagle_config": file}), base.conf, from_hf=True)
    assert made is not None
    return made


@pytest.mark.parametrize(("own", "words"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_is_not_trained_as_it_is_said_is_refused(
    own: dict[str, Any], words: tuple[str, ...], base: Namespace, tmp_path: Path
) -> None:
    with pytest.raises(StageError) as told:
        asked(base, tmp_path / "draft.json", json.dumps(own))
    assert all(word in str(told.value) for word in words), told.value


@pytest.mark.parametrize(("own", "made"), TAKEN, ids=lambda value: json.dumps(value)[:60])
def test_other_words_for_the_same_are_taken(
    own: dict[str, Any], made: dict[str, Any], base: Namespace, tmp_path: Path
) -> None:
    found = asked(base, tmp_path / "draft.json", json.dumps(own)).architecture
    assert {name: found[name] for name in made} == made


def test_every_field_of_modelopts_is_judged() -> None:
    from modelopt.torch.speculative.config import EAGLE3_DEFAULT_CFG

    assert set(EAGLE3_DEFAULT_CFG["config"]["eagle_architecture_config"]) <= set(eagle_config.KNOWN)
    said = {name for own, _ in REFUSED for name in own}
    assert set(eagle_config.KNOWN) <= said, "each in a case above"


def test_two_processes_refuse_alike(stage: Runner, source: Path, tmp_path: Path) -> None:
    (tmp_path / "draft.json").write_text('{"hidden_act": "gelu"}')
    words = ("--algorithm", "eagle3", "--eagle-config", str(tmp_path / "draft.json"))
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_SAVE": tmp_path / "mlm", "MLM_EXTRA_ARGS": "", "TP": 2}
    result = stage.ranks("convert", *words, **given)
    assert result.code == 2 and "Traceback" not in result.out
    assert result.out.count("--eagle-config: hidden_act is 'gelu'") == 1, "told once"
    assert "[import]" not in result.out and not (tmp_path / "mlm").exists()


def test_the_vocabulary_is_said_once(base: Namespace, tmp_path: Path) -> None:
    flag = Namespace(**{**vars(base), "draft_vocab_size": 100})
    assert asked(flag, tmp_path / "draft.json", "{}").architecture["draft_vocab_size"] == 100
    for other in ("50", "null"):
        with pytest.raises(StageError, match=r"--draft-vocab-size: 100, .* say it once"):
            asked(flag, tmp_path / "draft.json", f'{{"draft_vocab_size": {other}}}')


def test_a_file_that_holds_no_draft_is_told_before_the_base_is_loaded(
    base: Namespace, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "weights.pt").write_bytes(b"")
    torch.save([1], tmp_path / "list.pt")
    files = {tmp_path / "no.pt": "not a file", tmp_path / "weights.pt": "cannot be read",
             tmp_path / "list.pt": "no fc.weight", source / "model.safetensors": "no fc.weight",
             source / "config.json": "cannot be read"}  # fmt: skip
    for file, words in files.items():
        given = Namespace(**{**vars(base), "extra_model_path": file})
        with pytest.raises(StageError, match=f"--extra-model-path: {file} .*{words}"):
            asked(given, tmp_path / "draft.json", "{}")


@pytest.mark.parametrize("count", range(3, 70))
def test_three_layers_fit_any_base(count: int) -> None:
    chosen = eagle_config.default_layers(count)
    assert chosen == eagle_config.layers(chosen, count)
    if count > 8:
        assert chosen == [1, count // 2 - 1, count - 4]


def test_a_base_of_two_layers_has_too_few(base: Namespace, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="base has 2 layers"):
        asked(Namespace(**{**vars(base), "num_layers": 2}), tmp_path / "draft.json", "{}")


# --- what is made, and what is exported ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(stage: Runner, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model whose draft has other values than any default, exported beside it."""
    here = tmp_path_factory.mktemp("honoured")
    (here / "draft.json").write_text(json.dumps(HONOURED))
    words = ("--algorithm", "eagle3", "--eagle-config", str(here / "draft.json"))
    given = {"HF_MODEL_CKPT": source, "MLM_EXTRA_ARGS": ""}
    converted = stage("convert", *words, MLM_MODEL_SAVE=here / "mlm", **given)
    assert converted.code == 0, converted.out
    exported = stage("export", "--export-extra-modules", MLM_MODEL_CKPT=here / "mlm", EXPORT_DIR=here / "hf", **given)
    assert exported.code == 0, exported.out
    return here


def test_the_draft_is_what_was_said(stage: Runner, source: Path, made: Path) -> None:
    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.models import model

    with session(stage, source) as opened:
        whole = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(whole, checkpoint.folder(made / "mlm"))
    draft = whole.eagle_module
    layer = draft.decoder.layers[0]
    attention = layer.self_attention
    assert (attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition) == (8, 2)
    assert attention.linear_proj.weight.shape == (HIDDEN, 8 * 24)
    assert layer.mlp.linear_fc2.weight.shape == (HIDDEN, 96)
    assert draft.eagle_output_layer.weight.shape == (50, HIDDEN)
    assert float(draft.fc.weight.float().std()) == pytest.approx(0.5, rel=0.05)
    assert draft.decoder.final_layernorm.eps == 0.25
    assert whole.eagle_config.eagle_aux_hidden_state_layer_ids == [0, 1, 3]
    turned = draft.rotary_pos_emb.inv_freq
    assert torch.allclose(turned, 700 ** (-torch.arange(0, 24, 2) / 24))


def test_the_exported_configuration_says_the_same_and_can_be_given_again(base: Namespace, made: Path) -> None:
    file = made / "hf" / "config.json"
    config = json.loads(file.read_text())
    assert {name: config[name] for name in HONOURED if name != IDS} == {
        name: value for name, value in HONOURED.items() if name != IDS
    }
    assert config["eagle_config"][IDS] == HONOURED[IDS]
    assert (config["hidden_act"], config["attention_bias"], config["mlp_bias"]) == ("silu", False, False)
    again = asked(base, made / "again.json", file.read_text())
    assert again.architecture == asked(base, made / "again.json", json.dumps(HONOURED)).architecture
    assert len(tensors(made / "hf")) == 15


@pytest.mark.parametrize(
    ("own", "words", "told"),
    [
        ({"intermediate_size": 128}, "", "--eagle-config: intermediate_size of the draft in"),
        ({IDS: [0, 1, 2]}, "", IDS),
        ({}, "--draft-vocab-size 60", "--draft-vocab-size: draft_vocab_size of the draft in"),
    ],
)
@pytest.mark.parametrize("place", ["MLM_MODEL_CKPT", "MLM_MODEL_SAVE"])
def test_a_draft_that_is_there_is_the_one_that_is_asked_for(
    place: str, own: dict, words: str, told: str, stage: Runner, source: Path, made: Path, tmp_path: Path
) -> None:
    """From another checkpoint, and where a run goes on: the file would be passed over otherwise."""
    (tmp_path / "draft.json").write_text(json.dumps(own))
    (tmp_path / "data.jsonl").write_text('{"text": "a row of tokens and another"}\n' * 8)
    given: dict[str, Any] = {"MLM_MODEL_SAVE": tmp_path / "out", place: made / "mlm"}
    result = stage(
        "eagle3", "--no-eval", HF_MODEL_CKPT=source, MLM_WORK_DIR=tmp_path, **given,
        MLM_EXTRA_ARGS=f"--eagle-config {tmp_path / 'draft.json'} --seq-length 64 {words}",
        MLM_DATA_ARGS=f"--train-samples 4 --finetune-hf-dataset {tmp_path / 'data.jsonl'}",
    )  # fmt: skip
    assert result.code == 2 and told in result.out, result.out
    assert "[load]" not in result.out and "Traceback" not in result.out
