"""The table of stages: what each takes, reads and writes. Nothing else in mlmsub knows a stage by name."""

from __future__ import annotations

from dataclasses import dataclass

from mlmsub.core.errors import UsageError
from mlmsub.core.strict import nearest


@dataclass(frozen=True)
class Stage:
    """One step of work.

    `reads` and `writes` are the variables that hold its input and output checkpoint; `suffix` names the
    default output below MLM_WORK_DIR. A stage that is not `native` has no code in mlmsub.runtime (yet): it
    can be rendered, and run as a Megatron-LM example by `script`.
    """

    name: str
    summary: str
    reads: str = "MLM_MODEL_CKPT"
    writes: str = ""
    suffix: str = ""
    extra: tuple[str, ...] = ()  # positional arguments after the model
    native: bool = False


SCRIPT = "script"
TRAINING = ("eagle3", "finetune", "train")

_TABLE = (
    Stage("convert", "Hugging Face checkpoint to Megatron", "HF_MODEL_CKPT", "MLM_MODEL_SAVE", "_mlm"),
    Stage(
        "quantize",
        "post-training quantization",
        "HF_MODEL_CKPT",
        "MLM_MODEL_SAVE",
        "_quant",
        ("QFORMAT",),
        True,
    ),
    Stage("eagle3", "EAGLE3 draft: convert, then train", "HF_MODEL_CKPT", "MLM_MODEL_SAVE", "-Eagle3"),
    Stage("finetune", "supervised fine-tuning, QAT, QAD", "MLM_MODEL_CKPT", "MLM_MODEL_SAVE", "_sft"),
    Stage("train", "training on Megatron's own data sets", "MLM_MODEL_CKPT", "MLM_MODEL_SAVE", "_train"),
    Stage("prune", "depth and width pruning", "HF_MODEL_CKPT", "MLM_MODEL_SAVE", "_prune"),
    Stage("export", "unified Hugging Face checkpoint", "MLM_MODEL_CKPT", "EXPORT_DIR", "_export", (), True),
    Stage("generate", "generate from prompts"),
    Stage("mmlu", "MMLU score"),
    Stage("validate", "acceptance length of a draft"),
    Stage("extract", "hidden states for offline EAGLE3", writes="EXTRACT_DIR", suffix="_features"),
    Stage(SCRIPT, "your own command, such as a Megatron-LM example script"),
)
STAGES = {stage.name: stage for stage in _TABLE}


def find(name: str) -> Stage:
    """The stage of this name; UsageError with the nearest name otherwise."""
    if name not in STAGES:
        raise UsageError(f"unknown stage {name!r}{nearest(name, STAGES)}", fix=f"the stages are: {', '.join(STAGES)}")
    return STAGES[name]
