"""The exported draft in a small plain implementation, as servers run it: it has the acceptance length of before."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rig import Runner, make_llama, tensors
from training_rig import in_fp32

STEPS, MOST = 3, 24
WORDS = ["the", "model", "reads", "a", "row", "of", "tokens", "and", "learns", "what", "comes", "next"]


def write_texts(file: Path, count: int) -> Path:
    """Words that mostly follow one another in one order."""
    draw = random.Random(7)
    with file.open("w") as lines:
        for _ in range(count):
            at, text = draw.randrange(len(WORDS)), []
            for _ in range(draw.randint(20, 40)):
                at = (at + 1) % len(WORDS) if draw.random() < 0.85 else draw.randrange(len(WORDS))
                text.append(WORDS[at])
            lines.write(json.dumps({"text": " ".join(text)}) + "\n")
    return file


def make_base(folder: Path, texts: Path) -> Path:
    """The tiny Llama in float32, trained until its completions are such texts."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    make_llama(folder, tied=False)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(json.loads(line)["text"])["input_ids"] for line in texts.read_text().splitlines()]
    stream = torch.tensor([token for one in ids for token in one])
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(120):
        rows = torch.stack([stream[start : start + 48] for start in range(step * 7, step * 7 + 48 * 8, 48)])
        adam.zero_grad()
        model(rows, labels=rows).loss.backward()
        adam.step()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[(), ("--draft-vocab-size", "96")], ids=["whole", "reduced"])
def trained(request: pytest.FixtureRequest, stage: Runner, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """(runner, base, folder): folder/mlm is the trained draft with its base, folder/draft what was exported of it."""
    folder = tmp_path_factory.mktemp("served")
    texts = write_texts(folder / "texts.jsonl", 120)
    base = make_base(folder / "hf", texts)
    (folder / "draft.json").write_text('{"eagle_aux_hidden_state_layer_ids": [2, 0, 1]}')
    (folder / "prompts.jsonl").write_text("".join(
        json.dumps({"text": text}) + "\n" for text in ("the model reads a", "what comes", "tokens tokens and row of")
    ))  # fmt: skip
    runner = Runner(folder / "runs", in_fp32(stage.conf, folder / "model.yaml"))
    result = runner(
        "eagle3", "--no-eval", *request.param, HF_MODEL_CKPT=base, MLM_MODEL_SAVE=folder / "mlm", MLM_WORK_DIR=folder,
        MLM_DATA_ARGS=f"--train-iters 24 --split 100,0,0 --seq-length 64 --finetune-hf-dataset {texts}",
        MLM_OPTIM_ARGS="--lr 4e-3 --min-lr 4e-3 --lr-decay-style constant --clip-grad 1.0",
        MLM_TRAIN_ARGS="--micro-batch-size 8", MLM_EVAL_ARGS="--save-interval 100 --log-interval 8",
        MLM_EXTRA_ARGS=f"--eagle-config {folder / 'draft.json'}",
    )  # fmt: skip
    assert result.code == 0, result.out
    given = {"HF_MODEL_CKPT": base, "MLM_MODEL_CKPT": folder / "mlm"}
    result = runner("export", EXPORT_DIR=folder / "draft", MLM_EXTRA_ARGS="--export-extra-modules", **given)
    assert result.code == 0, result.out
    return runner, base, folder


class Served:
    """One decoder layer by the names of the exported file, and the base's embedding; no cache, all is read anew."""

    def __init__(self, folder: Path, base: torch.nn.Module) -> None:
        self.config, self.w = json.loads((folder / "config.json").read_text()), tensors(folder)
        self.embedding = base.model.embed_tokens.weight
        self.head = self.w.get("lm_head.weight", base.lm_head.weight)
        self.layers = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.w[name]

    def heads(self, x: torch.Tensor, name: str, rotate: bool = True) -> torch.Tensor:
        width = self.config["head_dim"]
        made = (x @ self.w[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(x), -1, width)
        if rotate:
            turns = torch.arange(0, width, 2) / width
            angles = torch.arange(len(x))[:, None] / self.config["rope_theta"] ** torch.cat([turns, turns])
            first, second = made.chunk(2, -1)
            made = made * angles.cos()[:, None] + torch.cat([-second, first], -1) * angles.sin()[:, None]
        share = self.config["num_attention_heads"] // made.shape[1]
        return made.repeat_interleave(share, 1).transpose(0, 1)

    def layer(self, tokens: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last slot says [vocabulary of the draft], and its state for the slot after it."""
        embedded = self.norm(self.embedding[tokens], "midlayer.input_layernorm.weight")
        x = torch.cat([embedded, self.norm(hidden, "midlayer.hidden_norm.weight")], -1)
        attended = F.scaled_dot_product_attention(
            self.heads(x, "q"), self.heads(x, "k"), self.heads(x, "v", rotate=False), is_causal=True
        )
        out = attended.transpose(0, 1).flatten(1) @ self.w["midlayer.self_attn.o_proj.weight"].T
        hidden = hidden + out
        x = self.norm(hidden, "midlayer.post_attention_layernorm.weight")
        gate, up = (x @ self.w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (F.silu(gate) * up) @ self.w["midlayer.mlp.down_proj.weight"].T
        return self.norm(hidden[-1], "norm.weight") @ self.head.T, hidden[-1]

    def propose(self, tokens: list[int], states: torch.Tensor) -> list[int]:
        """``tokens`` after the first, each beside the base's states at the one before it."""
        hidden, found = states @ self.w["fc.weight"].T, []
        for _ in range(STEPS):
            logits, state = self.layer(tokens[1:] + found, hidden)
            best = int(logits.argmax())
            found.append(best + int(self.w["d2t"][best]) if "d2t" in self.w else best)
            hidden = torch.cat([hidden, state[None]])
        return found


@torch.no_grad()
def complete(base: torch.nn.Module, draft: Served, prompt: list[int], ends: list[int]) -> tuple[list[int], int]:
    """The greedy completion, and the passes of the base that it took."""
    tokens, passes, proposed = list(prompt), 0, []
    while True:
        told = base(torch.tensor([tokens + proposed]), output_hidden_states=True)
        passes += 1
        said = told.logits[0, len(tokens) - 1 :].argmax(-1).tolist()
        right = next((n for n, token in enumerate(proposed) if token != said[n]), len(proposed))
        states = torch.cat([told.hidden_states[layer + 1][0] for layer in draft.layers], -1)
        for token in said[: right + 1]:
            tokens.append(token)
            if token in ends or len(tokens) - len(prompt) == MOST:
                return tokens[len(prompt) :], passes
        proposed = draft.propose(tokens, states[: len(tokens) - 1])


def test_the_exported_draft_has_the_acceptance_length_of_before(trained: tuple, tmp_path: Path) -> None:
    """Token for token, and pass for pass."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    from mlmsub.runtime.generation import acceptance, prompts

    runner, source, folder = trained
    result = runner(
        "validate", HF_MODEL_CKPT=source, MLM_MODEL_CKPT=folder / "mlm", VALIDATE_OUT=tmp_path / "out", STEPS=STEPS,
        OSL=MOST, PROMPTS_PATH=folder / "prompts.jsonl", MLM_EXTRA_ARGS="",
    )  # fmt: skip
    assert result.code == 0, result.out
    before = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(source)
    base = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    draft, ends = Served(folder / "draft", base), prompts.end_tokens(source, tokenizer)
    asked = acceptance.questions(folder / "prompts.jsonl", tokenizer, 100)
    after = [complete(base, draft, question.tokens, ends) for question in asked]
    assert after == [(answer["tokens"], answer["passes"]) for answer in before]
    lengths = [len(tokens) / passes for tokens, passes in after]
    told = json.loads((tmp_path / "out" / "acceptance.json").read_text())["acceptance_length"]
    assert sum(lengths) / len(lengths) == pytest.approx(told)
    assert 1.3 < told < 1 + STEPS, f"{lengths}: a draft that is never right, or always, shows nothing"
