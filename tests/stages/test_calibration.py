"""Calibration: what text becomes, that batches change nothing, that no padding is seen, what experts get."""

import json
import types
from pathlib import Path

import pytest
import torch
from rig import ENOUGH, Result, Runner, make_latent, make_latent_conf, session

from mlmsub.runtime.checkpoints import hf
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.quantization import calibration, calibration_data

TEXT = "One line of calibration text, long enough for a sample or two. "


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Path]:
    folder = tmp_path_factory.mktemp("latent")
    return Runner(folder / "runs", make_latent_conf(folder / "model.yaml")), make_latent(folder / "hf")


def built(opened: object, source: Path) -> object:
    from mlmsub.runtime.checkpoints import hf_import
    from mlmsub.runtime.models import model

    made = model.build(opened.args, opened.conf, "cpu")
    hf_import.import_weights(made, source, opened.conf, torch.bfloat16)
    return made


def test_a_batch_of_8_gives_the_ranges_of_single_samples(stage: Runner, source: Path) -> None:
    import modelopt.torch.quantization as mtq

    samples = torch.randint(0, 500, (11, 64), generator=torch.Generator().manual_seed(3))  # a rest of 3, too
    found = []
    with session(stage, source) as opened:
        for size in (8, 1):
            made = built(opened, source)
            mtq.quantize(made, mtq.FP8_DEFAULT_CFG, calibration.forward_loop(samples, size, "cpu"))
            found.append({name: buffer for name, buffer in made.named_buffers() if name.endswith("_amax")})
    eight, one = found
    assert len(one) == len(eight) == 4 * 4 * 2
    for name, value in one.items():
        assert value.dtype == torch.bfloat16 and value.numel() == 1
        torch.testing.assert_close(eight[name], value, rtol=2**-7, atol=0, msg=name)  # 1 ulp of bf16


def test_a_batch_of_8_routes_the_tokens_of_single_samples(latent: tuple[Runner, Path]) -> None:
    stage, source = latent
    samples = torch.randint(0, 500, (8, 48), generator=torch.Generator().manual_seed(3))
    maps: dict[int, list] = {8: [], 1: []}
    with session(stage, source) as opened:
        made = built(opened, source)
        for size, seen in maps.items():
            handles = [
                layer.mlp.router.register_forward_hook(
                    lambda _router, _inputs, outputs, size=size, seen=seen: seen.append(
                        outputs[1].view(-1, size, outputs[1].shape[-1]).transpose(0, 1)
                    )
                )
                for layer in made.decoder.layers[1:]
            ]
            calibration.forward_loop(samples, size, "cpu")(made)
            for handle in handles:
                handle.remove()
    for layer in range(2):
        one = torch.cat(maps[1][layer::2])
        assert one.shape == (8, 48, 4) and bool((one.sum(-1) == 2).all())
        assert torch.equal(torch.cat(maps[8][layer::2]), one)


def test_no_padding_reaches_the_model(stage: Runner, source: Path, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps({"text": TEXT * count}) for count in (1, 7, 2, 30, 1)))
    ids: list[torch.Tensor] = []
    with session(stage, source) as opened:
        made = built(opened, source)
        tokenizer = hf.tokenizer(source, opened.conf)
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        samples = calibration_data.chunks([file], lambda: tokenizer, 40, 9)
        made.embedding.register_forward_pre_hook(
            lambda _module, _args, given: ids.append(given["input_ids"]), with_kwargs=True
        )
        calibration.forward_loop(samples, 4, "cpu")(made)
    seen = torch.cat(ids)
    assert seen.shape == (9, 40) and torch.equal(seen, samples)
    assert tokenizer.pad_token_id not in seen.unique().tolist()
    assert tokenizer.eos_token_id in seen.unique().tolist(), "texts are set apart"


def test_a_random_place_of_each_text(stage: Runner, source: Path, tmp_path: Path) -> None:
    file = tmp_path / "data.txt"
    file.write_text("\n\n".join(" ".join(f"{text}{word}" for word in range(300)) for text in "abcd"))
    with session(stage, source) as opened:
        tokenizer = hf.tokenizer(source, opened.conf)

        def chunks(seed: int | None) -> list:
            return calibration_data.chunks([file], lambda: tokenizer, 32, 4, seed=seed).tolist()

        first, again, other, whole = chunks(1), chunks(1), chunks(2), chunks(None)
        assert "d" in tokenizer.decode(first[3]) and "d" not in tokenizer.decode(whole[3])
    assert first == again != other


def test_the_length_divides_by_the_ranks_that_share_it(stage: Runner, source: Path, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text(TEXT * 4)
    with session(stage, source) as opened:
        made = calibration_data.chunks(
            [tmp_path / "data.txt"], lambda: hf.tokenizer(source, opened.conf), 1000, 1, multiple=8
        )
    assert made.shape[1] % 8 == 0
    args = types.SimpleNamespace(sequence_parallel=True, tensor_model_parallel_size=4, context_parallel_size=2)
    assert calibration.sequence_multiple(args) == 16


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("org/name", ("org/name", "train")),
        ("org/name:test[:5]", ("org/name", "test[:5]")),
        ("a/b/c", None),
        ("/org/name", None),
        ("org/data.jsonl", None),
        ("name", None),
    ],
)
def test_names_of_data(data: str, words: tuple | None) -> None:
    if words is None:
        with pytest.raises(StageError, match="--calib-data"):
            calibration_data.find(data)
    else:
        found = calibration_data.find(data)
        assert (found.hub, found.split) == words


def test_a_data_set_of_the_hub_from_the_cache(stage: Runner, source: Path, tmp_path: Path, monkeypatch) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "cache" / "datasets--org--texts"
    snapshot = repository / "snapshots" / ("0" * 40)
    (snapshot / "data").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "data" / "train-00000.jsonl").write_text(json.dumps({"article": TEXT * 20}) + "\n")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    words = "--calib-size 2 --calib-max-sequence-length 32 --no-perplexity --calib-data "
    common = {"HF_MODEL_CKPT": source, "MLM_MODEL_SAVE": tmp_path / "q"}
    result = stage("quantize", "fp8", MLM_EXTRA_ARGS=words + "org/texts", **common)
    assert result.code == 0, result.out
    assert "2 samples of 32 tokens" in result.out and "built-in" not in result.out
    missing = stage(
        "quantize", "fp8", MLM_EXTRA_ARGS=words + "org/nothing", **{**common, "MLM_MODEL_SAVE": tmp_path / "r"}
    )
    assert missing.code == 2 and "org/nothing" in missing.out and "Traceback" not in missing.out


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("empty.txt", "\n\n \n", "has no text"),
        ("empty.jsonl", '{"text": ""}\n', "has no text"),
        ("broken.jsonl", '{"text": "a"}\n{', "line 2: not JSON"),
        ("keys.jsonl", '{"prompt": "a"}\n', "keys ['prompt']"),
        ("broken.parquet", "PAR", "not a parquet file"),
    ],
)
def test_data_that_cannot_be_used(
    name: str, content: str, word: str, stage: Runner, source: Path, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    result = stage(
        "quantize", "fp8", HF_MODEL_CKPT=source, MLM_MODEL_SAVE=tmp_path / "q", MLM_CALIB_DATA=tmp_path / name
    )
    assert result.code == 2 and word in result.out and "Traceback" not in result.out, result.out
    assert not (tmp_path / "q" / ".part").exists()


def events(result: Result, name: str) -> list[dict]:
    lines = (result.run_dir / "state" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def test_tokens_of_experts_are_told(latent: tuple[Runner, Path], tmp_path: Path) -> None:
    """A router that never takes expert 3 starves it; its range is the layer's."""
    from safetensors.torch import load_file, save_file

    stage, source = latent
    weights = load_file(source / "model.safetensors")
    bias = weights["model.layers.2.mlp.gate.e_score_correction_bias"]
    bias[3] = -100.0
    starving = tmp_path / "hf"
    starving.mkdir()
    for file in source.iterdir():
        (starving / file.name).write_bytes(file.read_bytes())
    save_file(weights, starving / "model.safetensors", metadata={"format": "pt"})
    result = stage("quantize", "fp8", HF_MODEL_CKPT=starving, MLM_MODEL_SAVE=tmp_path / "q", MLM_EXTRA_ARGS=ENOUGH)
    assert result.code == 0, result.out
    (event,) = events(result, "experts")
    one, two = event["layers"]
    assert (one["layer"], two["layer"]) == (1, 2)
    assert two["starved"] == [3] and two["min"] == 0
    # 8 samples of 64 tokens, 2 experts each, 4 experts
    assert one["min"] <= 8 * 64 * 2 / 4 <= one["max"]
    assert "layer 2: experts starved of calibration tokens (fewer than 16): 3 (0)." in result.out


def test_the_batch_fits_the_length() -> None:
    assert [calibration.batch_size(length, "cuda") for length in (128, 512, 4096, 65536)] == [32, 32, 4, 1]
    assert calibration.batch_size(4096, "cpu") == 8
