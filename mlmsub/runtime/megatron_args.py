"""Megatron's own argument parser, on a line made of the model conf, the layout and MLM_EXTRA_ARGS.

Megatron reads ``sys.argv``; the user's words come last on that line, so they win, and whatever Megatron
documents passes through.
"""

import difflib
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, NoReturn

from mlmsub.runtime import megatron_refusals
from mlmsub.runtime.env import Layout
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.modelconf import ModelConf

AddArguments = Callable[[ArgumentParser], object]
# what Megatron takes as any number, and fails of later, or passes over: kind, least and most
RANGES: dict[str, tuple[type, float, float]] = {
    name: (kind, least, most) for kind, least, most, names in (
        (int, 1, 2**40, "train-iters train-samples lr-decay-iters lr-decay-samples micro-batch-size global-batch-size"),
        (int, 1, 2**40, "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size"),
        (int, 1, 2**40, "expert-model-parallel-size expert-tensor-parallel-size recompute-num-layers rotary-base"),
        (int, 1, 2**40, "max-position-embeddings make-vocab-size-divisible-by distributed-timeout-minutes"),
        (int, 1, 2**40, "tensorboard-log-interval"),
        (int, 0, 2**40, "lr-warmup-iters lr-warmup-samples lr-wsd-decay-iters lr-wsd-decay-samples"),
        (int, 0, 2**40, "eval-iters eval-interval save-interval log-interval"),
        (int, 0, 2**32 - 1, "seed"),
        (int, 2, 2**40, "seq-length"),
        (float, 0, 1000, "lr min-lr lr-warmup-init init-method-std weight-decay start-weight-decay end-weight-decay"),
        (float, 0, 1, "lr-warmup-fraction"),
        (float, 0, 1e30, "clip-grad"),
        (float, 1e-30, 1, "adam-eps norm-epsilon"),
        (float, 1e-30, 1e30, "loss-scale rope-scaling-factor"),
        (float, 0, 0.999999, "adam-beta1 adam-beta2 sgd-momentum attention-dropout hidden-dropout"),
    ) for name in names.split()
}  # fmt: skip


def parse(
    conf: ModelConf,
    layout: Layout,
    extra: list[str],
    add_arguments: AddArguments,
    defaults: list[str] | None = None,
) -> Namespace:
    """Parse and validate. ``add_arguments`` adds the stage's own flags, ``defaults`` are its Megatron flags.

    Raises StageError that names the flag, with the nearest flags that exist, or tells Megatron's reason.
    """
    from megatron.training.arguments import parse_args, validate_args

    def provider(parser: ArgumentParser) -> ArgumentParser:
        add_arguments(parser)
        known = [flag for action in parser._actions for flag in action.option_strings]

        def fail(message: str) -> NoReturn:
            raise megatron_refusals.of_parser(message, known, extra)

        for flag, (kind, least, most) in RANGES.items():
            parser._option_string_actions[f"--{flag}"].type = within(kind, least, most)
        parser.error = fail  # type: ignore[method-assign]
        parser.print_help = lambda file=None: megatron_refusals.refuse_decided(["--help"])  # type: ignore[method-assign]
        return parser

    line = [*conf.arguments(), *_layout_words(layout), *_platform_words(), *(defaults or []), *extra]
    printed = StringIO()  # 700 lines: each argument with its value
    saved, sys.argv = sys.argv, ["mlmsub", *line]
    try:
        with redirect_stdout(printed):
            args: Namespace = parse_args(provider)
            for name, value in conf.config.items():
                setattr(args, name, value)
            validate_args(args, {})
            args.pruned = conf.pruned  # every checkpoint that is made of this one has its sizes
    except (AssertionError, ValueError) as error:
        raise megatron_refusals.of_check(error, line, extra) from error
    except SystemExit as error:  # Megatron prints and calls exit() for some old flags
        raise megatron_refusals.of_exit(printed.getvalue(), extra) from error
    finally:
        sys.argv = saved
    return args


def positive(text: str) -> int:
    """The type of a flag that takes a whole number of at least 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def within(kind: type, least: float, most: float) -> Callable[[str], Any]:
    """The type of a flag that takes a number of this kind, from ``least`` to ``most``."""

    def read(text: str) -> Any:
        name = "whole number" if kind is int else "number"
        try:
            value = kind(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is no {name}") from None
        if not least <= value <= most:  # as NaN is not
            raise ArgumentTypeError(f"{text} is no {name} from {least} to {most:,}")
        return value

    return read


def transformer_config(args: Namespace, conf: ModelConf) -> Any:
    """The (MLA)TransformerConfig of parsed arguments, with the conf's ``config`` fields set on it."""
    import dataclasses

    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.training.argument_utils import core_transformer_config_from_args

    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    fields = {field.name for field in dataclasses.fields(kind)}
    for name in conf.config:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            raise StageError(f"model conf: config.{name}", f"{kind.__name__} has no such field.", " ".join(near))
    try:
        return core_transformer_config_from_args(args)
    except (AssertionError, ValueError) as error:
        raise StageError("model conf and layout", megatron_refusals.of_check(error, [], []).problem) from error


def _layout_words(layout: Layout) -> list[str]:
    names = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.cp,
        "--expert-model-parallel-size": layout.ep,
        "--expert-tensor-parallel-size": layout.etp,
    }
    return [word for name, size in names.items() for word in (name, str(size))]


def _platform_words() -> list[str]:
    """Flags that follow from what is installed and which device there is."""
    import torch
    from megatron.core.extensions.transformer_engine import HAVE_TE

    # Apex's fused kernels are in no wheel; without the flag a layer refuses to be built when it is missing.
    words = ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-persist-layer-norm"]
    words.append("--no-rope-fusion")
    if not HAVE_TE:
        words += ["--transformer-impl", "local", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion"]
    if not torch.cuda.is_available():
        words += ["--use-cpu-initialization", "--distributed-backend", "gloo"]
    return words
