"""Training data: tokenized and packed once, read by every rank from memory-mapped files.

``prepare`` makes a folder whose name is a hash of all that its content depends on, so that another job with the same
inputs finds it. Documents are stored one after the other:

    tokens.bin      token ids, uint16 where the vocabulary allows it, else uint32
    mask.bin        uint8 per token: 1 if training learns it
    offsets.npy     int64 [documents + 1]
    documents.npy   int64, the documents by row; rows.npy int64 [rows + 1], the offsets of the rows in it
    counts.npy      int64 [vocabulary]: how often training learns each token
    index.json      parameters, counts and checksums

The folder is filled under another name, and gets its own by one rename.
"""

import hashlib
import json
import os
import shutil
import time
import uuid
from argparse import ArgumentParser, Namespace
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mlmsub.runtime.checkpoints import prefetch
from mlmsub.runtime.data import documents, packing
from mlmsub.runtime.data.documents import Chunk, Encoded, Recipe
from mlmsub.runtime.data.packing import PackedDataset
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import CheckFailed, StageError, writing
from mlmsub.runtime.outputs import write_json
from mlmsub.runtime.progress import say, warn
from mlmsub.runtime.session import Job, Session

FIELD = "--finetune-hf-dataset"
FORMAT = 1  # of the folder; a change of what is stored, or of how documents are made, needs another
KINDS = (".jsonl", ".parquet")
RECORDS = 256  # in a chunk
SMALL = 32 * 2**20  # bytes of data for which no other processes are started
NAMED = 5  # bad records that are named
WAIT = timedelta(hours=12)
ABANDONED = 3600.0  # seconds after which an unfinished folder that nobody writes to is removed


@dataclass(frozen=True)
class DataSpec:
    """What to train on. ``data`` is a .jsonl or .parquet, a folder of them, or a data set of the Hugging Face Hub."""

    data: str
    length: int  # tokens of a row
    data_split: str = "train"  # which files of the data set
    split: str = "100,0,0"  # of its documents: train, valid, test
    loss_on: str = "answers"  # or all
    long_documents: str = "cut"  # or chunk


def add_arguments(parser: ArgumentParser) -> None:
    """The first two are those of Megatron-LM's post-training examples; ``--split`` and ``--seq-length`` Megatron's."""
    group = parser.add_argument_group("data")
    group.add_argument(FIELD, help="a local .jsonl or .parquet, a folder of them, or a data set of the hub")
    group.add_argument("--finetune-data-split", default="train", help="which files of the data set")
    group.add_argument("--loss-on", choices=("answers", "all"), default="answers", help="which tokens are learned")
    group.add_argument("--long-documents", choices=("cut", "chunk"), default="cut", help="beyond --seq-length")


def spec(args: Namespace) -> DataSpec:
    """The data that parsed arguments ask for."""
    if not args.finetune_hf_dataset:
        raise StageError(FIELD, "is not given.", f"add {FIELD} FILE, FOLDER or NAME to MLM_DATA_ARGS.")
    data, part = args.finetune_hf_dataset, args.finetune_data_split
    return DataSpec(data, args.seq_length, part, args.split or "100,0,0", args.loss_on, args.long_documents)


def cache_folder(args: Namespace, env: Env) -> Path:
    """Where prepared data is kept: Megatron's --data-cache-path, else MLM_WORK_DIR/data, else the run directory."""
    if args.data_cache_path:
        return Path(args.data_cache_path)
    return (env.path("MLM_WORK_DIR") or env.run_dir) / "data"


def of(job: Job, session: Session) -> PackedDataset:
    """The data that this session's arguments ask for; their note of it is kept in the checkpoint, for a resume."""
    args = session.args
    trusted = session.conf.trust_remote_code
    data = prepare(job, session.source, trusted, spec(args), cache_folder(args, job.env))
    args.mlmsub_data = data.folder.name
    return data


def prepare(
    job: Job, tokenizer: Path, trust_remote_code: bool, asked: DataSpec, root: Path, processes: int | None = None
) -> PackedDataset:
    """The packed data under ``root``, made by one process if it is not there yet. All ranks call this.

    Where not all nodes see the folder, the first process of each of those makes its own. ``tokenizer`` is a folder;
    ``processes`` tokenize (default: as many as this process has processors, at most 16). Raises the same StageError on
    all ranks: no such data, more than half of the records bad, or an empty train split.
    """
    env = job.env
    recipe = Recipe(
        tokenizer, trust_remote_code, asked.length, asked.loss_on == "answers", asked.long_documents == "cut"
    )
    with job.steps("data", asked.data), _patient_group() as group:
        found: list[Path] | None = None
        if not _gather(Path(asked.data).exists(), group)[0]:
            found = prefetch.dataset(_hub_name(asked), env, split=asked.data_split, files=10**6, field=FIELD)
        folder: Path | None = None
        for mine in (env.rank == 0, env.local_rank == 0 and env.rank != 0):
            needed = mine and not _seen(folder)
            names = _agreed((lambda: _made(asked, recipe, found, root, processes)) if needed else None, group)
            folder = folder or root / next(name for name in names if name)
            if all(_gather(_seen(folder), group)):
                break
        else:
            raise StageError("--data-cache-path", f"not all processes of a node see {folder}.", "give another folder.")
        data = PackedDataset(folder)
        _report(job, data)
    return data


def _report(job: Job, data: PackedDataset) -> None:
    index = data.index
    for text in index["bad_records"]:
        warn(f"data: {text}")
    rows = {name: last - first for name, (first, last) in index["rows"].items()}
    notes = {"bad": "bad records", "too_long": f"longer than {index['length']}", "without_loss": "without loss"}
    say(
        f"data: {index['records']} records, {index['documents']} documents, {index['tokens']} tokens,"
        f" {index['learned']} of them learned, in {' + '.join(map(str, rows.values()))} rows of {index['length']}"
        f" ({index['fill']:.1%} full); "
        + ", ".join(f"{index[key]} {text}" for key, text in notes.items())
        + f"; {data.folder}"
    )
    counts = {key: index[key] for key in ("records", "documents", "tokens", "learned", "fill", *notes)}
    job.steps.event("data", **counts, rows=rows, folder=str(data.folder))


# --- which data ------------------------------------------------------------------------------------------------------


def _hub_name(asked: DataSpec) -> str:
    if asked.data.startswith((".", "/", "~")) or asked.data.count("/") != 1 or asked.data.endswith(KINDS):
        raise StageError(FIELD, f"{asked.data} does not exist here.", "check the path and the container's mounts.")
    return asked.data


def _local_files(asked: DataSpec) -> list[Path]:
    """The files of a local data set: of those in a folder the ones whose path names the split, if any does."""
    path = Path(asked.data)
    if path.is_file() and path.suffix in KINDS:
        return [path]
    names = (
        sorted(found.relative_to(path) for found in path.rglob("*") if found.suffix in KINDS) if path.is_dir() else []
    )
    of_split = [name for name in names if asked.data_split in str(name)]
    if not names or (not of_split and asked.data_split != "train"):
        what = f"no {asked.data_split} among its files" if names else f"no {' or '.join(KINDS)}"
        raise StageError(FIELD, f"{path} has {what}.", "give a .jsonl or .parquet file, or a folder of them.")
    return [path / name for name in of_split or names]


def _chunks(files: list[Path]) -> Iterator[Chunk]:
    for file in files:
        if file.suffix == ".parquet":
            yield from _parquet_chunks(file)
            continue
        first = 1
        try:
            with file.open("rb") as lines:
                while rows := list(islice(lines, RECORDS)):
                    yield Chunk(file.name, first, rows)
                    first += len(rows)
        except OSError as error:
            raise StageError(FIELD, f"{file} cannot be read: {error.strerror}.") from error


def _parquet_chunks(file: Path) -> Iterator[Chunk]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    first = 1
    try:
        for batch in ParquetFile(file).iter_batches(RECORDS):
            yield Chunk(file.name, first, batch)
            first += len(batch)
    except (ArrowException, OSError) as error:
        raise StageError(FIELD, f"{file} cannot be read as parquet: {error}") from error


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _identity(asked: DataSpec, recipe: Recipe, files: list[Path]) -> dict[str, Any]:
    """All that the content of the folder depends on."""
    tokenizer = documents.load_tokenizer(recipe.tokenizer, recipe.trust_remote_code)
    if tokenizer.is_fast:  # as it works, whichever files it came from
        content = tokenizer.backend_tokenizer.to_str()
    else:
        used = sorted(path for path in recipe.tokenizer.iterdir() if path.suffix in prefetch.SMALL)
        content = json.dumps([(path.name, _digest(path)) for path in used])
    template = tokenizer.chat_template
    parts = [content, str(tokenizer.special_tokens_map), json.dumps(template, sort_keys=True)]
    return {
        "format": FORMAT,
        "data": [_digest(file) for file in files],
        "tokenizer": hashlib.sha256("\0".join(parts).encode()).hexdigest(),
        "length": asked.length,
        "split": asked.split,
        "loss_on": asked.loss_on,
        "long_documents": asked.long_documents,
        "open_rows": packing.OPEN_ROWS,
    }


# --- making it -------------------------------------------------------------------------------------------------------


def _made(asked: DataSpec, recipe: Recipe, found: list[Path] | None, root: Path, processes: int | None) -> str:
    """The name of the folder with this data; it is made here unless it is there."""
    files = found or _local_files(asked)
    size = sum(file.stat().st_size for file in files)
    say(f"data: {len(files)} files, {size / 2**20:.1f} MiB")
    packing.split_bounds(asked.split, 0)
    identity = _identity(asked, recipe, files)
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    target = root / name
    if _seen(target):
        _verify(target)
        say(f"data: found in {target}")
        return name
    part = root / f".{name}.{uuid.uuid4().hex[:8]}"
    try:
        with writing("--data-cache-path", target):
            part.mkdir(parents=True)
            _remove_abandoned(root, name)
            workers = processes or (1 if size < SMALL else min(len(os.sched_getaffinity(0)), 16))
            _write(part, identity, files, _encoded(_chunks(files), recipe, workers), recipe)
            part.rename(target)
    except CheckFailed:
        if not _seen(target):  # else another job was faster
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return name


def _encoded(chunks: Iterator[Chunk], recipe: Recipe, processes: int) -> Iterator[Encoded]:
    """The documents of all chunks, in their order."""
    if processes == 1:
        yield from (documents.encode(chunk, recipe) for chunk in chunks)
        return
    # spawn: this process may have a GPU and threads, which a fork would break
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting: deque[Any] = deque()
        for chunk in chunks:
            waiting.append(pool.submit(documents.encode, chunk, recipe))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _write(part: Path, identity: dict[str, Any], files: list[Path], encoded: Iterator[Encoded], recipe: Recipe) -> None:
    """Write the documents as they come, then the rows that they make, then the index."""
    import numpy as np

    tokenizer = documents.load_tokenizer(recipe.tokenizer, recipe.trust_remote_code)
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    dtype = np.uint16 if vocabulary <= 2**16 else np.uint32
    tally: Counter[str] = Counter(records=0, bad=0, too_long=0, without_loss=0)
    bad: list[str] = []
    lengths: list[Any] = [np.zeros(1, np.int64)]
    tokens, clock = 0, _Clock()
    with (part / packing.TOKENS).open("wb") as token_file, (part / packing.MASK).open("wb") as mask_file:
        for some in encoded:
            token_file.write(some.tokens.astype(dtype).tobytes())
            mask_file.write(some.mask.tobytes())
            lengths.append(some.lengths)
            tokens += len(some.tokens)
            tally += some.tally
            bad += some.bad[: NAMED - len(bad)]
            clock.tell(f"data: {tally['records']} records, {tokens / 1e6:.1f} M tokens")
    counts = {name: tally[name] for name in ("records", "bad", "too_long", "without_loss")}
    _require_usable(counts, bad, tokens)
    offsets = np.cumsum(np.concatenate(lengths))
    np.save(part / packing.OFFSETS, offsets)
    rows = packing.write_rows(part, np.diff(offsets), identity["length"], identity["split"])
    train = packing.split_bounds(identity["split"], len(offsets) - 1)["train"]
    learned = packing.write_counts(part, dtype, vocabulary, offsets, train)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    index = {
        **identity, **counts, "bad_records": bad, "documents": len(offsets) - 1, "tokens": tokens, "learned": learned,
        "rows": rows, "fill": tokens / (max(last for _, last in rows.values()) * identity["length"]),
        "dtype": np.dtype(dtype).name, "vocabulary": vocabulary, "padding": padding,
        "files": [file.name for file in files],
        "checksums": {path.name: _digest(path) for path in sorted(part.iterdir())},
    }  # fmt: skip
    write_json(part / packing.INDEX, index)


def _require_usable(counts: dict[str, int], bad: list[str], tokens: int) -> None:
    named = "".join(f"\n  {text}" for text in bad)
    if counts["bad"] * 2 > counts["records"]:
        raise StageError(FIELD, f"{counts['bad']} of {counts['records']} records cannot be used:{named}")
    if not tokens:
        raise StageError(FIELD, f"{counts['records']} records leave nothing to train on ({counts}).{named}")


def _verify(folder: Path) -> None:
    index = json.loads((folder / packing.INDEX).read_text())
    for name, checksum in index["checksums"].items():
        if not (folder / name).is_file() or _digest(folder / name) != checksum:
            raise StageError("--data-cache-path", f"{folder / name} is damaged.", f"remove {folder}: it is made again.")


def _remove_abandoned(root: Path, name: str) -> None:
    """What jobs that were killed left half written."""
    for part in root.glob(f".{name}.*"):
        try:
            newest = max(path.stat().st_mtime for path in (part, *part.iterdir()))
        except OSError:  # another job removes it, or has just published it
            continue
        if time.time() - newest > ABANDONED:
            shutil.rmtree(part, ignore_errors=True)


class _Clock:
    """Tells how far the work is, every half minute."""

    def __init__(self, seconds: float = 30.0) -> None:
        self.seconds, self.last = seconds, time.monotonic()

    def tell(self, text: str) -> None:
        if time.monotonic() - self.last > self.seconds:
            self.last = time.monotonic()
            say(text)


# --- agreeing --------------------------------------------------------------------------------------------------------


@contextmanager
def _patient_group() -> Iterator[Any]:
    """A group of all ranks in which one may wait for another for hours, unlike in the default group; None without."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=WAIT)
    yield group
    dist.destroy_process_group(group)


def _gather(value: Any, group: Any) -> list[Any]:
    import torch.distributed as dist

    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def _agreed(make: Callable[[], str] | None, group: Any) -> list[str | None]:
    """What each rank's ``make`` returns, by rank; an error of one is raised by all."""
    made: str | None = None
    problem: StageError | None = None
    try:
        made = make() if make else None
    except StageError as error:
        problem = error
    except Exception as error:  # a worker that was killed
        problem = CheckFailed("data", f"{type(error).__name__}: {error}")
    answers = _gather((made, problem), group)
    for _, told in answers:
        if told:
            raise told
    return [name for name, _ in answers]


def _seen(folder: Path | None) -> bool:
    if folder is None or not folder.parent.is_dir():
        return False
    names = [path.name for path in folder.parent.iterdir()]  # asks the server of a network file system again
    return folder.name in names and (folder / packing.INDEX).is_file()
