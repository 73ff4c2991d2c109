"""Megatron's own argument parser, on a line made of the model conf, the layout and MLM_EXTRA_ARGS.

Megatron reads ``sys.argv``; the user's words come last on that line, so they win, and whatever Megatron
documents passes through.
"""

import difflib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, NoReturn

from mlmsub.runtime.env import Layout
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.modelconf import ModelConf

AddArguments = Callable[[ArgumentParser], object]


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
            raise StageError("MLM_EXTRA_ARGS or model conf", _explain(message, known))

        parser.error = fail  # type: ignore[method-assign]
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
    except (AssertionError, ValueError) as error:
        raise StageError("Megatron arguments", _first_line(error) or "Megatron refuses them.") from error
    except SystemExit as error:  # Megatron prints and calls exit() for --help and for some old flags
        raise StageError("Megatron arguments", " ".join(printed.getvalue().split())[-300:]) from error
    finally:
        sys.argv = saved
    return args


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
        raise StageError("model conf and layout", _first_line(error)) from error


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


def _explain(message: str, known: list[str]) -> str:
    if not message.startswith("unrecognized arguments:"):
        return f"{message}."
    words = message.partition(":")[2].split()
    unknown = next((word for word in words if word.startswith("--")), words[0]).partition("=")[0]
    near = difflib.get_close_matches(unknown, known, 3)
    hint = f" Nearest: {', '.join(near)}." if near else ""
    return f"neither Megatron nor this stage knows {unknown}.{hint}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
