"""Peak memory on one GPU, measured, beside what mlmsub.core.memory estimates for the same work.

    python benchmarks/memory.py                      # one GPU with 80 GB or more; about two minutes
    python benchmarks/memory.py --device cpu --tiny  # every case at toy sizes: does the script run?

Models have random weights, so nothing is downloaded. Each case runs in its own process and prints one JSON line:
`measured` is torch.cuda.max_memory_allocated in GiB, `reserved` the allocator's peak, `estimated` the estimate
without its overhead, `ratio` estimated / measured; with --jobs 1, `used_on_gpu` less `reserved` is the CUDA
context. On a CPU the peak is that of all tensors alive at once.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mlmsub.core import architecture, memory
from mlmsub.core.layout import Layout, split

COMMON = {
    "swiglu": "true", "disable-bias-linear": "true", "normalization": "RMSNorm", "position-embedding-type": "rope",
    "attention-dropout": "0.0", "hidden-dropout": "0.0", "max-position-embeddings": "65536", "seq-length": "4096",
}  # fmt: skip
MODELS = {
    "llama-1b": {
        "num-layers": "16", "hidden-size": "2048", "ffn-hidden-size": "8192", "num-attention-heads": "32",
        "num-query-groups": "8", "group-query-attention": "true", "kv-channels": "64", "padded-vocab-size": "128256",
    },
    "llama-8b": {
        "num-layers": "32", "hidden-size": "4096", "ffn-hidden-size": "14336", "num-attention-heads": "32",
        "num-query-groups": "8", "group-query-attention": "true", "kv-channels": "128",
        "padded-vocab-size": "128256", "untie-embeddings-and-output-weights": "true",
    },
    "qwen3-moe": {
        "hidden-size": "2048", "ffn-hidden-size": "6144", "num-attention-heads": "32",
        "num-query-groups": "4", "group-query-attention": "true", "kv-channels": "128",
        "padded-vocab-size": "151936", "qk-layernorm": "true",
        "num-experts": "128", "moe-ffn-hidden-size": "768", "moe-router-topk": "8", "moe-router-dtype": "fp32",
        "moe-router-load-balancing-type": "none", "untie-embeddings-and-output-weights": "true",
    },
    "deepseek-moe": {
        "hidden-size": "2048", "ffn-hidden-size": "10944", "num-attention-heads": "16", "kv-channels": "128",
        "padded-vocab-size": "102400", "multi-latent-attention": "true", "q-lora-rank": "1536", "kv-lora-rank": "512",
        "qk-head-dim": "128", "qk-pos-emb-head-dim": "64", "v-head-dim": "128", "qk-layernorm": "true",
        "rope-type": "rope", "num-experts": "64", "moe-ffn-hidden-size": "1408", "moe-router-topk": "6",
        "moe-shared-expert-intermediate-size": "2816", "moe-router-dtype": "fp32",
        "moe-router-load-balancing-type": "none", "untie-embeddings-and-output-weights": "true",
    },
}  # fmt: skip
TINY = {
    "hidden-size": "256", "ffn-hidden-size": "768", "num-attention-heads": "8", "num-query-groups": "4",
    "kv-channels": "32", "padded-vocab-size": "2048", "num-experts": "8", "moe-ffn-hidden-size": "192",
    "moe-router-topk": "2", "moe-shared-expert-intermediate-size": "192", "q-lora-rank": "96", "kv-lora-rank": "64",
    "qk-head-dim": "32", "qk-pos-emb-head-dim": "16", "v-head-dim": "32", "num-layers": "4",
    "moe-layer-freq": "[0]*1+[1]*3",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What to run: a stage's work on a model; `args` are more Megatron arguments."""

    model: str
    work: memory.Work
    args: dict[str, str] = field(default_factory=dict)

    def megatron_args(self, tiny: bool) -> dict[str, str]:
        own = COMMON | MODELS[self.model] | self.args
        if "multi-latent-attention" in own:
            own["kv-channels"] = "128"
        small = {name: value for name, value in TINY.items() if name in own} if tiny else {}
        return own | small


FORWARD = memory.Work("forward", logits=False)
TRAINING = memory.Work("training", distributed_optimizer=True, fused_optimizer=False)
# the most telling first
CASES = {
    "eagle3 dense 1x4096": Case("llama-8b", memory.Work("eagle3", batch=1, length=4096, fused_optimizer=False)),
    "train MoE 2x4096": Case("qwen3-moe", replace(TRAINING, batch=2, length=4096), {"num-layers": "2"}),
    "train dense 1x32768 full recompute": Case(
        "llama-1b", replace(TRAINING, batch=1, length=32768, recompute="full"),
        {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": "1"},
    ),
    "train dense 8x2048": Case("llama-1b", replace(TRAINING, batch=8, length=2048)),
    "calibrate MoE 32x512": Case("qwen3-moe", replace(FORWARD, batch=32, length=512), {"num-layers": "8"}),
    "calibrate dense 32x512": Case("llama-8b", replace(FORWARD, batch=32, length=512)),
    "calibrate dense 1x65536": Case("llama-8b", replace(FORWARD, batch=1, length=65536)),
    "train MLA+MoE 2x4096": Case(
        "deepseek-moe", replace(TRAINING, batch=2, length=4096), {"num-layers": "3", "moe-layer-freq": "[0]*1+[1]*2"}
    ),
    "eagle3 dense 4x2048": Case("llama-1b", memory.Work("eagle3", batch=4, length=2048, fused_optimizer=False)),
    "train dense 1x4096": Case("llama-1b", replace(TRAINING, batch=1, length=4096)),
    "calibrate MLA+MoE 64x512": Case(
        "deepseek-moe", replace(FORWARD, batch=64, length=512), {"num-layers": "8", "moe-layer-freq": "[0]*1+[1]*7"}
    ),
    "train dense 1x4096 plain optimizer": Case(
        "llama-1b", replace(TRAINING, batch=1, length=4096, distributed_optimizer=False)
    ),
    "logits dense 4x4096": Case("llama-8b", replace(FORWARD, batch=4, length=4096, logits=True)),
    "calibrate dense 1x512": Case("llama-8b", replace(FORWARD, batch=1, length=512)),
}  # fmt: skip


class LiveTensors:
    """The bytes of all tensor storages alive, and their peak: what a GPU's allocator would count, on a CPU."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.peak = 0

    def mode(self) -> Any:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        owner = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = function(*args, **(kwargs or {}))
                for leaf in tree_leaves(out):
                    if isinstance(leaf, torch.Tensor):
                        owner.see(leaf.untyped_storage())
                return out

        return Mode()

    def see(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self.live and storage.nbytes():
            self.live[key] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, key, None)
            self.peak = max(self.peak, sum(self.live.values()))


def run_case(name: str, device: str, tiny: bool) -> dict[str, object]:
    """Build the model, do the work once with everything in place, return the line to print."""
    import torch

    from mlmsub.runtime import distributed, megatron_args
    from mlmsub.runtime.env import Env
    from mlmsub.runtime.env import Layout as RuntimeLayout
    from mlmsub.runtime.modelconf import ModelConf
    from mlmsub.runtime.models import model

    case = CASES[name]
    args_of_model = case.megatron_args(tiny)
    work = replace(case.work, batch=min(case.work.batch, 4), length=256) if tiny else case.work
    if work.kind == "eagle3":
        work = replace(work, draft_ffn=int(args_of_model["ffn-hidden-size"]))
    tensors = LiveTensors()
    mode = tensors.mode() if device == "cpu" else None
    model.prepare()
    if mode:
        mode.__enter__()
    conf = ModelConf(model=case.model, megatron_args=typed(args_of_model))
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", args_of_model["padded-vocab-size"], "--bf16"]
    words += ["--micro-batch-size", str(work.batch), "--no-initialization"]
    if "num-experts" in args_of_model:
        words += ["--moe-token-dispatcher-type", "allgather" if device == "cpu" else "alltoall"]
    with distributed.process_group(Env({"RANK": "0", "WORLD_SIZE": "1"})):
        args = megatron_args.parse(conf, RuntimeLayout(), words, lambda parser: None, [])
        distributed.model_parallel(args)
        net = model.build(args, conf, device)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.normal_(0, 0.02)
        step = {"forward": forward, "training": training, "eagle3": eagle3}[work.kind](net, args, work, device)
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            tensors.peak = 0
        started = time.perf_counter()
        step()
        seconds = time.perf_counter() - started
        measured = torch.cuda.max_memory_allocated() if device == "cuda" else tensors.peak
        reserved = torch.cuda.max_memory_reserved() if device == "cuda" else tensors.peak
        outside = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] if device == "cuda" else 0
    own = estimated(args_of_model, work)
    return {
        "case": name, "measured": round(measured / memory.GIB, 4), "estimated": round(own.allocated, 4),
        "ratio": round(own.allocated / (measured / memory.GIB), 3), "reserved": round(reserved / memory.GIB, 4),
        "used_on_gpu": round(outside / memory.GIB, 3), "parts": {k: round(v, 4) for k, v in own.parts().items() if v},
        "parameters": sum(p.numel() for p in net.parameters()), "counted": dimensions(args_of_model).parameters,
        "seconds": round(seconds, 2), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }  # fmt: skip


def dimensions(args: dict[str, str]) -> architecture.Architecture:
    arch = architecture.read(args)
    assert arch is not None
    return arch


def estimated(args: dict[str, str], work: memory.Work) -> memory.Breakdown:
    arch = dimensions(args)
    return memory.estimate(arch, Layout(), split(len(arch.layers), 1), work)[0]


def typed(args: dict[str, str]) -> dict[str, Any]:
    """A flag's `true` as a YAML file would hold it."""
    return {name: True if value == "true" else value for name, value in args.items()}


def batch(args: Any, work: memory.Work, device: str) -> tuple[Any, Any]:
    import torch

    tokens = torch.randint(0, args.padded_vocab_size, (work.batch, work.length), device=device)
    return tokens, torch.arange(work.length, device=device).expand(work.batch, -1)


def forward(net: Any, args: Any, work: memory.Work, device: str) -> Any:
    """Calibration of FP8 quantizers through the quantize stage's own loop, or plain logits."""
    import modelopt.torch.quantization as mtq
    import torch

    from mlmsub.runtime.quantization import calibration

    tokens, positions = batch(args, work, device)
    if work.logits:

        def logits() -> None:
            with torch.no_grad():
                net(tokens, positions, None)

        return logits
    loop = calibration.forward_loop(tokens.cpu(), work.batch, device)
    # its first run makes the quantizers; calibration again is what a second call would do
    mtq.quantize(net, copy.deepcopy(mtq.FP8_DEFAULT_CFG), None)
    return lambda: mtq.calibrate(net, "max", loop)


def training(net: Any, args: Any, work: memory.Work, device: str) -> Any:
    """Megatron's DDP with fp32 gradients, its (distributed) optimizer on torch's Adam or Transformer Engine's."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    sharded = work.distributed_optimizer
    if device == "cpu":
        optimizer_on_cpu()
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    wrapped = DistributedDataParallel(net.config, config, net.train())
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-5, bf16=True, params_dtype=args.params_dtype,
                        use_distributed_optimizer=sharded),
        [wrapped],
    )  # fmt: skip
    tokens, positions = batch(args, work, device)

    def step() -> None:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        wrapped(tokens, positions, None, labels=tokens).float().mean().backward()
        wrapped.finish_grad_sync()
        optimizer.step()

    step()
    return step


def eagle3(net: Any, args: Any, work: memory.Work, device: str) -> Any:
    """The draft of modelopt's default recipe with the base model's own MLP width, and torch's Adam on it."""
    import modelopt.torch.speculative as mtsp
    import torch

    without_transformer_engine()
    recipe = copy.deepcopy(mtsp.config.EAGLE3_DEFAULT_CFG)
    recipe["config"]["eagle_architecture_config"]["intermediate_size"] = work.draft_ffn
    net = mtsp.convert(net, recipe).to(device).train()
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    master = [parameter.detach().float().requires_grad_() for parameter in trained]
    optimizer = torch.optim.AdamW(master, lr=1e-5, foreach=False)
    tokens, positions = batch(args, work, device)
    mask = torch.triu(torch.ones(1, 1, work.length, work.length, device=device, dtype=torch.bool), diagonal=1)
    mask = mask.repeat(work.batch, 1, 1, 1)

    def step() -> None:
        loss = net(input_ids=tokens, position_ids=positions, attention_mask=mask, labels=tokens)
        loss.float().mean().backward()
        for parameter, own in zip(trained, master, strict=True):
            own.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for parameter, own in zip(trained, master, strict=True):
                parameter.copy_(own)

    step()
    return step


def without_transformer_engine() -> None:
    """modelopt's EAGLE plugin takes norm, linear and attention from Transformer Engine: use plain ones."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.post_training.modelopt.layers import Linear
    from modelopt.torch.speculative.plugins import megatron_eagle

    from mlmsub.runtime.models.attention import TorchAttention, torch_norm

    if HAVE_TE:
        return
    plugin: Any = megatron_eagle
    original = plugin.get_gpt_modelopt_spec

    class Attention(TorchAttention):  # type: ignore[misc]
        """Clones keys and values: the draft's steps extend one cache in place."""

        def forward(self, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
            return super().forward(query, key.clone(), value.clone(), *rest, **named)

    def spec(config: Any, **named: Any) -> Any:
        made = original(config, **{**named, "local_core_attention": True})
        for layer in getattr(made, "layer_specs", [made]):
            layer.submodules.self_attention.submodules.core_attention = Attention
        return made

    plugin.get_gpt_modelopt_spec, plugin.TENorm, plugin.TELinear = spec, torch_norm, Linear
    plugin.te_dot_product_attention_with_cp = lambda *_args: nullcontext()


def optimizer_on_cpu() -> None:
    """Megatron's DDP, optimizers and recomputation name CUDA streams, types and generators: answer for the CPU."""
    import torch

    cuda: Any = torch.cuda
    stream = SimpleNamespace(wait_stream=lambda _other: None, record_event=lambda *_args: None)
    cuda.current_stream = cuda.default_stream = lambda *_args: stream
    cuda.Stream = lambda *_args, **_named: stream
    cuda.random.get_rng_state = lambda *_args, **_named: torch.get_rng_state()
    cuda.random.set_rng_state = lambda *_args, **_named: None

    types = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float32: "torch.cuda.FloatTensor"}
    original = torch.Tensor.type

    def type_(self: Any, *args: Any, **named: Any) -> Any:
        return types.get(self.dtype, original(self)) if not args and not named else original(self, *args, **named)

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--jobs", type=int, default=0, help="cases at once [default: 6 on a GPU, 1 on a CPU]")
    parser.add_argument("--budget", type=float, default=125, help="GiB that the cases at work may need together")
    parser.add_argument("--only", default="", help="run the cases whose name holds this")
    options = parser.parse_args()
    if options.device == "cpu":
        preload()
    jobs = options.jobs or (6 if options.device == "cuda" else 1)
    needs = {
        name: 0.0 if options.tiny else estimated(case.megatron_args(False), case.work).total * 1.15
        for name, case in CASES.items() if options.only in name
    }  # fmt: skip
    failed = 0
    for line in run_all(needs, options.device, options.tiny, jobs, options.budget):
        print(line, flush=True)
        failed += '"error"' in line
    return min(failed, 1)


def preload() -> None:
    """Import once what every case needs, before they are forked."""
    for name in (
        "megatron.training.arguments", "megatron.training.models.gpt", "megatron.core.distributed",
        "megatron.core.optimizer", "modelopt.torch.quantization", "modelopt.torch.speculative", "modelopt.torch.export",
        "mlmsub.runtime.models.model", "mlmsub.runtime.quantization.calibration",
    ):  # fmt: skip
        importlib.import_module(name)


def run_all(needs: dict[str, float], device: str, tiny: bool, jobs: int, budget: float) -> Iterator[str]:
    """Each case in its own process; together they need at most `budget` GiB. Yields their lines as they end."""
    # an import starts CUDA, which a forked process cannot use: there each case imports for itself
    context = multiprocessing.get_context("spawn" if device == "cuda" else "fork")
    waiting, running = dict(needs), dict[Any, tuple[str, Any, Any]]()
    while waiting or running:
        for name, need in list(waiting.items()):
            used = sum(needs[at_work] for at_work, _, _ in running.values())
            if len(running) < jobs and (not running or used + need <= budget):
                del waiting[name]
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=child, args=(there, name, device, tiny))
                process.start()
                there.close()
                running[process.sentinel] = (name, process, here)
        for ended in multiprocessing.connection.wait(list(running)):
            name, process, here = running.pop(ended)
            process.join()
            yield here.recv() if here.poll() else json.dumps({"case": name, "error": f"exit code {process.exitcode}"})


def child(pipe: Any, name: str, device: str, tiny: bool) -> None:
    os.dup2(2, 1)  # what libraries print is not for the reader of our lines
    try:
        line = json.dumps(run_case(name, device, tiny))
    except BaseException:
        line = json.dumps({"case": name, "error": traceback.format_exc()[-700:]})
    pipe.send(line)
    pipe.close()
    os._exit(0)  # a library's threads may wait for each other at the end


if __name__ == "__main__":
    sys.exit(main())
