"""A model conf: a model's Megatron arguments, its tokenizer, and what is known about it.

The same facts can stand in a Megatron-LM style `.sh` file that sets MODEL_ARGS and TOKENIZER_MODEL; such a
file is sourced in the job and never read here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from mlmsub.core.errors import UsageError
from mlmsub.core.strict import nearest

_ARGUMENT = re.compile(r"[a-z0-9][a-z0-9-]*")


@dataclass(frozen=True)
class ModelConf:
    """`megatron_args` maps argument names without dashes to values; the value `true` makes a bare flag."""

    model: str
    tokenizer: str
    megatron_args: dict[str, str]
    trust_remote_code: bool = False
    source_format: Literal["bf16", "fp8_block", "mxfp4"] = "bf16"
    config: dict[str, str] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    checked: str = ""

    def __post_init__(self) -> None:
        for name in self.megatron_args:
            if not _ARGUMENT.fullmatch(name):
                raise ValueError(f"megatron_args: {name!r} is not an argument's name (write it without dashes)")


def check_stage(conf: ModelConf, stage: str) -> None:
    """Raise UsageError where the conf says that the stage cannot work on this model."""
    if stage in conf.unsupported:
        raise UsageError(f"{stage} is not supported for {conf.model}: {conf.unsupported[stage]}")


def unknown(name: str, known: list[str], where: str) -> UsageError:
    """The error for a model that no conf is named after."""
    return UsageError(
        f"unknown model {name!r}{nearest(name, known)}",
        fix=f"known models: {', '.join(known)}; or give the path of a .yaml or .sh conf (looked in {where})",
    )
