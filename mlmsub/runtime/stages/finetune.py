"""finetune: train all weights on answers, with or without quantizers, from a checkpoint or where a run was cut off.

The source is the Hugging Face checkpoint HF_MODEL_CKPT, or the Megatron checkpoint MLM_MODEL_CKPT if set; the
quantizers of a quantized one are trained through (QAT) and saved again.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import checkpoint, hf, source
from mlmsub.runtime.data import dataset
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.modelconf import ModelConf
from mlmsub.runtime.progress import say, warn
from mlmsub.runtime.quantization import extensions, formats
from mlmsub.runtime.session import Job, Session
from mlmsub.runtime.session import arguments as megatron_arguments
from mlmsub.runtime.stage import CHECKPOINT, BaseStage
from mlmsub.runtime.training import arguments, distill, loop, losses, record, state, stopping, trainer
from mlmsub.runtime.training.folder import Folder

NO_DRAFT = "eagle3 trains drafts, and finetune a base, for which a draft would have to be trained anew."


class Stage(BaseStage):
    """``finetune MODEL [FLAG...]``; the same flags may stand in MLM_EXTRA_ARGS or in a group's variable."""

    makes = CHECKPOINT
    gives_live = True  # but it takes none: dropout and sequence parallelism are those that a model was built with
    not_taken: ClassVar[dict[str, str]] = arguments.NOT_TAKEN

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        env = self.env
        self.defaults = [*arguments.for_experts(self.conf, self.layout), *arguments.words(env)]
        in_place = arguments.IN_PLACE in (*self.defaults, *job.flags, *env.arguments("MLM_EXTRA_ARGS"))
        here = in_place and env.path(CHECKPOINT) is None
        target = self.ckpt if here and self.ckpt else env.work_path(CHECKPOINT, "_sft", job.model)
        self.in_place = in_place and self.ckpt is not None and target.resolve() == self.ckpt.resolve()
        self.folder = Folder(env, target, job.stage, in_place)
        self.folder.check(MLM_MODEL_CKPT=self.ckpt, HF_MODEL_CKPT=hf.check_source(env.text("HF_MODEL_CKPT")))
        if job.made_by == "eagle3":
            raise StageError(job.stage, f"{job.made_by} trains a draft: {NO_DRAFT}", "finetune first, then eagle3.")
        if self.layout.cp > 1:
            raise StageError("CP", "rows of packed documents are not split along their length.", "set CP=1.")
        self.outputs[CHECKPOINT] = target
        self.stop = stopping.StopFile(env)
        self.noted: dict[str, Any] = {}

    def add_arguments(self, parser: ArgumentParser) -> None:
        dataset.add_arguments(parser)
        arguments.add_arguments(parser)
        distill.add_arguments(parser)

    def run(self, session: Session, model: Any = None) -> Any:
        """Train, and save at every interval and at the end; the trained model.

        Raises Stopped if the job asks for an early end.
        """
        args, steps = session.args, self.job.steps
        arguments.check(args)
        taught = distill.asked(args)
        data = dataset.of(self.job, session)
        learner = self._trainer(session, taught)
        intervals = loop.Intervals.of(args)
        arguments.tell_evaluations(args, len(data.rows("valid")))
        if intervals.evaluate and not data.rows("valid"):
            intervals = replace(intervals, evaluate=0)
        finished = loop.run(
            learner,
            lambda split, consumed: loop.batches(data, args, split, consumed),
            (distill.distilled if taught else losses.supervised)(learner),
            intervals,
            self._save,
            steps=steps,
            should_stop=self.stop.asked,
        )
        formats.check_calibrated(learner.module)
        if not finished:
            self.stop.end(learner.iteration)
        return (distill.without_teacher(learner.module) if taught else learner.module).eval()

    def _trainer(self, session: Session, taught: bool) -> trainer.Trainer:
        """The model at the start of the training, or where it was cut off."""
        job, args = self.job, session.args
        distributed.on_main(self.folder.begin)
        if self.ckpt is not None and not self.in_place:
            checkpoint.require_complete(self.ckpt)
        more = distributed.on_main(lambda: distill.noted(args))
        self.noted = distributed.on_main(lambda: record.of(self, session, in_place=self.in_place, **more))
        resumed = state.latest(self.folder.target, self.noted)
        if resumed is None and self.in_place:
            checkpoint.require_complete(self.folder.target)
        here, field = (self.start_from, checkpoint.FIELD) if resumed is None else (resumed, CHECKPOINT)
        distributed.on_main(lambda: _refuse_draft(here, field))
        model = source.model(job, session, here)
        quantizers = formats.check_calibrated(model)
        if quantizers:
            say(f"training through {quantizers} quantizers")
            extensions.prepare(self.env, model)
        if taught:
            with job.steps("teacher", f"from {args.export_kd_teacher_load}"):
                model = distill.with_teacher(model, session, lambda conf: self._arguments(session, conf))
        made = trainer.prepare(model, args)
        if resumed is None:
            say(f"training: {args.train_iters} iterations of {args.global_batch_size} rows")
            return made
        if args.finetune:
            warn(f"--finetune is for a first start, and {self.folder.target} has a training to go on with.")
            args.finetune = False
        with job.steps("resume", f"from {resumed}"):
            state.load(made, resumed)
        job.steps.event("resume", iteration=made.iteration, folder=str(resumed))
        say(f"training goes on after iteration {made.iteration} of {args.train_iters}")
        return made

    def _arguments(self, session: Session, conf: ModelConf) -> Namespace:
        """Of a model with another conf, such as a teacher, in this run."""
        return megatron_arguments(self.job, conf, session.source, self.layout, self.add_arguments, self.defaults)

    def _save(self, learner: trainer.Trainer) -> None:
        with self.job.steps("save", f"iteration {learner.iteration} to {self.folder.target}"), self.folder.saving():
            state.save(learner, self.folder.target, self.noted, learner.args.keep_last)


def _refuse_draft(here: Path | None, field: str) -> None:
    if here is not None and checkpoint.draft(here) is not None:
        raise StageError(
            field, f"{here} has a draft: {NO_DRAFT}", f"give the base, or start eagle3 to train the draft of {here}."
        )
