"""What a stage is to the frame round it: inputs read first, then work on a model in a session.

A stage is one class in ``runtime/stages/<name>.py``, named ``Stage``. The frame (``driver``) makes all stages of a
run before torch is imported, so that a wrong input of the last one is told before the first one has worked for an
hour; then it runs them in order, and hands the live model from one to the next where their layouts agree.
"""

from abc import ABC, abstractmethod
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import checkpoint, hf
from mlmsub.runtime.env import Env, Layout
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.outputs import Output
from mlmsub.runtime.progress import say

if TYPE_CHECKING:
    from mlmsub.runtime.session import Job, Session

CHECKPOINT = "MLM_MODEL_SAVE"


class BaseStage(ABC):
    """One step of work. ``__init__`` reads and checks what it can without torch, and raises StageError.

    ``layout``: the groups that it works in. ``world_size``: how many of the run's processes take part (None: all).
    ``defaults``: Megatron arguments of its own, below the user's. ``outputs``: variable -> folder, what it makes.
    ``ckpt``: the Megatron checkpoint that it starts from, the user's or that of a stage before it.
    """

    words: ClassVar[int | None] = 0  # how many words after the model it takes; None: any number
    makes: ClassVar[str] = ""  # the variable of its output folder
    takes_live: ClassVar[bool] = False  # `run` can work on the live model of the stage before
    gives_live: ClassVar[bool] = False  # `run` returns the model, whole, for the stage after
    may_skip_save: ClassVar[bool] = False  # it looks at `job.saves` before it writes its checkpoint
    not_taken: ClassVar[dict[str, str]] = {}  # flags of the reference's scripts -> what to do instead

    def __init__(self, job: "Job") -> None:
        self.job, self.env = job, job.env
        if self.words is not None and len(job.words) > self.words:
            takes = f"a model and {self.words} word" if self.words else "a model only"
            raise StageError(job.stage, f"takes {takes}, not {' '.join(job.words)!r}.", "give flags in MLM_EXTRA_ARGS.")
        self.conf = job.conf()
        self.layout, self.world_size = self.place(job.env)
        self.layout.check(self.world_size or job.env.world_size)
        self.defaults: list[str] = []
        self.outputs: dict[str, Path] = {}
        self.ckpt = job.env.path(checkpoint.FIELD)
        if self.ckpt is not None and not job.made_by:
            checkpoint.folder(self.ckpt)

    @classmethod
    def place(cls, env: Env) -> tuple[Layout, int | None]:
        """The layout, and the number of processes (None: all)."""
        return env.layout(), None

    @abstractmethod
    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the stage's own flags."""

    @abstractmethod
    def run(self, session: "Session", model: Any = None) -> Any:
        """Do the work, on all ranks; returns the model for a next stage, or None if it has none to give.

        ``model``: the live model of the stage before, in place of the checkpoint that this one would load.
        """

    def output(self, suffix: str, marker: str, **inputs: Path | None) -> Output:
        """The folder of ``makes``; StageError if writing it would destroy an input, or what another run made."""
        target = self.env.work_path(self.makes, suffix, self.job.model)
        if self.job.number > 1:
            target = target.with_name(f"{target.name}-{self.job.number}")
        made = Output(self.env, self.makes, target, marker)
        if self.job.saves:
            local_source = hf.check_source(self.env.text("HF_MODEL_CKPT"))
            made.check(MLM_MODEL_CKPT=self.ckpt, HF_MODEL_CKPT=local_source, **inputs)
        self.outputs[self.makes] = target
        return made

    def begin(self, output: Output) -> None:
        """Look whether the input is whole, then make an empty place for the output; all ranks call it."""
        if self.ckpt is not None and not self.job.live:
            checkpoint.require_complete(self.ckpt)
        if self.job.saves:
            distributed.on_main(output.begin)

    def publish(self, output: Output) -> None:
        """The output is whole and was looked at: move it to its place; all ranks call it."""
        distributed.on_main(output.publish)

    @property
    def start_from(self) -> Path | None:
        """The folder that the checkpoint's tracker names; None: the weights come from Hugging Face's."""
        if self.ckpt is None or self.job.live:
            return self.ckpt
        return checkpoint.folder(self.ckpt)

    def origin(self, session: "Session") -> str:
        """Where the model comes from, for messages and results."""
        if self.job.live and self.job.made_by:
            return f"the model of {self.job.made_by}"
        return str(self.start_from or session.source)

    def model(self, session: "Session", live: Any) -> Any:
        """The model to work on: the live one, else a Megatron checkpoint's, else a Hugging Face one's."""
        from mlmsub.runtime.checkpoints import source

        return source.model(self.job, session, self.start_from) if live is None else live

    def save(self, session: "Session", model: Any, output: Output) -> None:
        """Write the model as the Megatron checkpoint ``output``, unless a later stage alone has use for it."""
        if not self.job.saves:
            say(f"{CHECKPOINT} is not set and the next stage takes the model as it is: no checkpoint is written")
            return
        with self.job.steps("save", f"to {output.target}"):
            checkpoint.save(model, session.args, output.part)
            self.publish(output)
