"""Calibration text: a local file or a data set of the Hub, packed into chunks of exactly the wanted length.

The tokens of all texts make one stream that is cut into chunks: no padding enters a statistic or a router, and
no attention mask is needed. Rank 0 alone reads; the others get the token ids from it.
"""

import json
import random
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import prefetch
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.megatron_args import positive
from mlmsub.runtime.progress import say, warn
from mlmsub.runtime.quantization import calibration

FIELD = "--calib-data"
BUILT_IN = Path(__file__).with_name("calibration.txt")
KINDS = (".jsonl", ".parquet", ".txt")
TEXT_KEYS = ("text", "content", "article", "document")
CHAT_KEYS = ("messages", "conversations")
_HUB = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+?)(?::(?P<split>[\w.%:+\[\]-]+))?")


@dataclass(frozen=True)
class Source:
    """Where calibration text comes from: a local file, or a data set of the Hub and its split."""

    file: Path | None = None
    hub: str = ""
    split: str = "train"

    @property
    def name(self) -> str:
        return self.file.name if self.file else f"{self.hub}:{self.split}"

    def files(self, env: Env) -> list[Path]:
        """The local files, those of a Hub data set downloaded first (all ranks call this)."""
        return [self.file] if self.file else prefetch.dataset(self.hub, env, split=self.split, field=FIELD)


def find(data: str | None) -> Source:
    """The source that the user named (``FILE`` or ``ORG/NAME[:SPLIT]``), the built-in text if none. Reads nothing."""
    if data is None:
        return Source(BUILT_IN)
    path = Path(data)
    if path.suffix in KINDS and path.is_file():
        return Source(path)
    hub = _HUB.fullmatch(data)
    if hub and path.suffix not in KINDS and not path.exists():
        return Source(hub=hub["name"], split=hub["split"] or "train")
    raise StageError(
        FIELD,
        f"{data} is not a file of kind {', '.join(KINDS)}, nor the ORG/NAME[:SPLIT] of a Hub data set.",
        "give a local file with one text per line, row or blank-separated paragraph.",
    )


def add_arguments(group: Any, size: int) -> None:
    """The reference's flags of calibration; ``size``: the stage's default number of samples."""
    group.add_argument("--calib-size", type=positive, default=size, help="number of samples")
    group.add_argument("--calib-batch-size", type=positive, help="default: 16384 tokens, 32 at most; 8 on a CPU")
    group.add_argument("--calib-max-sequence-length", type=positive, default=512, help="tokens per sample")
    group.add_argument(
        "--calib-data",
        "--calib-dataset-path-or-name",
        "--calib-dataset",
        help="a local .jsonl, .parquet or .txt, or ORG/NAME[:SPLIT] of a Hub data set",
    )


def samples(args: Namespace, data: Source, env: Env, open_tokenizer: Callable[[], Any]) -> Any:
    """The calibration samples [samples, length] of the whole run that the flags ask for (all ranks call this)."""
    if data.file == BUILT_IN:
        warn(
            "no calibration data was given: using the few built-in texts. Give --calib-data FILE in "
            "MLM_EXTRA_ARGS (or MLM_CALIB_DATA=FILE) for a model that will be served."
        )
    asked = (args.calib_size, args.calib_max_sequence_length)
    made = chunks(
        data.files(env),
        open_tokenizer,
        args.calib_max_sequence_length,
        args.calib_size,
        calibration.sequence_multiple(args),
        args.seed if getattr(args, "calib_use_random_offset", False) else None,
    )
    if tuple(made.shape) != asked:
        has = f"{len(made)} samples of {made.shape[1]} tokens"
        say(f"calibration: {data.name} has {has}, fewer than the {asked[0]} of {asked[1]} asked for")
    return made


def chunks(
    files: list[Path],
    open_tokenizer: Callable[[], Any],
    length: int,
    count: int,
    multiple: int = 1,
    seed: int | None = None,
) -> Any:
    """Token ids [samples, length] with at most ``count`` samples, the same on every rank (all ranks call this).

    ``multiple``: what the length must divide by (sequence or context parallelism). ``seed``: take from each text
    at most ``length`` tokens, from a random place; None takes whole texts.
    """
    return distributed.on_main(lambda: _pack(files, open_tokenizer(), length, count, multiple, seed))


def _pack(files: list[Path], tokenizer: Any, length: int, count: int, multiple: int, seed: int | None) -> Any:
    import torch

    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    names = ", ".join(str(file) for file in files)
    choose = None if seed is None else random.Random(seed)
    stream: list[int] = []
    for text, plain in _texts(files, tokenizer):
        ids = list(tokenizer(text, add_special_tokens=plain)["input_ids"])  # a chat template has written its own
        if choose and len(ids) > length:
            start = choose.randint(0, len(ids) - length)
            ids = ids[start : start + length]
        stream += ids if ids[-1:] == end else ids + end
        if len(stream) >= length * count:
            break
    if not any(token not in end for token in stream):
        raise StageError(FIELD, f"{names} has no text.")
    length = min(length, len(stream)) // multiple * multiple
    if not length:
        raise StageError(FIELD, f"{names} has {len(stream)} tokens, fewer than one sample needs.")
    samples = min(count, len(stream) // length)
    return torch.tensor(stream[: samples * length], dtype=torch.long).view(samples, length)


def _texts(files: list[Path], tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """Each text, and whether the tokenizer may add its special tokens."""
    for file in files:
        if file.suffix == ".txt":
            yield from ((part.strip(), True) for part in "".join(_lines(file)).split("\n\n") if part.strip())
            continue
        for row in _rows(file):
            text, plain = _text_of(row, file, tokenizer)
            if text:
                yield text, plain


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile

        try:
            for batch in ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
        except ArrowInvalid as error:
            raise StageError(FIELD, f"{file} is not a parquet file ({error}).") from error
        return
    for number, line in enumerate(_lines(file), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise StageError(FIELD, f"{file}, line {number}: not JSON ({error}).") from error
        if row is not None:
            yield row if isinstance(row, dict) else {"messages" if isinstance(row, list) else "text": row}


def _lines(file: Path) -> Iterator[str]:
    count = 0
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for line in lines:
                count += 1
                yield line
    except UnicodeDecodeError as error:
        raise StageError(FIELD, f"{file}, after line {count}: not UTF-8 ({error}).", "convert it to UTF-8.") from error


def _text_of(row: dict[str, Any], file: Path, tokenizer: Any) -> tuple[str, bool]:
    for key in TEXT_KEYS:
        if isinstance(row.get(key), str):
            return _clean(row[key]), True
    for key in CHAT_KEYS:
        turns = row.get(key)
        if isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns):
            turns = [{"role": _role(turn), "content": _content(turn)} for turn in turns]
            if tokenizer.chat_template:
                return str(tokenizer.apply_chat_template(turns, tokenize=False)), False
            return "\n".join(turn["content"] for turn in turns), True
    keys = ", ".join(TEXT_KEYS + CHAT_KEYS)
    raise StageError(FIELD, f"{file}: a row has keys {sorted(row)}.", f"one of these must hold text: {keys}.")


def _content(turn: dict[str, Any]) -> str:
    """A turn's text: a string, nothing (a tool call), or a list of parts of which the texts count."""
    content = turn.get("content", turn.get("value"))
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return _clean("".join(text for text in texts if isinstance(text, str)))


def _clean(text: str) -> str:
    """Without half of a surrogate pair, which JSON can say and no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _role(turn: dict[str, Any]) -> str:
    role = str(turn.get("role", turn.get("from", "user")))
    return {"human": "user", "gpt": "assistant"}.get(role, role)
