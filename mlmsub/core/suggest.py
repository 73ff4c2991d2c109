"""Layouts that satisfy every rule and fit the GPU's memory, best first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import log2

from mlmsub.core import layout, rules
from mlmsub.core.architecture import hybrid_pattern
from mlmsub.core.facts import Facts
from mlmsub.core.layout import Layout, Pipeline, divisors
from mlmsub.core.memory import Breakdown

COMFORT = 0.85  # of the GPU: what the estimate may take before it is called tight
FREE_NODES = (1, 2, 4, 8, 16, 32, 64)
_RECOMPUTE = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": "1"}
_ENDS = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")


@dataclass(frozen=True)
class Suggestion:
    """A layout with the arguments that it needs beside the variables, the fullest stage's memory, and why."""

    layout: Layout
    pipeline: Pipeline
    memory: Breakdown
    reason: str
    arguments: dict[str, str] = field(default_factory=dict)
    host: float = 0.0  # GiB of main memory on the fullest node, where the stage works there
    rank: tuple[float, ...] = ()

    def variables(self) -> dict[str, str]:
        """What to write into the env setup."""
        at = self.layout
        sizes = {"TP": at.tp, "PP": at.pp, "CP": at.cp, "EP": at.ep, "ETP": at.expert_tp}
        shown = {name: str(size) for name, size in sizes.items() if size > 1 or (name == "ETP" and at.tp > 1)}
        if self.arguments:
            shown["MLM_EXTRA_ARGS"] = " ".join(
                f"--{name}" if value == "true" else f"--{name} {value}" for name, value in self.arguments.items()
            )
        return shown or {"TP": "1"}


def suggest(facts: Facts, nodes: Sequence[int] = FREE_NODES, every: Sequence[Facts] = ()) -> list[Suggestion]:
    """Every legal layout that fits, best first. With several numbers of nodes: the smallest on which any fits.

    `every`: the facts of all stages of the run, for all of which a layout must be legal.
    """
    others = [one for one in every if one is not facts]
    for count in sorted(nodes):
        found = [
            one for chosen in _candidates(facts, count)
            if all(rules.legal(_uneven(_with(other, chosen))) for other in others)
            and (one := _judged(_uneven(_with(facts, chosen)), facts))
        ]  # fmt: skip
        if found:
            return sorted(found, key=lambda one: one.rank)
    return []


def _judged(candidate: Facts, original: Facts) -> Suggestion | None:
    """The layout as a suggestion, if it is legal and fits: where a training does not, with full recomputation."""
    if not rules.legal(candidate):
        return None
    found = _fitting(candidate, original)
    if found is None and candidate.stage in ("finetune", "train"):
        return _fitting(replace(candidate, args={**candidate.args, **_RECOMPUTE}), original)
    return found


def _candidates(facts: Facts, nodes: int) -> Iterator[Layout]:
    gpus = facts.layout.gpus_per_node
    world = nodes * gpus
    layers = len(facts.arch.layers) if facts.arch else 1
    if facts.stage == "export":
        for pp in range(1, min(world, layers) + 1):
            yield Layout(pp=pp, nodes=nodes, gpus_per_node=gpus)
        return
    cp = facts.layout.cp
    for tp in divisors(gpus):
        for pp in divisors(world):
            if world % (tp * pp * cp) or pp > layers:
                continue
            for ep in divisors(world // pp):
                if (ep > 1 and not facts.experts) or (facts.experts and facts.experts % ep):
                    continue
                for etp in sorted({1, tp}) if facts.experts and tp > 1 else [None]:
                    yield Layout(tp, pp, cp, ep, etp, nodes, gpus)


def _with(facts: Facts, chosen: Layout) -> Facts:
    """These facts with another layout, and the arguments that training it takes."""
    args, used = dict(facts.args), chosen
    if facts.stage == "export":
        used = Layout(pp=chosen.pp, nodes=chosen.nodes, gpus_per_node=chosen.gpus_per_node)
    if facts.stage in ("finetune", "train"):
        args["use-distributed-optimizer"] = "true"
    if chosen.tp > 1 and facts.experts and facts.trains:
        args["sequence-parallel"] = "true"
    return replace(facts, asked=chosen, layout=used, args=args)


def _uneven(facts: Facts) -> Facts:
    """First and last layer counts where the layers do not divide over PP, unless stages are given otherwise."""
    args, pp = dict(facts.args), facts.layout.pp
    if "|" in hybrid_pattern(args) or "pipeline-model-parallel-layout" in args or not facts.arch:
        return facts
    for name in _ENDS:
        args.pop(name, None)
    layers = len(facts.arch.layers)
    if layers % pp and (found := layout.ends(layers, pp)):
        args |= dict(zip(_ENDS, map(str, found), strict=True))
    return replace(facts, args=args)


def _fitting(facts: Facts, original: Facts) -> Suggestion | None:
    if not facts.memory or not isinstance(facts.pipeline, Pipeline):
        return None
    at, most = facts.layout, max(facts.memory, key=lambda stage: stage.total)
    share = most.total / facts.gpu_gib if facts.gpu_gib else 0.0
    if share > 1:
        return None
    arguments = {
        name: value for name, value in facts.args.items()
        if original.args.get(name) != value
    }  # fmt: skip
    host = _host(facts.memory, at)
    if facts.stage == "export":
        rank: tuple[float, ...] = (float(-at.pp),)
    else:
        # a pipeline has bubbles, TP talks in every layer, experts twice in each MoE layer
        cost = 1.5 * log2(at.pp) + log2(at.tp) + 0.5 * log2(at.ep) + 0.75 * log2(at.expert_tp if facts.experts else 1)
        cost += 0.5 * ("recompute-granularity" in arguments)
        rank = (float(share > COMFORT), cost, share)
    return Suggestion(at, facts.pipeline, most, _reason(facts, share, host), arguments, host, rank)


def _host(stages: Sequence[Breakdown], at: Layout) -> float:
    """Main memory of the fullest node; ranks are dealt to nodes in blocks."""
    nodes = range(0, len(stages), at.gpus_per_node)
    return max(sum(stage.host for stage in stages[start : start + at.gpus_per_node]) for start in nodes)


def _reason(facts: Facts, share: float, host: float) -> str:
    at = facts.layout
    words = ["no TP, no PP"] if at.tp * at.pp == 1 else []
    if at.pp > 1 and isinstance(facts.pipeline, Pipeline):
        words.append(f"layers {facts.pipeline.render()}")
    if facts.stage == "export":
        return "; ".join([*words, f"{host:.0f} GiB of main memory on a node"])
    if facts.experts:
        each = facts.experts // at.ep
        words.append(f"{each} expert{'s' * (each > 1)} a rank" + (f", each cut in {at.expert_tp}" * (at.expert_tp > 1)))
    words.append(f"DP {at.dp}")
    if share > COMFORT:
        words.append("tight")
    return "; ".join(words)
