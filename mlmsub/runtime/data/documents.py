"""From the records of a data set to documents: token ids, and the mask of the tokens that training learns.

A conversation is rendered whole, as the model's chat template has it. Its answers are found in the rendered text:
by the template's generation marks; else by rendering the conversation up to each answer; else, where the template
renders the past differently (it drops earlier thinking, or moves the system prompt), by looking for the answer's
words. The end-of-turn token is learned, what the template adds after it is not.
"""

import json
import os.path
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mlmsub.runtime.checkpoints import hf
from mlmsub.runtime.modelconf import ModelConf

CHAT_KEYS = ("messages", "conversations")
PAIR_KEYS = (("prompt", "completion"), ("question", "response"))
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]  # characters [start, end) of a text
Message = dict[str, Any]


class Unusable(Exception):
    """A record that cannot be trained on; the text says why."""


@dataclass(frozen=True)
class Recipe:
    """How records become documents of at most ``length`` tokens; longer ones are cut off, or made several."""

    tokenizer: Path
    trust_remote_code: bool
    length: int
    answers_only: bool
    cut: bool


@dataclass(frozen=True)
class Chunk:
    """Some records of a file: JSON lines, or a pyarrow table; ``first`` counts from 1."""

    file: str
    first: int
    rows: Any

    def records(self) -> Iterator[tuple[int, Any]]:
        """Each record with its number; an Unusable in the place of one that is not JSON."""
        lines = isinstance(self.rows, list)
        for number, row in enumerate(self.rows if lines else self.rows.to_pylist(), self.first):
            if not lines:
                yield number, row
            elif row.strip():
                try:
                    yield number, json.loads(row)
                except ValueError as error:
                    yield number, Unusable(f"not JSON ({error})")


@dataclass(frozen=True)
class Encoded:
    """Documents one after the other: token ids uint32, mask uint8 and the documents' lengths int64.

    ``tally`` counts records, bad, too_long and without_loss; ``bad`` names records that are, as ``file:line: reason``.
    """

    tokens: Any
    mask: Any
    lengths: Any
    tally: Counter[str]
    bad: list[str]


@cache
def load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """Once per process, also in those of a pool."""
    return hf.tokenizer(folder, ModelConf(folder.name, trust_remote_code=trust_remote_code))


def encode(chunk: Chunk, recipe: Recipe) -> Encoded:
    """The documents of a chunk. One in which nothing is learned is left out, and counted."""
    import numpy as np

    tokenizer = load_tokenizer(recipe.tokenizer, recipe.trust_remote_code)
    tally: Counter[str] = Counter()
    ids: list[Any] = [np.empty(0, np.uint32)]
    masks: list[Any] = [np.empty(0, np.uint8)]
    bad: list[str] = []
    for number, record in chunk.records():
        tally["records"] += 1
        try:
            if isinstance(record, Unusable):
                raise record
            tokens, mask = tokenize(record, tokenizer, recipe.answers_only)
        except Unusable as reason:
            tally["bad"] += 1
            bad.append(f"{chunk.file}:{number}: {reason}")
            continue
        tally["too_long"] += len(tokens) > recipe.length
        for start in range(0, recipe.length if recipe.cut else len(tokens), recipe.length):
            piece = slice(start, start + recipe.length)
            if any(mask[piece][1:]):
                ids.append(np.array(tokens[piece], np.uint32))
                masks.append(np.array(mask[piece], np.uint8))
            else:
                tally["without_loss"] += 1
    lengths = np.array([len(piece) for piece in ids[1:]], np.int64)
    return Encoded(np.concatenate(ids), np.concatenate(masks), lengths, tally, bad)


@dataclass(frozen=True)
class Text:
    """A text and the spans of it to learn. ``bare``: no template has put the tokenizer's start and end into it."""

    text: str
    spans: list[Span]
    bare: bool = False


def tokenize(record: Any, tokenizer: Any, answers_only: bool) -> tuple[list[int], list[int]]:
    """Token ids of a record, and 1 for each that is to be learned. Raises Unusable.

    A record has ``messages`` or ``conversations`` (role/content or from/value; ``tools`` beside them), a prompt and
    a completion, or ``text``, which is learned whole.
    """
    text = _text_of(record, tokenizer, answers_only)
    ids, mask = _ids(text, tokenizer)
    if not ids:
        raise Unusable("empty")
    if text.bare:
        start, end = _start(tokenizer), tokenizer.eos_token_id
        ids, mask = start + ids, [0] * len(start) + mask
        if end is not None:
            ids, mask = [*ids, end], [*mask, 1]
    return ids, mask if answers_only else [1] * len(ids)


def _text_of(record: Any, tokenizer: Any, answers_only: bool) -> Text:
    if not isinstance(record, dict):
        raise Unusable("not an object with named fields")
    for key in CHAT_KEYS:
        if isinstance(record.get(key), list):
            return _chat(_messages(record[key]), record.get("tools"), tokenizer, answers_only)
    for ask, answer in PAIR_KEYS:
        if record.get(ask) and record.get(answer):
            return _pair(record[ask], record[answer], tokenizer, answers_only)
    if isinstance(record.get("text"), str):
        if not record["text"].strip():
            raise Unusable("empty")
        return Text(record["text"], [(0, len(record["text"]))], bare=True)
    keys = ", ".join((*CHAT_KEYS, "text", *("+".join(pair) for pair in PAIR_KEYS)))
    raise Unusable(f"has {sorted(map(str, record))}; wanted is one of {keys}")


def _pair(ask: Any, answer: Any, tokenizer: Any, answers_only: bool) -> Text:
    if isinstance(ask, list) and isinstance(answer, list):
        return _chat(_messages(ask + answer), None, tokenizer, answers_only)
    if not (isinstance(ask, str) and isinstance(answer, str)):
        raise Unusable("prompt and completion are neither both texts nor both lists of messages")
    if tokenizer.chat_template is None:
        return Text(ask + answer, [(len(ask), len(ask + answer))], bare=True)
    turns = [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return _chat(turns, None, tokenizer, answers_only)


def _messages(turns: list[Any]) -> list[Message]:
    """Turns as the templates want them; ``from`` and ``value`` are ShareGPT's names."""
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise Unusable("a message is not an object")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str):
            raise Unusable("a message has no role")
        if not content and not turn.get("tool_calls"):
            raise Unusable(f"a message of {role} is empty")
        rest = {key: value for key, value in turn.items() if key not in ("from", "value") and value is not None}
        messages.append({**rest, "role": ROLES.get(role.lower(), role.lower()), "content": content or ""})
    if not messages:
        raise Unusable("empty")
    return messages


def _chat(messages: list[Message], tools: Any, tokenizer: Any, answers_only: bool) -> Text:
    if tokenizer.chat_template is None:
        raise Unusable("a conversation, and the tokenizer has no chat template")
    if answers_only and all(message["role"] != "assistant" for message in messages):
        raise Unusable("no message of the assistant")
    tools = tools or None

    def render(count: int, prompt: bool) -> str:
        """The first ``count`` messages, and the beginning of an answer."""
        if not count:
            return ""
        turns = messages[:count]
        return str(tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=prompt))

    try:
        whole = render(len(messages), False)
    except Exception as error:  # whatever the template's author raises
        raise Unusable(f"the chat template refuses it ({type(error).__name__}: {error})") from error
    if not answers_only:
        return Text(whole, [])
    if MARKS.search(tokenizer.get_chat_template(tools=tools)):
        spans = _marked(messages, tools, tokenizer)
    else:
        spans = _answers(whole, messages, render)
    return Text(whole, _to_the_end_of_turn(whole, spans, _specials(tokenizer)))


def _marked(messages: list[Message], tools: Any, tokenizer: Any) -> list[Span]:
    """What stands between the template's generation marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=tokenizer.get_chat_template(tools=tools),
        return_assistant_tokens_mask=True, **tokenizer.special_tokens_map,
    )  # fmt: skip
    return [(start, end) for start, end in rendered[1][0] if start < end]


def _answers(whole: str, messages: list[Message], render: Callable[[int, bool], str]) -> list[Span]:
    """The answers in a conversation whose template has no marks."""
    spans: list[Span] = []
    here = 0  # how far the messages so far reach in the whole; a system prompt may stand anywhere
    known = True  # whether the last message was found: what follows it is then looked for after it
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            span = _by_prefixes(whole, message, number, render)
            if span is None and known:
                span = _by_content(whole, message, here)
            if span is None:
                raise Unusable(f"the chat template renders message {number + 1}, an answer, in an unknown way")
            spans.append(span)
            here, known = span[1], True
        elif message["role"] != "system":
            found = _by_content(whole, message, here)
            here, known = (found[1], True) if found else (here, False)
    return spans


def _by_prefixes(whole: str, message: Message, number: int, render: Callable[[int, bool], str]) -> Span | None:
    """The answer as what the template adds to the messages before it; None where it renders those differently."""
    try:
        before, prompt, after = render(number, False), render(number, True), render(number + 1, False)
    except Exception:  # a template may refuse a conversation that ends with this message
        return None
    if not whole.startswith(before):
        return None
    content = _by_content(whole, message, len(before))
    if whole.startswith(prompt) and prompt != before:
        start = len(prompt)
    elif prompt == before:  # the template begins no answers: what it puts before one is unknown
        start = content[0] if content else len(before)
    else:  # it begins answers with more than it keeps of them, as with a <think>
        start = len(os.path.commonprefix([whole, prompt]))  # noqa: RUF071 - by character is meant
        start = min(start, content[0]) if content else start
    if whole.startswith(after) and len(after) > start:
        return start, len(after)
    return (min(start, content[0]), content[1]) if content and content[1] > start else None


def _by_content(whole: str, message: Message, here: int) -> Span | None:
    """The message's words after ``here``: all of them, or those that come after its thinking."""
    content = message["content"]
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    content = str(content).strip()
    for words in (content, content.rpartition("</think>")[2].strip()):
        at = whole.find(words, here) if words else -1
        if at >= 0:
            return at, at + len(words)
    return None


def _to_the_end_of_turn(whole: str, spans: list[Span], specials: tuple[str, ...]) -> list[Span]:
    """End each span with its end-of-turn token: the special token that it ends with, but for white space, or that
    follows."""
    ended = []
    for start, end in spans:
        stripped = start + len(whole[start:end].rstrip())
        if whole[start:stripped].endswith(specials):
            end = stripped
        else:
            following = [special for special in specials if whole.startswith(special, end)]
            end += max(map(len, following), default=0)
        ended.append((start, end))
    return ended


def _specials(tokenizer: Any) -> tuple[str, ...]:
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple({*added, *tokenizer.all_special_tokens} - {""})


def _start(tokenizer: Any) -> list[int]:
    """The tokens that this tokenizer puts before a text."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []


def _ids(text: Text, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids, and 1 for those with a character in a span."""
    if not tokenizer.is_fast:
        return _ids_by_parts(text, tokenizer)
    encoded = tokenizer(text.text, add_special_tokens=False)
    ids = list(encoded["input_ids"])
    mask = [0] * len(ids)
    for start, end in text.spans:
        first, last = _token_at(encoded, start, text.text), _token_at(encoded, end, text.text)
        if last < len(ids) and encoded.token_to_chars(last).start < end:
            last += 1  # one token has characters on both sides
        mask[first:last] = [1] * (last - first)
    return ids, mask


def _token_at(encoded: Any, at: int, text: str) -> int:
    """The first token that has the character ``at`` or a later one; some tokenizers leave characters out."""
    for position in range(at, len(text)):
        token = encoded.char_to_token(position)
        if token is not None:
            return int(token)
    return len(encoded["input_ids"])


def _ids_by_parts(text: Text, tokenizer: Any) -> tuple[list[int], list[int]]:
    """The same without offsets, which tokenizers in Python do not give: each part is tokenized by itself.

    That is also what generation does, which starts at the first token of an answer.
    """
    ids: list[int] = []
    mask: list[int] = []
    here = 0
    for start, end in [*text.spans, (len(text.text), len(text.text))]:
        for part, learned in ((text.text[here:start], 0), (text.text[start:end], 1)):
            if part:
                part_ids = tokenizer(part, add_special_tokens=False)["input_ids"]
                ids += part_ids
                mask += [learned] * len(part_ids)
        here = end
    return ids, mask
