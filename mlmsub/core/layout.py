"""Parallel layouts: sizes of the groups that Megatron-Core makes of a job's ranks, and layers on pipeline stages.

The rules are megatron-core 0.19's:
`core/parallel_state.py` (groups), `core/transformer/transformer_block.py: get_num_layers_to_build` (layers of a
transformer), `core/models/hybrid/hybrid_layer_allocation.py` (hybrid patterns), `training/arguments.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

from mlmsub.core.values import number

SIZES = ("TP", "PP", "CP", "EP", "ETP")
MOST = 100_000  # ranks in a group: more than any cluster has


@dataclass(frozen=True)
class Layout:
    """TP, PP, CP, EP and ETP on `nodes` x `gpus_per_node`. ETP unset means TP, as in Megatron-Core.

    Ranks form two kinds of groups: TP x CP x DP x PP for attention, dense MLPs and embeddings, and
    ETP x EP x EDP x PP for experts. Both multiply to the world size.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    nodes: int = 1
    gpus_per_node: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "ep", "nodes", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.upper()} must be at least 1, not {getattr(self, name)}")
        if self.etp is not None and self.etp < 1:
            raise ValueError(f"ETP must be at least 1, not {self.etp}")

    @property
    def world(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def dense_size(self) -> int:
        """Ranks that hold one copy of the dense layers."""
        return self.tp * self.pp * self.cp

    @property
    def expert_size(self) -> int:
        """Ranks that hold one copy of the experts."""
        return self.expert_tp * self.ep * self.pp

    @property
    def multiple(self) -> int:
        """The world size is a multiple of this."""
        return lcm(self.dense_size, self.expert_size)

    @property
    def fits(self) -> bool:
        return self.world % self.multiple == 0

    @property
    def dp(self) -> int:
        """Copies of the dense layers (without CP, whose ranks share them too); 0 where they do not fit."""
        return self.world // self.dense_size if self.world % self.dense_size == 0 else 0

    @property
    def edp(self) -> int:
        """Copies of each expert; 0 where they do not fit."""
        return self.world // self.expert_size if self.world % self.expert_size == 0 else 0

    def groups(self) -> dict[str, int]:
        """Every group and how many ranks one of it has."""
        return {
            "TP": self.tp, "CP": self.cp, "DP": self.dp, "PP": self.pp,
            "ETP": self.expert_tp, "EP": self.ep, "EDP": self.edp,
        }  # fmt: skip

    @classmethod
    def parse(cls, text: str) -> Layout:
        """`TP=8 PP=1 CP=1 EP=64 ETP=1 8x8`, in any order; what is left out is 1, ETP is TP."""
        sizes: dict[str, int] = {}
        for word in text.split():
            if match := re.fullmatch(r"(TP|PP|CP|EP|ETP)=(\d+)", word):
                name, value = match[1].lower(), int(match[2])
                if name in sizes:
                    raise ValueError(f"{match[1]} stands twice in {text!r}")
                sizes[name] = value
            elif (match := re.fullmatch(r"(\d+)x(\d+)", word)) and "nodes" not in sizes:
                sizes |= {"nodes": int(match[1]), "gpus_per_node": int(match[2])}
            else:
                raise ValueError(f"{word!r} is not part of a layout: write TP=8 PP=1 CP=1 EP=64 ETP=1 NODESxGPUS")
        return cls(**sizes)

    def render(self) -> str:
        """The form that `parse` reads; ETP stands there only where it was said."""
        words = [f"TP={self.tp}", f"PP={self.pp}", f"CP={self.cp}", f"EP={self.ep}"]
        if self.etp is not None:
            words.append(f"ETP={self.etp}")
        return " ".join([*words, f"{self.nodes}x{self.gpus_per_node}"])

    @classmethod
    def of_variables(cls, values: Mapping[str, str], nodes: int, gpus_per_node: int) -> Layout:
        """The layout of the variables TP, PP, CP, EP, ETP; ValueError names the one that is no number."""
        sizes: dict[str, int] = {}
        for name in SIZES:
            text = values.get(name, "").strip()
            if not text:
                continue
            if not 1 <= (size := number(text) or 0) <= MOST:
                raise ValueError(f"{name} must be a number from 1 to {MOST}, not {text[:24]!r}")
            sizes[name.lower()] = size
        return cls(**sizes, nodes=nodes, gpus_per_node=gpus_per_node)


class SplitError(ValueError):
    """The layers cannot be put on the pipeline stages; `fix` says how they could."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


@dataclass(frozen=True)
class Pipeline:
    """How many layers each pipeline stage holds, in order of the stages."""

    counts: tuple[int, ...]

    @property
    def layers(self) -> int:
        return sum(self.counts)

    @property
    def starts(self) -> tuple[int, ...]:
        """The index of each stage's first layer."""
        return tuple(sum(self.counts[:stage]) for stage in range(len(self.counts)))

    @classmethod
    def parse(cls, text: str) -> Pipeline:
        """`3+14x4+2`: 3 layers, then 14 stages of 4, then 2."""
        counts: list[int] = []
        for part in text.split("+"):
            match = re.fullmatch(r"(?:(\d+)x)?(\d+)", part.strip())
            if not match or int(match[1] or 1) < 1:
                raise ValueError(f"{part!r} is not a number of layers: write 4, or 14x4 for 14 stages of 4")
            counts += [int(match[2])] * int(match[1] or 1)
        return cls(tuple(counts))

    def render(self) -> str:
        parts: list[str] = []
        start = 0
        for index in range(1, len(self.counts) + 1):
            if index == len(self.counts) or self.counts[index] != self.counts[start]:
                times = index - start
                parts.append(f"{times}x{self.counts[start]}" if times > 1 else str(self.counts[start]))
                start = index
        return "+".join(parts)


def split(layers: int, pp: int, first: int | None = None, last: int | None = None) -> Pipeline:
    """Put `layers` on `pp` stages: evenly, or with `first` and `last` layers at the ends and the rest even.

    `first` and `last` are --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers. Raises
    SplitError where Megatron-Core would stop (get_num_layers_to_build), or silently lose layers (PP = 1).
    """
    if first is None and last is None:
        if layers % pp:
            raise SplitError(f"{layers} layers do not divide over PP={pp}", _even_or_ends(layers, pp))
        return Pipeline((layers // pp,) * pp)
    if pp == 1:
        raise SplitError("first and last layer counts are for PP > 1", "leave them out")
    middle = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    ends = " and ".join(f"{n} {where}" for n, where in ((first, "first"), (last, "last")) if n is not None)
    if rest < 0 or (middle == 0 and rest) or (middle and rest % middle):
        where = f"over {middle} other stages" if middle else "and no stage is left for them"
        raise SplitError(
            f"{layers} layers with {ends} leave {rest}, which do not divide {where} (PP={pp})",
            _even_or_ends(layers, pp),
        )
    counts = [rest // middle if middle else 0] * middle
    return Pipeline((*([first] if first is not None else ()), *counts, *([last] if last is not None else ())))


def split_pattern(pattern: str, pp: int) -> Pipeline:
    """Stages of a hybrid pattern with `|` borders: as many segments as stages, or a multiple (interleaved)."""
    segments = [len(part) for part in pattern.split("|")]
    if len(segments) % pp:
        raise SplitError(
            f"the hybrid pattern has {len(segments)} segments between its |, which do not divide over PP={pp}",
            f"PP may be {', '.join(map(str, divisors(len(segments))))}; or take the | out of the pattern",
        )
    return Pipeline(tuple(sum(segments[stage::pp]) for stage in range(pp)))


def split_string(text: str, pp: int, layers: int) -> Pipeline:
    """Stages of --pipeline-model-parallel-layout, such as `Et*3|(tt|)*28,L`: `t` is a layer, E and L the ends.

    core/transformer/pipeline_parallel_layer_layout.py: commas are cosmetic, `x*n` and `(xy|)*n` repeat.
    """
    flat = text.replace(",", "")
    flat = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), flat)
    flat = re.sub(r"([^()*\d])\*(\d+)", lambda m: m[1] * int(m[2]), flat)
    if not re.fullmatch(r"[EtmL|]+", flat):
        raise SplitError(f"the pipeline layout {text!r} cannot be read", "write E, t, m, L, | and repeats like (tt|)*4")
    segments = [part.count("t") for part in flat.split("|")]
    if len(segments) % pp:
        raise SplitError(
            f"the pipeline layout has {len(segments)} stages, which do not divide over PP={pp}",
            f"PP may be {', '.join(map(str, divisors(len(segments))))}",
        )
    if sum(segments) != layers:
        raise SplitError(f"the pipeline layout holds {sum(segments)} layers of {layers}", "count the t in it")
    return Pipeline(tuple(sum(segments[stage::pp]) for stage in range(pp)))


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def ends(layers: int, pp: int) -> tuple[int, int] | None:
    """First and last layer counts that make `layers` fit `pp` stages near the even share; None if none do.

    The ends also hold the embedding and the output layer, so they get less than the middle stages where possible.
    """
    if pp < 3:
        return None
    middle = -(-layers // pp)
    while middle * (pp - 2) > layers - 2:
        middle -= 1
    rest = layers - middle * (pp - 2)
    first, last = rest - rest // 2, rest // 2
    return (first, last) if middle and first <= middle + 1 else None


def _even_or_ends(layers: int, pp: int) -> str:
    even = ", ".join(map(str, divisors(layers)))
    if found := ends(layers, pp):
        first, last = found
        example = f"--decoder-first-pipeline-num-layers {first} --decoder-last-pipeline-num-layers {last}"
        shape = Pipeline((first, *[(layers - first - last) // (pp - 2)] * (pp - 2), last)).render()
        return f"PP may be {even}; or keep PP={pp} with {example} ({shape})"
    if pp == 2 and layers > 2:
        first = -(-layers // 2)
        return f"PP may be {even}; or keep PP=2 with --decoder-first-pipeline-num-layers {first}"
    return f"PP may be {even}"
