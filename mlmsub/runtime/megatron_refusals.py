"""What Megatron's parser and its checks refuse, told with the flag's name and what to do about it.

Megatron asserts much without a message, and prints and exits for some old flags.
"""

import ast
import difflib
import inspect
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mlmsub.runtime.errors import StageError, first_line

FIELD = "MLM_EXTRA_ARGS"
# flags that the stages decide: what is wrong with them, and what to do instead
DECIDED = {
    "--help": ("would print Megatron's usage and end.", "leave it out; docs/ has the flags of each stage."),
    "-h": ("would print Megatron's usage and end.", "leave it out; docs/ has the flags of each stage."),
    "--fp16": ("is not taken: the stages compute in bf16.", "leave it out."),
    "--save": ("is not taken: the folder to write is a variable.", "set MLM_MODEL_SAVE."),
    "--load": ("is not taken: the checkpoint to read is a variable.", "set MLM_MODEL_CKPT."),
}


def refuse_decided(words: Sequence[str]) -> None:
    """Raise StageError for the first of the user's words that is a flag of ``DECIDED``."""
    for word in words:
        flag = word.partition("=")[0]
        if flag in DECIDED:
            problem, fix = DECIDED[flag]
            raise StageError(FIELD, f"{flag} {problem}", fix)


def of_parser(message: str, known: Sequence[str], users: Sequence[str]) -> StageError:
    """argparse's refusal. ``known``: all flags that there are; ``users``: the words of MLM_EXTRA_ARGS."""
    if message.startswith("unrecognized arguments:"):
        words = message.partition(":")[2].split() or ["''"]
        unknown = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
        near = difflib.get_close_matches(unknown, known, 3)
        hint = f" Nearest: {', '.join(near)}." if near else ""
        fix = f"correct {unknown}, or leave it out."
        return StageError(where([unknown], users), f"neither Megatron nor this stage knows {unknown}.{hint}", fix)
    named, _, reason = message.removeprefix("argument ").partition(": ")
    flags = [word for word in named.split("/") if word in known]
    if not message.startswith("argument ") or not flags:
        return StageError(where([], users), f"{message}.", "correct the arguments.")
    return StageError(where(flags, users), f"{named}: {reason}.", f"correct {named}, or leave it out.")


def of_check(error: Exception, line: Sequence[str], users: Sequence[str]) -> StageError:
    """A check that failed in Megatron's code. ``line``: all words that it was given, ``users``: those of the user."""
    condition, looked_at = _failed(error)
    # validation has the training's batch sizes; a message of Megatron's names what it has copied them to
    text = (first_line(error) if str(error) else "").replace("eval_global_batch_size", "global_batch_size")
    text = text.replace("eval_micro_batch_size", "micro_batch_size")
    names = dict.fromkeys([*looked_at, *re.findall(r"[a-z]+(?:_[a-z]+)+", text)])
    flags = [f"--{name.replace('_', '-')}" for name in names]
    given = [flag for flag in flags if flag in _flags(users)] or [flag for flag in flags if flag in _flags(line)]
    text = text or f"Megatron's check `{condition}` fails."
    text += "" if text.endswith(".") else "."
    shown = ", ".join(given)
    if not any(flag in text for flag in given):
        text = f"{shown}: {text}" if given else text
    return StageError(where(given, users), text, f"correct {shown}, or leave it out." if given else "")


@contextmanager
def refusing(field: str, *also: type[Exception]) -> Iterator[None]:
    """What Megatron's code in the body asserts or lacks is told as a wrong value of ``field``; ``also``: more kinds."""
    kinds: tuple[type[Exception], ...] = (AssertionError, ImportError, TypeError, ValueError, *also)
    try:
        yield
    except kinds as error:
        raise StageError(field, f"Megatron refuses it: {of_check(error, [], []).problem}", "correct it.") from error


def of_exit(printed: str, users: Sequence[str]) -> StageError:
    """Megatron ended the process after it had printed why."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    text = lines[-1] if lines else "Megatron ended without a word."
    return StageError(where([word for word in text.split() if word in _flags(users)], users), text)


def where(flags: Sequence[str], users: Sequence[str]) -> str:
    """The field of an error about ``flags``; ``users``: the words of MLM_EXTRA_ARGS."""
    if not flags:
        return "MLM_EXTRA_ARGS or model conf"
    return FIELD if set(flags) & _flags(users) else "Megatron arguments"


def _flags(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0] for word in words}


def _failed(error: Exception) -> tuple[str, list[str]]:
    """The condition that failed, and the arguments that it and the conditions round it look at, as Python has them."""
    frame, number = list(traceback.walk_tb(error.__traceback__))[-1]
    try:
        tree = ast.parse(inspect.getsource(inspect.getmodule(frame) or frame))
    except (OSError, TypeError, SyntaxError):
        return "", []
    found = [test for test, node in _conditions(tree) if node.lineno <= number <= (node.end_lineno or 0)]
    names = [
        part.attr for test in reversed(found) for part in ast.walk(test)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in ("args", "self")
    ]  # fmt: skip
    return ast.unparse(found[-1]) if found else "", list(dict.fromkeys(names))


def _conditions(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.stmt]]:
    """The conditions of a module with their statements, the outer ones first."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert | ast.If):
            yield node.test, node
