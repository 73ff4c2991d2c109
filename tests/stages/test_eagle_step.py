"""One step of EAGLE3 training against a small plain-torch implementation that takes each document alone, in float32."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from rig import GROUPS, HEADS, HIDDEN, MODEL, Runner

WIDTH = HIDDEN // HEADS
DOCUMENTS = [[9, 21, 6], [17, 2], [40]]  # lengths by row; the rows have 48 tokens


@contextmanager
def opened(stage: Runner, source: Path, *words: str) -> Iterator:
    """A session of eagle3 on one process, in float32."""
    from mlmsub.runtime.env import Env
    from mlmsub.runtime.models import eagle
    from mlmsub.runtime.progress import Steps
    from mlmsub.runtime.session import Job, start

    with mock.patch.dict(os.environ, stage.environment(stage.run_dir(), {"HF_MODEL_CKPT": source}), clear=True):
        os.environ["MLM_EXTRA_ARGS"] = ""
        job = Job("eagle3", MODEL, [], Env(), Steps())
        given = ["--algorithm", "eagle3", *words]
        with start(job, job.conf(), job.env.layout(), eagle.add_arguments, given) as session:
            session.args.bf16, session.args.params_dtype = False, torch.float32
            yield session


def with_draft(session: object, source: Path) -> torch.nn.Module:
    """The tiny model in float32 with a draft whose weights are large enough to matter."""
    from mlmsub.runtime.checkpoints import hf_import
    from mlmsub.runtime.models import eagle, model

    made = model.build(session.args, session.conf, "cpu")
    hf_import.import_weights(made, source, session.conf, torch.float32)
    eagle.add(made, session.args, eagle.asked(session.args, session.conf, from_hf=True))
    random = torch.Generator().manual_seed(2)
    for parameter in made.eagle_module.parameters():
        values = torch.rand(parameter.shape, generator=random)
        parameter.data.copy_(0.5 + values if parameter.ndim == 1 else (values - 0.5) / 2)
    if hasattr(made.eagle_module, "d2t"):
        eagle.set_vocabulary(made, torch.randint(0, 1000, (512,), generator=random))
    return made


def batch() -> object:
    """Rows of packed documents; about half of the tokens are learned."""
    from mlmsub.runtime.data.packing import collate

    random = torch.Generator().manual_seed(4)
    rows = [
        [
            (torch.randint(0, 512, (n,), generator=random).numpy(), (torch.rand(n, generator=random) < 0.6).numpy())
            for n in lengths
        ]
        for lengths in DOCUMENTS
    ]
    return collate(rows, 48, 0)


# --- the plain implementation ------------------------------------------------------------------------------------


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """x [slots, heads, width]"""
    angles = slots[:, None] / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = torch.cat([angles, angles], -1).cos()[:, None], torch.cat([angles, angles], -1).sin()[:, None]
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Plain:
    """A draft's weights by Megatron's names, and its loss on one document."""

    def __init__(self, module: torch.nn.Module, embedding: torch.Tensor, base_head: torch.Tensor) -> None:
        self.w = {name: value.detach().clone().requires_grad_() for name, value in module.named_parameters()}
        self.embedding, self.base_head = embedding, base_head
        d2t = getattr(module, "d2t", None)
        self.kept = torch.arange(len(base_head)) if d2t is None else torch.arange(len(d2t)) + d2t

    def layer(self, name: str) -> torch.Tensor:
        return self.w[f"decoder.layers.0.{name}"]

    def loss(self, tokens: torch.Tensor, learned: torch.Tensor, aux: torch.Tensor, logits: torch.Tensor) -> list:
        """Sums of the cross entropy over the learned tokens, of three steps."""
        slots = torch.arange(len(tokens) - 1)  # slot i: token i + 1 and state i
        embedded = norm(self.embedding[tokens[1:]], self.w["enorm.weight"])
        state = F.linear(aux, self.w["fc.weight"])[:-1]
        qkv = self.layer("self_attention.linear_qkv.weight").view(GROUPS, HEADS // GROUPS + 2, WIDTH, -1)
        parts = (qkv[:, :-2], qkv[:, -2:-1], qkv[:, -1:])
        head = self.w.get("eagle_output_layer.weight", self.base_head)
        targets = logits[:, self.kept].softmax(-1)
        past: list[tuple[torch.Tensor, torch.Tensor]] = []
        sums = []
        for step in range(3):
            x = torch.cat([embedded, norm(state, self.layer("input_layernorm.weight"))], -1)
            query, key, value = (F.linear(x, part.flatten(0, 2)).view(len(x), -1, WIDTH) for part in parts)
            query, key = rotate(query, slots), rotate(key, slots)
            past.append((key.repeat_interleave(HEADS // GROUPS, 1), value.repeat_interleave(HEADS // GROUPS, 1)))
            rows = [self.attend(query[slot], past, slot, step) for slot in range(step, len(slots))]
            out = torch.stack([torch.zeros(HIDDEN)] * min(step, len(slots)) + rows)
            state = state + F.linear(out, self.layer("self_attention.linear_proj.weight"))
            gate, up = F.linear(
                norm(state, self.layer("pre_mlp_layernorm.weight")), self.layer("mlp.linear_fc1.weight")
            ).chunk(2, -1)
            state = state + F.linear(F.silu(gate) * up, self.layer("mlp.linear_fc2.weight"))
            said = F.linear(norm(state, self.w["decoder.final_layernorm.weight"]), head).log_softmax(-1)
            cross = -(targets[1:] * said).sum(-1)
            sums.append(sum((cross[i] for i in range(step, len(slots) - 1) if learned[i + 2]), torch.zeros(())))
            state = torch.cat([torch.zeros(1, HIDDEN), state[:-1].detach()])
        return sums

    @staticmethod
    def attend(query: torch.Tensor, past: list, slot: int, step: int) -> torch.Tensor:
        seen = [past[0][0][: slot - step + 1], *(past[j][0][slot - step + j][None] for j in range(1, step + 1))]
        values = [past[0][1][: slot - step + 1], *(past[j][1][slot - step + j][None] for j in range(1, step + 1))]
        keys, values = torch.cat(seen), torch.cat(values)
        scores = torch.einsum("hw,khw->hk", query, keys) / WIDTH**0.5
        return torch.einsum("hk,khw->hw", scores.softmax(-1), values).flatten()


def expected(plain: Plain, source: Path, given: object, aux_layers: list[int]) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    sums = [torch.zeros(()) for _ in range(3)]
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths:
            tokens = given.tokens[row, start : start + length]
            learned = torch.cat([torch.zeros(1), given.loss_mask[row, start : start + length - 1]])
            with torch.no_grad():
                told = base(tokens[None], output_hidden_states=True)
            aux = torch.cat([told.hidden_states[layer + 1][0] for layer in aux_layers], -1)
            for step, value in enumerate(plain.loss(tokens, learned, aux, told.logits[0])):
                sums[step] = sums[step] + value
            start += length
    return sums


# --- the tests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--draft-vocab-size", "100")], ids=["whole", "reduced"])
def test_loss_and_gradients_are_those_of_a_plain_implementation(
    words: tuple[str, ...], stage: Runner, source: Path
) -> None:
    with opened(stage, source, *words) as session:
        from mlmsub.runtime.models import eagle_training

        model = with_draft(session, source)
        given = batch()
        with mock.patch.dict(eagle_training.CHUNK, cpu=512 * 20):  # several chunks, the last one shorter
            output, loss_of = eagle_training.DraftStep(model)(model, given)
        total, tokens, reports = loss_of(output)
        total.backward()
        layers = model.eagle_config.eagle_aux_hidden_state_layer_ids
        plain = Plain(model.eagle_module, model.embedding.word_embeddings.weight.detach(), model.output_layer.weight)
        sums = expected(plain, source, given, layers)
        want = sums[0] + 0.9 * sums[1] + 0.81 * sums[2]
        want.backward()
        assert int(tokens) == int(given.loss_mask.sum())
        for step, value in enumerate(sums):
            assert float(reports[f"loss_{step}"][0]) == pytest.approx(float(value), rel=1e-4)
        assert float(total) == pytest.approx(float(want), rel=1e-4)
        for name, parameter in model.eagle_module.named_parameters():
            grad, other = parameter.grad, plain.w[name].grad
            assert float((grad - other).norm() / other.norm()) < 1e-3, name
        assert all(parameter.grad is None for name, parameter in model.named_parameters() if "eagle" not in name)


def test_logits_are_made_for_learned_tokens_alone(stage: Runner, source: Path) -> None:
    """Of both models; a batch in which nothing is learned has a loss and gradients of zero."""
    with opened(stage, source) as session:
        from mlmsub.runtime.models import eagle_training

        model = with_draft(session, source)
        given = batch()
        softmax, made = eagle_training._softmax, []
        with mock.patch.object(eagle_training, "_softmax", lambda logits: made.append(len(logits)) or softmax(logits)):
            eagle_training.DraftStep(model)(model, given)
            assert 0 < sum(made) <= 4 * int(given.loss_mask.sum()) < given.tokens.numel() * 4 * 0.7
            made.clear()
            given.loss_mask.zero_()
            loss, _ = eagle_training.DraftStep(model)(model, given)
        loss.backward()
        assert float(loss) == 0 and sum(made) == 0
        assert not any(parameter.grad.any() for parameter in model.eagle_module.parameters())


def test_the_loss_is_modelopts_on_one_document(stage: Runner, source: Path) -> None:
    """modelopt 0.47 first computes the base's cross entropy. In float32 Megatron does so in place, and what the draft
    learns from is no longer the base's logits; so that gets a copy here.
    """
    with opened(stage, source) as session:
        from mlmsub.runtime.data.packing import collate
        from mlmsub.runtime.models.eagle_training import DraftStep

        model = with_draft(session, source)
        tokens = torch.randint(0, 512, (48,), generator=torch.Generator().manual_seed(6)).numpy()
        given = collate([[(tokens, torch.ones(48).bool().numpy())]], 48, 0)
        total, _ = DraftStep(model)(model, given)
        cross_entropy = model.compute_language_model_loss
        with mock.patch.object(
            model, "compute_language_model_loss", lambda labels, logits: cross_entropy(labels, logits.clone())
        ):
            losses = model.train()(given.tokens, labels=given.labels)
        assert float(total) == pytest.approx(float((losses * given.loss_mask).sum()), rel=1e-4)
