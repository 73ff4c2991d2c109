"""Does the model conf describe the source? What no tensor's shape shows, and a wrong conf would compute silently."""

import math
from collections.abc import Iterator
from typing import Any

from mlmsub.runtime.errors import StageError


def check(model: Any, config: dict[str, Any]) -> None:
    """Raise StageError where a Megatron model contradicts the source's config.json (transformers' names, 4 and 5)."""
    wrong = [
        f"{name} is {ours} in the conf and {theirs} in config.json"
        for name, ours, theirs in _pairs(model, config)
        if theirs is not None and not _same(ours, theirs)
    ]
    if wrong:
        raise StageError(
            "model conf", f"contradicts the source: {'; '.join(wrong)}.",
            "correct the conf, or make one from that config.json (`mlmsub conf from-hf`).",
        )  # fmt: skip


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, bool) or not isinstance(theirs, (int, float)):
        return bool(ours == theirs)
    return math.isclose(ours, theirs, rel_tol=1e-6)


def _pairs(model: Any, config: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(argument, the conf's value, the source's or None where it says nothing)."""
    ours = model.config
    yield "num-attention-heads", ours.num_attention_heads, config.get("num_attention_heads")
    if not ours.multi_latent_attention:
        yield "num-query-groups", ours.num_query_groups, config.get("num_key_value_heads")
        yield "kv-channels", ours.kv_channels, config.get("head_dim")
    norm = next((config[key] for key in ("rms_norm_eps", "layer_norm_eps", "norm_eps") if key in config), None)
    yield "norm-epsilon", ours.layernorm_epsilon, norm
    rope = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    rope |= config.get("rope_parameters") or {}
    if not isinstance(rope.get("rope_theta"), (int, float)):  # none, or one set of parameters per kind of layer
        return
    if not ours.multi_latent_attention and model.position_embedding_type not in ("rope", "yarn"):
        yield "position-embedding-type", model.position_embedding_type, "rope"
        return
    yield "rotary-base", getattr(ours, "rotary_base", None) or model.rotary_base, rope["rope_theta"]
    if not ours.multi_latent_attention:
        yield "rotary-percent", model.rotary_percent, rope.get("partial_rotary_factor", 1.0)
        yield "use-rope-scaling", bool(model.rotary_scaling), rope.get("rope_type", rope.get("type")) == "llama3"
