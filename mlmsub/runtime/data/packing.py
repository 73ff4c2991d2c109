"""Packing: many documents in one row of a fixed length, and the batches that training reads.

Documents of one row do not attend to each other, and each has positions of its own from 0. What is left over at
the end of a row is padding: a document of its own, without loss.
"""

import json
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from mlmsub.runtime.errors import StageError

AnyBatch = TypeVar("AnyBatch", bound="Batch")
SPLITS = ("train", "valid", "test")
OPEN_ROWS = 1024
INDEX = "index.json"
TOKENS, MASK, COUNTS = "tokens.bin", "mask.bin", "counts.npy"
OFFSETS, DOCUMENTS, ROWS = "offsets.npy", "documents.npy", "rows.npy"


def pack(lengths: Sequence[int], capacity: int, open_rows: int = OPEN_ROWS) -> tuple[list[int], list[int]]:
    """Best fit in order: each document goes to the fullest of the open rows that still has room for it.

    When ``open_rows`` rows are open, the fullest is closed for the next. Returns the documents by row, and the offsets
    of the rows in that list [rows + 1]. The same lengths give the same rows. No length may exceed ``capacity``.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens free, row) of the open rows, sorted
    for document, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"document {document} has {length} tokens, a row {capacity}")
        at = bisect_left(room, (length, -1))
        if at < len(room):
            free, row = room.pop(at)
        else:
            free, row = capacity, len(rows)
            rows.append([])
            if len(room) == open_rows:
                room.pop(0)
        rows[row].append(document)
        if free > length:
            insort(room, (free - length, row))
    offsets = [0]
    for row_documents in rows:
        offsets.append(offsets[-1] + len(row_documents))
    return [document for row_documents in rows for document in row_documents], offsets


def split_bounds(split: str, documents: int) -> dict[str, tuple[int, int]]:
    """The documents [first, last) of train, valid and test; ``split`` is Megatron's, such as ``99,1,0``."""
    try:
        parts = [float(part) for part in split.split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= len(SPLITS) or not all(0 <= part < float("inf") for part in parts) or not sum(parts):
        raise StageError("--split", f"{split!r} is not up to three proportions.", "give train,valid,test: 98,1,1.")
    ends = [round(documents * sum(parts[: count + 1]) / sum(parts)) for count in range(len(parts))]
    ends += [documents] * (len(SPLITS) - len(ends))
    return dict(zip(SPLITS, zip([0, *ends], ends, strict=False), strict=True))


class Order:
    """Which row is the n-th sample of a training: all rows once per epoch, each epoch in an order of its own.

    It depends on ``seed`` and the number of rows alone, not on the layout. Without a seed: in order.
    """

    def __init__(self, rows: int, seed: int | None) -> None:
        if rows < 1:
            raise ValueError("no rows")
        self.rows, self.seed = rows, seed
        self._epoch = -1
        self._permutation: Any = None

    def __getitem__(self, sample: int) -> int:
        epoch, at = divmod(sample, self.rows)
        if self.seed is None:
            return at
        if epoch != self._epoch:
            import numpy as np

            # RandomState: NumPy keeps its streams the same in all versions, so a resumed job goes on in its order
            self._epoch, self._permutation = epoch, np.random.RandomState([self.seed, epoch]).permutation(self.rows)
        return int(self._permutation[at])


def shares(consumed: int, micro_batch: int, rank: int, ranks: int) -> Iterator[range]:
    """The samples of each micro batch of one data-parallel rank, from sample ``consumed`` of the job on; endless.

    As Megatron deals them: a step's micro batches go round the ranks. So a global batch holds the same samples
    whatever the layout is.
    """
    while True:
        yield range(consumed + rank * micro_batch, consumed + (rank + 1) * micro_batch)
        consumed += micro_batch * ranks


@dataclass(frozen=True)
class Batch:
    """Rows as tensors [batch, sequence]. ``labels`` are the next tokens; ``loss_mask`` is 0.0 where none is learned.

    ``document_ids`` count the documents of each row from 0; the padding has the last. At the end of a document, where
    no next token is, the label is the padding token.
    """

    tokens: Any  # int64
    labels: Any  # int64
    loss_mask: Any  # float32
    position_ids: Any  # int64
    document_ids: Any  # int32

    def to(self: AnyBatch, device: Any) -> AnyBatch:
        """On another device; from pinned memory without waiting."""
        return type(self)(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})

    def pin(self: AnyBatch) -> AnyBatch:
        return type(self)(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


def collate(rows: Sequence[Sequence[tuple[Any, Any]]], length: int, padding: int) -> Batch:
    """A batch of rows; a row is its documents, each as token ids and the mask of the tokens that are learned."""
    import numpy as np
    import torch

    shape = (len(rows), length)
    tokens, labels = np.full(shape, padding, np.int64), np.full(shape, padding, np.int64)
    loss_mask, positions = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
    ids = np.zeros(shape, np.int32)
    for row, documents in enumerate(rows):
        start = 0
        for number, (document, learned) in enumerate(documents):
            end = start + len(document)
            tokens[row, start:end] = document
            labels[row, start : end - 1] = document[1:]
            loss_mask[row, start : end - 1] = learned[1:]
            positions[row, start:end] = np.arange(len(document))
            ids[row, start:end] = number
            start = end
        positions[row, start:] = np.arange(length - start)
        ids[row, start:] = len(documents)
    return Batch(*(torch.from_numpy(array) for array in (tokens, labels, loss_mask, positions, ids)))


def write_rows(part: Path, lengths: Any, capacity: int, split: str) -> dict[str, tuple[int, int]]:
    """Pack the documents of each split into rows of their own; returns the rows [first, last) of each split."""
    import numpy as np

    order: list[int] = []
    offsets = [0]
    rows: dict[str, tuple[int, int]] = {}
    for name, (first, last) in split_bounds(split, len(lengths)).items():
        start = len(offsets) - 1
        packed, ends = pack(lengths[first:last].tolist(), capacity)
        offsets += [len(order) + end for end in ends[1:]]
        order += [first + document for document in packed]
        rows[name] = (start, len(offsets) - 1)
    if not rows["train"][1]:
        raise StageError("--split", f"{split} of {len(lengths)} documents leaves none to train on.")
    np.save(part / DOCUMENTS, np.array(order, np.int64))
    np.save(part / ROWS, np.array(offsets, np.int64))
    return rows


def write_counts(part: Path, dtype: Any, vocabulary: int, offsets: Any, train: tuple[int, int]) -> int:
    """Write how often the train split's documents have each token as a label with loss; returns the sum."""
    import numpy as np

    tokens, mask = np.memmap(part / TOKENS, dtype, "r"), np.memmap(part / MASK, np.uint8, "r")
    counts = np.zeros(vocabulary, np.int64)
    for first in range(*train, 4096):
        ends = offsets[first : min(first + 4096, train[1]) + 1]
        learned = mask[ends[0] : ends[-1]].astype(bool)
        learned[ends[:-1] - ends[0]] = False  # nothing comes before a document's first token
        counts += np.bincount(tokens[ends[0] : ends[-1]][learned], minlength=vocabulary)
    np.save(part / COUNTS, counts)
    return int(counts.sum())


class PackedDataset:
    """Rows of packed documents in the folder that ``dataset.prepare`` made; read through memory maps."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        self.folder = folder
        self.index: dict[str, Any] = json.loads((folder / INDEX).read_text())
        self._tokens = np.memmap(folder / TOKENS, self.index["dtype"], "r")
        self._mask = np.memmap(folder / MASK, np.uint8, "r")
        self._offsets, self._documents, self._rows = (
            np.load(folder / name, mmap_mode="r") for name in (OFFSETS, DOCUMENTS, ROWS)
        )

    @property
    def counts(self) -> Any:
        """How often training learns each token of the vocabulary; int64 [vocabulary]."""
        import numpy as np

        return np.load(self.folder / COUNTS)

    def rows(self, split: str) -> range:
        return range(*self.index["rows"][split])

    def row(self, number: int) -> list[tuple[Any, Any]]:
        """The documents of a row, each as token ids and the mask of those that are learned."""
        documents = self._documents[self._rows[number] : self._rows[number + 1]]
        spans = [slice(self._offsets[document], self._offsets[document + 1]) for document in documents]
        return [(self._tokens[span], self._mask[span]) for span in spans]

    def batch(self, rows: Sequence[int]) -> Batch:
        return collate([self.row(row) for row in rows], self.index["length"], self.index["padding"])

    def batches(
        self, split: str, micro_batch: int, rank: int = 0, ranks: int = 1, consumed: int = 0, seed: int | None = None
    ) -> Iterator[Batch]:
        """Endless micro batches of one data-parallel rank, from the job's sample ``consumed`` on."""
        rows = self.rows(split)
        if not rows:
            raise StageError("--split", f"the {split} part of the data has no rows.", "give it a larger proportion.")
        yield from map(self.batch, rows_in_order(rows, micro_batch, rank, ranks, consumed, seed))


def rows_in_order(
    rows: range, micro_batch: int, rank: int, ranks: int, consumed: int, seed: int | None
) -> Iterator[list[int]]:
    """The rows of each micro batch of one data-parallel rank, from the job's sample ``consumed`` on, endless."""
    order = Order(len(rows), seed)
    for samples in shares(consumed, micro_batch, rank, ranks):
        yield [rows[order[sample]] for sample in samples]


def attention_mask(document_ids: Any) -> Any:
    """Boolean mask [batch, 1, sequence, sequence], True where a query (dim 2) must not see a key, as in Megatron."""
    import torch

    length = document_ids.shape[1]
    other = document_ids[:, None, :, None] != document_ids[:, None, None, :]
    later = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).triu(1)
    return other | later


def cu_seqlens(document_ids: Any) -> Any:
    """Where the documents of a batch begin in its tokens laid out as one sequence, then its length; int32.

    For attention over packed sequences (``PackedSeqParams`` with ``qkv_format="thd"``): rows one after the other,
    padding as a sequence. Asks the device for a size; call it on the batch before it moves there.
    """
    import torch

    new = torch.ones_like(document_ids, dtype=torch.bool)
    new[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = new.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([document_ids.numel()])]).to(torch.int32)


def draft_vocabulary(counts: Any, size: int, vocabulary: int | None = None) -> tuple[Any, Any, float]:
    """EAGLE3's reduced draft vocabulary: the ``size`` most frequent tokens of ``counts``, by rising id.

    Returns ``d2t`` int64 [size], what is to be added to a draft id to get the target id; ``t2d`` bool [vocabulary],
    whether the draft knows a target id; and the share of all counted tokens that it knows. ``vocabulary`` is the
    target's number of rows, if larger than the tokenizer's. Of equally frequent tokens the lower ids are taken.
    """
    import numpy as np

    rows = vocabulary or len(counts)
    if not 1 <= size <= rows or rows < len(counts):
        raise StageError("draft vocabulary", f"{size} tokens of {len(counts)}, where the target has {rows} rows.")
    padded = np.zeros(rows, np.int64)
    padded[: len(counts)] = counts
    known = np.sort(np.argsort(-padded, kind="stable")[:size])
    t2d = np.zeros(rows, bool)
    t2d[known] = True
    coverage = float(padded[known].sum()) / max(int(padded.sum()), 1)
    return known - np.arange(size), t2d, coverage
