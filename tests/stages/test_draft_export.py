"""The exported draft against what vLLM's and SGLang's loaders take, its rope, its layers, and any layout's bytes.

No server runs here. The lists are those of vllm-project/vllm at 00bd1493b3e82d6c13c68ee8a0e1c5a96707e190
(vllm/model_executor/models/llama_eagle3.py) and sgl-project/sglang at 03d5a7771f6082e7737a5f19cae7d1e863087013
(python/sglang/srt/models/llama_eagle3.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import FFN, GROUPS, HEADS, HIDDEN, Result, Runner, session, tensors

FLAG = {"MLM_EXTRA_ARGS": "--export-extra-modules"}
WIDTH = HIDDEN // HEADS
# Parameters of the loaders' modules. vLLM renames midlayer. to layers.0. and puts model. before all but lm_head and
# d2t; SGLang looks for a name as it is, then with model. before it, and passes over what it does not find.
SERVED = {
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    "midlayer.hidden_norm.weight": (HIDDEN,),
    "midlayer.input_layernorm.weight": (HIDDEN,),
    "midlayer.post_attention_layernorm.weight": (HIDDEN,),
    "midlayer.self_attn.q_proj.weight": (HEADS * WIDTH, 2 * HIDDEN),  # the embedding beside the states
    "midlayer.self_attn.k_proj.weight": (GROUPS * WIDTH, 2 * HIDDEN),
    "midlayer.self_attn.v_proj.weight": (GROUPS * WIDTH, 2 * HIDDEN),
    "midlayer.self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
    "midlayer.mlp.gate_proj.weight": (FFN, HIDDEN),
    "midlayer.mlp.up_proj.weight": (FFN, HIDDEN),
    "midlayer.mlp.down_proj.weight": (HIDDEN, FFN),
    "norm.weight": (HIDDEN,),
}
REDUCED = {"lm_head.weight": (100, HIDDEN), "d2t": (100,), "t2d": (512,)}
# vLLM's registry has this name for its Eagle3LlamaForCausalLM; SGLang's class has it
ARCHITECTURE = "LlamaForCausalLMEagle3"


def convert(stage: Runner, source: Path, save: Path, *words: str, **layout: Any) -> Path:
    """A model with a draft of three layers' states and a vocabulary that is not the first ids."""
    (save.parent / "draft.json").write_text('{"eagle_aux_hidden_state_layer_ids": [3, 0, 2]}')
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_SAVE": save, "MLM_EXTRA_ARGS": "", **layout}
    made = (stage.ranks if layout else stage)(
        "convert", "--algorithm", "eagle3", "--eagle-config", str(save.parent / "draft.json"), *words, **given
    )
    assert made.code == 0, made.out
    return save


@contextmanager
def loaded(stage: Runner, source: Path, here: Path) -> Iterator[tuple[torch.nn.Module, Any]]:
    """The model of a checkpoint on one process, and the arguments."""
    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.models import model

    with session(stage, source) as opened:
        made = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(made, checkpoint.folder(here))
        yield made, opened.args


@pytest.fixture(scope="module")
def reduced(stage: Runner, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(stage, source, tmp_path_factory.mktemp("reduced") / "mlm", "--draft-vocab-size", "100")


def export(stage: Runner, source: Path, ckpt: Path, out: Path, **changes: Any) -> Result:
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": ckpt, "EXPORT_DIR": out, **FLAG, **changes}
    return (stage.ranks if "PP" in changes else stage)("export", **given)


@pytest.fixture(scope="module")
def exported(stage: Runner, source: Path, reduced: Path) -> Path:
    result = export(stage, source, reduced, reduced.parent / "out")
    assert result.code == 0, result.out
    assert "[load]" not in result.out, "the base is not read"
    return reduced.parent / "out"


def test_the_names_and_shapes_are_those_that_servers_load(exported: Path) -> None:
    assert {name: tuple(tensor.shape) for name, tensor in tensors(exported).items()} == {**SERVED, **REDUCED}
    assert sorted(file.name for file in exported.iterdir()) == ["config.json", "model.safetensors"]


def test_the_configuration_is_the_trained_draft(exported: Path) -> None:
    from transformers import AutoConfig

    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == [ARCHITECTURE]
    assert (config["draft_vocab_size"], config["vocab_size"], config["tie_word_embeddings"]) == (100, 512, False)
    assert (config["rope_theta"], config["rope_scaling"]) == (10000, None)
    read = AutoConfig.from_pretrained(exported)
    assert (read.model_type, read.num_attention_heads, read.num_key_value_heads) == ("llama", HEADS, GROUPS)
    assert (read.head_dim, read.intermediate_size, read.num_hidden_layers) == (WIDTH, FFN, 1)
    assert read.rope_parameters["rope_theta"] == 10000 and read.rope_parameters["rope_type"] == "default"


def test_each_server_takes_the_states_that_the_draft_was_trained_on(exported: Path) -> None:
    """A state is modelopt's after layer i. Both servers look before a layer: vLLM at the ids, SGLang at ids + 1."""
    config = json.loads((exported / "config.json").read_text())
    sglang = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert sglang == [0, 2, 3] and sglang == sorted(sglang)
    assert config["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in sglang]
    assert config["eagle_config"]["use_aux_hidden_state"] is True


def test_the_vocabulary_is_written_as_offsets(stage: Runner, source: Path, reduced: Path, tmp_path: Path) -> None:
    """Servers take d2t[i] + i as the base's token of the draft's token i."""
    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.models import eagle

    counts = torch.zeros(512, dtype=torch.int64)
    counts[5::5] = 3
    with loaded(stage, source, reduced) as (model, args):
        eagle.set_vocabulary(model, counts)
        (tmp_path / "mlm").mkdir()
        checkpoint.save(model, args, tmp_path / "mlm")
    assert export(stage, source, tmp_path / "mlm", tmp_path / "out").code == 0
    made = tensors(tmp_path / "out")
    kept = made["d2t"] + torch.arange(100)
    assert kept.tolist() == list(range(5, 505, 5))
    assert made["t2d"].nonzero().flatten().tolist() == kept.tolist()


def test_each_weight_is_in_its_place(stage: Runner, source: Path, reduced: Path, exported: Path) -> None:
    made = tensors(exported)
    with loaded(stage, source, reduced) as (model, _):
        own = {name.replace("decoder.layers.0.", ""): value for name, value in model.eagle_module.named_parameters()}
        qkv = own["self_attention.linear_qkv.weight"].view(GROUPS, HEADS // GROUPS + 2, WIDTH, 2 * HIDDEN)
        for head in range(HEADS):
            rows = made["midlayer.self_attn.q_proj.weight"][head * WIDTH : (head + 1) * WIDTH]
            assert torch.equal(rows, qkv[head // 2, head % 2])
        assert torch.equal(made["midlayer.self_attn.v_proj.weight"][WIDTH:], qkv[1, 3])
        assert torch.equal(made["midlayer.self_attn.k_proj.weight"][:WIDTH], qkv[0, 2])
        assert torch.equal(made["midlayer.mlp.up_proj.weight"], own["mlp.linear_fc1.weight"][FFN:])
        assert torch.equal(made["fc.weight"], own["fc.weight"])
        assert torch.equal(made["lm_head.weight"], own["eagle_output_layer.weight"])


def test_a_whole_vocabulary_is_the_bases(stage: Runner, source: Path, tmp_path: Path) -> None:
    """SGLang takes the base's output layer only where draft_vocab_size is null; vLLM where there is no lm_head."""
    ckpt = convert(stage, source, tmp_path / "mlm")
    assert export(stage, source, ckpt, tmp_path / "out").code == 0
    assert tensors(tmp_path / "out").keys() == SERVED.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["draft_vocab_size"] is None


def test_llama_3s_rope_is_written_as_trained(stage: Runner, source: Path, tmp_path: Path) -> None:
    extra = "--use-rope-scaling --rope-scaling-factor 32 --rotary-base 500000"
    source = Path(shutil.copytree(source, tmp_path / "hf"))
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    ckpt = convert(stage, source, tmp_path / "mlm", *extra.split())
    assert export(stage, source, ckpt, tmp_path / "out").code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == 500000 and config["rope_scaling"] == {
        "rope_type": "llama3", "rope_theta": 500000, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def test_any_layout_gives_the_same_bytes(
    stage: Runner, source: Path, reduced: Path, exported: Path, tmp_path: Path
) -> None:
    """The reference's form, on pipeline stages, and a checkpoint that was saved at TP=2."""
    split = convert(stage, source, tmp_path / "mlm", "--draft-vocab-size", "100", TP=2)
    result = export(stage, source, split, tmp_path / "out", PP=2)
    assert result.code == 0, result.out
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (exported / name).read_bytes()


def test_a_checkpoint_without_a_draft_is_refused(stage: Runner, source: Path, bf16: Path, tmp_path: Path) -> None:
    result = export(stage, source, bf16, tmp_path / "out")
    assert result.code == 2 and "has no draft" in result.out
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("own", [{"num_hidden_layers": 2}, {"use_input_layernorm_in_first_layer": False}])
def test_a_draft_that_no_server_knows_is_refused(
    own: dict, stage: Runner, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is asked for; and where another version has made it, before it trains on and before it is exported."""
    from mlmsub.runtime.models import eagle_config

    (tmp_path / "draft.json").write_text(json.dumps(own))
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_SAVE": tmp_path / "mlm", "MLM_EXTRA_ARGS": ""}
    words = ("convert", "--algorithm", "eagle3", "--eagle-config", str(tmp_path / "draft.json"))
    refused = stage(*words, **given)
    assert refused.code == 2 and next(iter(own)) in refused.out and not (tmp_path / "mlm").exists()
    fixed = dict(eagle_config.FIXED)
    with monkeypatch.context() as older:
        older.setattr(eagle_config, "FIXED", {**fixed, **own})
        made = stage(*words, **given)
    assert made.code == 0, made.out
    result = export(stage, source, tmp_path / "mlm", tmp_path / "out")
    assert result.code == 2 and next(iter(own)) in result.out


def test_a_vocabulary_with_a_token_twice_is_no_vocabulary(stage: Runner, source: Path, reduced: Path) -> None:
    from mlmsub.runtime.checkpoints import draft_export
    from mlmsub.runtime.errors import CheckFailed

    here = reduced / "release"
    read = draft_export._read(here)
    read["d2t"][1] = -1
    with pytest.raises(CheckFailed, match="same token"):
        draft_export._converted(read, draft_export.architecture(here))
