"""Prompts: read from a file of several kinds, or given as words, and made into token ids.

A record is either plain text, which the model continues, or a conversation, which it answers through the tokenizer's
chat template. A record that cannot be used keeps its place and says why.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlmsub.runtime.errors import StageError

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
KINDS = (".txt", ".jsonl", ".parquet")
CHAT_KEYS = ("messages", "conversations")
TURN_KEYS = ("turns", "prompt")  # MT-bench's own file, and its copy on the hub
TEXT_KEYS = ("prompt", "text")
ROLES = {"human": "user", "gpt": "assistant"}

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One record. ``messages`` is empty for plain ``text``; ``problem`` is set where neither can be used."""

    index: int
    text: str = ""
    messages: tuple[Message, ...] = ()
    problem: str = ""
    category: str = ""

    @property
    def turns(self) -> int:
        """Answers to make: each user message that none follows. A conversation's own last answer was left out."""
        return sum(self._open(place) for place in range(len(self.messages))) if self.messages else 1

    def conversation(self, answers: list[str]) -> list[Message]:
        """The messages up to the next open one, with the answers that the model gave to those before."""
        made: list[Message] = []
        left = iter(answers)
        for place, message in enumerate(self.messages):
            made.append(message)
            if self._open(place):
                answer = next(left, None)
                if answer is None:
                    break
                made.append({"role": "assistant", "content": answer})
        return made

    def _open(self, place: int) -> bool:
        following = self.messages[place + 1 : place + 2]
        return not following or (self.messages[place]["role"] == following[0]["role"] == "user")


def check_file(value: str | None, field: str) -> Path | None:
    """The prompts file that the user named in ``field``; raise StageError if there is no such file."""
    if value is None:
        return None
    path = Path(value)
    if path.suffix not in KINDS or not path.is_file():
        raise StageError(
            field,
            f"{value} is not a file of kind {', '.join(KINDS)}.",
            "give a local file: .txt with one prompt a line, or records with text, prompt, turns or messages.",
        )
    return path


def read(file: Path) -> list[Prompt]:
    """All records of a file, in its order."""
    if file.suffix == ".txt":
        lines = [line.strip() for line in file.read_text().splitlines()]
        return [Prompt(index, text) for index, text in enumerate(filter(None, lines))]
    rows = _parquet(file) if file.suffix == ".parquet" else _json_lines(file)
    return [replace(_record(row), index=index, category=_category(row)) for index, row in enumerate(rows)]


def words(texts: list[str]) -> list[Prompt]:
    """Prompts given on the command line, plain text each."""
    return [Prompt(index, text) for index, text in enumerate(texts)]


def as_chat(prompt: Prompt) -> Prompt:
    """Plain text as a user's message."""
    return replace(prompt, text="", messages=({"role": "user", "content": prompt.text},)) if prompt.text else prompt


def render(prompt: Prompt, answers: list[str], tokenizer: Any) -> tuple[str, list[int]]:
    """(text, token ids) that the model reads next. Raises ValueError if the tokenizer or its template refuses.

    Without a template a conversation is its contents, a line each.
    """
    if not prompt.messages:
        return prompt.text, list(tokenizer(prompt.text)["input_ids"])
    conversation = prompt.conversation(answers)
    if not tokenizer.chat_template:
        text = "".join(f"{message['content']}\n" for message in conversation)
        return text, list(tokenizer(text)["input_ids"])
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template raises what its author likes
        raise ValueError(f"the chat template refuses it: {error}".partition("\n")[0]) from error
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def end_tokens(folder: Path, tokenizer: Any) -> list[int]:
    """The ids that end a completion: generation_config.json's or else config.json's, and the tokenizer's own."""
    found = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        data = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        ids = data.get("eos_token_id", data.get("text_config", {}).get("eos_token_id"))
        if ids is not None:
            found |= set(ids) if isinstance(ids, list) else {ids}
            break
    return sorted(found - {None})


def _record(row: Any) -> Prompt:
    """A row of a file; the index is set by ``read``."""
    if isinstance(row, _Bad):
        return Prompt(0, problem=row.problem)
    if isinstance(row, str) and row.strip():
        return Prompt(0, row)
    if not isinstance(row, dict):
        return Prompt(0, problem=f"{str(row)[:60]!r} is no record.")
    for key in CHAT_KEYS:
        if isinstance(row.get(key), list):
            return _chat(row[key], key)
    for key in TURN_KEYS:
        if isinstance(row.get(key), list):
            return _chat([{"role": "user", "content": text} for text in row[key]], key)
    for key in TEXT_KEYS:
        if isinstance(row.get(key), str) and row[key].strip():
            return Prompt(0, row[key])
    wanted = ", ".join(dict.fromkeys((*CHAT_KEYS, *TURN_KEYS, *TEXT_KEYS)))
    return Prompt(0, problem=f"its keys are {sorted(row)}, and none of {wanted} holds a prompt.")


def _category(row: Any) -> str:
    """What MT-bench's records, and the built-in ones, say that they ask for."""
    return str(row.get("category") or "") if isinstance(row, dict) else ""


def _chat(turns: list[Any], key: str) -> Prompt:
    messages: list[Message] = []
    for turn in turns:
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            return Prompt(0, problem=f"{key} holds {str(turn)[:60]!r}, which is no message with a role and a content.")
        messages.append({"role": ROLES.get(role, role), "content": content})
    while messages and messages[-1]["role"] == "assistant":  # a reference
        messages.pop()
    if not messages or messages[-1]["role"] == "system":
        return Prompt(0, problem=f"{key} has no message to answer.")
    return Prompt(0, messages=tuple(messages))


@dataclass(frozen=True)
class _Bad:
    problem: str


def _json_lines(file: Path) -> Iterator[Any]:
    with file.open() as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    yield _Bad(f"line {number} is not JSON ({error}).")


def _parquet(file: Path) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    for batch in ParquetFile(file).iter_batches():
        yield from batch.to_pylist()
