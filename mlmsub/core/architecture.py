"""A model's dimensions, read from Megatron arguments, and how many parameters each of its layers has.

Names and defaults are those of megatron-core 0.19 (`TransformerConfig`, `MLATransformerConfig`, and the
arguments that megatron.training derives from them).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mlmsub.core.values import number

# Layers of a transformer: attention and a dense MLP, attention and experts. The other letters are those of
# Megatron's hybrid patterns (core/models/hybrid/hybrid_layer_allocation.py), where a layer is one of the parts.
DENSE, MOE = "d", "e"
PARTS = {
    DENSE: ("attention", "mlp"), MOE: ("attention", "experts"), "M": ("mamba",), "*": ("attention",),
    "+": ("attention",), "-": ("mlp",), "E": ("experts",),
}  # fmt: skip
NAMES = {DENSE: "dense", MOE: "MoE", "M": "Mamba", "*": "attention", "+": "attention", "-": "MLP", "E": "MoE"}


def unlike(name: str, model: str) -> str:
    """What the last parts of two names contradict each other in, or "": sizes such as 20b or A3B, Base and Instruct."""
    for pattern in (r"(?<![a-z0-9.])a?\d+(?:\.\d+)?[bm](?![a-z0-9])", r"\b(?:base|instruct)\b"):
        said, meant = (set(re.findall(pattern, text.rpartition("/")[2].lower())) for text in (name, model))
        if said and meant and said != meant:
            return f"{', '.join(sorted(said))} against {', '.join(sorted(meant))}"
    return ""


def parse_words(words: Iterable[str]) -> dict[str, str]:
    """`--name value`, `--name=value` and bare flags (value `true`) of an argument line; the last of a name wins."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found[name] = value if equals else "true"
        elif name:
            found[name] = word if found[name] == "true" else f"{found[name]} {word}"
    return found


@dataclass(frozen=True)
class Count:
    """Numbers of parameters by how ranks share them: split by TP, held by every rank, split by ETP x EP."""

    split: int = 0
    replicated: int = 0
    expert: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.split + other.split, self.replicated + other.replicated, self.expert + other.expert)

    def __mul__(self, times: int) -> Count:
        return Count(self.split * times, self.replicated * times, self.expert * times)

    @property
    def total(self) -> int:
        return self.split + self.replicated + self.expert


@dataclass(frozen=True)
class Architecture:
    """A model's dimensions. `layers` has one letter per layer (see PARTS); zero means: the model has no such thing."""

    layers: str
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int  # rows of the embedding, padded; 0 = only the tokenizer knows
    tied: bool
    gated: bool
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_width: int = 1  # vectors per norm: RMSNorm 1, LayerNorm 2
    sinks: bool = False
    learned_positions: int = 0
    # multi-head latent attention
    mla: bool = False
    q_lora: int = 0
    kv_lora: int = 0
    qk_head: int = 0
    qk_rope: int = 0
    v_head: int = 0
    # mixture of experts
    experts: int = 0
    topk: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    latent: int = 0
    # Mamba
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    mamba_groups: int = 0
    mamba_state: int = 0
    mtp_layers: int = 0

    @property
    def inner(self) -> int:
        """Width of a Mamba layer's state path."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def query_width(self) -> int:
        """Width of all queries together."""
        return self.heads * (self.qk_head + self.qk_rope if self.mla else self.head_dim)

    @property
    def value_width(self) -> int:
        """Width of what attention gives to its output projection."""
        return self.heads * (self.v_head if self.mla else self.head_dim)

    @property
    def kv_width(self) -> int:
        """Width of keys and values together, as attention reads them."""
        return self.query_width + self.value_width if self.mla else 2 * self.groups * self.head_dim

    def has(self, part: str) -> bool:
        return any(part in PARTS[letter] for letter in set(self.layers))

    def part(self, name: str) -> Count:
        """Parameters of one part of a layer, with the norm before it."""
        norm = Count(replicated=self.hidden * self.norm_width)
        return (
            norm
            + {"attention": self._attention, "mlp": self._mlp, "experts": self._experts, "mamba": self._mamba}[name]()
        )

    def layer(self, letter: str) -> Count:
        return sum((self.part(name) for name in PARTS[letter]), Count())

    @property
    def embedding(self) -> Count:
        return Count(split=self.vocab * self.hidden, replicated=self.learned_positions * self.hidden)

    @property
    def head(self) -> Count:
        """The output layer's own weights (none when tied), the final norm and multi-token prediction layers."""
        own = Count(0 if self.tied else self.vocab * self.hidden, self.hidden * self.norm_width)
        if not self.mtp_layers:
            return own
        one = Count(2 * self.hidden**2, 3 * self.hidden * self.norm_width) + self.layer(self.layers[-1])
        return own + one * self.mtp_layers

    @property
    def parameters(self) -> int:
        layers = sum((self.layer(letter) * self.layers.count(letter) for letter in set(self.layers)), Count())
        return (self.embedding + layers + self.head).total

    @property
    def active_parameters(self) -> int:
        """Those that one token passes through: of the experts, top-k."""
        if not self.experts:
            return self.parameters
        routed = self.part("experts").expert * sum("experts" in PARTS[letter] for letter in self.layers)
        return self.parameters - routed + routed * self.topk // self.experts

    def _attention(self) -> Count:
        h, heads = self.hidden, self.heads
        if self.mla:
            per_q = heads * (self.qk_head + self.qk_rope)
            norms = (self.q_lora + self.kv_lora) * self.norm_width if self.qk_norm else 0
            up = self.kv_lora * heads * (self.qk_head + self.v_head) + heads * self.v_head * h
            down = h * (self.kv_lora + self.qk_rope)
            if self.q_lora:
                return Count(self.q_lora * per_q + up, h * self.q_lora + down + norms)
            return Count(h * per_q + up, down + norms)
        qkv = (heads + 2 * self.groups) * self.head_dim
        return Count(
            h * qkv + heads * self.head_dim * h + (qkv if self.bias or self.qkv_bias else 0) + heads * self.sinks,
            h * self.bias + 2 * self.head_dim * self.norm_width * self.qk_norm,
        )

    def _mlp(self, ffn: int = 0, width: int = 0) -> Count:
        ffn, width, up = ffn or self.ffn, width or self.hidden, 2 if self.gated else 1
        return Count((up + 1) * width * ffn + up * ffn * self.bias, width * self.bias)

    def _experts(self) -> Count:
        h, each = self.hidden, self._mlp(self.moe_ffn, self.latent or self.hidden).total
        shared = self._mlp(self.shared_ffn) if self.shared_ffn else Count()
        own = h * self.experts + self.experts * self.bias + h * self.shared_gate + 2 * h * self.latent
        return shared + Count(replicated=own, expert=self.experts * each)

    def _mamba(self) -> Count:
        """core/ssm/mamba_mixer.py: one projection in for z, x, B, C and dt, a convolution of width 4, one out."""
        states = 2 * self.mamba_groups * self.mamba_state
        into = self.hidden * (2 * self.inner + states + self.mamba_heads)
        return Count(into + 5 * (self.inner + states) + 3 * self.mamba_heads + self.inner + self.inner * self.hidden)


MOST = 10**9
_DIMENSIONS = (
    "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "kv-channels",
    "num-experts", "moe-router-topk", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size", "q-lora-rank",
    "kv-lora-rank", "qk-head-dim", "v-head-dim", "seq-length", "max-position-embeddings", "padded-vocab-size",
    "vocab-size", "mamba-num-heads", "mamba-head-dim", "mamba-num-groups", "mamba-state-dim", "micro-batch-size",
    "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
    "qk-pos-emb-head-dim", "moe-latent-size",
)  # fmt: skip


def read(args: Mapping[str, str]) -> Architecture | None:
    """The dimensions that these arguments describe; None where the essential ones are missing or not numbers."""
    if any(odd_numbers(args)):
        return None
    try:
        return _read(args)
    except (KeyError, ValueError, SyntaxError, ZeroDivisionError):
        return None


def odd_numbers(args: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(argument, value) of the dimensions that are no whole number from 1 on, or beyond any model."""
    for name in _DIMENSIONS:
        text = args.get(name)
        if text is not None and not 0 < (number(text) or 0) < MOST:
            yield name, text


def _read(args: Mapping[str, str]) -> Architecture:
    def size(name: str, default: int = 0) -> int:
        return int(args.get(name, default))

    hidden, heads = int(args["hidden-size"]), int(args["num-attention-heads"])
    head_dim = size("kv-channels", hidden // heads)
    experts, mla = size("num-experts"), flag(args, "multi-latent-attention")
    ffn = size("ffn-hidden-size", 4 * hidden)
    layers = layer_letters(args)
    # without the flag Megatron ignores the number (training/argument_utils.py)
    grouped = size("num-query-groups", 1) if flag(args, "group-query-attention") else heads
    mamba_dim = size("mamba-head-dim", 64)
    return Architecture(
        layers=layers, hidden=hidden, ffn=ffn, heads=heads, groups=grouped, head_dim=head_dim,
        vocab=size("padded-vocab-size", size("vocab-size")),
        tied=not flag(args, "untie-embeddings-and-output-weights"),
        gated=any(flag(args, name) for name in ("swiglu", "quick-geglu", "geglu")),
        bias=not flag(args, "disable-bias-linear"), qkv_bias=flag(args, "add-qkv-bias"),
        qk_norm=flag(args, "qk-layernorm"), norm_width=1 if args.get("normalization") == "RMSNorm" else 2,
        sinks=args.get("softmax-type") == "learnable",
        learned_positions=size("max-position-embeddings")
        if args.get("position-embedding-type", "learned_absolute") == "learned_absolute"
        and not flag(args, "no-position-embedding") and not flag(args, "use-rotary-position-embeddings") else 0,
        mla=mla, q_lora=size("q-lora-rank"), kv_lora=size("kv-lora-rank", 512 if mla else 0),
        qk_head=size("qk-head-dim", 128), qk_rope=size("qk-pos-emb-head-dim", 64), v_head=size("v-head-dim", 128),
        experts=experts, topk=size("moe-router-topk", 2 if experts else 0),
        moe_ffn=size("moe-ffn-hidden-size", ffn),
        shared_ffn=size("moe-shared-expert-intermediate-size"), shared_gate=flag(args, "moe-shared-expert-gate"),
        latent=size("moe-latent-size"),
        mamba_heads=size("mamba-num-heads", 2 * hidden // mamba_dim) if "M" in layers else 0,
        mamba_head_dim=mamba_dim, mamba_groups=size("mamba-num-groups", 8),
        mamba_state=size("mamba-state-dim", 128),
        mtp_layers=size("mtp-num-layers"),
    )  # fmt: skip


def flag(args: Mapping[str, str], name: str) -> bool:
    return args.get(name, "").lower() == "true"


def hybrid_pattern(args: Mapping[str, str]) -> str:
    """The main pattern of a hybrid model with its `|` stage borders; "" for a transformer."""
    pattern = args.get("hybrid-layer-pattern") or args.get("hybrid-override-pattern") or ""
    return pattern.partition("/")[0]


def layer_letters(args: Mapping[str, str]) -> str:
    """One letter per layer. Raises ValueError for a pattern that cannot be read, KeyError without any."""
    if pattern := hybrid_pattern(args).replace("|", ""):
        if unknown := sorted(set(pattern) - set(PARTS)):
            raise ValueError(f"hybrid pattern: no layer is called {unknown[0]!r}")
        return pattern
    count = int(args["num-layers"])
    if not int(args.get("num-experts", 0)):
        return DENSE * count
    moe = moe_layers(args.get("moe-layer-freq", "1"), count)
    return "".join(MOE if is_moe else DENSE for is_moe in moe)


def moe_layers(frequency: str, count: int) -> list[int]:
    """1 for each MoE layer: every n-th from the first on, or a list such as `[0]*3+[1]*58`.

    Raises ValueError for another length than `count` or another expression (training/arguments.py, moe_freq_type).
    """
    if "[" not in frequency:
        return [int(index % int(frequency) == 0) for index in range(count)]
    found = _value(ast.parse(frequency.strip(), mode="eval").body)
    if not isinstance(found, list) or len(found) != count:
        raise ValueError(f"moe-layer-freq {frequency} does not describe {count} layers")
    return [int(item) for item in found]


def _value(node: ast.expr) -> int | list[int]:
    """Lists and numbers under `+` and `*`; nothing is executed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        items = [_value(item) for item in node.elts]
        return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int) and right < 10000:
            return left * right
    raise ValueError("not a list of layers")
