"""A training checkpoint without its frozen base: where the base is, and whether it is still the same.

An iteration of eagle3 holds the draft; its ``base.json`` names the folder beside it that holds the base, and the hash
of what is there. The name is relative, so that a training may be moved or mounted elsewhere as a whole.
"""

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlmsub.runtime.errors import StageError

FIELD, FILE = "MLM_MODEL_CKPT", "base.json"
PART = "eagle_module."  # what trains
WEIGHTS = ("embedding.", "decoder.", "output_layer.")  # the base's own keys in a checkpoint
# torch.save ends each tensor with the directory of its archive, where the CRC-32 of its bytes is
TAIL = 1024
# what to do about an iteration that is damaged
OTHER = "let latest_checkpointed_iteration.txt name another iteration that is there, or save it again."
THREADS = 16  # at once, of reads that are too short for any disk or network to be busy with one


@dataclass(frozen=True)
class Base:
    """The folder's name beside the iterations, and the hash of the base in it."""

    folder: str
    sha256: str

    @classmethod
    def at(cls, here: Path) -> "Base":
        """The base in the folder ``here`` of a whole checkpoint, as it is now."""
        return cls(here.name, digest(here))

    @classmethod
    def of(cls, here: Path) -> "Base | None":
        """What the iteration ``here`` refers to; None: it holds its base itself. StageError: its note is damaged."""
        file = here / FILE
        if not file.exists():
            return None
        try:
            noted = cls(**json.loads(file.read_text()))
            if not re.fullmatch(r"\w[\w.-]*", noted.folder):
                raise ValueError(f"{noted.folder!r} is no name of a folder beside it")
            if not re.fullmatch(r"[0-9a-f]{64}", noted.sha256):
                raise ValueError(f"{noted.sha256!r} is no SHA-256")
        except (OSError, TypeError, ValueError) as error:
            raise StageError(FIELD, f"{file} is damaged: {error}.", OTHER) from error
        return noted

    def note(self) -> dict[str, Any]:
        """What an iteration notes that refers to this base, in ``FILE``."""
        return asdict(self)


def parts(state: dict[str, Any], here: Path, base: Path) -> dict[Path, dict[str, Any]]:
    """What is to be loaded of a model's sharded state, by the folder that has it."""
    if base == here:
        return {here: state}
    made: dict[Path, dict[str, Any]] = {base: {}, here: {}}
    for name, tensor in state.items():
        made[here if name.startswith(PART) else base][name] = tensor
    return made


def digest(here: Path, keys: tuple[str, ...] = WEIGHTS) -> str:
    """A SHA-256 of the base's plan and of the checksums that torch has written at the end of each tensor.

    So every byte as it was written counts, and 1 KiB of each stored tensor is read. It is that of a layout: the same
    weights in other slices have another. Bytes that a disk has changed since are not seen. ``keys``: how the names of
    the tensors that count begin.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    plan = FileSystemReader(here).read_metadata()
    sizes = {key: entry for key, entry in plan.state_dict_metadata.items() if key.startswith(keys)}
    stored = sorted(
        (index.fqn, tuple(index.offset or ()), item.length, str(item.relative_path), item.offset)
        for index, item in plan.storage_data.items()
        if index.fqn in sizes
    )
    places: dict[str, dict[int, int]] = {}  # by file: where a tensor begins -> where it ends
    for _, _, length, name, start in stored:
        places.setdefault(name, {})[start] = start + length

    def tails(name: str) -> dict[int, bytes]:
        with (here / name).open("rb") as file:
            return {
                start: os.pread(file.fileno(), min(TAIL, end - start), max(start, end - TAIL))
                for start, end in sorted(places[name].items())
            }

    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip(places, pool.map(tails, places), strict=True))
    made = hashlib.sha256()
    for key, offsets, length, name, start in stored:
        kind = getattr(sizes[key], "size", None), getattr(getattr(sizes[key], "properties", None), "dtype", None)
        made.update(repr((key, *kind, offsets, length)).encode() + found[name][start])
    return made.hexdigest()
