"""Stored hidden states: whatever the layout and the interruptions, those of a fresh forward pass."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rig import ROOT, Result, Runner, make_latent, make_latent_conf, session

from mlmsub.runtime.errors import StageError

LENGTH, HIDDEN, LAYERS = 48, 64, [0, 1, 2]
FLAGS = "--rows-per-shard 3"


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    """Texts of 3 to 25 words, some of them in a second split."""
    draw = random.Random(5)
    words = (ROOT / "mlmsub" / "runtime" / "quantization" / "calibration.txt").read_text().split()
    texts = [" ".join(words[at : at + draw.randrange(3, 25)]) for at in draw.sample(range(len(words) - 25), 24)]
    file = folder / "extract-data.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "extract-draft.json").write_text(json.dumps({"eagle_aux_hidden_state_layer_ids": LAYERS}))
    return file


def given(source: Path, data: Path, target: Path, flags: str = FLAGS) -> dict[str, object]:
    return {
        "HF_MODEL_CKPT": source, "EXTRACT_DIR": target,
        "MLM_EXTRA_ARGS": f"{flags} --eagle-config {data.parent / 'extract-draft.json'}",
        "MLM_DATA_ARGS": f"--finetune-hf-dataset {data} --data-cache-path {data.parent / 'extract-cache'}"
        f" --split 80,20,0 --seq-length {LENGTH}",
    }  # fmt: skip


@pytest.fixture(scope="module")
def one(stage: Runner, source: Path, data: Path, folder: Path) -> Path:
    """What a single process makes in one go."""
    target = folder / "features"
    made = stage("extract", **given(source, data, target))
    assert made.code == 0, made.out
    assert made.done["outputs"] == {"EXTRACT_DIR": str(target)}
    assert f"tokens x (3 + 1) layers x {HIDDEN} x 2 bytes" in made.out
    return target


def content(target: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(target.iterdir())}


def cosine(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(one.float(), other.float(), dim=-1)


def close(one: Path, other: Path) -> None:
    """The same rows; states equal up to the rounding of bfloat16."""
    from safetensors.torch import load_file

    assert sorted(content(one)) == sorted(content(other))
    for name in content(one):
        if name.endswith(".safetensors"):
            mine, theirs = load_file(one / name), load_file(other / name)
            for key, tensor in mine.items():
                if tensor.dtype != torch.bfloat16:
                    assert torch.equal(tensor, theirs[key])
                    continue
                padding = (tensor == 0).all(-1)
                assert torch.equal(padding, (theirs[key] == 0).all(-1))
                assert cosine(tensor, theirs[key])[~padding].min() > 0.999


def test_the_reader_returns_what_a_fresh_forward_gives(stage: Runner, source: Path, one: Path, data: Path) -> None:
    """The packed rows in one pass with a mask between the documents, as modelopt's own forward reads them."""
    from mlmsub.runtime.checkpoints import hf_import
    from mlmsub.runtime.data.hidden_states import Dataset
    from mlmsub.runtime.data.packing import Batch, PackedDataset, attention_mask
    from mlmsub.runtime.models import eagle, model

    found = Dataset(one)
    found.verify()
    packed = PackedDataset(data.parent / "extract-cache" / found.plan.data)
    assert len(found.rows("train")) > 3
    assert len(found.rows("valid")) > 0
    assert (found.counts == packed.counts).all()
    mine, theirs = (kind.batches("train", 2, 1, 2, consumed=5, seed=7) for kind in (found, packed))
    for _ in range(4):
        got, rows = next(mine), next(theirs)
        assert all(torch.equal(getattr(got, name), getattr(rows, name)) for name in Batch.__dataclass_fields__)
    with session(stage, source) as opened:
        base = model.build(opened.args, opened.conf, "cpu")
        hf_import.import_weights(base, source, opened.conf, torch.bfloat16)
        wanted = {"eagle_aux_hidden_state_layer_ids": LAYERS}
        eagle.add(base, opened.args, eagle.Draft(eagle.architecture(opened.args, wanted), wanted, False, None))
        assert found.plan.layers == base.eagle_config.eagle_aux_hidden_state_layer_ids
        found.require(found.plan.layers, HIDDEN, LENGTH)
        for number in range(found.plan.rows):
            rows, got = packed.batch([number]), found.batch([number])
            with torch.no_grad():
                last, _ = base._base_model_forward(rows.tokens, rows.position_ids, attention_mask(rows.document_ids))
            aux = torch.cat(base._aux_hidden_states, dim=-1)
            base._aux_hidden_states.clear()
            size = sum(len(ids) for ids, _ in packed.row(number))
            for state, want in ((got.aux_hidden_states, aux), (got.hidden_states, last)):
                assert state.dtype == torch.bfloat16
                assert not state[0, size:].any()
                assert cosine(state[0, :size], want[:size, 0]).min() > 0.999
    moved = found.batch([0, 1]).to("cpu")
    assert moved.hidden_states.shape == (2, LENGTH, HIDDEN)


def test_the_states_are_those_of_transformers_after_these_layers(source: Path, one: Path, data: Path) -> None:
    """The outputs of the first and the second layer, side by side, by a library that knows nothing of ours."""
    from transformers import AutoModelForCausalLM

    from mlmsub.runtime.data.hidden_states import Dataset
    from mlmsub.runtime.data.packing import PackedDataset

    found = Dataset(one)
    assert found.plan.layers == LAYERS
    packed = PackedDataset(data.parent / "extract-cache" / found.plan.data)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    aux, start = found.batch([0]).aux_hidden_states[0], 0
    for ids, _ in packed.row(0):
        with torch.no_grad():
            states = model(torch.tensor(ids.astype("int64"))[None], output_hidden_states=True).hidden_states
        for place, layer in enumerate(LAYERS):
            stored = aux[start : start + len(ids), place * HIDDEN : (place + 1) * HIDDEN]
            assert cosine(stored, states[layer + 1][0]).min() > 0.999
            assert cosine(stored, states[layer + 2][0]).min() < 0.99, "the next layer's would pass too"
        start += len(ids)


@pytest.mark.parametrize("layout", [{}, {"TP": 2}])
def test_two_processes_store_the_same(
    stage: Runner, source: Path, one: Path, data: Path, folder: Path, layout: dict
) -> None:
    target = folder / f"features{layout}"
    flags = f"{FLAGS} --sequence-parallel" if layout else FLAGS
    made = stage.ranks("extract", **given(source, data, target, flags), **layout)
    assert made.code == 0, made.out
    if layout:
        close(one, target)
        identities = [json.loads((folder / "index.json").read_text())["identity"] for folder in (one, target)]
        assert identities[0] == identities[1] and identities[0]["source"].startswith("hf:")
    else:
        assert content(one) == content(target)


def test_experts_on_two_processes_store_the_same(data: Path, folder: Path, tmp_path: Path) -> None:
    """Three shards: the last round has one for two replicas, which go through the experts together."""
    latent = make_latent(tmp_path / "latent")
    runner = Runner(tmp_path / "runs", make_latent_conf(tmp_path / "latent.yaml"))
    made = runner("extract", **given(latent, data, tmp_path / "one", "--rows-per-shard 7"))
    assert made.code == 0, made.out
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == 3
    made = runner.ranks("extract", **given(latent, data, tmp_path / "two", "--rows-per-shard 7"), EP=2)
    assert made.code == 0, made.out
    close(tmp_path / "one", tmp_path / "two")


def test_a_killed_run_goes_on_to_the_same_bytes(
    stage: Runner, source: Path, one: Path, data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlmsub.runtime.data.hidden_states import Dataset, Writer

    target, write, numbers = folder / "killed", Writer.write, []

    def killed(self: Writer, number: int, *rest: object) -> None:
        numbers.append(number)
        if number == 2:
            (self.folder / ".hidden-00002.safetensors.part").write_bytes(b"half")
            raise KeyboardInterrupt
        write(self, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            stage("extract", **given(source, data, target))
    with pytest.raises(StageError, match="its extraction has not ended"):
        Dataset(target)
    half = target / "hidden-00001.safetensors"
    half.write_bytes(half.read_bytes()[:-9])

    run_dir = stage.run_dir()
    stop = run_dir / "state" / "0" / "stop"
    stop.parent.mkdir(parents=True)
    stop.touch()
    stopped = stage("extract", run_dir=run_dir, **given(source, data, target))
    assert stopped.code == 0, stopped.out
    assert (stop.parent / "saved").is_file()
    assert not (stop.parent / "done.json").exists()

    numbers.clear()
    monkeypatch.setattr(
        Writer, "write", lambda self, number, *rest: (numbers.append(number), write(self, number, *rest))
    )
    made = stage("extract", **given(source, data, target))
    assert made.code == 0, made.out
    assert numbers[0] == 2, "the first shard was whole, the second is the one that was made before the stop"
    assert content(target) == content(one)
    numbers.clear()
    assert stage("extract", **given(source, data, target)).code == 0
    assert not numbers


def test_damage_is_named_and_mended(stage: Runner, source: Path, one: Path, data: Path, folder: Path) -> None:
    from mlmsub.runtime.data.hidden_states import Dataset

    target = folder / "damaged"
    shutil.copytree(one, target)
    file = target / "hidden-00001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StageError, match=r"hidden-00001\.safetensors is damaged: its checksum"):
        Dataset(target).verify()
    made = stage("extract", **given(source, data, target, f"{FLAGS} --verify"))
    assert made.code == 0, made.out
    assert content(target) == content(one)

    file.write_bytes(whole[:-1])
    with pytest.raises(StageError, match=r"hidden-00001\.safetensors is damaged: it has"):
        Dataset(target)
    file.unlink()
    with pytest.raises(StageError, match=r"hidden-00001\.safetensors is missing"):
        Dataset(target)
    with pytest.raises(StageError, match=r"has layers \[0, 1, 2\], and the draft needs \[1, 2\]"):
        Dataset(one).require([2, 1], HIDDEN)
    index = json.loads((target / "index.json").read_text())
    for change, said in (
        ({"format": 9}, "format 9"), ({"rows_per_shard": 2}, "does not list the shards"), ({"splits": 3}, "damaged"),
        ({"identity": {"ends": ""}}, "damaged"), ({"identity": "x"}, "damaged"),
    ):  # fmt: skip
        (target / "index.json").write_text(json.dumps({**index, **change}))
        with pytest.raises(StageError, match=said):
            Dataset(target)


def test_what_cannot_be_stored_is_refused(
    stage: Runner, source: Path, one: Path, data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(target: Path, said: str, flags: str = FLAGS, **more: object) -> Result:
        made = stage("extract", **given(source, data, target, flags), **more)
        assert (made.code, said in made.out) == (2, True), made.out
        return made

    before = content(one)
    refused(one, "was begun with rows_per_shard 3, and this is 2", "--rows-per-shard 2")
    refused(folder / "none", "set PP=1", PP=2, WORLD_SIZE=2)
    strange = folder / "strange"
    strange.mkdir()
    (strange / "something").touch()
    refused(strange, "is not empty")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    refused(folder / "none", "GiB free of")
    assert content(one) == before
