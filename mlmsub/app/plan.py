"""What a submission would be: values with their origin, layout, pipeline, memory, issues. Sends nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby

from mlmsub.app.resolve import Resolved, public_values
from mlmsub.core import checks, composition, rules, suggest
from mlmsub.core.architecture import NAMES
from mlmsub.core.facts import Facts
from mlmsub.core.issues import Issue
from mlmsub.core.layout import Pipeline
from mlmsub.core.memory import Breakdown
from mlmsub.core.suggest import Suggestion


@dataclass(frozen=True)
class Plan:
    """A resolved run and what follows from it; `facts` is None where the layout cannot be read.

    Of several stages, `facts` are those of the one that needs most of a GPU's memory.
    """

    resolved: Resolved
    facts: Facts | None
    suggestions: tuple[Suggestion, ...] | None = None  # None: not asked for

    @property
    def issues(self) -> list[Issue]:
        """All issues; with suggestions, those that no other layout would mend."""
        found = self.resolved.issues
        return [issue for issue in found if not self.suggestions or issue.code not in rules.LAYOUT_CODES]

    @property
    def parts(self) -> list[composition.Part]:
        """The stages of a run that has several."""
        found = composition.parts(self.resolved.spec, self.resolved.values)
        return found if len(found) > 1 else []

    @property
    def failed(self) -> bool:
        return self.suggestions == () or any(issue.severity == "error" for issue in self.issues)


@dataclass(frozen=True)
class Stretch:
    """Consecutive pipeline stages that hold the same number of layers and need the same memory."""

    first: int
    last: int
    layers: tuple[int, int]  # the first stage's first layer, the last stage's last
    memory: Breakdown | None


def make(resolved: Resolved, *, with_suggestions: bool = False, free_nodes: bool = False) -> Plan:
    """The plan of a submission; with suggestions for its nodes, or for any number of them."""
    spec, profile = resolved.spec, resolved.profile.profile
    try:
        every = checks.facts(spec, resolved.reading, resolved.values, profile)
    except ValueError:
        return Plan(resolved, None, () if with_suggestions else None)
    facts = max(every, key=lambda one: max((stage.total for stage in one.memory), default=0.0))
    if not with_suggestions:
        return Plan(resolved, facts)
    most = profile.max_nodes or max(suggest.FREE_NODES)
    nodes = [count for count in suggest.FREE_NODES if count <= most] if free_nodes else [spec.nodes]
    hopeless = any(issue.code == "stage-unsupported" for issue in resolved.issues)
    return Plan(resolved, facts, () if hopeless else tuple(suggest.suggest(facts, nodes, every)))


def stretches(facts: Facts) -> list[Stretch]:
    """The pipeline's stages, like ones together."""
    if not isinstance(facts.pipeline, Pipeline):
        return []
    pipeline, memory = facts.pipeline, facts.memory
    stages = range(len(pipeline.counts))

    def kind(stage: int) -> tuple[object, ...]:
        parts = tuple(round(size, 2) for size in memory[stage].parts().values()) if memory else ()
        return pipeline.counts[stage], *parts

    found = []
    for _, group in groupby(stages, key=kind):
        members = list(group)
        first, last = members[0], members[-1]
        layers = pipeline.starts[first], pipeline.starts[last] + pipeline.counts[last] - 1
        found.append(Stretch(first, last, layers, memory[first] if memory else None))
    return found


def layer_kinds(facts: Facts) -> str:
    """`1 dense, 60 MoE`."""
    letters = facts.arch.layers if facts.arch else ""
    return ", ".join(f"{letters.count(letter)} {NAMES[letter]}" for letter in dict.fromkeys(letters))


def remote_code(facts: Facts) -> str:
    """Who allows the checkpoint's own Python code to run: the user, the model conf, or nobody ("")."""
    if "trust-remote-code" in facts.user_args:
        return "MLM_EXTRA_ARGS"
    return "model conf" if facts.conf and facts.conf.trust_remote_code else ""


def data(plan: Plan) -> dict[str, object]:
    """The plan as plain data."""
    resolved, facts = plan.resolved, plan.facts
    spec = resolved.spec
    found: dict[str, object] = {
        "stage": spec.stage, "stages": [
            {"stage": part.stage.name, "from": part.source, "to": part.target} for part in plan.parts
        ], "model": spec.model, "profile": resolved.profile.name, "nodes": spec.nodes,
        "gpus_per_node": spec.gpus_per_node, "image": spec.image, "mounts": list(spec.mounts), "sbatch": spec.sbatch,
        "values": {name: {"value": value, "origin": origin} for name, value, origin in public_values(resolved)},
        "issues": [asdict(issue) for issue in resolved.issues], "allow": list(spec.allow),
    }  # fmt: skip
    if facts:
        found |= {"trust_remote_code": remote_code(facts) or None} | _layout(facts)
    if plan.suggestions is not None:
        found["suggestions"] = [
            {
                "layout": one.layout.render(), "variables": one.variables(), "pipeline": list(one.pipeline.counts),
                "memory_gib": _rounded(one.memory.parts()), "host_gib_per_node": round(one.host, 1),
                "reason": one.reason,
            }
            for one in plan.suggestions
        ]  # fmt: skip
    return found


def _layout(facts: Facts) -> dict[str, object]:
    at = facts.layout
    return {
        "layout": at.render(), "world": at.world, "groups": at.groups(),
        "parameters": facts.arch.parameters if facts.arch else None,
        "active_parameters": facts.arch.active_parameters if facts.arch else None,
        "pipeline": list(facts.pipeline.counts) if isinstance(facts.pipeline, Pipeline) else None,
        "gpu": {"type": facts.gpu_type, "gib": round(facts.gpu_gib, 1) if facts.gpu_gib else None},
        "memory_gib": [
            {"stage": stage.stage, "total": round(stage.total, 2), "host": round(stage.host, 2)}
            | _rounded(stage.parts())
            for stage in facts.memory
        ],
    }  # fmt: skip


def _rounded(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(size, 2) for name, size in parts.items() if size}
