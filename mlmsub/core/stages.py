"""The table of stages: what each takes, reads and writes. Nothing else in mlmsub knows a stage by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    extra: tuple[str, ...] = ()  # positional arguments after the model; a last `NAME...` takes any number
    native: bool = False

    @property
    def words(self) -> int | None:
        """How many words after the model it takes; None: any number."""
        return None if "".join(self.extra).endswith("...") else len(self.extra)


AND = "+"  # between the stages of one run
SCRIPT = "script"
TRAINING = ("eagle3", "finetune", "train")
REPEATABLE = ("GENERATE_OUT", "MMLU_OUT", "VALIDATE_OUT")  # of stages that look at a model, before and after another

_TABLE = (
    Stage("convert", "Hugging Face checkpoint to Megatron", "HF_MODEL_CKPT", "MLM_MODEL_SAVE", "_mlm", (), True),
    Stage(
        "quantize",
        "post-training quantization",
        "HF_MODEL_CKPT",
        "MLM_MODEL_SAVE",
        "_quant",
        ("QFORMAT",),
        True,
    ),
    Stage("eagle3", "EAGLE3 draft: convert, then train", "HF_MODEL_CKPT", "MLM_MODEL_SAVE", "-Eagle3", (), True),
    Stage("finetune", "supervised fine-tuning, QAT, QAD", "HF_MODEL_CKPT", "MLM_MODEL_SAVE", "_sft", (), True),
    Stage("train", "training on Megatron's own data sets", "MLM_MODEL_CKPT", "MLM_MODEL_SAVE", "_train"),
    Stage("prune", "depth and width pruning", "HF_MODEL_CKPT", "MLM_MODEL_SAVE", "_prune", (), True),
    Stage("export", "unified Hugging Face checkpoint", "MLM_MODEL_CKPT", "EXPORT_DIR", "_export", (), True),
    Stage("generate", "generate from prompts", "HF_MODEL_CKPT", "GENERATE_OUT", "_generate", ("PROMPT...",), True),
    Stage("mmlu", "MMLU score", "HF_MODEL_CKPT", "MMLU_OUT", "_mmlu", (), True),
    Stage("validate", "acceptance length of a draft", "MLM_MODEL_CKPT", "VALIDATE_OUT", "_validate", (), True),
    Stage("extract", "hidden states for offline EAGLE3", "HF_MODEL_CKPT", "EXTRACT_DIR", "_features", (), True),
    Stage(SCRIPT, "your own command, such as a Megatron-LM example script"),
)
STAGES = {stage.name: stage for stage in _TABLE}


def find(name: str) -> Stage:
    """The stage of this name, or several with + between as one; UsageError with the nearest name otherwise."""
    if AND in name:
        made = parts(name)
        _refuse_odd(made)
        extra = sorted((word for stage in made for word in stage.extra), key=lambda word: word.endswith("..."))
        return replace(made[-1], name=name, summary="several in one run", reads=made[0].reads, extra=tuple(extra))
    if name not in STAGES:
        raise UsageError(f"unknown stage {name!r}{nearest(name, STAGES)}", fix=f"the stages are: {', '.join(STAGES)}")
    return STAGES[name]


def parts(name: str) -> tuple[Stage, ...]:
    """The stages of a run, in their order."""
    return tuple(find(part) for part in name.split(AND)) if AND in name else (find(name),)


def trains(name: str) -> bool:
    """Whether a stage of this run is a training."""
    return any(part in TRAINING for part in name.split(AND))


def _refuse_odd(made: tuple[Stage, ...]) -> None:
    for index, stage in enumerate(made):
        if stage.name == SCRIPT:
            raise UsageError("script runs alone, not among other stages", fix="give --after RUN to one of two runs")
        if stage in made[:index] and (stage.writes not in REPEATABLE or stage is made[index - 1]):
            raise UsageError(
                f"{stage.name} stands twice in one run", fix="leave one out, or give --after RUN to one of two runs"
            )
