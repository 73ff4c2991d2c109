"""A model conf: a model's Megatron arguments, its tokenizer, and what is known about it.

The same facts can stand in a Megatron-LM style `.sh` file that sets MODEL_ARGS and TOKENIZER_MODEL. The job sources
that one; `read_shell` only reads it, so that the checks know the model. It runs nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from mlmsub.core.architecture import parse_words
from mlmsub.core.errors import UsageError
from mlmsub.core.strict import nearest

_ARGUMENT = re.compile(r"[a-z0-9][a-z0-9-]*")
_YAML_WORDS = ("null", "no", "yes", "on", "off", "y", "n", "false")
_LAST = ("checked", "notes", "unsupported", "restrictions", "config", "megatron_args")
_ENV_SETUP_NAMES = ("HF_MODEL_CKPT", "TP", "PP", "EP", "ETP", "CP", "EXPORT_DIR")


@dataclass(frozen=True)
class ModelConf:
    """`megatron_args` maps argument names without dashes to values; the value `true` makes a bare flag.

    `family` is the model_type of the model's config.json. `config` holds fields of Megatron's TransformerConfig that
    no argument reaches. `unsupported` and `restrictions` map a stage to the reason why it cannot work, and to what it
    can only do. An empty `checked` means that nobody compared the facts with a public source or the logits.
    """

    model: str
    tokenizer: str
    megatron_args: dict[str, str]
    aliases: tuple[str, ...] = ()
    family: str = ""
    trust_remote_code: bool = False
    source_format: Literal["bf16", "fp8_block", "mxfp4"] = "bf16"
    config: dict[str, str] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    restrictions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    checked: str = ""

    def __post_init__(self) -> None:
        for name in self.megatron_args:
            if not _ARGUMENT.fullmatch(name):
                raise ValueError(f"megatron_args: {name!r} is not an argument's name (write it without dashes)")


def unknown(name: str, known: Sequence[str], where: str) -> UsageError:
    """The error for a model that no conf is named after."""
    return UsageError(
        f"unknown model {name!r}{nearest(name, known)}",
        fix=f"known models: {', '.join(known)}; or give the path of a .yaml or .sh conf (looked in {where})",
    )


def render(conf: ModelConf) -> str:
    """The conf as YAML text, without the keys that are empty; the long ones come last."""
    lines = []
    names = [item.name for item in fields(conf)]
    for key in sorted(names, key=lambda name: _LAST.index(name) if name in _LAST else -1):
        value = getattr(conf, key)
        if isinstance(value, dict) and value:
            lines += [f"{key}:", *(f"  {name}: {_scalar(text)}" for name, text in value.items())]
        elif isinstance(value, tuple) and value:
            lines += [f"{key}:", *(f"  - {_scalar(text)}" for text in value)]
        elif isinstance(value, str | bool) and (value or key in ("model", "tokenizer")):
            lines.append(f"{key}: {'true' if value is True else _scalar(str(value))}")
    return "\n".join(lines) + "\n"


def _scalar(text: str) -> str:
    """Plain where every YAML reader takes it for the same text, number or flag; else in double quotes."""
    word = r"[A-Za-z]([A-Za-z0-9_./ -]*[A-Za-z0-9_./-])?"
    if re.fullmatch(rf"{word}|-?(0|[1-9][0-9]*)(\.[0-9]+(e[-+][0-9]+)?)?", text) and text.lower() not in _YAML_WORDS:
        return text
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'


# --- confs as shell files -------------------------------------------------------------------


def link_target(text: str) -> str:
    """The path that a symbolic link became as a text file (git without link support, zip); "" for other files."""
    line = text.strip()
    return line if re.fullmatch(r"[\w./-]+\.sh", line) else ""


def read_shell(text: str, name: str) -> ModelConf | None:
    """What a Megatron-LM style `.sh` conf says, as far as reading can tell; None where it says nothing readable.

    As if no variable were set before it: `if [ -z ${X} ]` is taken, its `else` and `if [ -n "${X}" ]` are not.
    Raises UsageError for an env setup, which sets TP, HF_MODEL_CKPT and the like, but no MODEL_ARGS.
    """
    values = _assignments(text)
    if "MODEL_ARGS" not in values:
        found = [key for key in values if key in _ENV_SETUP_NAMES or key.startswith("MLM_")]
        if found and not re.search(r"(?m)^\s*(source|\.)\s", text):
            raise UsageError(
                f"{name} is an env setup, not a model conf: it sets {', '.join(found)}, and no MODEL_ARGS",
                fix="give it with --env-setup, and the model's name as the argument",
            )
        return None
    args = {key: value for key, value in parse_words(values["MODEL_ARGS"].split()).items() if _ARGUMENT.fullmatch(key)}
    tokenizer = values.get("TOKENIZER_MODEL", "")
    notes = []
    if (checkpoint := values.get("HF_MODEL_CKPT", "")) and tokenizer and checkpoint != tokenizer:
        notes.append(f"its default checkpoint is {checkpoint}, its tokenizer {tokenizer}")
    if checkpoint and checkpoint.rpartition("/")[2] != name.rpartition("/")[2]:
        notes.append(f"its default checkpoint is {checkpoint}, not {name}")
    return ModelConf(name, tokenizer, args, trust_remote_code="trust-remote-code" in args, notes=tuple(notes))


def _assignments(text: str) -> dict[str, str]:
    """The variables that the file sets, in its order; the elements of an array joined by blanks."""
    try:
        words = iter(_words(text))
    except ValueError:  # a quote without its end: bash will say where
        return {}
    values: dict[str, str] = {}
    branches: list[_If] = []
    for word in words:
        if word == "if":
            branches.append(_If())
        elif branches and word in ("then", "elif", "else", "fi"):
            branches = branches[:-1] if word == "fi" else [*branches[:-1], branches[-1].at(word)]
        elif match := re.match(r"([A-Za-z_]\w*)(\+?)=", word):
            value = word[match.end() :] or _array(text, match[1])
            if all(branch.open for branch in branches):
                before = f"{values.get(match[1], '')} " if match[2] else ""
                values[match[1]] = before + _expand(value, values)
        elif branches and not branches[-1].open:
            branches[-1] = replace(branches[-1], condition=f"{branches[-1].condition} {word}")
    return values


@dataclass(frozen=True)
class _If:
    """An `if` being read: is its present branch the one that a shell without any variable would take?"""

    condition: str = ""
    open: bool = False
    taken: bool = False

    def at(self, word: str) -> _If:
        if word == "elif":
            return _If(taken=self.taken)
        entered = not self.taken and (word == "else" or "-n" not in self.condition.split())
        return _If(open=entered, taken=self.taken or entered)


def _array(text: str, name: str) -> str:
    """The elements of `NAME=( ... )`, which `_words` takes apart; "" where NAME is set to nothing."""
    match = re.search(rf"(?m)^\s*(?:export\s+)?{name}\+?=\(", text)
    return " ".join(_words(text[match.end() :], until=")")) if match else ""


def _words(text: str, until: str | None = None) -> list[str]:
    """Shell words without their quotes. Raises ValueError for a quote that does not end."""
    lexer = shlex.shlex("".join(_without_continuations(text)), posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    lexer.commenters = ""
    found = []
    for word in lexer:
        if word == until:
            break
        found.append(word)
    return found


def _without_continuations(text: str) -> Iterator[str]:
    """The text without comments and without the line ends that a backslash joins, as bash reads it."""
    quote, index, before = "", 0, "\n"
    while index < len(text):
        here = text[index]
        if here == "\\" and quote != "'":
            if text[index + 1 : index + 2] != "\n":
                before = text[index : index + 2]
                yield before
            index += 2
        elif here == "#" and not quote and before.isspace():
            index = text.find("\n", index)
            if index < 0:
                return
        else:
            if here in "\"'" and quote in ("", here):
                quote = "" if quote else here
            yield here
            before = here
            index += 1


def _expand(text: str, values: Mapping[str, str]) -> str:
    """`$X`, `${X}` and `${X:-default}` from what the file has set so far."""
    return re.sub(
        r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})",
        lambda match: values.get(match[1] or match[2], "") or _expand(match[3] or "", values),
        text,
    )
