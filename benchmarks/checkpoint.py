"""Import of a checkpoint with many small tensors and a real-size index, and saves against the disk's own speed.

    python benchmarks/checkpoint.py [--layers 60] [--experts 384] [--library-layers 2] [--gib 3] [--folder DIR]
    python benchmarks/checkpoint.py --saves cuda [--gib 3] [--folder DIR]     # saves alone, of tensors on the GPU

Import: a DeepSeek-V3 of tiny FP8-block tensors under the published names, one file per layer and one for the rest.
This package imports all layers. modelopt's own importer, which parses the index for every tensor, takes
`--library-layers` of them beside the whole index. Each is a process of its own, on the CPU; opens are those of
Python's open() and safetensors' safe_open.

Saves: `--gib` GiB of bf16 in tensors of 32 MiB by one process, against the same bytes through write() and fsync().
With `--saves cuda` the bytes of every way come from the GPU.
Everything is repeated and the best of each is taken. Prints JSON lines, then the tables of checkpoint.md.
"""

from __future__ import annotations

import argparse
import builtins
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

PLAIN = "write() and fsync()"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

HIDDEN, FFN, RANK, ROPE, HEADS = 8, 8, 8, 4, 2
ARGUMENTS = {
    "hidden-size": HIDDEN, "ffn-hidden-size": FFN, "num-attention-heads": HEADS, "kv-channels": 4,
    "normalization": "RMSNorm", "swiglu": True, "disable-bias-linear": True, "position-embedding-type": "rope",
    "seq-length": 64, "max-position-embeddings": 64, "attention-dropout": 0.0, "hidden-dropout": 0.0,
    "multi-latent-attention": True, "qk-layernorm": True, "q-lora-rank": RANK, "kv-lora-rank": RANK, "qk-head-dim": 4,
    "qk-pos-emb-head-dim": ROPE, "v-head-dim": 4, "rope-type": "rope", "moe-ffn-hidden-size": FFN,
    "moe-shared-expert-intermediate-size": FFN, "moe-router-topk": 2, "moe-router-score-function": "sigmoid",
    "moe-router-enable-expert-bias": True, "moe-router-dtype": "fp32", "moe-router-load-balancing-type": "none",
    "moe-token-dispatcher-type": "allgather",
}  # fmt: skip


def layer_tensors(layer: int, experts: int) -> dict[str, Any]:
    """Layer 0 is dense, as in DeepSeek-V3's; projections are FP8 with one scale each, for they are one block."""
    import torch

    made: dict[str, Any] = {}

    def projection(name: str, *shape: int) -> None:
        made[f"{name}.weight"] = torch.ones(shape).to(torch.float8_e4m3fn)
        made[f"{name}.weight_scale_inv"] = torch.full((1, 1), 0.3)

    prefix = f"model.layers.{layer}"
    attention = f"{prefix}.self_attn"
    projection(f"{attention}.q_a_proj", RANK, HIDDEN)
    projection(f"{attention}.q_b_proj", HEADS * 8, RANK)
    projection(f"{attention}.kv_a_proj_with_mqa", RANK + ROPE, HIDDEN)
    projection(f"{attention}.kv_b_proj", HEADS * 8, RANK)
    projection(f"{attention}.o_proj", HIDDEN, HEADS * 4)
    for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"):
        made[f"{prefix}.{name}.weight"] = torch.ones(8, dtype=torch.bfloat16)
    parts = ["mlp"] if layer == 0 else [f"mlp.experts.{expert}" for expert in range(experts)] + ["mlp.shared_experts"]
    for part in parts:
        for name in ("gate_proj", "up_proj", "down_proj"):
            projection(f"{prefix}.{part}.{name}", FFN, HIDDEN)
    if layer:
        made[f"{prefix}.mlp.gate.weight"] = torch.ones(experts, HIDDEN, dtype=torch.bfloat16)
        made[f"{prefix}.mlp.gate.e_score_correction_bias"] = torch.rand(experts)
    return made


def make_source(folder: Path, layers: int, experts: int) -> int:
    """Write the checkpoint; returns the number of its tensors."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    index: dict[str, str] = {}
    sizes = {"model.embed_tokens": (64, HIDDEN), "lm_head": (64, HIDDEN), "model.norm": (HIDDEN,)}
    rest = {f"{name}.weight": torch.ones(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    for number in range(layers + 1):
        file = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        tensors = layer_tensors(number, experts) if number < layers else rest
        save_file(tensors, folder / file)
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=2))
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 64}
    config |= {"num_hidden_layers": layers, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return len(index)


def peak_mib() -> int:
    """Of this program alone, unlike ru_maxrss, which a process has from the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


def import_once(way: str, folder: Path, layers: int, experts: int) -> None:
    """One import in this process; prints a JSON line of its own counts, memory and seconds."""
    os.environ |= {"MLMSUB_RUN_DIR": str(folder.parent / "run"), "HF_MODEL_CKPT": str(folder), "MLM_EXTRA_ARGS": ""}
    import safetensors
    import torch
    from modelopt.torch.export.plugins import mcore_custom

    from mlmsub.runtime.checkpoints import hf_import
    from mlmsub.runtime.env import Env
    from mlmsub.runtime.modelconf import ModelConf
    from mlmsub.runtime.models import model
    from mlmsub.runtime.progress import Steps
    from mlmsub.runtime.session import Job, start

    frequency = f"[0]*1+[1]*{layers - 1}"
    arguments = {**ARGUMENTS, "num-layers": layers, "num-experts": experts, "moe-layer-freq": frequency}
    job = Job("convert", "tiny", [], Env(), Steps())
    with start(job, ModelConf("tiny", megatron_args=arguments), job.env.layout(), lambda _: None, []) as session:
        made = model.build(session.args, session.conf, "cpu")
        opens = {"index": 0, "files": 0}

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(path: Any, *rest: Any, **options: Any) -> Any:
                if str(path).startswith(str(folder)) and not str(path).endswith("config.json"):
                    opens["index" if str(path).endswith(".json") else "files"] += 1
                return function(path, *rest, **options)

            return call

        builtins.open = counted(builtins.open)
        mcore_custom.safe_open = counted(safetensors.safe_open)
        Path.open = counted(Path.open)  # type: ignore[method-assign]
        before, seconds = peak_mib(), time.monotonic()
        if way == "ours":
            hf_import.import_weights(made, folder, session.conf, torch.bfloat16)
        else:
            from modelopt.torch.export import import_mcore_gpt_from_hf

            with redirect_stderr(StringIO()):
                import_mcore_gpt_from_hf(made, str(folder), dtype=torch.bfloat16, moe_router_dtype="fp32")
        seconds = time.monotonic() - seconds
    after = peak_mib()
    tensors = sum(len(layer_tensors(number, experts)) for number in range(layers)) + 3
    result = {"tensors": tensors, "seconds": round(seconds, 2), **opens, "peak_mib": after}
    print("RESULT " + json.dumps({"way": way, "layers": layers, **result, "grown_mib": after - before}))


def imports(folder: Path, layers: int, experts: int, library_layers: int) -> str:
    """The table of both importers."""
    tensors = make_source(folder / "hf", layers, experts)
    (folder / "run" / "conf").mkdir(parents=True)
    found = {}
    for way, count in (("ours", layers), ("modelopt", library_layers)):
        words = ["--one", way, "--folder", folder / "hf", "--layers", count, "--experts", experts]
        done = subprocess.run([sys.executable, __file__, *map(str, words)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        found[way] = json.loads(done.stdout.rpartition("RESULT ")[2])
        print(json.dumps(found[way]), flush=True)
    one, other = found["ours"], found["modelopt"]
    size = (folder / "hf" / "model.safetensors.index.json").stat().st_size / 1e6
    rows = [
        f"{layers} layers x {experts} experts: {tensors} tensors in {layers + 1} files, index {size:.1f} MB.", "",
        "| | layers | tensors | seconds | ms per tensor | index parsed | file opens | peak RSS, MiB | grown by, MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for way, each in found.items():
        cost = f"{each['seconds'] / each['tensors'] * 1e3:.2f}"
        cells = [each["layers"], each["tensors"], each["seconds"], cost, each["index"], each["files"]]
        rows.append(f"| {' | '.join(map(str, [way, *cells, each['peak_mib'], each['grown_mib']]))} |")
    times, opens = (other[what] / other["tensors"] * tensors / one[what] for what in ("seconds", "files"))
    told = f"All layers at modelopt's cost per tensor: {times:.0f} times the seconds, {opens:.0f} times the opens."
    return "\n".join([*rows, "", told])


def saves(folder: Path, gib: float, rounds: int, device: str) -> str:
    """The table of saves: megatron-core's writer, this package's, and plain writes, with one thread and with four."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from mlmsub.runtime.checkpoints import checkpoint_writer
    from mlmsub.runtime.models import compat, cpu

    if device == "cpu":
        cpu.install()
    compat.in_process_results_queue()
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    weights = [torch.rand(4096, 4096, device=device).to(torch.bfloat16) for _ in range(int(gib * 32))]

    def raw(here: Path, threads: int) -> None:
        def write(number: int) -> None:
            with (here / str(number)).open("wb", buffering=0) as file:
                for weight in weights[number::threads]:
                    file.write(memoryview(weight.cpu().view(torch.uint8).numpy()))
                os.fsync(file.fileno())

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, range(threads)))

    def save(here: Path, kind: Any, threads: int) -> None:
        state = {f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", weight) for n, weight in enumerate(weights)}
        dist_checkpointing.save(state, str(here), kind("torch_dist", 1, thread_count=threads))

    ways: dict[str, Callable[[Path, int], None]] = {
        PLAIN: raw,
        "megatron-core": lambda here, threads: save(here, TorchDistSaveShardedStrategy, threads),
        "mlmsub": lambda here, threads: save(here, checkpoint_writer.Writer, threads),
    }
    best: dict[tuple[str, int], float] = {}
    for turn in range(rounds):
        for threads in (1, checkpoint_writer.THREADS):
            for name, way in ways.items():
                here = folder / "save"
                here.mkdir()
                seconds = time.monotonic()
                way(here, threads)
                seconds = time.monotonic() - seconds
                shutil.rmtree(here)
                os.sync()
                print(json.dumps({"save": name, "threads": threads, "round": turn, "seconds": round(seconds, 2)}))
                best[name, threads] = min(seconds, best.get((name, threads), seconds))
    fastest = min(seconds for (name, _), seconds in best.items() if name == PLAIN)
    rows = ["| | threads | GB/s | of the fastest plain write |", "| --- | ---: | ---: | ---: |"]
    size = sum(weight.nbytes for weight in weights) / 1e9
    rows += [f"| {name} | {n} | {size / s:.2f} | {fastest / s:.0%} |" for (name, n), s in sorted(best.items())]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 60), ("experts", 384), ("library-layers", 2), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: a temporary one")
    parser.add_argument("--one", choices=("ours", "modelopt"), help=argparse.SUPPRESS)
    parser.add_argument("--saves", choices=("cpu", "cuda"), help="saves alone, of tensors there")
    given = parser.parse_args()
    if given.saves != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if given.one:
        import_once(given.one, given.folder, given.layers, given.experts)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        tables = [saves(Path(scratch), given.gib, given.rounds, given.saves or "cpu")]
        if given.saves is None:
            tables.insert(0, imports(Path(scratch), given.layers, given.experts, given.library_layers))
        print("\n" + "\n\n".join(tables))


if __name__ == "__main__":
    main()
