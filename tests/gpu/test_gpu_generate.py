"""generate on a GPU: a dense model's likeliest tokens, by a CUDA graph; models with experts, by eager steps."""

from __future__ import annotations

import json
from pathlib import Path

from gpurig import Chain
from rig import Result
from test_generate import check_greedy

# of different lengths, and more than one batch
PROMPTS = [" ".join(["The river runs past tea and maps"] * times) for times in (1, 9, 3, 17, 2)]
FLAGS = "--max-new-tokens 24 --generate-batch-size 4"


def generate(chain: Chain, out: Path, **variables: object) -> tuple[Result, list[dict]]:
    given = {"HF_MODEL_CKPT": chain.source, "GENERATE_OUT": out, "MLM_EXTRA_ARGS": FLAGS, **variables}
    done = chain.stage("generate", *PROMPTS, **given)
    assert done.code == 0, done.out
    return done, [json.loads(line) for line in (out / "completions.jsonl").read_text().splitlines()]


def test_completions(chain: Chain, tmp_path: Path) -> None:
    done, found = generate(chain, tmp_path / "out")
    assert [line["prompt"] for line in found] == PROMPTS
    if not chain.experts:  # where they nearly tie in bf16, a token goes to another one than in float32
        check_greedy(found, chain.source, 24)
    assert ("decode steps are a CUDA graph" in done.out) == (not chain.experts), done.out
    assert "no CUDA graph" not in done.out, done.out


def test_a_quantized_checkpoint(llama: Chain, tmp_path: Path) -> None:
    _, made = llama.quantize("FP8_DEFAULT_CFG")
    done, found = generate(llama, tmp_path / "out", MLM_MODEL_CKPT=made, MLM_EXTRA_ARGS=f"{FLAGS} --ignore-eos")
    assert [len(line["tokens"]) for line in found] == [24] * len(PROMPTS)
    assert done.done["peak_gib"]["GPU"] > 0
