"""Quoting for the two languages that a job script is written in: shell, and `#SBATCH` lines."""

from __future__ import annotations

import re
import shlex

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def quote(word: str) -> str:
    """The word as POSIX shell text; any value without NUL comes back byte for byte."""
    if "\0" in word:
        raise ValueError("a shell word cannot hold NUL")
    return shlex.quote(word)


def join(words: tuple[str, ...] | list[str]) -> str:
    return " ".join(map(quote, words))


def assignment(name: str, value: str) -> str:
    """`NAME=value`, to be sourced."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a shell variable's name")
    return f"{name}={quote(value)}"


def is_name(text: str) -> bool:
    """Whether the shell can hold a variable of this name."""
    return _NAME.fullmatch(text) is not None


def sbatch_value(value: str) -> str:
    """A value for a `#SBATCH --option=` line.

    sbatch splits these lines itself: it takes blanks, `#`, quotes and backslashes as the shell does in
    double quotes, and knows no line continuation; a control character cannot be expressed.
    """
    if _CONTROL.search(value):
        raise ValueError(f"a #SBATCH line cannot hold the control characters of {value!r}")
    if re.search(r"[\s\"'\\#]", value):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return value
