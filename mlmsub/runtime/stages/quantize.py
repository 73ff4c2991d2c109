"""quantize: calibrate a model to a low-precision format and save it as a Megatron checkpoint.

The source is the Hugging Face checkpoint HF_MODEL_CKPT, or the Megatron checkpoint MLM_MODEL_CKPT if set.
"""

from argparse import ArgumentParser
from functools import partial
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import checkpoint, hf
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.megatron_args import positive
from mlmsub.runtime.progress import say, warn
from mlmsub.runtime.quantization import calibration_data, extensions, formats, quantizing, recipes
from mlmsub.runtime.quantization.perplexity import Perplexity
from mlmsub.runtime.session import Job, Session
from mlmsub.runtime.stage import CHECKPOINT, BaseStage

# flags of the reference's quantize.py that this stage does not take, with what to do instead
NOT_TAKEN = {
    "--prompts": "the generate stage writes text from the quantized checkpoint.",
    "--references": "the generate stage compares its text with references.",
    "--generate-output-len": "the generate stage takes the length of its text.",
    "--export-real-quant-cfg": "the reference reads it no more; --compress stores low-bit weights.",
    "--pretrained-model-path": "set HF_MODEL_CKPT.",
}


class Stage(BaseStage):
    """``quantize MODEL [FORMAT|RECIPE|auto]``"""

    words = 1
    makes = CHECKPOINT
    takes_live = gives_live = may_skip_save = True
    not_taken = NOT_TAKEN

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.word = job.words[0] if job.words else self.env.text("QFORMAT")
        self.target = self.output("_quant", checkpoint.TRACKER)
        calibration_data.find(self.env.text("MLM_CALIB_DATA"))

    def add_arguments(self, parser: ArgumentParser) -> None:
        _add_arguments(parser)

    def _drafted(self, session: Session, live: Any) -> StageError | None:
        """What to say of a model with a draft: calibration does not reach the draft, and it is trained for its base."""
        start = self.start_from if live is None else None
        if not hasattr(live, "eagle_module") and (start is None or checkpoint.draft(start) is None):
            return None
        problem = f"{self.origin(session)} has a draft."
        return StageError(checkpoint.FIELD, problem, "quantize the base, then train a draft for it with eagle3.")

    def run(self, session: Session, model: Any = None) -> Any:
        """Quantize the model, in place where it is live, and save it."""
        from mlmsub.runtime.models.model import device

        args, job = session.args, self.job
        plan = recipes.resolve(self.word, args, device(args))
        data = calibration_data.find(args.calib_data or self.env.text("MLM_CALIB_DATA"))
        samples = None
        if plan.needs_samples:
            open_tokenizer = partial(hf.tokenizer, session.source, session.conf)
            with job.steps(
                "data", f"{data.name}, {args.calib_size} samples of {args.calib_max_sequence_length} tokens"
            ):
                samples = calibration_data.samples(args, data, self.env, open_tokenizer)
        self.begin(self.target)
        distributed.agree(self._drafted(session, model))
        model = self.model(session, model)
        if any(distributed.gather(any(True for _ in formats.quantizers(model)))):
            raise StageError(
                checkpoint.FIELD, f"{self.origin(session)} is quantized already.", "start from the unquantized one."
            )
        if self.start_from is not None:  # the import looks at what it reads
            quantizing.check_weights(model)
        _quantize(job, session, model, plan, samples)
        self.save(session, model, self.target)
        return model


def _quantize(job: Job, session: Session, model: Any, plan: recipes.Plan, samples: Any) -> None:
    """Quantize ``model`` in place, and check that it is what was asked for."""
    args, steps = session.args, job.steps
    device = next(model.parameters()).device.type
    perplexity = None
    if args.perplexity:
        perplexity = Perplexity(lambda: hf.tokenizer(session.source, session.conf), args, device)
        with steps("perplexity", "of a fixed text, before"):
            perplexity.measure_before(model)
    count = quantizing.quantize(model, plan, samples, args, device, job)
    say(f"{count} quantizers calibrated")
    if formats.not_exported(model):
        warn(f"{plan.name} can be used in Megatron; the export stage cannot write it as a Hugging Face checkpoint.")
    if args.compress:
        with steps("compress"):
            say(f"{quantizing.compress(model)} weights are stored in low precision")
        warn("a compressed checkpoint can be used in Megatron; the export stage takes one made without --compress.")
    if perplexity is None:
        return
    if not formats.can_run(model, device):
        say(f"perplexity of the fixed text: {perplexity.before:.4g} before; {plan.name} computes on a GPU only")
        return
    extensions.prepare(job.env, model, compile_fp8=False)
    with steps("perplexity", f"of a fixed text, in {plan.name}"):
        perplexity.compare(model, steps)


def _add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("quantize")
    group.add_argument("--export-quant-cfg", help="the format, as the word after the model")
    group.add_argument("--recipe", help="a modelopt recipe: a YAML file or a name under modelopt_recipes")
    calibration_data.add_arguments(group, size=512)
    group.add_argument("--calib-use-random-offset", action="store_true", help="one sample per text, at a random place")
    group.add_argument("--no-perplexity", dest="perplexity", action="store_false", help="measure no perplexity")
    group.add_argument("--skip-generate", action="store_true", help="taken for the reference's sake: no text is made")
    _add_format_arguments(group)
    _add_search_arguments(group)


def _add_format_arguments(group: Any) -> None:
    group.add_argument("--weight-only", action="store_true", help="do not quantize activations")
    group.add_argument("--disable-qkv-quant", action="store_true", help="do not quantize the attention blocks")
    group.add_argument("--export-kv-cache-quant", choices=sorted(formats.KV_FORMATS), default="none")
    group.add_argument("--num-first-layers-to-skip-quant", type=positive)
    group.add_argument("--num-last-layers-to-skip-quant", type=positive)
    group.add_argument("--compress", action="store_true", help="store the weights in low precision")
    group.add_argument("--sync-expert-weight-amax", action="store_true", help="one weight range for a layer's experts")
    group.add_argument("--layerwise", action="store_true", help="calibrate layer by layer, in less memory")
    group.add_argument("--layerwise-checkpoint", help="a folder for the progress of it, to go on from; one process")


def _add_search_arguments(group: Any) -> None:
    group.add_argument("--auto-quantize-bits", type=float, help="bits per weight to reach by a search over formats")
    group.add_argument("--auto-quantize-formats", nargs="+", default=["NVFP4_DEFAULT_CFG", "FP8_DEFAULT_CFG"])
    group.add_argument("--auto-quantize-method", choices=("gradient", "kl_div"), default="gradient")
    group.add_argument("--auto-quantize-score-size", type=positive, default=128, help="samples to score with")
    group.add_argument("--auto-quantize-checkpoint", help="a file for the search's state, to go on from")
