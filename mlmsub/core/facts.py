"""What the rules look at: a run's layout, model and arguments, gathered from its RunSpec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from mlmsub.core import architecture, layout, memory, stages
from mlmsub.core.architecture import Architecture
from mlmsub.core.envsetup import Reading
from mlmsub.core.layout import Layout, Pipeline, SplitError
from mlmsub.core.memory import Breakdown, Work
from mlmsub.core.modelconf import ModelConf
from mlmsub.core.profile import Profile
from mlmsub.core.spec import RunSpec
from mlmsub.core.values import number

Found = Iterator[tuple[str, str, str]]  # what a rule yields: field, message, fix
# The argument variables in the order of the line: later ones win, as in Megatron-LM's examples.
_TRAINING = ("MLM_DATA_ARGS", "MLM_OPTIM_ARGS", "MLM_TRAIN_ARGS", "MLM_EVAL_ARGS", "MLM_RESUME_ARGS")
ARGUMENT_VARIABLES = {
    "eagle3": _TRAINING, "finetune": _TRAINING, "train": _TRAINING, "extract": ("MLM_DATA_ARGS",),
}  # fmt: skip
SIZE_ARGUMENTS = {
    "tensor-model-parallel-size": "tp", "pipeline-model-parallel-size": "pp", "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep", "expert-tensor-parallel-size": "etp",
}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """One run, for the rules. `layout` is what the job will use; `asked` what TP, PP, CP, EP and ETP say."""

    stage: str
    asked: Layout
    layout: Layout
    args: Mapping[str, str] = field(default_factory=dict)  # Megatron arguments: the conf's, then the user's
    user_args: Mapping[str, str] = field(default_factory=dict)  # the user's alone
    words: tuple[str, ...] = ()  # the stage's own arguments after the model
    conf: ModelConf | None = None
    model: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    assigned: frozenset[str] = frozenset()  # names that the env setup or --set assigns
    gpu_type: str = ""
    gpu_gib: float | None = None
    run: tuple[str, ...] = ()  # the names of all stages of the run

    @cached_property
    def arch(self) -> Architecture | None:
        return architecture.read(self.args)

    @cached_property
    def pipeline(self) -> Pipeline | SplitError | None:
        """Layers per stage, or why they cannot be put on the stages; None where the layers are not known."""
        return split(self.args, self.arch, self.layout.pp) if self.arch else None

    @cached_property
    def work(self) -> Work | None:
        return memory.work_of(self.stage, self.args) if self.stage in memory.KINDS else None

    @cached_property
    def memory(self) -> list[Breakdown]:
        """Each pipeline stage's memory; empty where it cannot be estimated."""
        known = self.arch and self.work and isinstance(self.pipeline, Pipeline)
        if not known or not self.layout.dp or not (self.layout.edp or not self.experts):
            return []
        assert self.arch and self.work and isinstance(self.pipeline, Pipeline)
        return memory.estimate(self.arch, self.layout, self.pipeline, self.work)

    @property
    def experts(self) -> int:
        return self.arch.experts if self.arch else 0

    @property
    def imports(self) -> bool:
        """Whether the stage reads the Hugging Face checkpoint into Megatron's modules."""
        stage = stages.STAGES.get(self.stage)
        reads = stage is not None and stage.reads == "HF_MODEL_CKPT"
        return reads and not self.values.get("MLM_MODEL_CKPT")

    @property
    def trains(self) -> bool:
        return self.stage in stages.TRAINING

    def has(self, *names: str) -> bool:
        """Whether one of these Megatron arguments is given."""
        return any(name in self.args for name in names)


def split(args: Mapping[str, str], arch: Architecture, pp: int) -> Pipeline | SplitError:
    """The layers of each pipeline stage under these arguments."""
    pattern = architecture.hybrid_pattern(args)
    try:
        if "|" in pattern:
            return layout.split_pattern(pattern, pp)
        if text := args.get("pipeline-model-parallel-layout", ""):
            return layout.split_string(text, pp, len(arch.layers))
        first, last = (number(args.get(f"decoder-{end}-pipeline-num-layers", "")) for end in ("first", "last"))
        embedding, loss = (
            architecture.flag(args, f"account-for-{what}-in-pipeline-split") for what in ("embedding", "loss")
        )
        if pp > 1 and (embedding or loss):
            counts = list(layout.split(len(arch.layers) + embedding + loss, pp).counts)
            counts[0] -= embedding
            counts[-1] -= loss
            return Pipeline(tuple(counts))
        return layout.split(len(arch.layers), pp, first, last)
    except SplitError as error:
        return error


def gather(
    spec: RunSpec, conf: ModelConf | None, reading: Reading, values: Mapping[str, str], profile: Profile
) -> Facts:
    """Raises ValueError naming the variable where one of TP, PP, CP, EP, ETP is no number."""
    stage, words = spec.stage, spec.args[1:]
    if not spec.native:  # one of Megatron-LM's example scripts does the stage that it is named after
        stage = spec.args[0].rpartition("/")[2].removesuffix(".sh") if spec.args else ""
        words = spec.args[2:]
    place = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    words, flags = words[:place], words[place:] if spec.native or stage == "convert" else ()
    asked = Layout.of_variables(values, spec.nodes, spec.gpus_per_node)
    user_args = architecture.parse_words((*flags, *_user_words(stage, spec, reading, values)))
    sizes = {
        name: size for argument, name in SIZE_ARGUMENTS.items() if (size := number(user_args.get(argument, "")))
    }  # fmt: skip
    used = replace(asked, **sizes)
    if stage == "export":
        used = Layout(pp=used.pp, nodes=spec.nodes, gpus_per_node=spec.gpus_per_node)
    return Facts(
        stage=stage,
        asked=replace(asked, **sizes),
        layout=used,
        args={**(conf.megatron_args if conf else {}), **user_args},
        user_args=user_args,
        words=words,
        conf=conf,
        model=spec.model,
        values=values,
        assigned=frozenset((*reading.values, *reading.arrays, *spec.overrides)),
        gpu_type=profile.gpu_type,
        gpu_gib=memory.gpu_gib(profile.gpu_memory, profile.gpu_type),
    )


def _user_words(stage: str, spec: RunSpec, reading: Reading, values: Mapping[str, str]) -> Iterator[str]:
    """The words of the argument variables: an array's elements exactly, else split on white space."""
    for name in (*ARGUMENT_VARIABLES.get(stage, ()), "MLM_EXTRA_ARGS"):
        array: Iterable[str] | None = None if name in spec.overrides else reading.arrays.get(name)
        yield from values.get(name, "").split() if array is None else array
