"""prune: layers by hand and by block influence, saved, exported and read by transformers; what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from rig import LAYERS, Result, Runner, logits, make_latent, make_latent_conf, session, tensors

CALIBRATE = "--calib-size 8 --calib-max-sequence-length 64"


@pytest.fixture(scope="session")
def uneven(source: Path, folder: Path) -> Path:
    """The tiny model, whose second layer changes hardly anything: its output projections are tiny."""
    from rig import rewrite

    made = folder / "uneven"
    shutil.copytree(source, made)
    quiet = ("layers.1.self_attn.o_proj.weight", "layers.1.mlp.down_proj.weight")
    rewrite(made, lambda found: {name: t * 1e-3 if name.endswith(quiet) else t for name, t in found.items()})
    return made


@pytest.fixture(scope="session")
def pruned(stage: Runner, uneven: Path, folder: Path) -> Result:
    """The same with three of its four layers, and the file of scores."""
    flags = f"{CALIBRATE} --pruning-scores-path {folder / 'scores.json'}"
    return stage(
        "prune", HF_MODEL_CKPT=uneven, MLM_MODEL_SAVE=folder / "pruned", TARGET_NUM_LAYERS=3, MLM_EXTRA_ARGS=flags
    )


def events(result: Result) -> dict[str, dict]:
    lines = (result.run_dir / "state" / "events.jsonl").read_text().splitlines()
    return {event["event"]: event for event in map(json.loads, lines)}


def hf_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    with torch.no_grad():
        return model.eval()(ids).logits.float()


def alike(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0))


IDS = torch.randint(1, 300, (2, 40), generator=torch.Generator().manual_seed(3))


def test_the_layer_that_changes_least_goes(pruned: Result, folder: Path) -> None:
    assert pruned.code == 0, pruned.out
    told = events(pruned)["prune"]
    assert told["dropped"] == [2]
    assert told["parameters_after"] < told["parameters_before"]
    assert abs(told["loss_after"] - told["loss_before"]) < 0.05, "it hardly did anything"
    assert f"loss of the fixed text: {told['loss_before']:.4f} before" in pruned.out
    scores = json.loads((folder / "scores.json").read_text())["block_influence"]
    assert min(scores, key=scores.get) == "2" and len(scores) == LAYERS


def test_influence_is_one_minus_the_cosine_of_input_and_output(pruned: Result, uneven: Path, folder: Path) -> None:
    """Against transformers' hidden states, on the samples that the stage cut out of its built-in text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mlmsub.runtime.quantization import calibration_data

    tokenizer = AutoTokenizer.from_pretrained(uneven)
    samples = calibration_data._pack([calibration_data.BUILT_IN], tokenizer, 64, 8, 1, None)
    model = AutoModelForCausalLM.from_pretrained(uneven, dtype=torch.bfloat16).eval()
    passed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _layer, given, out: passed.append((given[0], out)))
    with torch.no_grad():
        model(samples)
    scores = json.loads((folder / "scores.json").read_text())["block_influence"]
    for number, (before, after) in enumerate(passed, 1):
        want = 1 - torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1).mean()
        assert scores[str(number)] == pytest.approx(float(want), rel=0.02, abs=1e-4), number


def test_influence_compares_each_token_with_itself() -> None:
    """Two tokens of two channels: the first passes as it is (0), the second is turned by a right angle (1)."""
    from types import SimpleNamespace

    from mlmsub.runtime.models import pruning

    given = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # [sequence, batch, width]

    class Layer(torch.nn.Module):
        layer_number = 3

        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
            return torch.tensor([[[2.0, 0.0]], [[5.0, 0.0]]]), None

    layer, sums = Layer(), {}
    with pruning._watching(SimpleNamespace(decoder=SimpleNamespace(layers=[layer])), sums):
        layer(hidden_states=given)
        layer(given)
    assert sums == {3: [pytest.approx(2.0), 4]}


def test_export_is_read_by_transformers_and_computes_the_same(
    stage: Runner, pruned: Result, uneven: Path, folder: Path
) -> None:
    """The model conf still says four layers: the checkpoint's own sizes win."""
    out = folder / "pruned-hf"
    result = stage("export", HF_MODEL_CKPT=uneven, MLM_MODEL_CKPT=folder / "pruned", EXPORT_DIR=out)
    assert result.code == 0, result.out
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 3
    with loaded(stage, uneven, folder / "pruned") as model:
        assert len(model.decoder.layers) == 3
        want = logits(model, IDS)
    assert alike(hf_logits(out, IDS), want) > 0.9999
    kept = tensors(uneven)
    for name, tensor in tensors(out).items():
        for new, old in ((1, 2), (2, 3)):
            if f"layers.{new}." in name:
                name = name.replace(f"layers.{new}.", f"layers.{old}.")
                break
        assert torch.equal(tensor, kept[name]), name


class loaded:
    """The Megatron model of a checkpoint, built as a stage that reads it would."""

    def __init__(self, stage: Runner, source: Path, ckpt: Path) -> None:
        self.opened = session(stage, source, MLM_MODEL_CKPT=ckpt)
        self.ckpt = ckpt

    def __enter__(self) -> torch.nn.Module:
        from mlmsub.runtime.checkpoints import checkpoint
        from mlmsub.runtime.models import model

        opened = self.opened.__enter__()
        made = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(made, checkpoint.folder(self.ckpt))
        return made

    def __exit__(self, *error: object) -> None:
        self.opened.__exit__(*error)


def test_what_is_made_of_a_pruned_checkpoint_has_its_sizes(
    stage: Runner, pruned: Result, uneven: Path, folder: Path
) -> None:
    """prune, quantize and export, with the conf of the unpruned model throughout."""
    quantized, out = folder / "pruned-fp8", folder / "pruned-fp8-hf"
    result = stage(
        "quantize", "FP8_DEFAULT_CFG", HF_MODEL_CKPT=uneven, MLM_MODEL_CKPT=folder / "pruned", MLM_MODEL_SAVE=quantized
    )
    assert result.code == 0, result.out
    assert json.loads((quantized / "pruned.json").read_text())["num-layers"] == 3
    result = stage("export", HF_MODEL_CKPT=uneven, MLM_MODEL_CKPT=quantized, EXPORT_DIR=out)
    assert result.code == 0, result.out
    found = tensors(out)
    assert found["model.layers.2.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert not any("layers.3." in name for name in found)


def test_prune_and_export_in_one_run(stage: Runner, uneven: Path, folder: Path) -> None:
    """The second stage is made before the first has pruned, and still finds the checkpoint's sizes."""
    ckpt, out = folder / "one-run", folder / "one-run-hf"
    result = stage(
        "prune+export", HF_MODEL_CKPT=uneven, MLM_MODEL_SAVE=ckpt, EXPORT_DIR=out, LAYERS_TO_DROP="1 3",
        MLM_EXTRA_ARGS="",
    )  # fmt: skip
    assert result.code == 0, result.out
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 2


def test_scores_of_an_earlier_run_are_used(stage: Runner, uneven: Path, folder: Path) -> None:
    scores = folder / "given.json"
    scores.write_text(
        json.dumps({"model": "test/tiny-llama", "block_influence": {"1": 0.9, "2": 0.8, "3": 0.1, "4": 0.2}})
    )
    flags = f"--target-num-layers 2 --pruning-scores-path {scores}"
    result = stage("prune", HF_MODEL_CKPT=uneven, MLM_MODEL_SAVE=folder / "two", MLM_EXTRA_ARGS=flags)
    assert result.code == 0, result.out
    assert events(result)["prune"]["dropped"] == [3, 4]
    assert "calibration" not in events(result), "nothing was left to measure"
    scores.write_text(json.dumps({"model": "test/tiny-llama", "block_influence": {"1": 0.9}}))
    result = stage("prune", HF_MODEL_CKPT=uneven, MLM_MODEL_SAVE=folder / "two-b", MLM_EXTRA_ARGS=flags)
    assert result.code == 2 and "scores of 1 layers" in result.out


def test_a_pipeline_stage_may_lose_all_its_layers(stage: Runner, tied_source: Path, folder: Path) -> None:
    """Both layers of the first stage go; the embedding is shared with the last one."""
    ckpt, out = folder / "pp", folder / "pp-hf"
    result = stage.ranks(
        "prune", HF_MODEL_CKPT=tied_source, MLM_MODEL_SAVE=ckpt, LAYERS_TO_DROP="1 2", PP=2, MLM_EXTRA_ARGS=""
    )
    assert result.code == 0, result.out
    result = stage("export", HF_MODEL_CKPT=tied_source, MLM_MODEL_CKPT=ckpt, EXPORT_DIR=out)
    assert result.code == 0, result.out
    found, had = tensors(out), tensors(tied_source)
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], had["model.layers.2.mlp.up_proj.weight"])
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], had["model.layers.3.mlp.up_proj.weight"])
    assert hf_logits(out, IDS).std() > 0.3


def test_an_expert_layer_goes_and_the_dense_one_stays(folder: Path) -> None:
    """Latent attention, one dense layer, then experts: what says which layers are dense follows."""
    source = make_latent(folder / "latent")
    runner = Runner(folder / "latent-runs", make_latent_conf(folder / "latent.yaml"))
    ckpt, out = folder / "latent-pruned", folder / "latent-hf"
    result = runner("prune", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=ckpt, LAYERS_TO_DROP="1", MLM_EXTRA_ARGS="")
    assert result.code == 2 and "layer 1 is dense" in result.out, result.out
    result = runner("prune", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=ckpt, LAYERS_TO_DROP="2", MLM_EXTRA_ARGS="")
    assert result.code == 0, result.out
    result = runner("export", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=ckpt, EXPORT_DIR=out)
    assert result.code == 0, result.out
    config = json.loads((out / "config.json").read_text())
    assert (config["num_hidden_layers"], config["first_k_dense_replace"]) == (2, 1)
    with loaded(runner, source, ckpt) as model:
        want = logits(model, IDS)
    assert alike(hf_logits(out, IDS), want) > 0.995  # where experts nearly tie, a token goes to another one


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, "nothing says what to prune"),
        ({"TARGET_NUM_LAYERS": 3, "LAYERS_TO_DROP": "1"}, "goes with no other target"),
        ({"LAYERS_TO_DROP": "5"}, "there is no layer 5"),
        ({"LAYERS_TO_DROP": "1 2 3 4"}, "0 layers would be left"),
        ({"TARGET_NUM_LAYERS": 4}, "nothing would be pruned"),
        ({"TARGET_NUM_LAYERS": 6}, "6 layers would be left of 4"),
        ({"TARGET_NUM_QUERY_GROUPS": 1, "TARGET_NUM_LAYERS": 3}, "within each query group"),
        ({"LAYERS_TO_DROP": "1", "TP": 2}, "prune needs TP=1"),
        ({"LAYERS_TO_DROP": "first"}, "'first' is no number"),
        ({"TARGET_HIDDEN_SIZE": 32}, "has no transformer_engine"),
    ],
)
def test_what_cannot_be_pruned_is_refused(
    stage: Runner, source: Path, folder: Path, variables: dict[str, object], says: str
) -> None:
    result = stage("prune", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=folder / "refused", MLM_EXTRA_ARGS="", **variables)
    assert result.code == 2 and says in result.out, result.out
    assert not (folder / "refused").exists()


@pytest.mark.parametrize(
    ("widths", "says"),
    [
        ({"hidden_size": 60, "num_attention_heads": 2}, ""),
        ({"hidden_size": 62}, "not a multiple of the number of attention heads"),
        ({"hidden_size": 128}, "more than the model has: 64"),
        ({"num_attention_heads": 3}, "a multiple of 2"),
        ({"num_experts": 4}, "the model has no num-experts"),
    ],
)
def test_widths_are_checked_before_anything_is_loaded(
    stage: Runner, source: Path, widths: dict[str, int], says: str
) -> None:
    """Megatron's, modelopt's and transformers' conditions on the sizes that are left."""
    from mlmsub.runtime.errors import StageError
    from mlmsub.runtime.models.pruning import Targets
    from mlmsub.runtime.stages import prune

    targets = Targets(widths)
    with session(stage, source) as opened:
        try:
            targets.check(opened.args)
            prune._check_result(opened, targets)
            found = ""
        except StageError as error:
            found = str(error)
    assert says in found and bool(says) == bool(found), found


def test_a_config_with_an_entry_per_layer_gets_shorter() -> None:
    """transformers refuses a Qwen3 with more layer_types than layers; its heads' width is no longer the usual."""
    from transformers import AutoConfig, Qwen3Config

    from mlmsub.runtime.checkpoints import hf_export

    data = Qwen3Config(num_hidden_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2).to_dict()
    del data["head_dim"]
    hf_export.resize(data, {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "head_dim": 16})
    made = AutoConfig.for_model(**data)
    assert (len(made.layer_types), made.num_hidden_layers, made.head_dim) == (3, 3, 16)


def test_layers_that_follow_a_pattern_stay(stage: Runner, source: Path, folder: Path) -> None:
    conf = yaml.safe_load(stage.conf.read_text())
    conf["megatron_args"] |= {"window-size": "16,0", "window-attn-skip-freq": 2}
    file = folder / "window.yaml"
    file.write_text(yaml.safe_dump(conf))
    run_dir = stage.run_dir(file)
    result = stage(
        "prune", run_dir=run_dir, HF_MODEL_CKPT=source, MLM_MODEL_SAVE=folder / "window", LAYERS_TO_DROP="1",
        MLM_EXTRA_ARGS="",
    )  # fmt: skip
    assert result.code == 2 and "--window-attn-skip-freq" in result.out, result.out
