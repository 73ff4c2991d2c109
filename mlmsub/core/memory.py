"""Memory of one GPU in each pipeline stage: what the weights, the optimizer, the activations and the rest take.

Sources: bytes per parameter as in megatron-core's optimizer (`core/optimizer/distrib_optimizer.py`) and
`training/theoretical_memory_usage.py`; activations counted tensor by tensor along the modules that
`mlmsub.runtime` builds (`core/transformer`, `core/transformer/moe`, modelopt's layer spec), in the manner of
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198). The
constants are held against measured peaks: see benchmarks/memory.md. Sizes are in bytes inside, in GiB outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mlmsub.core.architecture import PARTS, Architecture, Count, flag
from mlmsub.core.layout import Layout, Pipeline
from mlmsub.core.values import number

GIB = 2**30
Kind = Literal["forward", "eagle3", "training", "host"]
KINDS: dict[str, Kind] = {
    "convert": "forward", "quantize": "forward", "eagle3": "eagle3", "finetune": "training", "train": "training",
    "prune": "forward", "export": "host", "generate": "forward", "mmlu": "forward", "validate": "forward",
    "extract": "forward",
}  # fmt: skip
GPU_GB = {
    "a100": 80, "h100": 80, "h200": 141, "h20": 96, "gh200": 96, "b200": 180, "gb200": 186, "b300": 288, "gb300": 288,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What a stage does with a model, as far as memory is concerned. Lengths are in tokens."""

    kind: Kind
    batch: int = 1
    length: int = 4096
    logits: bool = True  # whether a forward pass runs the output layer
    generated: int = 0  # length that a KV cache is made for
    recompute: Literal["none", "selective", "full"] = "none"
    distributed_optimizer: bool = False
    sequence_parallel: bool = False
    fused_optimizer: bool = True  # Transformer Engine's or Apex's; torch's Adam needs room for one more copy
    dropout: bool = False
    draft_vocab: int = 0
    draft_steps: int = 3  # modelopt's eagle_ttt_steps
    draft_ffn: int = 0  # 0 = modelopt's default draft


@dataclass(frozen=True)
class Breakdown:
    """One GPU of one pipeline stage, in GiB; `host` is main memory of one rank."""

    stage: int
    layers: int
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    cache: float = 0.0  # KV cache, calibration buffers
    draft: float = 0.0
    overhead: float = 0.0
    host: float = 0.0

    @property
    def allocated(self) -> float:
        """What torch allocates: all but the overhead."""
        return self.total - self.overhead

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        names = ("weights", "gradients", "optimizer", "activations", "logits", "cache", "draft", "overhead")
        return {name: getattr(self, name) for name in names}


def estimate(arch: Architecture, layout: Layout, pipeline: Pipeline, work: Work) -> list[Breakdown]:
    """The memory of each pipeline stage's GPUs; the layout must fit its world."""
    return [_stage(arch, layout, pipeline, work, stage) for stage in range(layout.pp)]


def worst(stages: Sequence[Breakdown]) -> Breakdown:
    return max(stages, key=lambda stage: stage.total)


def gpu_gib(gpu_memory: int, gpu_type: str) -> float | None:
    """A GPU's memory in GiB from the profile: `gpu_memory` in GB, else by the kind's name; None where unknown."""
    names = [name for name in GPU_GB if name in gpu_type.lower().replace("-", "_").split("_")]
    gigabytes = gpu_memory or (GPU_GB[names[0]] if names else 0)
    # what is sold as 80 GB has 81559 MiB (H100), 141 GB has 143771 (H200): binary, less half a percent
    return gigabytes * 0.995 if gigabytes else None


def work_of(stage: str, args: Mapping[str, str]) -> Work:
    """A stage's work from the Megatron arguments (model conf, then the user's). KeyError for `script`."""
    kind = KINDS[stage]
    recompute: Literal["none", "selective", "full"] = "none"
    if args.get("recompute-granularity") == "full":
        recompute = "full"
    elif flag(args, "recompute-activations") or args.get("recompute-granularity") == "selective":
        recompute = "selective"
    work = Work(
        kind=kind, batch=_number(args, "micro-batch-size", 1), length=_number(args, "seq-length", 4096),
        recompute=recompute, distributed_optimizer=flag(args, "use-distributed-optimizer"),
        sequence_parallel=flag(args, "sequence-parallel"),
        dropout=any(_is_above_0(args.get(name, "0.1")) for name in ("hidden-dropout", "attention-dropout")),
    )  # fmt: skip
    if stage in ("quantize", "prune"):
        length = _number(args, "calib-max-sequence-length", 512)
        batch = max(1, min(32, 16384 // max(1, length)))  # runtime/quantization/calibration.py: batch_size
        return replace(
            work, batch=_number(args, "calib-batch-size", batch), length=length,
            logits=False,
        )  # fmt: skip
    if stage == "convert":
        return replace(work, batch=1, length=1, logits=False)
    if stage in ("generate", "validate"):
        return replace(work, generated=work.length)
    return work


def _number(args: Mapping[str, str], name: str, default: int) -> int:
    said = number(args.get(name, ""))
    return default if said is None else said


def _is_above_0(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:  # Megatron refuses it
        return True


def _stage(arch: Architecture, layout: Layout, pipeline: Pipeline, work: Work, stage: int) -> Breakdown:
    start, count = pipeline.starts[stage], pipeline.counts[stage]
    letters = arch.layers[start : start + count]
    first, last = stage == 0, stage == layout.pp - 1
    held = sum((arch.layer(letter) * letters.count(letter) for letter in sorted(set(letters))), Count())
    if first or (last and arch.tied):
        held += arch.embedding
    if last:
        held += arch.head
    dense, experts = held.split / layout.tp + held.replicated, held.expert / (layout.expert_tp * layout.ep)
    weights = 2 * (dense + experts)
    if work.kind == "host":
        return Breakdown(stage, count, overhead=_CONTEXT / GIB, host=2 * held.total / GIB)
    step = _Step(arch, layout, work)
    found = {"weights": weights}
    if work.kind == "training":
        found |= _training(step, letters, dense, experts, last=last, in_flight=layout.pp - stage)
    else:
        peak = step.forward_peak(letters)
        logits = step.forward_logits() if last and (work.logits or work.kind == "eagle3") else 0.0
        found |= {"activations": max(0.0, peak - logits), "logits": logits, "cache": step.cache(letters)}
        if work.kind == "eagle3" and last:
            found |= step.draft(found["activations"])
    found["overhead"] = _overhead(layout, found["activations"] + found["logits"])
    return Breakdown(stage, count, **{name: size / GIB for name, size in found.items()})


def _training(
    step: _Step, letters: str, dense: float, experts: float, *, last: bool, in_flight: int
) -> dict[str, float]:
    """Gradients are summed in fp32 (4 bytes), Adam keeps fp32 weights and two moments (12 bytes).

    The distributed optimizer splits the 12 over DP x CP ranks, those of experts over EDP. A pipeline stage holds
    the activations of as many micro batches as there are stages from it to the last (1F1B). The peak is either in
    the backward pass or in the optimizer's step, when the activations are gone.
    """
    work, layout = step.work, step.layout
    sharded = work.distributed_optimizer
    own = dense / (layout.dp * layout.cp if sharded else 1) + experts / (layout.edp if sharded else 1)
    saved, working = step.saved(letters), step.backward_working(letters)
    logits = step.training_logits() if last else 0.0
    activations = saved * in_flight + max(0.0, working - logits)
    temporary = 0.0 if work.fused_optimizer else 4 * own
    return {
        "gradients": 4 * (dense + experts), "optimizer": 12 * own + max(0.0, temporary - activations - logits),
        "activations": activations, "logits": logits,
    }  # fmt: skip


_CONTEXT = 1.6 * GIB  # CUDA context with the libraries' kernels; measured on an H200
_NCCL = 0.15 * GIB  # buffers of one communicator; not measured yet
_SLACK = 0.2  # what the allocator keeps beside activations: it gives cached blocks back, but not all
_IMBALANCE = 1.5  # tokens on the fullest rank of an expert-parallel group against the mean; not measured yet


def _overhead(layout: Layout, passing: float) -> float:
    """`passing` is what comes and goes with each micro batch."""
    groups = sum(size > 1 for size in layout.groups().values()) + (layout.world > 1)
    return _CONTEXT + groups * _NCCL + _SLACK * passing


@dataclass(frozen=True)
class _Step:
    """Activations of one micro batch on one rank. Widths are in elements per token, results in bytes."""

    arch: Architecture
    layout: Layout
    work: Work

    @property
    def tokens(self) -> float:
        return self.work.batch * self.work.length / self.layout.cp

    @property
    def hidden(self) -> float:
        """The residual stream's width: split over TP where sequence parallelism is on."""
        on = self.work.sequence_parallel and self.layout.tp > 1
        return self.arch.hidden / (self.layout.tp if on else 1)

    def forward_peak(self, letters: str) -> float:
        """Without gradients one part of one layer is alive, and the streams that its callers hold: three widths."""
        widths = {name: self._forward(name) for letter in sorted(set(letters)) for name in PARTS[letter]}
        return 2 * self.tokens * (3 * self.hidden + max(widths.values(), default=0.0))

    def _forward(self, part: str) -> float:
        a, tp = self.arch, self.layout.tp
        if part == "attention":
            rotated = 2 * (a.query_width + a.kv_width / 2) / tp
            return a.hidden + (a.query_width + a.kv_width) / tp + rotated + 2 * a.value_width / tp
        if part == "mlp":
            return a.hidden + self._mlp * a.ffn / tp
        if part == "mamba":
            return a.hidden + (6 * a.inner + 4 * a.mamba_groups * a.mamba_state) / tp
        return self._experts_forward()

    @property
    def _mlp(self) -> float:
        """What an unfused MLP holds, in widths of its ffn: both halves, their activation, offset and product.

        Transformer Engine's fused SwiGLU holds three; the estimate is for the larger.
        """
        return 5.0 if self.arch.gated else 3.0

    def _experts_forward(self) -> float:
        """Tokens arrive top-k times: permuted, put out by the experts, gathered and weighted; the router in fp32."""
        a = self.arch
        routed = self._arriving * (a.latent or a.hidden) * (4 if self.layout.ep == 1 else 6)
        one_expert = self._mlp * a.moe_ffn * self._arriving / a.experts * 2 / self.layout.expert_tp
        return a.hidden + routed + one_expert + self._router + 2 * a.hidden * bool(a.shared_ffn)

    @property
    def _arriving(self) -> float:
        """How often one token of the micro batch is an expert's on this rank: top-k, more where routing is uneven.

        Under sequence parallelism each TP rank sends its own part of the tokens, and ETP ranks gather them again.
        """
        at, uneven = self.layout, 1.0 if self.layout.ep == 1 else _IMBALANCE
        own = at.expert_tp / at.tp if self.work.sequence_parallel and at.tp > 1 else 1.0
        return self.arch.topk * uneven * own

    @property
    def _router(self) -> float:
        """Logits, scores and top-k masks of all experts, most of them in fp32."""
        return 6.0 * self.arch.experts * self.hidden / self.arch.hidden

    def forward_logits(self) -> float:
        return 2 * self.tokens * self.arch.vocab / self.layout.tp * 2

    def cache(self, letters: str) -> float:
        if not self.work.generated:
            return 0.0
        attention = sum("attention" in PARTS[letter] for letter in letters)
        return 2 * self.work.batch * self.work.generated * attention * self.arch.kv_width / self.layout.tp

    def saved(self, letters: str) -> float:
        """What the forward pass keeps of one micro batch for the backward pass."""
        if self.work.recompute == "full":
            return 2 * self.tokens * self.hidden * len(letters)
        return 2 * self.tokens * sum(self._saved(name) for letter in letters for name in PARTS[letter])

    def _saved(self, part: str) -> float:
        a, tp = self.arch, self.layout.tp
        norm = 2 * self.hidden + (0.5 * self.hidden if self.work.dropout else 0)
        if part == "attention":
            return norm + self._attention_saved()
        if part == "mlp":
            return norm + self._mlp * a.ffn / tp
        if part == "mamba":
            return norm + (4 * a.inner + 4 * a.mamba_groups * a.mamba_state) / tp
        each = (a.latent or a.hidden) + (self._mlp + 1) * a.moe_ffn / self.layout.expert_tp
        return norm + self._arriving * each + self._mlp * a.shared_ffn / tp + self._router

    def _attention_saved(self) -> float:
        """Query, key and value as attention reads them, its output, and projections that live on in their views."""
        a, tp = self.arch, self.layout.tp
        statistics = 2 * a.heads / tp
        if a.mla:
            low = 2 * (a.q_lora + a.kv_lora) + a.qk_rope
            up = a.heads * (a.qk_head + a.v_head)
            return low + (2 * a.query_width + up + a.value_width) / tp + statistics
        projected, rotated = a.query_width + a.kv_width, a.query_width + a.kv_width / 2
        return (projected + rotated + a.value_width) / tp + statistics

    def backward_working(self, letters: str) -> float:
        """Gradients of one layer in flight; under full recomputation that layer's saved tensors too."""
        widths = {letter: sum(self._saved(name) for name in PARTS[letter]) for letter in set(letters)}
        largest = max(widths.values(), default=0.0)
        return 2 * self.tokens * largest * (1.4 if self.work.recompute == "full" else 0.4)

    def training_logits(self) -> float:
        """A softmax in fp32 beside logits in bf16, later their gradient; and the output weight's own gradient."""
        share = self.arch.vocab / self.layout.tp
        return 6 * self.tokens * share + 2 * share * self.arch.hidden

    def draft(self, base: float) -> dict[str, float]:
        """EAGLE3: the draft's weights with gradients and Adam, and its test-time-training steps.

        The loss gathers the logits over TP (modelopt, `logits_kld_loss`), so each rank holds the whole vocabulary:
        for each step a softmax and a log-softmax in bf16.
        """
        a, tp, work = self.arch, self.layout.tp, self.work
        heads, groups, width = (a.heads, a.heads, 128) if a.mla else (32, 8, 128)
        ffn = work.draft_ffn or (a.ffn if a.mla else 14336)
        vocab = work.draft_vocab or a.vocab
        qkv = (heads + 2 * groups) * width
        split = 2 * a.hidden * qkv + heads * width * a.hidden + 3 * a.hidden * ffn
        own = split / tp + 3 * a.hidden**2 + (a.hidden * vocab / tp if work.draft_vocab else 0)
        optimizer = 12 / (self.layout.dp * self.layout.cp if work.distributed_optimizer else 1)
        one = 8 * a.hidden + (qkv * 1.7 + 2 * heads * width + 4 * ffn) / tp
        logits = self.tokens * (2 * a.vocab / tp + 2 * vocab * (2 * work.draft_steps + 3))
        aux = 2 * self.tokens * 4 * self.hidden
        steps = 2 * self.tokens * one * work.draft_steps + aux
        return {"draft": own * (2 + 4 + optimizer), "activations": max(base, steps), "logits": logits}
