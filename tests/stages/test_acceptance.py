"""Acceptance length: against modelopt's own evaluator, on a tiny base with a draft that is right now and then."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rig import MODEL, ROOT, Runner, free_port
from test_decoding import build, ids
from test_twins import TWINS, make, opened

from mlmsub.runtime.errors import StageError

STEPS, MOST = 3, 20
LENGTHS = (5, 19, 12)


@pytest.fixture(scope="module", params=["llama", "kimi-k2"])
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """A base in float32 and its draft, trained on the base's own completions of some of the prompts; their folder."""
    from mlmsub.runtime.generation import acceptance

    folder = tmp_path_factory.mktemp(request.param)
    make(folder / "hf", *TWINS[request.param])
    with opened(folder, folder / "hf") as session:
        made = with_draft(session, folder / "hf")
        given = acceptance.answers(made, asked()[:2], acceptance.Settings(1, 3 * MOST, []))
        train(made, [asked()[row].tokens + given[row].tokens for row in range(2)])
        torch.save(made.eagle_module.state_dict(), folder / "draft.pt")
        yield request.param, made, folder


def asked() -> list:
    from mlmsub.runtime.generation.acceptance import Question

    return [Question(n, "odd" if n % 2 else "even", "", ids(size)) for n, size in enumerate(LENGTHS)]


def with_draft(session: object, source: Path, weights: Path | None = None) -> torch.nn.Module:
    """The draft of a dense base has a vocabulary of its own."""
    from mlmsub.runtime.models import eagle

    made, dense = build(session, source), session.args.num_experts is None
    with torch.no_grad():
        made.output_layer.weight.mul_(16)  # a base that is sure of itself, so that a draft learns in a few steps
    wanted = {"draft_vocab_size": 384} if dense else {}
    eagle.add(made, session.args, eagle.Draft(eagle.architecture(session.args, wanted), wanted, False, weights))
    if dense:
        eagle.set_vocabulary(made, torch.arange(512, 0, -1) * (torch.arange(512) % 4 != 1))
    return made


def train(model: torch.nn.Module, texts: list[list[int]]) -> None:
    """A few steps of modelopt's own loss.

    Without that of the base, which counts nothing: in float32 Megatron's cross-entropy turns the logits into
    probabilities in place, and the draft would learn the softmax of those.
    """
    from modelopt.torch.speculative.utils import get_default_attention_mask_and_position_ids as masked

    for parameter in model.parameters():
        parameter.requires_grad = False
    trained = list(model.eagle_module.parameters())
    for parameter in trained:
        parameter.requires_grad = True
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    model.train()
    model.compute_language_model_loss = lambda labels, logits: logits.new_zeros(labels.shape)
    for step in range(60):
        tokens = torch.tensor([texts[step % len(texts)]])
        mask, positions = masked(tokens)
        loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del model.compute_language_model_loss
    model.eval()


def theirs(model: torch.nn.Module, prompt: list[int], steps: int, ends: list[int]) -> tuple[list[int], float]:
    from modelopt.torch.speculative.plugins.megatron_eagle import MegatronARValidation

    validator = MegatronARValidation.__new__(MegatronARValidation)
    validator.model, validator.end_token = model, ends[0] if ends else -1
    with torch.no_grad():
        tokens, length = validator.validate(MOST, input_ids=torch.tensor([prompt]), steps=steps)
    return tokens[0, len(prompt) :].tolist(), length


@pytest.mark.parametrize("steps", [1, STEPS])
def test_acceptance_is_that_of_modelopt(drafted: tuple, steps: int) -> None:
    """Alone and in a batch, with an end token that one row makes early and the others later or never."""
    from mlmsub.runtime.generation import acceptance

    _, model, _ = drafted
    lengths = []
    for ends in ([], [theirs(model, asked()[1].tokens, 0, [])[0][7]]):
        want = [theirs(model, question.tokens, steps, ends) for question in asked()]
        for rows in (1, 3):
            got = acceptance.answers(model, asked(), acceptance.Settings(steps, MOST, ends, rows))
            assert [(answer.tokens, answer.acceptance_length) for answer in got] == want
        lengths += [length for _, length in want]
    assert max(lengths) > 1.2, "the draft is never right: nothing was tested"
    assert min(lengths) < 1 + steps, "the draft is always right: nothing was tested"


def test_a_model_in_training_is_left_as_it_was(drafted: tuple) -> None:
    from mlmsub.runtime.generation import acceptance

    _, model, _ = drafted
    tokens = torch.tensor([ids(30)])

    def state() -> tuple:
        hooks = [len(module._forward_hooks) for module in model.modules()]
        return [module.training for module in model.modules()], hooks, [p.requires_grad for p in model.parameters()]

    model.train()
    model.decoder.layers[0].training = False
    before, want = state(), loss(model, tokens)
    made = acceptance.evaluate(model, asked(), acceptance.Settings(STEPS, MOST, []))
    assert state() == before
    assert torch.equal(loss(model, tokens), want)
    model.eval()
    length = {name: part["acceptance_length"] for name, part in made["categories"].items()}
    assert made["acceptance_length"] == pytest.approx((2 * length["even"] + length["odd"]) / 3)
    assert made["tokens"] == 3 * MOST
    assert len(acceptance.table(made)) == 4


def loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    from modelopt.torch.speculative.utils import get_default_attention_mask_and_position_ids as masked

    mask, positions = masked(tokens)
    return model(tokens, positions, mask, labels=tokens)


def test_models_that_cannot_be_evaluated_are_refused(drafted: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlmsub.runtime.generation import acceptance

    _, model, _ = drafted
    settings = acceptance.Settings(1, 4, [])
    monkeypatch.setattr(model.config, "pipeline_model_parallel_size", 2)
    with pytest.raises(StageError, match="PP=1"):
        acceptance.evaluate(model, asked(), settings)
    monkeypatch.undo()
    monkeypatch.setattr(model.eagle_config, "use_aux_hidden_state", False)
    with pytest.raises(StageError, match="no EAGLE3 draft"):
        acceptance.evaluate(model, asked(), settings)


LAYOUTS = {"llama": {"TP": "2"}, "kimi-k2": {"EP": "2"}}


def test_two_processes_count_the_same(drafted: tuple) -> None:
    """Split layers; and experts on two ranks that answer different prompts, one of them fewer."""
    from mlmsub.runtime.generation import acceptance

    name, model, folder = drafted
    want = acceptance.answers(model, asked(), acceptance.Settings(STEPS, MOST, []))
    variables = Runner(folder / "ranks", folder / "model.yaml")
    environment = variables.environment(variables.run_dir(), {"HF_MODEL_CKPT": folder / "hf", **LAYOUTS[name]})
    environment["MLM_EXTRA_ARGS"] = "--moe-token-dispatcher-type allgather"
    port = free_port()
    environment |= {
        "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outs)
    got = json.loads((folder / "answers.json").read_text())
    assert got == [[answer.tokens, answer.passes] for answer in want]


def rank(folder: Path) -> None:
    """One of the processes of ``test_two_processes_count_the_same``."""
    from mlmsub.runtime.env import Env
    from mlmsub.runtime.generation import acceptance
    from mlmsub.runtime.progress import Steps
    from mlmsub.runtime.session import Job, start

    job = Job("quantize", MODEL, [], Env(), Steps())
    with start(job, job.conf(), job.env.layout(), lambda parser: None, []) as session:
        made = with_draft(session, folder / "hf", folder / "draft.pt")
        given = acceptance.answers(made, asked(), acceptance.Settings(STEPS, MOST, []))
        if job.env.rank == 0:
            (folder / "answers.json").write_text(json.dumps([[answer.tokens, answer.passes] for answer in given]))


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
