"""What the safetensors files of a Hugging Face folder hold, from their headers: no weight is read."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mlmsub.runtime.checkpoints.hf import INDEX
from mlmsub.runtime.errors import CheckFailed

# safetensors' names of the types that hold a weight as it is; any other is one of a quantized weight
PLAIN = ("BF16", "F16", "F32")
_LAYER = re.compile(r"^(?:model\.|language_model\.|backbone\.)*layers\.(\d+)\.")  # not a vision tower's


class Stored(NamedTuple):
    """One tensor: its type as safetensors names it (``BF16``, ``F8_E4M3``, ``U8``, ...), shape and file."""

    kind: str
    shape: tuple[int, ...]
    file: str


def source_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of a source checkpoint: its index may leave files out that hold the same in another layout."""
    index = folder / INDEX
    if not index.is_file():
        return headers(folder, "HF_MODEL_CKPT")
    return headers(folder, "HF_MODEL_CKPT", sorted(set(json.loads(index.read_text())["weight_map"].values())))


def headers(folder: Path, field: str = "export", files: Iterable[str] | None = None) -> dict[str, Stored]:
    """Every tensor of ``files`` (default: all that are there); raise CheckFailed on ``field`` if one is cut off."""
    found: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")) if files is None else [folder / name for name in files]:
        with file.open("rb") as stream:
            begin, header = entries(stream)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if file.stat().st_size != begin + end:
            raise CheckFailed(field, f"{file} is cut off.")
        found.update({name: Stored(e["dtype"], tuple(e["shape"]), file.name) for name, e in header.items()})
    return found


def entries(stream: Any) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file begins, and what its header says of each tensor.

    The file is a little-endian 64-bit size, a JSON header of that size, and the data (huggingface.co/docs/safetensors).
    ``stream`` is at its beginning. Raises ValueError or AttributeError if it is something else.
    """
    size = int.from_bytes(stream.read(8), "little")
    header: dict[str, Any] = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return 8 + size, header


def layer_of(name: str) -> int | None:
    """The number of the decoder layer that a tensor belongs to."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None
