"""prune: take layers out of a model, or make it narrower, and save it as a Megatron checkpoint.

The source is the Hugging Face checkpoint HF_MODEL_CKPT, or the Megatron checkpoint MLM_MODEL_CKPT if set. Depth alone
is pruned on any machine; width is modelopt's work and needs Transformer Engine and a GPU.
"""

import copy
import importlib.util
import json
import math
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import checkpoint, hf, hf_export, hf_import, source
from mlmsub.runtime.env import Env, Layout
from mlmsub.runtime.errors import CheckFailed, StageError
from mlmsub.runtime.megatron_args import positive, transformer_config
from mlmsub.runtime.models import pruning
from mlmsub.runtime.progress import say, warn
from mlmsub.runtime.quantization import calibration, calibration_data, formats
from mlmsub.runtime.quantization.perplexity import Perplexity
from mlmsub.runtime.session import Job, Session
from mlmsub.runtime.stage import CHECKPOINT, BaseStage

# the reference's prune.sh: TARGET_NUM_LAYERS=24 is --target-num-layers 24
VARIABLES = (*(f"TARGET_{name.upper()}" for name in pruning.WIDTHS.values()), "TARGET_NUM_LAYERS", "LAYERS_TO_DROP")
COSTLY = 2.0  # a perplexity that grows by this factor is told as a warning


class Stage(BaseStage):
    """``prune MODEL``; what to prune stands in variables or in MLM_EXTRA_ARGS."""

    makes = CHECKPOINT
    not_taken: ClassVar[dict[str, str]] = {
        "--prompts": "the generate stage writes text from the pruned checkpoint.",
        "--references": "the generate stage compares its text with references.",
        "--pretrained-model-path": "set HF_MODEL_CKPT.",
        "--target-num-query-groups": "modelopt prunes heads within each query group, and keeps the groups.",
        "--target-mamba-num-heads": "models with Mamba layers are not pruned.",
        "--target-mamba-head-dim": "models with Mamba layers are not pruned.",
    }

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.defaults = _words_of_variables(job.env)
        asked = _read([*self.defaults, *job.flags, *job.env.arguments("MLM_EXTRA_ARGS")], self.add_arguments)
        self.targets = _targets(asked)
        self.targets.require()
        if self.targets.widths:
            _require_transformer_engine()
        self.data = calibration_data.find(asked.calib_data or job.env.text("MLM_CALIB_DATA"))
        self.result = self.output("_prune", checkpoint.TRACKER)

    @classmethod
    def place(cls, env: Env) -> tuple[Layout, int | None]:
        """One process per pipeline stage: modelopt lets each rank rank its channels, so replicas could differ."""
        asked = env.layout()
        layout = Layout(pp=asked.pp)
        if asked != layout:
            raise StageError("TP, CP, EP", f"prune needs TP=1 CP=1 EP=1 ETP=1, not {asked}.", "use PP.")
        if layout.pp > env.world_size:
            raise StageError("PP", f"{layout.pp} is more than the {env.world_size} processes of this run.")
        return layout, layout.pp

    def run(self, session: Session, model: Any = None) -> None:
        from mlmsub.runtime.models.model import device

        args, where = session.args, device(session.args)
        self.targets.check(args)
        distributed.on_main(lambda: _check_result(session, self.targets))
        if self.targets.widths and where == "cpu":
            raise StageError("prune", "width needs a GPU: Transformer Engine's layers compute nowhere else.")
        scores = _shared_scores(args, self.job.model) if not self.targets.widths else None
        open_tokenizer = partial(hf.tokenizer, session.source, session.conf)
        loss = Perplexity(open_tokenizer, args, where)
        calibrates = self._calibrates(scores)
        samples = calibration_data.samples(args, self.data, self.env, open_tokenizer) if calibrates else None
        self.begin(self.result)
        model = (
            self._prunable(session, where) if self.targets.widths else source.model(self.job, session, self.start_from)
        )
        if any(distributed.gather(any(True for _ in formats.quantizers(model)))):
            raise StageError("MLM_MODEL_CKPT", f"{self.start_from} is quantized.", "prune first, then quantize.")
        if hasattr(model, "eagle_module"):
            raise StageError("MLM_MODEL_CKPT", f"{self.start_from} has a draft.", "prune first, then train a draft.")
        before = self._measure(loss, model, "the model to prune")
        parameters = _parameters(model)
        dropped = self._prune(session, model, samples, scores, where)
        if _parameters(model) >= parameters:
            raise CheckFailed("prune", "nothing was pruned: the model has as many parameters as before.")
        self._tell(dropped, parameters, _parameters(model), before, self._measure(loss, model, "the pruned model"))
        with self.job.steps("save", f"to {self.result.target}"):
            checkpoint.save(model, pruning.pruned_arguments(args, self.targets, dropped), self.result.part)
            self.publish(self.result)

    def _prunable(self, session: Session, where: str) -> Any:
        """The model with the layers that modelopt prunes."""
        from mlmsub.runtime.models.model import build

        args, steps = session.args, self.job.steps
        model = build(args, session.conf, where, pruning.transformer_engine_layers)
        if self.start_from is not None:
            with steps("load", f"from {self.start_from}"):
                checkpoint.load(model, self.start_from)
            return model
        host = copy.copy(args)
        host.use_cpu_initialization = True
        with steps("import", f"from {session.source}"):
            whole = build(host, session.conf, "cpu")
            hf_import.import_weights(whole, session.source, session.conf, args.params_dtype, steps)
            pruning.copy_weights(whole, model)
        return model

    def _calibrates(self, scores: dict[int, float] | None) -> bool:
        return bool(self.targets.widths) or (not self.targets.dropped and scores is None)

    def _prune(
        self, session: Session, model: Any, samples: Any, scores: dict[int, float] | None, where: str
    ) -> tuple[int, ...]:
        """Prune in place; returns the layers that went, counted from 1."""
        args, steps = session.args, self.job.steps
        size = 1 if samples is None else args.calib_batch_size or calibration.batch_size(samples.shape[1], where)
        if samples is not None:
            steps.event("calibration", samples=len(samples), length=samples.shape[1], batch=size)
        if self.targets.widths:
            path = Path(args.pruning_scores_path) if args.pruning_scores_path else None
            with steps("prune", "width, by modelopt's Minitron"):
                loop = calibration.forward_loop(samples, size, where)
                return pruning.prune_width(model, self.targets, loop, path)
        dropped = self.targets.dropped
        if self.targets.num_layers is not None:
            if scores is None:
                with steps("scores", "block influence of each layer"):
                    scores = pruning.block_influence(model, samples, size, where)
                if args.pruning_scores_path:
                    made, file = scores, Path(args.pruning_scores_path)
                    distributed.on_main(lambda: pruning.write_scores(file, self.job.model, made))
            steps.event("block_influence", scores={layer: round(score, 6) for layer, score in scores.items()})
            say("block influence: " + ", ".join(f"{layer} {score:.4f}" for layer, score in scores.items()))
            dropped = pruning.least_influential(scores, self.targets.num_layers, pruning.dense_layers(args))
        pruning.drop_layers(model, dropped)
        return dropped

    def _measure(self, loss: Perplexity, model: Any, what: str) -> float:
        """The mean loss per token of a fixed text; CheckFailed if it is not finite."""
        with self.job.steps("loss"):
            value = loss.measure(model)
        if not math.isfinite(value):
            raise CheckFailed("loss", f"{what} computes NaN or infinity.", "check that the checkpoint is whole.")
        return math.log(value)

    def _tell(self, dropped: tuple[int, ...], had: int, has: int, before: float, after: float) -> None:
        if dropped:
            say(f"layers dropped: {', '.join(map(str, dropped))}")
        say(f"parameters: {had:,} before, {has:,} after ({100 * has / had:.1f} %)")
        say(f"loss of the fixed text: {before:.4f} before, {after:.4f} after")
        numbers = {"parameters_before": had, "parameters_after": has, "loss_before": before, "loss_after": after}
        self.job.steps.event("prune", dropped=list(dropped), widths=dict(self.targets.widths), **numbers)
        if after - before > math.log(COSTLY):
            warn("pruning has more than doubled the perplexity: train the pruned model before it is used.")

    def add_arguments(self, parser: ArgumentParser) -> None:
        group = parser.add_argument_group("prune")
        for name in pruning.WIDTHS.values():
            group.add_argument(f"--target-{name.replace('_', '-')}", type=positive, help="prune to this size")
        group.add_argument("--target-num-layers", type=positive, help="keep so many layers, by block influence")
        group.add_argument("--layers-to-drop", type=positive, nargs="*", metavar="N", help="these layers, from 1")
        group.add_argument("--pruning-scores-path", help="a file for the scores; used if it is there")
        calibration_data.add_arguments(group, size=1024)


def _words_of_variables(env: Env) -> list[str]:
    words: list[str] = []
    for flag, reason in Stage.not_taken.items():
        variable = flag.removeprefix("--").replace("-", "_").upper()
        if variable.startswith("TARGET_") and env.text(variable):
            raise StageError(variable, "cannot be pruned.", reason)
    for name in VARIABLES:
        values = env.arguments(name)
        if values:
            words += [f"--{name.lower().replace('_', '-')}", *values]
    return words


def _read(words: list[str], add_arguments: Any) -> Namespace:
    """This stage's own flags on a line that Megatron parses later: what they ask for is known before torch is."""
    parser = ArgumentParser(prog="prune", allow_abbrev=False, add_help=False)
    add_arguments(parser)

    def fail(message: str) -> NoReturn:
        raise StageError("MLM_EXTRA_ARGS", f"{message}.")

    parser.error = fail  # type: ignore[method-assign]
    return parser.parse_known_args(words)[0]


def _targets(asked: Namespace) -> pruning.Targets:
    widths = {name: getattr(asked, f"target_{theirs}") for name, theirs in pruning.WIDTHS.items()}
    return pruning.Targets(
        {name: size for name, size in widths.items() if size is not None},
        asked.target_num_layers,
        tuple(sorted(set(asked.layers_to_drop or ()))),
    )


def _require_transformer_engine() -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        raise StageError(
            "prune",
            "modelopt prunes the width of Transformer Engine's layers, and this Python has no transformer_engine.",
            "use an image that has it, or prune depth alone: --target-num-layers or --layers-to-drop.",
        )


def _shared_scores(args: Namespace, model: str) -> dict[int, float] | None:
    """Scores of layers that an earlier run has written, the same on every rank."""
    if not args.pruning_scores_path:
        return None
    found: dict[int, float] | None = distributed.on_main(
        lambda: pruning.read_scores(Path(args.pruning_scores_path), model, args.num_layers)
    )
    if found is not None:
        say(f"scores from {args.pruning_scores_path}")
    return found


def _check_result(session: Session, targets: pruning.Targets) -> None:
    """Raise StageError unless Megatron and transformers both take a model of these sizes."""
    from transformers import AutoConfig

    args = session.args
    last = tuple(range(targets.left(args) + 1, args.num_layers + 1))
    made = transformer_config(pruning.pruned_arguments(args, targets, last), session.conf)
    data = json.loads((session.source / "config.json").read_text())
    if "auto_map" in data:  # its class is the checkpoint's own code
        return
    text = data.get("text_config", data)
    _require_fields(text, targets)
    hf_export.resize(text, hf_export.sizes(made))
    try:
        AutoConfig.for_model(data.pop("model_type"), **data)
    except Exception as error:  # huggingface_hub's validation wraps any error, under a class of its own
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        raise StageError("prune", f"transformers refuses a model of these sizes: {reason}", "choose others.") from error


def _require_fields(text: dict[str, Any], targets: pruning.Targets) -> None:
    """Raise StageError if a config.json has no field of its own for a size of the experts that would change."""
    for name, field in (
        ("moe_ffn_hidden_size", "moe_intermediate_size"),
        ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
    ):
        # n_shared_experts counts in units of moe_intermediate_size
        if name in targets.widths and (field not in text or text.get("n_shared_experts")):
            raise StageError(name, f"config.json of this family has no {field} of its own.", "leave this target out.")


def _parameters(model: Any) -> int:
    """Of the whole model; an output layer that is the embedding counts on each pipeline stage that holds it."""
    mine = sum(parameter.numel() for parameter in model.parameters())
    return sum(distributed.gather(mine))
