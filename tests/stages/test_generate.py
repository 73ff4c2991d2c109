"""generate as a user runs it: one process and two, prompts of every kind, what is written and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rig import ROOT, Result, Runner, make_latent, make_latent_conf
from test_decoding import build, ours, theirs

PROMPTS = ["The river", "Tea is made of leaves that are dried, rolled and", "A map shows where the roads lead and"]


@pytest.fixture(scope="module")
def asked(folder: Path) -> Path:
    file = folder / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    return file


def generate(stage: Runner, source: Path, out: Path, *words: str, ranks: bool = False, **variables: object) -> Result:
    given = {"HF_MODEL_CKPT": source, "GENERATE_OUT": out, "MLM_EXTRA_ARGS": "--osl 12", **variables}
    return (stage.ranks if ranks else stage)("generate", *words, **given)


def lines(done: Result) -> list[dict]:
    assert done.code == 0, done.out
    out = Path(done.done["outputs"]["GENERATE_OUT"])
    assert [path.name for path in out.iterdir()] == ["completions.jsonl"]
    return [json.loads(line) for line in (out / "completions.jsonl").read_text().splitlines()]


def check_greedy(found: list[dict], source: Path, count: int, kind: str = "AutoModelForCausalLM") -> None:
    """Each token is transformers' likeliest next one in float32, but for what rounding to bf16 can swap."""
    import transformers

    reference = getattr(transformers, kind).from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    for line in found:
        prompt = tokenizer(line["prompt"])["input_ids"]
        assert line["prompt_tokens"] == len(prompt)
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + line["tokens"]])).logits[0, len(prompt) - 1 : -1]
        missed = logits.max(-1).values - logits[torch.arange(len(line["tokens"])), torch.tensor(line["tokens"])]
        assert float(missed.max()) < 0.1 * float(logits.std()), missed
        assert line["completion"] == tokenizer.decode(line["tokens"], skip_special_tokens=True)
        assert 0 not in line["tokens"][:-1]
        assert line["finish_reason"] == ("stop" if line["tokens"][-1] == 0 else "length")
        assert line["finish_reason"] == "stop" or len(line["tokens"]) == count


@pytest.fixture(scope="module")
def greedy(stage: Runner, source: Path, asked: Path, folder: Path) -> list[dict]:
    return lines(generate(stage, source, folder / "greedy", PROMPTS_PATH=asked))


def test_completions_are_the_likeliest(greedy: list[dict], source: Path) -> None:
    assert [line["prompt"] for line in greedy] == PROMPTS
    assert [(line["index"], line["turn"]) for line in greedy] == [(0, 0), (1, 0), (2, 0)]
    check_greedy(greedy, source, 12)


def test_a_pipeline_makes_the_same(
    greedy: list[dict], stage: Runner, source: Path, bf16: Path, asked: Path, folder: Path
) -> None:
    done = generate(stage, source, folder / "pp2", ranks=True, PROMPTS_PATH=asked, PP=2, MLM_MODEL_CKPT=bf16)
    assert lines(done) == greedy


def test_tensor_parallel(stage: Runner, source: Path, asked: Path, folder: Path) -> None:
    extra = "--osl 12 --sequence-parallel"  # which decoding switches off
    done = generate(stage, source, folder / "tp2", ranks=True, PROMPTS_PATH=asked, TP=2, MLM_EXTRA_ARGS=extra)
    check_greedy(lines(done), source, 12)


def test_replicas_share_the_prompts(greedy: list[dict], stage: Runner, source: Path, asked: Path, folder: Path) -> None:
    """Three prompts on two replicas; each replica's batch has its own padding."""
    done = generate(stage, source, folder / "dp2", ranks=True, PROMPTS_PATH=asked)
    assert "batches of 2" in done.out
    found = lines(done)
    assert [line["prompt"] for line in found] == PROMPTS
    check_greedy(found, source, 12)


def test_experts_on_two_ranks(folder: Path, tmp_path: Path, asked: Path) -> None:
    """Replicas whose experts are spread over both take every step together, also when one has ended."""
    latent = make_latent(folder / "hf-latent-generate")
    stage = Runner(tmp_path, make_latent_conf(tmp_path / "model.yaml"))
    done = generate(stage, latent, tmp_path / "ep2", ranks=True, PROMPTS_PATH=asked, EP=2)
    found = lines(done)
    assert [line["prompt"] for line in found] == PROMPTS
    check_greedy(found, latent, 12)


def test_a_quantized_checkpoint(stage: Runner, source: Path, fp8: Result, folder: Path) -> None:
    done = generate(
        stage, source, folder / "fp8-generate", *PROMPTS, MLM_MODEL_CKPT=folder / "fp8",
        MLM_EXTRA_ARGS="--max-new-tokens 4 --ignore-eos --generate-batch-size 2",
    )  # fmt: skip
    assert [len(line["tokens"]) for line in lines(done)] == [4, 4, 4]
    assert "3 prompts, batches of 2, up to 4 tokens, greedy" in done.out


def test_conversations_turn_by_turn(stage: Runner, source: Path, tmp_path: Path) -> None:
    """The built-in prompts have two turns; the second reads the first's answer."""
    done = generate(stage, source, tmp_path / "out", MLM_EXTRA_ARGS="--osl 3 --ignore-eos --fraction 0.25")
    found = lines(done)
    assert [(line["index"], line["turn"]) for line in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[1]["prompt"].startswith(found[0]["prompt"] + found[0]["completion"])
    assert "no chat template" in done.out
    events = [json.loads(line) for line in (done.run_dir / "state" / "events.jsonl").read_text().splitlines()]
    speeds = [event for event in events if event["event"] == "generated"]
    assert [(event["turn"], event["tokens"]) for event in speeds] == [(0, 6), (1, 6)]


def test_records_that_cannot_be_used(stage: Runner, source: Path, tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"text": "The river"}\n{"title": "x"}\n{"text": "' + "long " * 600 + '"}\n')
    done = generate(stage, source, tmp_path / "out", MLM_EXTRA_ARGS=f"--osl 600 --prompts {file}")
    first, *rest = lines(done)
    assert first["prompt_tokens"] + len(first["tokens"]) <= 512
    assert [(line["index"], sorted(line)) for line in rest] == [(1, ["error", "index"]), (2, ["error", "index"])]
    assert "2 of 3 records were left out" in done.out and "the model reads 512" in done.out
    file.write_text('{"title": "x"}\n')
    done = generate(stage, source, tmp_path / "other", MLM_EXTRA_ARGS=f"--prompts {file}")
    assert done.code == 2 and "none of the 1 records can be used" in done.out
    assert not (tmp_path / "other" / "completions.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        ((), {"PROMPTS_PATH": "/nowhere.txt"}, "PROMPTS_PATH: /nowhere.txt is not a file of kind"),
        ((), {"MLM_EXTRA_ARGS": "--prompts x.csv"}, "--prompts: x.csv is not a file of kind"),
        (("Hello", "--chat"), {}, "--chat: the tokenizer of"),
        (("Hello",), {"MLM_EXTRA_ARGS": "--top-p 1.5"}, "MLM_EXTRA_ARGS: --top-p: invalid"),
        (("Hello",), {"MLM_EXTRA_ARGS": "--draft-length 3"}, "--draft-length is not implemented"),
    ],
)
def test_errors_name_the_field(
    stage: Runner, source: Path, tmp_path: Path, words: tuple[str, ...], variables: dict, said: str
) -> None:
    done = generate(stage, source, tmp_path / "out", *words, **variables)
    assert done.code == 2
    assert said in done.out


def test_smollm2_answers_as_in_transformers(tmp_path: Path) -> None:
    """In float32, where rounding swaps no token; the stage's own bf16 is as close as bf16 is."""
    pytest.importorskip("gguf")
    import smollm2
    from rig import session
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = smollm2.checkpoint()
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    stage = Runner(tmp_path, ROOT / "conf" / f"{name}.yaml", name)
    questions = ["What is the capital of France?", "Name three colours.", "How many legs does a spider have, and why?"]
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(source)
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    want = [theirs(reference, prompt, [2]) for prompt in prompts]
    with session(stage, source) as opened_session:
        got = ours(build(opened_session, source), prompts, [2])
    assert [done.tokens for done in got] == want
    assert got[0].reason == "stop" and "Paris" in tokenizer.decode(got[0].tokens)

    found = lines(generate(stage, source, tmp_path / "out", *questions, "--chat", MLM_EXTRA_ARGS="--osl 24"))
    assert [line["prompt"] for line in found] == texts
    assert found[0]["tokens"] == want[0]
