"""Rules on sizes: the groups of ranks, what TP, ETP and EP divide, layers on pipeline stages, memory.

Each function yields (field, message, fix) for what it finds; core/rules.py says when it is asked.
"""

from __future__ import annotations

from mlmsub.core.architecture import flag
from mlmsub.core.facts import Facts, Found
from mlmsub.core.layout import Layout, SplitError, divisors
from mlmsub.core.values import number


def world(facts: Facts) -> Found:
    at = facts.layout
    if facts.stage == "export":
        if at.pp > at.world:
            yield "PP", f"PP={at.pp} is more than the {at.world} GPUs of {_place(at)}", f"use {_nodes(at, at.pp)}"
        return
    if at.world % at.dense_size:
        product = f"TP*PP*CP = {at.tp}*{at.pp}*{at.cp} = {at.dense_size}"
        message = f"{product} does not divide the {at.world} GPUs of {_place(at)}"
        legal = ", ".join(map(str, divisors(at.world)))
        yield "TP", message, f"TP*PP*CP must be one of {legal}; or use {_nodes(at, at.dense_size)}"


def expert_world(facts: Facts) -> Found:
    at = facts.layout
    if facts.stage == "export" or not (facts.experts or at.ep > 1) or at.world % at.expert_size == 0:
        return
    product = f"ETP*EP*PP = {at.expert_tp}*{at.ep}*{at.pp} = {at.expert_size}"
    where = " (ETP is not set, so it is TP)" if at.etp is None and at.tp > 1 else ""
    legal = [n for n in divisors(at.world) if n % at.pp == 0]
    fix = f"ETP*EP*PP must be one of {', '.join(map(str, legal))}; or use {_nodes(at, at.expert_size)}"
    if at.etp is None and at.tp > 1 and at.world % (at.ep * at.pp) == 0:
        fix = f"set ETP=1; {fix}"
    yield "EP", f"{product} does not divide the {at.world} GPUs of {_place(at)}{where}", fix


def etp_default(facts: Facts) -> Found:
    at = facts.layout
    if at.etp is None and at.tp > 1 and facts.experts and facts.stage != "export":
        size = f"ETP*EP = {at.tp}*{at.ep} = {at.tp * at.ep} ranks hold one copy of the experts"
        yield "ETP", f"is not set, so it is TP={at.tp}: {size}", "set ETP=1 if EP alone is to split the experts"


def no_experts(facts: Facts) -> Found:
    at = facts.layout
    if facts.arch and not facts.experts and at.ep > 1:
        yield "EP", f"EP={at.ep}, but {facts.model} has no experts", "leave EP out"


def experts(facts: Facts) -> Found:
    if facts.experts and facts.experts % facts.layout.ep:
        legal = _legal(facts.experts, facts.layout.world)
        yield "EP", f"{facts.experts} experts do not divide over EP={facts.layout.ep}", f"EP may be {legal}"


def heads(facts: Facts) -> Found:
    yield from _divides(facts, "attention heads", facts.arch.heads if facts.arch else 0)


def query_groups(facts: Facts) -> Found:
    """Megatron itself also takes a TP that is a multiple of the groups; ModelOpt's importer does not."""
    arch, tp = facts.arch, facts.layout.tp
    if not arch or arch.mla or not arch.has("attention") or arch.groups % tp == 0:
        return
    if facts.imports or tp % arch.groups:
        message = f"{arch.groups} query groups do not divide over TP={tp}"
        yield "TP", message, f"TP may be {_legal(arch.groups)}; or load a Megatron checkpoint instead of importing"


def vocabulary(facts: Facts) -> Found:
    arch = facts.arch
    if arch and arch.vocab:
        yield from _divides(facts, "rows of the embedding", arch.vocab)
        divisor = number(facts.args.get("make-vocab-size-divisible-by", ""))
        said = number(facts.args.get("vocab-size", ""))
        if "padded-vocab-size" in facts.args or not said or not divisor:
            return
        if padded := -said % (divisor * facts.layout.tp):
            yield (
                "make-vocab-size-divisible-by",
                f"pads the vocabulary from {said} to {said + padded} rows, which the checkpoint does not have",
                f"give --padded-vocab-size {said} or --make-vocab-size-divisible-by 1",
            )


def dense_ffn(facts: Facts) -> Found:
    if facts.arch and facts.arch.has("mlp"):
        yield from _divides(facts, "columns of the MLP (ffn-hidden-size)", facts.arch.ffn)


def moe_ffn(facts: Facts) -> Found:
    at = facts.layout
    if facts.arch and facts.experts and facts.arch.moe_ffn % at.expert_tp:
        message = f"moe-ffn-hidden-size {facts.arch.moe_ffn} does not divide over ETP={at.expert_tp}"
        yield "ETP", message, f"ETP may be {_legal(facts.arch.moe_ffn, at.world)}"


def shared_ffn(facts: Facts) -> Found:
    if facts.arch and facts.experts:
        yield from _divides(facts, "columns of the shared expert", facts.arch.shared_ffn)


def mamba(facts: Facts) -> Found:
    if facts.arch and facts.arch.has("mamba"):
        yield from _divides(facts, "Mamba heads", facts.arch.mamba_heads)
        yield from _divides(facts, "Mamba groups", facts.arch.mamba_groups)


def pipeline(facts: Facts) -> Found:
    if isinstance(facts.pipeline, SplitError):
        yield "PP", str(facts.pipeline), facts.pipeline.fix


def sequence_parallel_needed(facts: Facts) -> Found:
    if facts.trains and facts.experts and facts.layout.tp > 1 and not flag(facts.args, "sequence-parallel"):
        message = f"training experts with TP={facts.layout.tp} needs sequence parallelism"
        yield "TP", message, "add --sequence-parallel to MLM_EXTRA_ARGS, or set TP=1"


def sequence_parallel_off(facts: Facts) -> Found:
    if flag(facts.args, "sequence-parallel") and facts.layout.tp == 1:
        yield "sequence-parallel", "Megatron switches it off where TP is 1", ""


def tp_in_a_node(facts: Facts) -> Found:
    at = facts.layout
    if at.tp > at.gpus_per_node:
        message = f"TP={at.tp} spans nodes of {at.gpus_per_node} GPUs: each layer waits for the network"
        yield "TP", message, f"TP may be {_legal(at.gpus_per_node)} within a node; use PP or EP across nodes"


def idle_data_parallel(facts: Facts) -> Found:
    at = facts.layout
    if facts.stage in ("export", "prune") and at.world > at.pp:
        others = "wait, or end if nothing follows" if facts.run else "end at once"
        fewer = at.nodes * at.gpus_per_node > _up(at, at.pp) and not facts.run
        message = f"{facts.stage} works on PP={at.pp} of {at.world} ranks; the others {others}"
        yield "PP", message, f"use {_nodes(at, at.pp)}" if fewer else ""


def context_length(facts: Facts) -> Found:
    cp, length = facts.layout.cp, number(facts.args.get("seq-length", ""))
    if cp > 1 and length and length % (2 * cp):
        message = f"seq-length {length} is no multiple of 2*CP = {2 * cp}"
        yield "CP", message, f"use --seq-length {-(-length // (2 * cp)) * 2 * cp}"


def fp8_blocks(facts: Facts) -> Found:
    """Block scales belong to 128 x 128 weights: a rank's slice must hold whole blocks."""
    arch, at = facts.arch, facts.layout
    if not arch or not facts.conf or facts.conf.source_format != "fp8_block" or not facts.imports:
        return
    slices = [
        ("TP", "ffn-hidden-size", arch.ffn * arch.has("mlp"), at.tp),
        ("ETP", "moe-ffn-hidden-size", arch.moe_ffn * bool(arch.experts), at.expert_tp),
        ("TP", "moe-shared-expert-intermediate-size", arch.shared_ffn, at.tp),
        ("TP", "the attention's output width", arch.value_width, at.tp),
    ]
    for name, what, width, parts in slices:
        if parts > 1 and width % parts == 0 and (width // parts) % 128:
            message = f"{what} {width} over {name}={parts} is {width // parts} a rank, which cuts FP8 blocks of 128"
            legal = ", ".join(str(n) for n in divisors(width) if width // n % 128 == 0 and n <= at.world)
            yield name, message, f"{name} may be {legal}"


def memory(facts: Facts) -> Found:
    if not facts.memory or not facts.gpu_gib:
        return
    most = max(facts.memory, key=lambda stage: stage.total)
    name, size = max(most.parts().items(), key=lambda part: part[1])
    where = f" on pipeline stage {most.stage}" if facts.layout.pp > 1 else ""
    if most.total > facts.gpu_gib:
        message = f"about {most.total:.0f} GiB are needed{where}, and the GPU has {facts.gpu_gib:.0f}"
        yield "memory", f"{message}; most of it: {name} {size:.0f} GiB", "see `mlmsub plan --suggest`"


def state_fits(facts: Facts) -> Found:
    """What the parameters need whatever the batch is: exact, where the rest is an estimate."""
    if not facts.memory or not facts.gpu_gib:
        return
    most = max(stage.weights + stage.gradients + stage.optimizer for stage in facts.memory)
    if most > facts.gpu_gib:
        what = "weights, gradients and optimizer alone take" if facts.trains else "the weights alone take"
        message = f"{what} {most:.0f} GiB, and the GPU has {facts.gpu_gib:.0f}"
        yield "memory", message, "split the model over more ranks: see `mlmsub plan --suggest`"


def _divides(facts: Facts, what: str, number: int) -> Found:
    if number and number % facts.layout.tp:
        yield "TP", f"{number} {what} do not divide over TP={facts.layout.tp}", f"TP may be {_legal(number, 64)}"


def _legal(number: int, most: int = 0) -> str:
    return ", ".join(str(n) for n in divisors(number) if not most or n <= most)


def _place(at: Layout) -> str:
    return f"{at.nodes} node{'s' * (at.nodes > 1)} x {at.gpus_per_node}"


def _up(at: Layout, multiple: int) -> int:
    """The smallest number of GPUs on whole nodes that is a multiple of `multiple` (for export: at least)."""
    nodes = -(-multiple // at.gpus_per_node)
    return nodes * at.gpus_per_node


def _nodes(at: Layout, multiple: int) -> str:
    nodes = -(-multiple // at.gpus_per_node)
    while nodes * at.gpus_per_node % multiple and nodes < multiple:
        nodes += 1
    return f"--nodes {nodes}"
