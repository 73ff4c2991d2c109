"""Hidden states of a base for every row of the training data, in files that train an EAGLE3 draft without the base.

A folder of them holds, for R rows of L tokens each, A layers that the draft reads, and H the base's hidden size:

    hidden-00000.safetensors ...   some rows each, in their order: aux_hidden_states [rows, L, A x H] (layers in order)
                                   and hidden_states [rows, L, H] (after the final norm), bfloat16, zero in padding;
                                   tokens, labels, position_ids, document_ids int32 and loss_mask uint8 [rows, L]
    counts.npy                     int64 [vocabulary]: how often training learns each token
    index.json                     the plan, and bytes and SHA-256 of each file; written last

While it is made, ``plan.json`` says what it will be, and ``.done/`` has a file for each shard that is whole.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mlmsub.runtime.data.packing import COUNTS, INDEX, Batch, PackedDataset, rows_in_order
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.outputs import write_json
from mlmsub.runtime.progress import warn

FIELD = "EXTRACT_DIR"
PLAN, DONE = "plan.json", ".done"
FORMAT = 1  # of the folder
SHARD = 512 * 2**20  # bytes of a shard, about: a rank holds one in memory, twice
AUX, LAST = "aux_hidden_states", "hidden_states"
MADE_AGAIN = "run extract again: it makes what is missing or damaged."


@dataclass(frozen=True)
class HiddenBatch(Batch):
    """Rows with what the base says of them, as modelopt's offline model is given it, but batch first; bfloat16."""

    aux_hidden_states: Any  # [batch, sequence, layers x hidden]
    hidden_states: Any  # [batch, sequence, hidden]


@dataclass(frozen=True)
class Plan:
    """What a folder holds: the same plan gives the same files, whatever the layout and the interruptions.

    ``data``: the name of the packed data, a hash of its content. ``layers``: counted from 0, rising. ``splits``: the
    rows [first, last) of each. ``identity``: what the base is, by content; see ``Dataset.require_base``. Older folders
    have none.
    """

    base: str
    data: str
    layers: list[int]
    hidden_size: int
    length: int
    padding: int
    splits: dict[str, list[int]]
    rows_per_shard: int
    format: int = FORMAT
    identity: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return max(last for _, last in self.splits.values())

    @property
    def row_bytes(self) -> int:
        """In the files: bfloat16 states, four int32 and a byte for each token."""
        return self.length * (2 * self.hidden_size * (len(self.layers) + 1) + 17)

    @property
    def shards(self) -> list[range]:
        return [
            range(first, min(first + self.rows_per_shard, self.rows))
            for first in range(0, self.rows, self.rows_per_shard)
        ]

    def as_json(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


def plan(
    data: PackedDataset, base: str, identity: dict[str, Any], layers: Sequence[int], hidden_size: int,
    rows_per_shard: int | None = None,
) -> Plan:  # fmt: skip
    """The plan for these rows; ``rows_per_shard``: as many as make ``SHARD`` bytes."""
    index = data.index
    splits = {name: list(rows) for name, rows in index["rows"].items()}
    made = Plan(
        base, data.folder.name, sorted(layers), hidden_size, index["length"], index["padding"], splits, 1,
        identity=identity,
    )  # fmt: skip
    return replace(made, rows_per_shard=rows_per_shard or max(1, SHARD // made.row_bytes))


def shard_name(number: int) -> str:
    return f"hidden-{number:05d}.safetensors"


class Writer:
    """Fills a folder by a plan, shard by shard, by several processes; each is whole or absent."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan

    def begin(self) -> None:
        """Make the folder, or find it (one process only). StageError where it is by another plan."""
        found = next((self.folder / name for name in (INDEX, PLAN) if (self.folder / name).is_file()), None)
        if found is not None:
            theirs, mine = _read(found), self.plan.as_json()
            del mine["base" if theirs.get("identity") else "identity"]  # a base that has moved is the same
            other = [name for name in mine if theirs.get(name) != mine[name]]
            if other:
                name = other[0]
                problem = f"{self.folder} was begun with {name} {theirs.get(name)!r}, and this is {mine[name]!r}."
                if name == "identity":
                    problem = f"{self.folder} was begun with another base than {self.plan.base}: {theirs['base']}."
                raise StageError(FIELD, problem, "give another folder, or set MLM_OVERWRITE=1 to begin anew.")
            return
        try:
            write_json(self.folder / PLAN, self.plan.as_json())
        except OSError as error:
            raise StageError(FIELD, f"cannot write to {self.folder}: {error.strerror}.") from error

    def missing(self, verify: bool = False) -> list[int]:
        """The shards to make. Those that are there are compared by size, with ``verify`` by checksum."""
        index = self.folder / INDEX
        listed = _read(index)["shards"] if index.is_file() else {}
        absent = []
        for number in range(len(self.plan.shards)):
            name = shard_name(number)
            note = self.folder / DONE / f"{name}.json"
            told = listed.get(name) or (_read(note) if note.is_file() else None)
            if told is None or _damage(self.folder / name, told, verify):
                absent.append(number)
        if absent and listed:  # no reader takes it for whole meanwhile
            write_json(self.folder / PLAN, self.plan.as_json())
            for name, told in listed.items():
                write_json(self.folder / DONE / f"{name}.json", told)
            index.unlink()
        return absent

    def write(self, number: int, batch: Batch, aux: Any, last: Any) -> None:
        """Write one shard: ``aux`` and ``last`` [rows, length, ...] bfloat16. StageError: the disk refuses it."""
        import torch
        from safetensors.torch import save

        tensors = {f.name: getattr(batch, f.name).to(torch.int32) for f in fields(Batch) if f.name != "loss_mask"}
        tensors |= {"loss_mask": batch.loss_mask.to(torch.uint8), AUX: aux, LAST: last}
        content = save(tensors)
        file = self.folder / shard_name(number)
        part = self.folder / f".{file.name}.part"
        note = self.folder / DONE / f"{file.name}.json"
        try:
            note.unlink(missing_ok=True)
            with part.open("wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            part.replace(file)
            write_json(note, {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
        except OSError as error:
            raise StageError(FIELD, f"cannot write {file}: {error.strerror}.") from error

    def finish(self, counts: Any) -> None:
        """Write the index, when all shards are there (one process only); nothing where it is there already."""
        import numpy as np

        if (self.folder / INDEX).is_file():
            return
        names = [shard_name(number) for number in range(len(self.plan.shards))]
        shards = {name: _read(self.folder / DONE / f"{name}.json") for name in names}
        np.save(self.folder / COUNTS, counts)
        write_json(self.folder / INDEX, {**self.plan.as_json(), "shards": shards})
        for left in [*(self.folder / DONE).iterdir(), *self.folder.glob(".*.part"), self.folder / PLAN]:
            left.unlink(missing_ok=True)
        (self.folder / DONE).rmdir()


class Dataset:
    """Reads such a folder through memory maps; the interface of ``packing.PackedDataset``.

    StageError where the folder is not whole, naming the file. That a file's bytes are those that were written is
    looked at by ``verify`` alone, which reads them all.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / INDEX).is_file():
            left = "its extraction has not ended" if (folder / PLAN).is_file() else "no index.json"
            raise StageError(
                FIELD, f"{folder} holds no hidden states: {left}.", "run extract, or give its EXTRACT_DIR."
            )
        self.folder, self.index = folder, _read(folder / INDEX)
        if self.index.get("format") != FORMAT:
            problem = f"{folder / INDEX} has format {self.index.get('format')!r}, and this reads {FORMAT}."
            raise StageError(FIELD, problem, "extract again.")
        try:
            self.plan = Plan(**{one.name: self.index[one.name] for one in fields(Plan) if one.name in self.index})
            if self.plan.identity and not {"source", "ends", "quantized"} <= self.plan.identity.keys():
                raise ValueError("identity")
            self._shards: Mapping[str, Any] = self.index["shards"]
            complete = list(self._shards) == [shard_name(number) for number in range(len(self.plan.shards))]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StageError(FIELD, f"{folder / INDEX} is damaged ({error}).", "extract again.") from error
        if not complete:
            raise StageError(FIELD, f"{folder / INDEX} does not list the shards of its rows.", "extract again.")
        self._check(verify=False)
        self._open: dict[int, Any] = {}

    def verify(self) -> None:
        """Compare every file with its checksum."""
        self._check(verify=True)

    def require(self, layers: Sequence[int], hidden_size: int, length: int | None = None) -> None:
        """StageError unless these are states of such layers, for a model of this hidden size and rows of ``length``."""
        for name, wanted in (("layers", sorted(layers)), ("hidden_size", hidden_size), ("length", length)):
            has = getattr(self.plan, name)
            if wanted is not None and has != wanted:
                raise StageError(
                    FIELD, f"{self.folder} has {name} {has}, and the draft needs {wanted}.", "extract again."
                )

    def require_base(self, mine: Mapping[str, Any]) -> None:
        """StageError unless these are states of the base with the identity ``mine``.

        ``ends``: of its embedding, final norm and output layer. ``quantized``: whether its layers are. ``source``: of
        the checkpoint that it is from, which is compared with one of the same kind; None: it was in no checkpoint.
        """
        theirs = self.plan.identity
        if not theirs:
            warn(f"{self.folder} is of an older version: that its states are those of this base is not looked at.")
            return
        sources = [str(one["source"]).split(":") for one in (theirs, mine)]
        other = ["source"] if sources[0][0] == sources[1][0] and sources[0] != sources[1] else []
        other += [name for name in ("ends", "quantized") if theirs[name] != mine[name]]
        if other:
            raise StageError(
                FIELD, f"{self.folder} has the states of another base, {self.plan.base} (not the same: {other[0]}).",
                "give that base as MLM_MODEL_CKPT or HF_MODEL_CKPT, or extract again, to another folder.",
            )  # fmt: skip

    @property
    def counts(self) -> Any:
        """How often training learns each token of the vocabulary; int64 [vocabulary]."""
        import numpy as np

        return np.load(self.folder / COUNTS)

    def rows(self, split: str) -> range:
        return range(*self.plan.splits[split])

    def batch(self, rows: Sequence[int]) -> HiddenBatch:
        """These rows; their states are copied from the files, and nothing else is read."""
        import torch

        found = [self._row(row) for row in rows]
        stacked = {one.name: torch.stack([row[one.name] for row in found]) for one in fields(HiddenBatch)}
        for name in ("tokens", "labels", "position_ids"):
            stacked[name] = stacked[name].long()
        stacked["loss_mask"] = stacked["loss_mask"].float()
        return HiddenBatch(**stacked)

    def batches(
        self, split: str, micro_batch: int, rank: int = 0, ranks: int = 1, consumed: int = 0, seed: int | None = None
    ) -> Iterator[HiddenBatch]:
        """Endless micro batches of one data-parallel rank, from the job's sample ``consumed`` on.

        The rows of ``PackedDataset.batches`` with the same arguments.
        """
        rows = self.rows(split)
        if not rows:
            raise StageError(
                "--split", f"the {split} part of {self.folder} has no rows.", "extract with another --split."
            )
        yield from map(self.batch, rows_in_order(rows, micro_batch, rank, ranks, consumed, seed))

    def _row(self, row: int) -> dict[str, Any]:
        from safetensors import SafetensorError, safe_open

        number, place = divmod(row, self.plan.rows_per_shard)
        try:
            if number not in self._open:
                self._open[number] = safe_open(self.folder / shard_name(number), "pt")
            return {one.name: self._open[number].get_slice(one.name)[place] for one in fields(HiddenBatch)}
        except (SafetensorError, OSError) as error:
            raise StageError(
                FIELD, f"{self.folder / shard_name(number)} is damaged ({error}).", "extract again with --verify."
            ) from error

    def _check(self, verify: bool) -> None:
        for name, told in self._shards.items():
            problem = _damage(self.folder / name, told, verify)
            if problem:
                raise StageError(FIELD, f"{self.folder / name} {problem}.", MADE_AGAIN)


def _damage(file: Path, told: Mapping[str, Any], verify: bool) -> str:
    """What is wrong with a shard, or an empty string."""
    if not file.is_file():
        return "is missing"
    if file.stat().st_size != told["bytes"]:
        return f"is damaged: it has {file.stat().st_size} bytes of {told['bytes']}"
    if verify:
        digest = hashlib.sha256()
        with file.open("rb") as opened:
            while block := opened.read(2**22):
                digest.update(block)
        if digest.hexdigest() != told["sha256"]:
            return "is damaged: its checksum is another"
    return ""


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise StageError(FIELD, f"{file} cannot be read ({error}).", "remove it, and extract again.") from error
    if not isinstance(data, dict):
        raise StageError(FIELD, f"{file} is not a JSON object.", "remove it, and extract again.")
    return data
