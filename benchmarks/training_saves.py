"""Bytes and seconds of an eagle3 iteration on disk, with and without its frozen base, on a Kimi-K2-shaped model.

    python benchmarks/training_saves.py [--layers 8] [--experts 384] [--folder DIR]

A random DeepSeek-V3 with Kimi-K2's traits (latent attention, one dense layer, then routed and shared experts) is
trained for two iterations that are both saved: once as is the default, once with --save-base. What is compared is the
second save. Then both are calculated for Kimi-K2's own sizes. One process on the CPU; about a minute, 3 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
WORDS = ["the", "model", "reads", "a", "row", "of", "tokens", "and", "learns", "what", "comes", "next", "in", "it"]
MODEL = "benchmark/kimi-twin"
# float32 copies of the weights, and Adam's two moments, beside the weights in bfloat16
TRAINED_BYTES, FROZEN_BYTES = 2 + 4 + 4 + 4, 2


@dataclass(frozen=True)
class Sizes:
    """Of a model of Kimi-K2's architecture; the defaults are Kimi-K2's."""

    layers: int = 61
    experts: int = 384
    hidden: int = 7168
    dense: int = 18432
    expert: int = 2048
    vocabulary: int = 163840
    heads: int = 64
    query_rank: int = 1536
    key_rank: int = 512
    rope: int = 64
    width: int = 128

    def base(self) -> int:
        """Weights, without those of the norms."""
        attention = self.query_rank * (self.hidden + self.heads * (self.width + self.rope))
        attention += self.hidden * (self.key_rank + self.rope) + self.key_rank * self.heads * 2 * self.width
        attention += self.heads * self.width * self.hidden
        experts = (self.experts + 1) * 3 * self.hidden * self.expert + self.experts * self.hidden
        ends = 2 * self.vocabulary * self.hidden
        return self.layers * attention + 3 * self.hidden * self.dense + (self.layers - 1) * experts + ends

    def draft(self, vocabulary: int = 0) -> int:
        """Weights of the draft that eagle3 makes; ``vocabulary``: tokens of an output layer of its own."""
        groups = 8 if self.heads % 8 == 0 else self.heads
        attention = (self.heads + 2 * groups) * self.width * 2 * self.hidden + self.heads * self.width * self.hidden
        return 3 * self.hidden**2 + attention + 3 * self.hidden * self.dense + vocabulary * self.hidden


def make_source(folder: Path, sizes: Sizes) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

    words = ["<end>", "<unknown>", *dict.fromkeys(WORDS)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[0]).save_pretrained(folder)
    config = DeepseekV3Config(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.dense,
        moe_intermediate_size=sizes.expert, num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads, n_shared_experts=1, n_routed_experts=sizes.experts, num_experts_per_tok=8,
        first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=2.827, kv_lora_rank=sizes.key_rank,
        q_lora_rank=sizes.query_rank, qk_rope_head_dim=sizes.rope, qk_nope_head_dim=sizes.width,
        v_head_dim=sizes.width, max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=0,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def train(source: Path, run_dir: Path, save: Path, *words: str) -> float:
    """Two iterations of eagle3, saved after each; returns the seconds of the second save."""
    from mlmsub.core import hf_config, modelconf

    conf = hf_config.convert(json.loads((source / "config.json").read_text()), MODEL)
    conf.megatron_args.update({"seq-length": "64", "moe-token-dispatcher-type": "allgather"})
    (run_dir / "conf").mkdir(parents=True)
    (run_dir / "conf" / "model.yaml").write_text(modelconf.render(conf))
    data = run_dir / "data.jsonl"
    data.write_text("".join(json.dumps({"text": " ".join(WORDS)}) + "\n" for _ in range(64)))
    given = {
        "MLMSUB_RUN_DIR": run_dir, "HF_MODEL_CKPT": source, "MLM_MODEL_SAVE": save, "MLM_WORK_DIR": run_dir,
        "MLM_DATA_ARGS": f"--train-iters 2 --split 100,0,0 --finetune-hf-dataset {data}",
        "MLM_EVAL_ARGS": "--no-eval --save-interval 1 --log-interval 1", "PYTHONPATH": ROOT,
    }  # fmt: skip
    environment = {**os.environ, **{name: str(value) for name, value in given.items()}}
    subprocess.run([sys.executable, "-m", "mlmsub.runtime", "eagle3", MODEL, *words], env=environment, check=True)
    lines = map(json.loads, (run_dir / "state" / "events.jsonl").read_text().splitlines())
    return [line["seconds"] for line in lines if line["event"] == "step" and line["name"] == "save"][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    given = parser.parse_args()
    sizes = Sizes(given.layers, given.experts, 256, 512, 64, 512, 8, 64, 64, 16, 32)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        make_source(folder / "hf", sizes)
        rows = []
        for way, words in (("the draft, and a reference", ()), ("--save-base", ("--save-base",))):
            save = folder / f"mlm{len(rows)}"
            seconds = train(folder / "hf", folder / f"run{len(rows)}", save, *words)
            here = save / "iter_0000002"
            rows.append((way, sum(file.stat().st_size for file in here.rglob("*") if file.is_file()), seconds))
        tensors, seconds = hash_base(folder / "mlm0" / "release")
    print(f"\nbase {sizes.base():,} weights, draft {sizes.draft():,}\n\n| an iteration has | bytes | save, s |")
    print("| --- | ---: | ---: |")
    for way, size, spent in rows:
        print(f"| {way} | {size:,} | {spent:.2f} |")
    print(f"\nfull : draft {rows[1][1] / rows[0][1]:.1f} : 1; the base's hash: {tensors:,} tensors, {seconds:.2f} s")
    calculate(Sizes())


def hash_base(release: Path) -> tuple[int, float]:
    """How many stored tensors the base has, and the seconds of their hash."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    from mlmsub.runtime.checkpoints import frozen_base

    plan = FileSystemReader(release).read_metadata()
    start = time.monotonic()
    frozen_base.digest(release)
    spent = time.monotonic() - start
    return sum(index.fqn.startswith(frozen_base.WEIGHTS) for index in plan.storage_data), spent


def calculate(kimi: Sizes) -> None:
    print(f"\nKimi-K2, calculated: base {kimi.base():,} weights; GB of an iteration\n")
    print("| draft's vocabulary | draft's weights | draft, and a reference | --save-base | ratio |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, vocabulary in (("whole", 0), ("32,000", 32000)):
        alone = kimi.draft(vocabulary) * TRAINED_BYTES
        full = alone + kimi.base() * FROZEN_BYTES
        print(f"| {name} | {kimi.draft(vocabulary):,} | {alone / 1e9:.1f} | {full / 1e9:,.0f} | {full / alone:.0f} |")


if __name__ == "__main__":
    main()
