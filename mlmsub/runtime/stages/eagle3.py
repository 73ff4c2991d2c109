"""eagle3: give a model an EAGLE3 draft, then train the draft; the base stays as it is.

The base runs beside the draft, or (``--export-offline-model``) its hidden states come from EXTRACT_DIR, where the stage
extract has stored them. Two phases, in one run: where MLM_MODEL_SAVE holds no complete checkpoint, the model is
converted with a fresh draft and saved there as ``release``; then the draft trains, and every iteration that is saved
goes to the same folder. A run that was cut off goes on in the phase where it was.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import checkpoint, frozen_base, hf, identity, source
from mlmsub.runtime.checkpoints.frozen_base import Base
from mlmsub.runtime.data import dataset, hidden_states
from mlmsub.runtime.data.packing import PackedDataset
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.generation import prompts
from mlmsub.runtime.models import eagle, eagle_config
from mlmsub.runtime.progress import say, warn
from mlmsub.runtime.quantization import extensions, formats
from mlmsub.runtime.stage import CHECKPOINT, BaseStage
from mlmsub.runtime.training import arguments, loop, record, state, stopping, trainer
from mlmsub.runtime.training.folder import Folder

if TYPE_CHECKING:
    from mlmsub.runtime.session import Job, Session

Data = PackedDataset | hidden_states.Dataset

NO_EVAL, SAVE_BASE = "--no-eval", "--save-base"
MOST = 64  # tokens of an answer whose acceptance is measured


class DraftFolder(Folder):
    """MLM_MODEL_SAVE: a training's folder that may begin with a converted model, or with half of one."""

    def goes_on(self) -> bool:
        return bool(self.tracker())

    def _entries(self) -> list[Path]:
        return [entry for entry in super()._entries() if entry.name != checkpoint.RELEASE]


class Stage(BaseStage):
    """``eagle3 MODEL [FLAG...]``; the same flags may stand in MLM_EXTRA_ARGS or in a group's variable."""

    makes = CHECKPOINT
    not_taken: ClassVar[dict[str, str]] = arguments.NOT_TAKEN

    def __init__(self, job: "Job") -> None:
        super().__init__(job)
        eagle.check_layout(self.layout.pp, self.layout.cp)
        experts = arguments.for_experts(self.conf, self.layout)
        self.defaults = ["--algorithm", "eagle3", *experts, *arguments.words(job.env)]
        target = job.env.work_path(CHECKPOINT, "-Eagle3", job.model)
        self.folder = DraftFolder(job.env, target, job.stage)
        self.folder.check(MLM_MODEL_CKPT=self.ckpt, HF_MODEL_CKPT=hf.check_source(job.env.text("HF_MODEL_CKPT")))
        self.outputs = {CHECKPOINT: target}
        self.prompts = prompts.check_file(job.env.text("PROMPTS_PATH"), "PROMPTS_PATH")
        self.stop = stopping.StopFile(job.env)
        self.base: Base | None = None  # what the saves refer to
        self.noted: dict[str, Any] = {}  # what makes this training, for the saves

    def add_arguments(self, parser: ArgumentParser) -> None:
        eagle.add_arguments(parser.add_argument_group("draft"))
        dataset.add_arguments(parser)
        arguments.add_arguments(parser)
        parser.add_argument(SAVE_BASE, action="store_true", help="save the frozen base with every iteration too")
        parser.add_argument(NO_EVAL, action="store_true", help="measure no acceptance length, and no validation loss")

    def run(self, session: "Session", model: Any = None) -> Any:
        """Train, and save at every interval and at the end."""
        from mlmsub.runtime.models.eagle_training import DraftStep

        args, steps = session.args, self.job.steps
        eagle.check_layout(args.pipeline_model_parallel_size, args.context_parallel_size)
        draft = distributed.on_main(lambda: eagle.asked(args, session.conf, from_hf=self.start_from is None))
        if draft is None:
            raise StageError("--algorithm", "eagle3 trains a draft of that kind.", "leave --algorithm out.")
        arguments.check(args)
        intervals = loop.Intervals.of(args)
        if args.no_eval:
            intervals = replace(intervals, evaluate=0)
        measure = self._acceptance(session) if intervals.evaluate else None
        data: Any = self._stored(args) if args.export_offline_model else dataset.of(self.job, session)
        arguments.tell_evaluations(args, len(data.rows("valid")))
        if not data.rows("valid"):
            intervals = replace(intervals, evaluations=0)
        learner = self._trainer(session, draft, data)
        finished = loop.run(
            learner,
            lambda split, consumed: loop.batches(data, args, split, consumed),
            DraftStep(learner.module),
            intervals,
            self._save,
            steps=steps,
            evaluate=measure,
            should_stop=self.stop.asked,
        )
        if not finished:
            self.stop.end(learner.iteration)

    def _stored(self, args: Namespace) -> hidden_states.Dataset:
        """The hidden states that ``extract`` has stored, for a base without layers."""
        data = hidden_states.Dataset(self.env.work_path(hidden_states.FIELD, "_features", self.job.model))
        args.mlmsub_data, args.finetune_hf_dataset = data.plan.data, str(data.folder)
        say(f"hidden states of {data.plan.rows} rows from {data.folder}")
        return data

    def _trainer(self, session: "Session", draft: eagle.Draft, data: Data) -> trainer.Trainer:
        """The model with its draft, converted now or before, at the start of the training or where it was cut off."""
        args = session.args
        distributed.on_main(self.folder.begin)
        if self.ckpt is not None:
            checkpoint.require_complete(self.ckpt)
        self.noted = distributed.on_main(lambda: record.of(self, session))
        resumed = state.latest(self.folder.target, self.noted)
        converted = None if resumed else distributed.on_main(self._converted)
        here = resumed or converted
        own = distributed.on_main(lambda: self._own_draft(draft, here)) or draft.architecture
        if isinstance(data, hidden_states.Dataset):
            data.require(own[eagle_config.LAYERS], args.hidden_size, args.seq_length)
        model = source.model(self.job, session, here or self.start_from)
        if isinstance(data, hidden_states.Dataset):
            data.require_base(self._identity(model))
        if here is None:
            self._convert(model, args, draft, data)
        if not args.save_base:
            with self.job.steps("base", "its hash"):
                self.base = distributed.on_main(lambda: self._base(resumed))
        extensions.prepare(self.job.env, model)
        made = trainer.prepare(model, args)
        if resumed is not None:
            with self.job.steps("resume", f"from {resumed}"):
                state.load(made, resumed)
            self.job.steps.event("resume", iteration=made.iteration, folder=str(resumed))
        say(f"training: {args.train_iters} iterations of {args.global_batch_size} rows, {made.iteration} done")
        return made

    def _base(self, resumed: Path | None) -> Base | None:
        """The base that every iteration refers to, which the first phase has saved; None: each has to hold it."""
        known = None if resumed is None else Base.of(resumed)
        if known is not None:
            return known  # it was looked at when the model was loaded
        release = self.folder.target / checkpoint.RELEASE
        reason = checkpoint.incomplete_part(release)
        base = None if reason else Base.at(release)
        if base is not None and resumed is not None and frozen_base.digest(resumed) != base.sha256:
            reason = f"it is not that of {resumed}, or is laid out otherwise."
        if reason:
            warn(f"the base is saved with every iteration, since {release} cannot be referred to: {reason}")
            return None
        return base

    def _converted(self) -> Path | None:
        """The complete checkpoint of the first phase, or None."""
        release = self.folder.target / checkpoint.RELEASE
        reason = checkpoint.incomplete(self.folder.target)
        if reason:
            if self.folder.tracker():
                warn(f"the model is converted again: {reason}")
            return None
        record.check(self.noted, release)
        say(f"found a converted model in {self.folder.target}")
        return release

    def _identity(self, model: Any) -> dict[str, Any]:
        """What an offline base is, as far as it is here; all ranks call it."""
        start, found = self.start_from, self.noted.get("source")
        quantized = distributed.on_main(lambda: start is not None and checkpoint.quantized(start))
        known = found and identity.of_base(found["is"])
        return {"source": known, "ends": identity.of_ends(model), "quantized": quantized}

    def _own_draft(self, draft: eagle.Draft, here: Path | None) -> dict[str, Any] | None:
        """The architecture of the draft that the training begins with, if there is one: it has to be what is asked."""
        place = here or self.start_from
        config = checkpoint.draft(place) if place else None
        if place is None or config is None:
            if here is not None:
                raise StageError(CHECKPOINT, f"{here} holds a model without a draft.", "give another folder.")
            return None
        offline = config["eagle_offline"]
        if offline != draft.offline:
            problem, fix = (" not", "add it") if offline else ("", "leave it out")
            raise StageError(
                "--export-offline-model", f"is{problem} given, and {place} is of the other kind.",
                f"{fix}, or give another folder.",
            )  # fmt: skip
        own = eagle_config.served(config["eagle_architecture_config"], place)
        eagle_config.require_same({name: draft.architecture[name] for name in draft.given}, own, place)
        return own

    def _convert(self, model: Any, args: Namespace, draft: eagle.Draft, data: Data) -> None:
        """The first phase: the base with a fresh draft, saved."""
        steps = self.job.steps
        formats.check_calibrated(model)
        if not hasattr(model, "eagle_module"):
            with steps("draft", draft.describe()):
                count = eagle.add(model, args, draft)
                say(f"draft: {count:,} parameters")
                steps.event("draft", parameters=count, vocabulary=draft.architecture["draft_vocab_size"])
        if hasattr(model.eagle_module, "d2t"):
            coverage = eagle.set_vocabulary(model, data.counts)
            say(f"draft vocabulary: {len(model.eagle_module.d2t)} tokens, {coverage:.2%} of what training learns")
            steps.event("draft_vocabulary", tokens=len(model.eagle_module.d2t), coverage=round(coverage, 6))
        with steps("save", f"converted, to {self.folder.target}"), self.folder.saving():
            checkpoint.save(model, args, self.folder.target, {record.FILE: self.noted})

    def _save(self, learner: trainer.Trainer) -> None:
        with self.job.steps("save", f"iteration {learner.iteration} to {self.folder.target}"), self.folder.saving():
            state.save(learner, self.folder.target, self.noted, learner.args.keep_last, self.base)

    def _acceptance(self, session: "Session") -> Callable[[trainer.Trainer], dict[str, float]]:
        """What measures the acceptance length on the prompts of PROMPTS_PATH, or the built-in ones."""
        from mlmsub.runtime.generation import acceptance

        if session.args.export_offline_model:
            problem = f"the base has no layers, so the acceptance length is not measured: say so with {NO_EVAL}."
            raise StageError(
                "--export-offline-model",
                problem,
                "add it to MLM_EVAL_ARGS, and measure with validate on the whole model.",
            )
        tokenizer = hf.tokenizer(session.source, session.conf)
        room = session.args.max_position_embeddings - 2 * MOST
        asked = acceptance.questions(self.prompts, tokenizer, room)
        ends = prompts.end_tokens(session.source, tokenizer)

        def measure(learner: trainer.Trainer) -> dict[str, float]:
            learner.module.eval()
            settings = acceptance.Settings(learner.module.eagle_ttt_steps, MOST, ends)
            found = acceptance.evaluate(learner.module, asked, settings)
            return {"acceptance length": found["acceptance_length"]}

        return measure
