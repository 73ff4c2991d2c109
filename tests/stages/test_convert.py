"""convert: the same model at any layout, and a draft that is the same at any layout too."""

import copy
import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import LAYERS, ROOT, Result, Runner, logits, make_latent, make_latent_conf, session, tensors

from mlmsub.runtime.errors import StageError
from mlmsub.runtime.models import eagle

IDS = torch.arange(1, 49).view(2, 24)
NOTHING = {"MLM_EXTRA_ARGS": ""}


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Path]:
    folder = tmp_path_factory.mktemp("latent")
    return Runner(folder / "runs", make_latent_conf(folder / "model.yaml")), make_latent(folder / "hf")


@pytest.fixture(scope="module")
def draft(stage: Runner, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a draft, made by one process."""
    made = tmp_path_factory.mktemp("draft") / "mlm"
    result = stage("convert", "--algorithm", "eagle3", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=made, **NOTHING)
    assert result.code == 0, result.out
    assert "layers [0, 1, 2]" in result.out, "sorted, as their hidden states are concatenated"
    return made


@contextmanager
def loaded(stage: Runner, source: Path, folder: Path, **changes: Any) -> Iterator[Any]:
    """The model of a Megatron checkpoint, in one process."""
    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.models import model

    with session(stage, source) as opened:
        vars(opened.args).update(changes)
        made = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(made, checkpoint.folder(folder))
        yield made


def test_converted_model_computes_what_transformers_does(stage: Runner, source: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    result = stage("convert", HF_MODEL_CKPT=source, MLM_WORK_DIR=tmp_path, **NOTHING)
    assert result.code == 0, result.out
    made = tmp_path / "test" / "tiny-llama_mlm"
    assert result.done["outputs"] == {"MLM_MODEL_SAVE": str(made)}
    with loaded(stage, source, made) as model:
        got = logits(model, IDS)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        want = theirs(IDS).logits.float()
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("split", [{"TP": 2}, {"PP": 2}], ids=["TP", "PP"])
def test_two_processes_convert_to_the_same_model(
    split: dict[str, int], stage: Runner, source: Path, bf16: Path, draft: Path, tmp_path: Path
) -> None:
    made = tmp_path / "mlm"
    result = stage.ranks(
        "convert", "--algorithm", "eagle3", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=made, **split, **NOTHING
    )
    assert result.code == 0, result.out
    with loaded(stage, source, draft) as model:
        want = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with loaded(stage, source, made) as model:
        got = dict(model.named_parameters())
        assert set(got) == set(want)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_experts_and_latent_attention_split(latent: tuple[Runner, Path], tmp_path: Path) -> None:
    """EP=2 from Hugging Face, then anew at TP=2 with whole experts; exported, it is the source."""
    stage, source = latent
    first = stage.ranks("convert", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "ep", EP=2, **NOTHING)
    assert first.code == 0, first.out
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": tmp_path / "ep", "MLM_MODEL_SAVE": tmp_path / "tp"}
    second = stage.ranks("convert", **given, TP=2, ETP=2, **NOTHING)
    assert second.code == 0, second.out
    assert "[import]" not in second.out
    exported = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "tp", EXPORT_DIR=tmp_path / "out")
    assert exported.code == 0, exported.out
    got, want = tensors(tmp_path / "out"), tensors(source)
    assert all(torch.equal(got[name].to(want[name].dtype), want[name]) for name in want)


def test_a_quantized_checkpoint_stays_quantized(
    stage: Runner, source: Path, fp8: Result, fp8_export: Result, folder: Path, tmp_path: Path
) -> None:
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": folder / "fp8", "MLM_MODEL_SAVE": tmp_path / "mlm"}
    result = stage("convert", **given, **NOTHING)
    assert result.code == 0, result.out
    assert f"{LAYERS * 4 * 2} quantizers are kept" in result.out
    exported = stage("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "mlm", EXPORT_DIR=tmp_path / "out")
    assert exported.code == 0, exported.out
    got, want = tensors(tmp_path / "out"), tensors(folder / "fp8-hf")
    assert set(got) == set(want)
    assert all(torch.equal(got[name].float(), want[name].float()) for name in want)


def test_a_quantized_base_takes_a_draft(stage: Runner, source: Path, fp8: Result, folder: Path, tmp_path: Path) -> None:
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": folder / "fp8", "MLM_MODEL_SAVE": tmp_path / "mlm"}
    result = stage("convert", "--algorithm", "eagle3", **given, **NOTHING)
    assert result.code == 0, result.out
    with loaded(stage, source, folder / "fp8") as model:
        want = logits(model, IDS)
    with loaded(stage, source, tmp_path / "mlm") as model:
        with torch.no_grad():  # modelopt's model with a draft takes no runtime_gather_output, and makes the mask itself
            got = model(IDS).float()
        assert float(model.eagle_module.fc.weight.detach().float().std()) == pytest.approx(0.01, rel=0.1)
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.9999


# --- the draft ------------------------------------------------------------------------------


def test_no_matrix_of_a_draft_is_left_at_zero(stage: Runner, source: Path, draft: Path) -> None:
    with loaded(stage, source, draft) as model:
        parameters = dict(model.eagle_module.named_parameters())
        matrices = {name: float(value.detach().float().std()) for name, value in parameters.items() if value.ndim > 1}
        norms = [value for value in parameters.values() if value.ndim == 1]
    assert set(matrices) == {
        "fc.weight", "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_proj.weight", "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
    }  # fmt: skip
    assert list(matrices.values()) == pytest.approx([0.01] * 5, rel=0.1)
    assert all((norm == 1).all() for norm in norms)


def test_making_a_draft_leaves_modelopts_config_alone(stage: Runner, source: Path, tmp_path: Path) -> None:
    from modelopt.torch.speculative.config import EAGLE3_DEFAULT_CFG

    before = copy.deepcopy(EAGLE3_DEFAULT_CFG)
    file = tmp_path / "draft.json"
    file.write_text(
        json.dumps({"intermediate_size": 96, "eagle_aux_hidden_state_layer_ids": [3, 0, 2], "use_cache": True})
    )
    result = stage(
        "convert", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "mlm",
        MLM_EXTRA_ARGS=f"--algorithm eagle3 --eagle-config {file} --draft-vocab-size 100",
    )  # fmt: skip
    assert result.code == 0, result.out
    assert "MLP 96, vocabulary 100, hidden states of layers [0, 2, 3]" in result.out
    assert before == EAGLE3_DEFAULT_CFG


def test_a_reduced_vocabulary_is_the_most_frequent_tokens(stage: Runner, source: Path, tmp_path: Path) -> None:
    from mlmsub.runtime.checkpoints import checkpoint

    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_SAVE": tmp_path / "mlm"}
    result = stage("convert", "--algorithm", "eagle3", "--draft-vocab-size", "4", **given, **NOTHING)
    assert result.code == 0, result.out
    with loaded(stage, source, tmp_path / "mlm") as model:
        counts = torch.zeros(512, dtype=torch.long)
        counts[torch.tensor([7, 300, 5, 411, 2])] = torch.tensor([10, 40, 20, 25, 5])
        assert eagle.set_vocabulary(model, counts) == pytest.approx(0.95)
        assert (model.eagle_module.d2t + torch.arange(4)).tolist() == [5, 7, 300, 411]
    with session(stage, source) as opened:
        (tmp_path / "again").mkdir()
        checkpoint.save(model, opened.args, tmp_path / "again")
    with loaded(stage, source, tmp_path / "again") as again:
        assert torch.equal(again.eagle_module.d2t, model.eagle_module.d2t)


def test_a_draft_trains(stage: Runner, source: Path, tmp_path: Path) -> None:
    """With as many groups as heads nothing but attention's own copy keeps the steps' shared cache apart."""
    (tmp_path / "draft.json").write_text('{"num_key_value_heads": 4}')
    words = ("--algorithm", "eagle3", "--eagle-config", str(tmp_path / "draft.json"))
    result = stage("convert", *words, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "mlm", **NOTHING)
    assert result.code == 0, result.out
    with loaded(stage, source, tmp_path / "mlm") as model:
        losses, trainable = train(model, 8)
        assert len(trainable) == len(list(model.eagle_module.parameters())), "the base is frozen"
        assert {parameter.dtype for parameter in trainable} == {torch.bfloat16}
    assert losses[-1] < 0.9 * losses[0]


def test_a_latent_models_draft_trains(latent: tuple[Runner, Path], tmp_path: Path) -> None:
    stage, source = latent
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_SAVE": tmp_path / "mlm"}
    result = stage("convert", "--algorithm", "eagle3", **given, **NOTHING)
    assert result.code == 0, result.out
    assert "4 heads of 24 in 4 groups, MLP 128" in result.out
    with loaded(stage, source, tmp_path / "mlm") as model:
        _, trainable = train(model, 1)
    assert all(bool(parameter.grad.abs().sum() > 0) for parameter in trainable)


def train(model: Any, steps: int) -> tuple[list[float], list[torch.nn.Parameter]]:
    """The losses of a few steps, and what was trained."""
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, 1e-2)
    losses = []
    for _ in range(steps):
        loss = model(IDS, labels=IDS.roll(-1, 1)).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, trainable


def test_an_offline_model_has_no_layers(stage: Runner, source: Path, draft: Path, tmp_path: Path) -> None:
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_SAVE": tmp_path / "mlm"}
    words = ("--algorithm", "eagle3", "--export-offline-model")
    result = stage("convert", *words, **given, **NOTHING)
    assert result.code == 0, result.out
    with loaded(stage, source, draft) as model:
        want = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with loaded(stage, source, tmp_path / "mlm", export_offline_model=True) as model:
        got = dict(model.named_parameters())
        assert not len(model.decoder.layers) and model.eagle_offline
        assert {name for name in want if not name.startswith("decoder.layers.")} == set(got)
        assert all(torch.equal(got[name], want[name]) for name in got)
    # and again, from the Megatron checkpoint
    result = stage(
        "convert", "--export-offline-model", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=tmp_path / "mlm",
        MLM_MODEL_SAVE=tmp_path / "again", **NOTHING,
    )  # fmt: skip
    assert result.code == 0, result.out


def test_a_draft_starts_from_given_weights(stage: Runner, source: Path, draft: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with loaded(stage, source, draft) as model:
        weights = {name: tensor + 1 for name, tensor in model.eagle_module.named_parameters()}
    save_file(weights, tmp_path / "draft.safetensors")
    result = stage.ranks(
        "convert", "--algorithm", "eagle3", "--extra-model-path", str(tmp_path / "draft.safetensors"),
        HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "mlm", TP=2, **NOTHING,
    )  # fmt: skip
    assert result.code == 0, result.out
    with loaded(stage, source, tmp_path / "mlm") as model:
        got = dict(model.eagle_module.named_parameters())
    assert all(torch.equal(got[name], weights[name]) for name in weights)


# Megatron's arguments of published models, and the draft that fits: heads, groups, head_dim, MLP
FITS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": (9, 3, 64, 1536),
    "Qwen/Qwen3-30B-A3B": (32, 4, 128, 8 * 768),  # no dense layer: what a token passes
    "meta-llama/Llama-3.1-8B-Instruct": (32, 8, 128, 14336),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (40, 8, 128, 2 * 8192),  # the chosen and the shared expert
    "moonshotai/Kimi-K2-Instruct": (64, 8, 128, 18432),
    "openai/gpt-oss-20b": (64, 8, 64, 4 * 2880),
}


def arguments(name: str, tmp_path: Path, *words: str) -> Namespace:
    from mlmsub.runtime import megatron_args, modelconf
    from mlmsub.runtime.env import Env, Layout
    from mlmsub.runtime.models import model

    model.prepare()
    (tmp_path / "conf").mkdir(exist_ok=True)
    (tmp_path / "conf" / "model.yaml").write_bytes((ROOT / "conf" / f"{name}.yaml").read_bytes())
    conf = modelconf.load(Env({"MLMSUB_RUN_DIR": str(tmp_path)}), "m")
    rest = ["--micro-batch-size", "1", "--padded-vocab-size", "1000", "--tokenizer-type", "NullTokenizer", *words]
    return megatron_args.parse(
        conf, Layout(), rest, lambda parser: eagle.add_arguments(parser.add_argument_group("convert")), []
    )


@pytest.mark.parametrize("name", FITS)
def test_a_draft_is_made_to_fit_its_base(name: str, tmp_path: Path) -> None:
    args = arguments(name, tmp_path)
    made = eagle.architecture(args, {})
    keys = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    assert tuple(made[key] for key in keys) == FITS[name]
    assert made["rope_theta"] == args.rotary_base and made["rms_norm_eps"] == args.layernorm_epsilon
    assert made["rope_scaling"].get("factor") == {"Llama-3": 8.0, "Llama-4": 16.0}.get(name[11:18])
    layers = made["eagle_aux_hidden_state_layer_ids"]
    assert layers == sorted(layers) and len(layers) == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ('{"intermediate_sise": 8}', "did you mean intermediate_size"),
        ('{"hidden_size": 8}', "hidden_size is 8, .* 576 alone"),
        ('{"eagle_aux_hidden_state_layer_ids": [1, 30]}', "0 to 29"),
        ('{"draft_vocab_size": 2000}', "not within the base's 1000"),
        ("[1]", "not a JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_a_wrong_architecture_file_is_refused(data: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "draft.json"
    file.write_text(data)
    args = arguments("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path, "--eagle-config", str(file))
    with pytest.raises(StageError, match=words):
        eagle.architecture(args, eagle.given(args))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fp8",), "takes a model only, not 'fp8'"),
        (("--algorithm", "medusa"), "medusa"),
        (("--draft-vocab-size", "100"), "add --algorithm eagle3"),
        (("--algoritm", "eagle3"), "--algorithm"),
        (("--algorithm", "eagle3", "--extra-model-path", "/nowhere"), "/nowhere is not a file"),
        (("--algorithm", "eagle3", "--eagle-config", "/nowhere"), "/nowhere cannot be read"),
    ],
)
def test_what_is_asked_wrongly_writes_nothing(
    words: tuple[str, ...], said: str, stage: Runner, source: Path, tmp_path: Path
) -> None:
    result = stage("convert", *words, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "out", **NOTHING)
    assert result.code == 2 and said in result.out.splitlines()[-1], result.out
    assert not (tmp_path / "out").exists()


def test_a_second_draft_is_refused(stage: Runner, source: Path, draft: Path, tmp_path: Path) -> None:
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_CKPT": draft, "MLM_MODEL_SAVE": tmp_path / "out"}
    result = stage("convert", "--algorithm", "eagle3", **given, **NOTHING)
    assert result.code == 2 and "has a draft already" in result.out


def test_a_hybrid_model_says_what_it_needs(tmp_path: Path) -> None:
    from mlmsub.runtime.models import model

    with pytest.raises(StageError, match="needs mamba_ssm"):
        model._hybrid_builder(arguments("nvidia/Nemotron-H-4B-Instruct", tmp_path), None)
