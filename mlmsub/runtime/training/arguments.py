"""The arguments of a training: the reference's groups of defaults, each replaced as a whole by its variable."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

from mlmsub.runtime.env import Env, Layout
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.modelconf import ModelConf
from mlmsub.runtime.progress import say
from mlmsub.runtime.training import trainer, writers

# in the order of the line, as in Megatron-LM's post-training examples: later words win
GROUPS = ("MLM_DATA_ARGS", "MLM_OPTIM_ARGS", "MLM_TRAIN_ARGS", "MLM_EVAL_ARGS", "MLM_RESUME_ARGS")
# Those of the examples' finetune.sh and eagle3.sh, but for flags that nothing here reads: packed documents have
# positions and attention of their own always (--reset-position-ids, --reset-attention-mask), the loss mask comes from
# the data (--eod-mask-loss), and a gradient that is not finite always ends the run.
DEFAULTS = {
    "MLM_DATA_ARGS": "--train-samples 128000 --lr-decay-samples 128000 --lr-warmup-samples 0 --split 100,0,0"
    " --finetune-hf-dataset Magpie-Align/Magpie-Llama-3.1-Pro-MT-300K-Filtered",
    "MLM_OPTIM_ARGS": "--lr 5.0e-5 --min-lr 1.0e-7 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.0"
    " --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.010 --use-distributed-optimizer",
    "MLM_TRAIN_ARGS": "--micro-batch-size 1 --attention-dropout 0.0 --hidden-dropout 0.0",
    "MLM_EVAL_ARGS": "--eval-iters 1 --eval-interval 1000 --save-interval 1000 --log-interval 100",
    "MLM_RESUME_ARGS": "",
}
IN_PLACE = "--in-place"
# flags of Megatron's that its own training loop reads, and the one here does not: what to do instead
_ONE_SIZE = "give --global-batch-size: it stays as it is."
_END = "give --train-iters; a job that comes to its time limit saves, and goes on after its restart."
_VALIDATION = "leave it out: validation takes the training's batch sizes and --eval-iters."
NOT_TAKEN = {
    "--rampup-batch-size": _ONE_SIZE,
    "--step-batch-size-schedule": _ONE_SIZE,
    "--exit-interval": _END,
    "--exit-duration-in-mins": _END,
    "--skip-train": "use validate, or mmlu.",
    "--iterations-to-skip": "leave it out.",
    "--eval-global-batch-size": _VALIDATION,
    "--eval-micro-batch-size": _VALIDATION,
    "--full-validation": _VALIDATION,
    "--start-eval-at-iter": "give --eval-interval.",
    "--save-retain-interval": "give --keep-last.",
    "--non-persistent-save-interval": "give --save-interval.",
    "--num-distributed-optimizer-instances": "leave it out: the optimizer is shared over all data-parallel ranks.",
    "--data-path": "give --finetune-hf-dataset.",
    "--finetune-data-files": "give the file or the folder with --finetune-hf-dataset.",
}


def words(env: Env, defaults: Mapping[str, str] = DEFAULTS) -> list[str]:
    """The words of all groups: a variable's where it is set, else the default's."""
    return [word for name in GROUPS for word in env.arguments(name) or defaults[name].split()]


def for_experts(conf: ModelConf, layout: Layout) -> list[str]:
    """What Megatron asks for before it trains experts together with tensor parallelism."""
    return ["--sequence-parallel"] if layout.tp > 1 and "--num-experts" in conf.arguments() else []


def add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument(IN_PLACE, action="store_true", help="MLM_MODEL_SAVE may be MLM_MODEL_CKPT")
    group.add_argument("--keep-last", type=_count, default=0, help="iterations to keep in MLM_MODEL_SAVE; 0: all")


def check(args: Namespace) -> None:
    """Raise StageError where the arguments alone show that nothing could be trained: before a model is loaded."""
    if args.lr is None:
        raise StageError("--lr", "is not given: MLM_OPTIM_ARGS replaces all of its defaults.", "add --lr to it.")
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        problem = "Megatron shards the state of Adam, not of SGD."
        raise StageError("--use-distributed-optimizer", problem, "leave it out, or give --optimizer adam.")
    if args.optimizer == "sgd" and not args.no_save_optim:
        problem = "sgd: Megatron cannot load its state, so that no training could go on after a restart."
        raise StageError("--optimizer", problem, "give adam, or add --no-save-optim.")
    if args.optimizer not in ("adam", "sgd"):
        from megatron.core.optimizer import HAVE_EMERGING_OPTIMIZERS

        if not HAVE_EMERGING_OPTIMIZERS:
            problem = f"{args.optimizer} needs the package emerging-optimizers, which is not installed here."
            raise StageError("--optimizer", problem, "give adam, or install it in the image.")
    writers.check(args)
    trainer.check(args)


def tell_evaluations(args: Namespace, rows: int) -> None:
    """Say once why a training evaluates less than it seems; ``rows``: those of the validation data."""
    if getattr(args, "no_eval", False):
        say("no evaluation: --no-eval")
    elif not args.eval_iters or not args.eval_interval:
        say(f"no evaluation: --eval-iters is {args.eval_iters}, --eval-interval {args.eval_interval}")
    elif not rows:
        say(f"no validation loss: --split {args.split} leaves no validation data")
    elif args.eval_interval > args.train_iters:
        say(f"one evaluation, at the end: --eval-interval {args.eval_interval} of {args.train_iters} iterations")


def _count(text: str) -> int:
    if not text.isdigit():
        raise StageError("--keep-last", f"{text!r} is not a number of checkpoints.")
    return int(text)
