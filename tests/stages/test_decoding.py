"""Decoding with a key/value cache, in float32, against transformers: rows of different lengths, every attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_twins import GPT_OSS, LLAMA4, TWINS, _store_as_mxfp4, make, opened

LENGTHS = (3, 41, 17, 1)
NEW = 24


def ids(length: int) -> list[int]:
    return torch.randint(1, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def theirs(reference: torch.nn.Module, prompt: list[int], ends: list[int] | None = None) -> list[int]:
    """transformers' greedy completion of one prompt."""
    given = torch.tensor([prompt])
    made = reference.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False, eos_token_id=ends,
        pad_token_id=0,
    )  # fmt: skip
    return made[0, len(prompt) :].tolist()


def build(session: object, source: Path) -> torch.nn.Module:
    from mlmsub.runtime.checkpoints import hf_import
    from mlmsub.runtime.models import model

    session.args.bf16, session.args.params_dtype = False, torch.float32
    made = model.build(session.args, session.conf, "cpu")
    hf_import.import_weights(made, source, session.conf, torch.float32)
    return made


def ours(
    made: torch.nn.Module,
    prompts: list[list[int]],
    ends: list[int],
    rows: int = 4,
    graphs: bool = False,
    **sampling: object,
) -> list:
    from mlmsub.runtime.generation.batches import Generator, Task
    from mlmsub.runtime.generation.decoding import Decoder
    from mlmsub.runtime.generation.sampling import Sampling

    found: dict = {}
    with Decoder(made, max(map(len, prompts)) + NEW) as decoder:
        maker = Generator(decoder, rows, NEW, ends, Sampling(**sampling), graphs=graphs)
        for begin in range(0, len(prompts), rows):
            part = prompts[begin : begin + rows]
            tasks = [Task(str(begin + row), prompt, NEW) for row, prompt in enumerate(part)]
            maker.run(tasks, max(map(len, part)), lambda row, done, begin=begin: found.update({begin + row: done}))
    return [found[row] for row in range(len(prompts))]


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe", "kimi-k2", "deepseek-v2-lite", "llama4-scout", "gpt-oss"])
def test_greedy_is_that_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlmsub.runtime.generation import batches

    kind, values = TWINS.get(name, ("GptOssConfig", GPT_OSS))
    reference = make(tmp_path / "hf", kind, LLAMA4 if name == "llama4-scout" else values)
    if name == "gpt-oss":
        _store_as_mxfp4(reference, tmp_path / "hf" / "model.safetensors")
    if name == "deepseek-v2-lite":
        from test_twins import _scale_as_deepseek_does

        _scale_as_deepseek_does(reference)
    prompts = [ids(length) for length in LENGTHS]
    want = [theirs(reference, prompt) for prompt in prompts]
    with opened(tmp_path, tmp_path / "hf") as session:
        made = build(session, tmp_path / "hf")
        got = ours(made, prompts, [])
        assert [done.tokens for done in got] == want
        assert {done.reason for done in got} == {"length"}
        # A token that the first row makes ends it there, and no other row before its own; it is looked for after some
        # steps only, as on a GPU.
        monkeypatch.setitem(batches.STRIDE, "cpu", 8)
        end = want[0][5]
        stopped = ours(made, prompts, [end], rows=3)
        for row, done in enumerate(stopped):
            cut = want[row].index(end) + 1 if end in want[row] else NEW
            assert done.tokens == want[row][:cut]
            assert done.reason == ("stop" if end in want[row] else "length")


def test_steps_of_several_tokens_and_going_back(tmp_path: Path) -> None:
    """What verifying a draft needs: some tokens at once, wrong ones among them, then on from an earlier position."""
    from test_twins import logits

    from mlmsub.runtime.generation.decoding import Decoder

    make(tmp_path / "hf", *TWINS["kimi-k2"])
    tokens = torch.tensor([ids(30), ids(31)[:30]])
    with opened(tmp_path, tmp_path / "hf") as session:
        made = build(session, tmp_path / "hf")
        want = logits(made, tokens)
        with Decoder(made, 32) as decoder:
            lengths = torch.tensor([9, 5])
            first = decoder.prefill(tokens[:, :9], lengths)
            rows = torch.arange(2)
            assert torch.allclose(first, want[rows, lengths - 1], atol=1e-4)
            places = lengths[:, None] + torch.arange(6)
            drafted = tokens.gather(1, places)
            drafted[:, 3:] += 7  # rejected
            got = decoder.step(drafted % 500, places)
            assert torch.allclose(got[:, :3], want[rows[:, None], places[:, :3]], atol=1e-4)
            places = places[:, :4] + 3
            got = decoder.step(tokens.gather(1, places), places)
            assert torch.allclose(got, want[rows[:, None], places], atol=1e-4)
        assert torch.equal(logits(made, tokens), want), "the model is as it was"


def test_a_model_with_a_draft_is_decoded_without_it(tmp_path: Path) -> None:
    """And what the draft reads of the base, three layers' hidden states, is left for whoever verifies drafts."""
    from mlmsub.runtime.errors import StageError
    from mlmsub.runtime.generation.decoding import Decoder
    from mlmsub.runtime.models import eagle

    make(tmp_path / "hf", *TWINS["llama"])
    prompts = [ids(length) for length in LENGTHS]
    with opened(tmp_path, tmp_path / "hf") as session:
        made = build(session, tmp_path / "hf")
        want = ours(made, prompts, [])
        eagle.add(made, session.args, eagle.Draft(eagle.architecture(session.args, {}), {}, False, None))
        assert ours(made, prompts, []) == want
        with Decoder(made, 16) as decoder:
            decoder.prefill(torch.tensor([ids(8)]), torch.tensor([8]))
            whole = decoder.hidden_states
            decoder.prefill(torch.tensor([ids(8)[:5]]), torch.tensor([5]))
            decoder.step(torch.tensor([ids(8)[5:]]), torch.arange(5, 8)[None])
        assert len(whole) == len(made.eagle_config.eagle_aux_hidden_state_layer_ids)
        for one, last in zip(whole, decoder.hidden_states, strict=True):
            assert torch.allclose(one[5:], last, atol=1e-4)
        assert not made._aux_hidden_states
        made.eagle_offline = True
        with pytest.raises(StageError, match="no layers"):
            Decoder(made, 16)


class Coarse(torch.nn.Module):
    """Stands for a quantizer of the KV cache."""

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor * 4).round() / 4


class ForeignCore(torch.nn.Module):
    """Stands for Transformer Engine's attention as modelopt quantizes it: another class, with quantizers in it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.q_bmm_quantizer = inner, torch.nn.Identity()
        self.k_bmm_quantizer, self.v_bmm_quantizer = Coarse(), Coarse()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **more: object
    ) -> object:
        return self.inner(query, self.k_bmm_quantizer(key), self.v_bmm_quantizer(value), *args, **more)


@pytest.mark.parametrize("name", ["llama", "kimi-k2"])
def test_another_attention_is_replaced_meanwhile(name: str, tmp_path: Path) -> None:
    from test_twins import logits

    from mlmsub.runtime.generation.decoding import Decoder

    make(tmp_path / "hf", *TWINS[name])
    tokens = torch.tensor([ids(20), ids(21)[:20]])
    with opened(tmp_path, tmp_path / "hf") as session:
        made = build(session, tmp_path / "hf")
        plain = logits(made, tokens)
        for layer in made.decoder.layers:
            layer.self_attention.core_attention = ForeignCore(layer.self_attention.core_attention)
        want = logits(made, tokens)
        assert not torch.allclose(want, plain, atol=1e-2)
        with Decoder(made, 24) as decoder:
            first = decoder.prefill(tokens[:, :12], torch.tensor([12, 12]))
            rest = decoder.step(tokens[:, 12:], torch.arange(12, 20).expand(2, -1))
        assert torch.allclose(first, want[:, 11], atol=1e-4)
        assert torch.allclose(rest, want[:, 12:], atol=1e-4)
        assert torch.equal(logits(made, tokens), want)


@pytest.mark.parametrize("fails", [False, True])
def test_the_graph_of_a_step(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order of warm-up, capture and replay, and the way back. CUDA's part is played: a capture runs nothing, a
    replay runs what was captured."""
    from mlmsub.runtime.generation import batches

    captures: list[Graph] = []
    replays: list[Graph] = []
    capturing: list[Graph] = []
    eager = batches.Generator._eager

    class Graph:
        def replay(self) -> None:
            replays.append(self)
            eager(*self.work)

    class Capture:
        def __init__(self, graph: Graph, stream: object, capture_error_mode: str) -> None:
            self.graph = graph

        def __enter__(self) -> None:
            captures.append(self.graph)
            if fails:
                raise RuntimeError("operation not permitted when stream is capturing")
            capturing.append(self.graph)

        def __exit__(self, *_error: object) -> None:
            capturing.clear()

    def step(*work: object) -> None:
        if capturing:
            capturing[0].work = work
        else:
            eager(*work)

    monkeypatch.setattr(batches.Generator, "_eager", step)
    monkeypatch.setattr(batches, "REACH", 16)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    make(tmp_path / "hf", *TWINS["llama"])
    prompts = [ids(length) for length in (41, 40, 3, 2)]
    with opened(tmp_path, tmp_path / "hf") as session:
        made = build(session, tmp_path / "hf")
        want = [done.tokens for done in ours(made, prompts, [], rows=2)]
        got = [done.tokens for done in ours(made, prompts, [], rows=2, graphs=True)]
    assert got == want
    assert len(captures) == (1 if fails else 2), "one for each reach"
    assert len(replays) == (0 if fails else 2 * (NEW - 1 - batches.WARM_UP))
    assert ("its steps are eager" in capsys.readouterr().out) == fails


def test_samples_depend_on_the_seed_and_the_prompt_alone(tmp_path: Path) -> None:
    make(tmp_path / "hf", *TWINS["llama"])
    prompts = [ids(length) for length in LENGTHS]
    with opened(tmp_path, tmp_path / "hf") as session:
        made = build(session, tmp_path / "hf")
        one, alone, other = (
            [done.tokens for done in ours(made, prompts, [], rows, temperature=0.8, top_k=50, top_p=0.9, seed=seed)]
            for rows, seed in ((4, 1), (1, 1), (4, 2))
        )
    assert one == alone
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_sampling_follows_the_probabilities() -> None:
    """Against transformers' own filters: the same tokens are left, at the same rates."""
    from transformers.generation.logits_process import (
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    from mlmsub.runtime.generation.sampling import Sampling, choose

    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 3
    scores = logits
    for warper in (TemperatureLogitsWarper(1.7), TopKLogitsWarper(12), TopPLogitsWarper(0.8)):
        scores = warper(None, scores)
    want = scores.softmax(-1)[0]
    draws = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    got = choose(logits.expand(20000, -1), Sampling(1.7, 12, 0.8), draws)
    rates = torch.bincount(got, minlength=40) / 20000
    assert torch.allclose(rates, want, atol=2e-4), (rates - want).abs().max()
    assert 1 < int((want > 0).sum()) < 12
