"""Read the tensors of a Hugging Face checkpoint folder: memory-mapped, and only the part that is asked for.

An index file names the file of each tensor if there are several (huggingface.co/docs/safetensors). The files are
mapped here rather than through the safetensors library, whose mapping keeps every page that was touched in the
process for as long as a file is open: a rank that reads 100 GB would seem to need them.
"""

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mlmsub.runtime.checkpoints import hf_headers
from mlmsub.runtime.checkpoints.hf import INDEX
from mlmsub.runtime.errors import StageError

SINGLE = "model.safetensors"
FIELD, AGAIN = "HF_MODEL_CKPT", "fetch the checkpoint again."
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """A range of one dimension of a tensor."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # first byte in the file
    stop: int


class _File:
    """One safetensors file: its header, and its bytes mapped."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as stream:
                self.bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: it is empty
            raise StageError(FIELD, f"{path} cannot be read: {error}.", AGAIN) from error
        self.entries: dict[str, _Entry] = {}
        try:
            begin, header = hf_headers.entries(self.bytes)
            for name, entry in header.items():
                start, stop = entry["data_offsets"]
                kind = DTYPES.get(entry["dtype"])
                if kind is None:
                    raise StageError(FIELD, f"{name} in {path} has the unknown type {entry['dtype']}.")
                self.entries[name] = _Entry(kind, tuple(entry["shape"]), begin + start, begin + stop)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problem = f"{path} is not a safetensors file, or cut off in its header."
            raise StageError(FIELD, problem, f"{AGAIN[:-1]}; a Git LFS pointer is a text in its place.") from error
        whole = max((entry.stop for entry in self.entries.values()), default=begin)
        if len(self.bytes) < whole:
            raise StageError(FIELD, f"{path} is cut off: {len(self.bytes)} of {whole} bytes.", AGAIN)

    def advise(self, advice: int, entry: _Entry) -> None:
        start = entry.start - entry.start % mmap.PAGESIZE
        self.bytes.madvise(advice, start, entry.stop - start)


class Reader:
    """The tensors of a folder. The index is parsed once, a file is opened when its first tensor is asked for.

    ``opens``, ``jumps_back`` (to a file before the last one, by name), ``bytes_read`` and ``names_read`` count
    what was done. Every error is a StageError that names the tensor and the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opens = self.jumps_back = self.bytes_read = 0
        self.names_read: set[str] = set()
        self._open: dict[str, _File] = {}
        self._last = ""
        self.files = self._single() if (folder / SINGLE).is_file() else self._index()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.bytes.close()
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name)[1].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name)[1].shape

    def where(self, name: str) -> str:
        """The file of a tensor, for messages."""
        return str(self.folder / self.files[name])

    def read(self, name: str, span: Span | None = None, device: Any = "cpu") -> torch.Tensor:
        """The tensor, or the part of it in ``span``, as a new contiguous tensor on ``device``."""
        file, entry = self._entry(name)
        position = self.files[name]
        self.jumps_back += position < self._last
        self._last = position
        view = self._map(file, entry, span)
        made = view.to(device, copy=True).contiguous()
        del view
        # the pages are the file's, so they come back when they are asked for again
        file.advise(mmap.MADV_DONTNEED, entry)
        self.bytes_read += made.nbytes
        self.names_read.add(name)
        return made

    @staticmethod
    def _map(file: _File, entry: _Entry, span: Span | None) -> torch.Tensor:
        if span is None or span.dim == 0:  # a run of bytes: fetched at once, not page by page
            rows = entry.shape[0] if entry.shape else 1
            row = (entry.stop - entry.start) // max(rows, 1)
            start, stop = (0, rows) if span is None else (span.start, span.stop)
            shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
            entry = _Entry(entry.dtype, shape, entry.start + start * row, entry.start + stop * row)
            file.advise(mmap.MADV_WILLNEED, entry)
            span = None
        elements = (entry.stop - entry.start) // entry.dtype.itemsize
        view = torch.frombuffer(file.bytes, dtype=entry.dtype, count=elements, offset=entry.start).view(entry.shape)
        return view if span is None else view.narrow(span.dim, span.start, span.stop - span.start)

    def _entry(self, name: str) -> tuple[_File, _Entry]:
        if name not in self.files:
            listing = SINGLE if (self.folder / SINGLE).is_file() else INDEX
            raise StageError(
                FIELD, f"{self.folder / listing} has no tensor {name}.",
                "check that the model conf and the checkpoint are the same model.",
            )  # fmt: skip
        file = self._file(self.files[name])
        if name not in file.entries:
            raise StageError(FIELD, f"{self.where(name)} has no tensor {name}, against {INDEX}.", AGAIN)
        return file, file.entries[name]

    def _file(self, name: str) -> _File:
        if name not in self._open:
            self._open[name] = _File(self.folder / name)
            self.opens += 1
        return self._open[name]

    def _single(self) -> dict[str, str]:
        return dict.fromkeys(self._file(SINGLE).entries, SINGLE)

    def _index(self) -> dict[str, str]:
        index = self.folder / INDEX
        try:
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            if not all(isinstance(name, str) for name in files.values()):
                raise ValueError("weight_map names something that is no file")
        except FileNotFoundError as error:
            problem = f"{self.folder} has neither {SINGLE} nor {INDEX}."
            raise StageError(FIELD, problem, "only safetensors checkpoints can be imported.") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StageError(FIELD, f"{index} cannot be read: {error!r}.", AGAIN) from error
        missing = sorted(name for name in set(files.values()) if not (self.folder / name).is_file())
        if missing:
            raise StageError(
                FIELD, f"{self.folder} lacks {len(missing)} files of its index: {', '.join(missing[:3])}.", AGAIN
            )
        return files
