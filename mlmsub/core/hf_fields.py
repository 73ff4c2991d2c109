"""The fields of a config.json that are counts: whole numbers, or the file is not what it says."""

from __future__ import annotations

from collections.abc import Mapping

from mlmsub.core.errors import UsageError

_COUNTS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "moe_intermediate_size", "num_experts_per_tok",
)  # fmt: skip


def check(data: Mapping[str, object]) -> None:
    """Raises UsageError naming the first count that is none."""
    for key in _COUNTS:
        value = data.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"config.json: {key} must be a whole number from 1 on, not {value!r}")


def check_finite(args: Mapping[str, str]) -> None:
    """Raises UsageError naming the first argument that became no finite number."""
    for name, text in args.items():
        if text in ("nan", "inf", "-inf"):
            raise UsageError(f"config.json: {name} is not a finite number")
