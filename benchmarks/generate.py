"""Tokens per second of mlmsub's decoding, beside modelopt's megatron_generate on the same model.

    python benchmarks/generate.py HF_FOLDER                  # a GPU; SmolLM2-135M-Instruct takes about two minutes
    python benchmarks/generate.py HF_FOLDER --new 4 --prompt 8 --batches 1 2 --repeat 1   # a CPU: does the script run?

HF_FOLDER is a checkpoint of the model in --conf (`python tests/stages/smollm2.py HF_FOLDER` makes SmolLM2's). Each line
is JSON: `tokens_per_second` counts made tokens over prompt and decode seconds, `step_ms` is one decode step of the
batch; the run is the median of --repeat, after one that captures the CUDA graph. Prompts are random tokens of one
length, and end tokens are ignored.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mlmsub.runtime.checkpoints import hf_import
from mlmsub.runtime.env import Env
from mlmsub.runtime.progress import Steps
from mlmsub.runtime.session import Job, Session, start
from mlmsub.runtime.stages import generate

SMOLLM2 = Path(__file__).resolve().parent.parent / "conf" / "HuggingFaceTB" / "SmolLM2-135M-Instruct.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--conf", type=Path, default=SMOLLM2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=256, help="tokens")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--reference", action="store_true", help="time megatron_generate at batch 1 too (CUDA only)")
    given = parser.parse_args()
    with opened(given.source, given.conf) as session:
        model = build(session)
        for batch in given.batches:
            tell(ours(model, batch, given))
        if given.reference:
            tell(theirs(model, given))


@contextmanager
def opened(source: Path, conf: Path) -> Iterator[Session]:
    """The session that the stage itself works in, alone in its process group."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "conf").mkdir()
        shutil.copy(conf, Path(folder) / "conf" / "model.yaml")
        os.environ |= {"MLMSUB_RUN_DIR": folder, "HF_MODEL_CKPT": str(source)}
        job = Job("generate", yaml.safe_load(conf.read_text())["model"], [], Env(), Steps())
        with start(job, job.conf(), job.env.layout(), generate._add_arguments, []) as session:
            yield session


def build(session: Session) -> Any:
    from mlmsub.runtime.models import model

    made = model.build(session.args, session.conf, model.device(session.args))
    hf_import.import_weights(made, session.source, session.conf, session.args.params_dtype)
    return made


def ours(model: Any, batch: int, given: argparse.Namespace) -> dict[str, Any]:
    from mlmsub.runtime.generation.batches import Generator, Speed, Task
    from mlmsub.runtime.generation.decoding import Decoder, cache_bytes
    from mlmsub.runtime.generation.sampling import Sampling

    tasks = [Task(str(row), prompt(row, given.prompt), given.new) for row in range(batch)]
    graphs = generate._graphs(model) and not given.eager
    with Decoder(model, given.prompt + given.new) as decoder:
        maker = Generator(decoder, batch, given.new, [], Sampling(), graphs=graphs)
        speeds = []
        for _ in range(given.repeat + 1):
            maker.speed = Speed()
            maker.run(tasks, given.prompt, lambda row, done: None)
            speeds.append(maker.speed)
    speed = sorted(speeds[1:], key=lambda one: one.decode)[given.repeat // 2]
    return {
        "batch": batch, "prompt": given.prompt, "new": given.new, "graph": maker.graphs,
        "tokens_per_second": round(speed.tokens / (speed.prefill + speed.decode), 1),
        "prefill_s": round(speed.prefill, 4), "decode_s": round(speed.decode, 4),
        "step_ms": round(1000 * speed.decode / max(1, given.new - 1), 3),
        "cache_mib": round(cache_bytes(model) * batch * (given.prompt + given.new) / 2**20, 1),
    }  # fmt: skip


def theirs(model: Any, given: argparse.Namespace) -> dict[str, Any]:
    import torch
    from modelopt.torch.utils.plugins.megatron_generate import megatron_generate

    ids = torch.tensor([prompt(0, given.prompt)], device="cuda")
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        megatron_generate(model, ids, osl=given.new, disable_tqdm=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return {"reference": "megatron_generate", "batch": 1, "tokens_per_second": round(given.new / seconds[-1], 1)}


def prompt(row: int, length: int) -> list[int]:
    import torch

    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(row)).tolist()


def tell(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
