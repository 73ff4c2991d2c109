"""The weights of a Hugging Face checkpoint as plain numbers, whatever they are stored as."""

import json
from pathlib import Path
from typing import Any

import torch

from mlmsub.runtime.checkpoints import dequantize
from mlmsub.runtime.checkpoints.hf_reader import FIELD, Reader, Span
from mlmsub.runtime.errors import StageError

PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ANOTHER = "start from the bf16, FP8 or (gpt-oss) MXFP4 checkpoint of the model."


class Weights:
    """Reads tensors onto ``device``; quantized ones are dequantized there in fp32 and rounded once, to ``dtype``."""

    def __init__(self, reader: Reader, dtype: torch.dtype, device: Any = "cpu") -> None:
        self.reader, self.dtype, self.device = reader, dtype, device
        self.block = _block(reader.folder)

    def get(self, key: str, span: Span | None = None) -> torch.Tensor:
        """A tensor, or the part of it in ``span``. Plain ones keep their type. StageError if it cannot be read."""
        stored = self.reader.dtype(key)
        if stored == torch.float8_e4m3fn and len(self.reader.shape(key)) == 2:
            return self._fp8(key, span).to(self.dtype)
        if stored not in PLAIN:
            kind, where = str(stored).removeprefix("torch."), self.reader.where(key)
            raise StageError(FIELD, f"{key} in {where} is stored as {kind}, which cannot be imported.", ANOTHER)
        return self.reader.read(key, span, self.device)

    def expert(self, key: str, index: int) -> torch.Tensor:
        """Entry ``index`` of the packed tensor ``key`` of gpt-oss: [out, in], or [out] for a bias.

        The file has MXFP4 in ``_blocks`` and ``_scales``, or the plain weight transposed, as transformers keeps it.
        """
        one = Span(0, index, index + 1)
        if not self.is_mxfp4(key):
            entry = self.get(key, one)[0]
            return entry.T if entry.ndim == 2 else entry
        blocks, scales = (self.reader.read(f"{key}_{part}", one, self.device) for part in ("blocks", "scales"))
        return dequantize.mxfp4(blocks, scales)[0].to(self.dtype)

    def is_mxfp4(self, key: str) -> bool:
        return f"{key}_blocks" in self.reader

    def _fp8(self, key: str, span: Span | None) -> torch.Tensor:
        """In fp32. Scales are by block (DeepSeek, Qwen3), by row, or one (modelopt, compressed-tensors)."""
        by_block, scale = f"{key}_scale_inv", f"{key}_scale"
        if by_block in self.reader:
            return self._fp8_blocks(key, by_block, span)
        if scale in self.reader:
            rows, shape = self.reader.shape(key)[0], self.reader.shape(scale)
            by_row = shape in ((rows,), (rows, 1))
            if by_row or shape in ((), (1,), (1, 1)):
                part = span if by_row and span is not None and span.dim == 0 else None
                factor = self.reader.read(scale, part, self.device).to(torch.float32).reshape(-1, 1)
                return self.reader.read(key, span, self.device).to(torch.float32) * factor
        raise StageError(
            FIELD, f"{key} in {self.reader.where(key)} is FP8 and has neither {by_block} nor a {scale} that is one "
            "number or one for each row.", ANOTHER,
        )  # fmt: skip

    def _fp8_blocks(self, key: str, scale: str, span: Span | None) -> torch.Tensor:
        whole, offset, part = self.reader.shape(key), [0, 0], None
        wanted = tuple(-(-side // block) for side, block in zip(whole, self.block, strict=True))
        if self.reader.shape(scale) != wanted:
            raise StageError(
                FIELD, f"{scale} in {self.reader.where(scale)} is {list(self.reader.shape(scale))}; "
                f"{list(whole)} in blocks of {list(self.block)} has {list(wanted)}.",
                "check quantization_config.weight_block_size in config.json.",
            )  # fmt: skip
        if span is not None:  # its edges may lie inside of blocks
            offset[span.dim], side = span.start, self.block[span.dim]
            part = Span(span.dim, span.start // side, -(-span.stop // side))
        weight, scales = self.reader.read(key, span, self.device), self.reader.read(scale, part, self.device)
        return dequantize.fp8_blocks(weight, scales, self.block, (offset[0], offset[1]))


def _block(folder: Path) -> tuple[int, int]:
    """Rows and columns of an FP8 block (``quantization_config.weight_block_size``), 128 x 128 if it is not said."""
    data = json.loads((folder / "config.json").read_text())
    config = data.get("quantization_config") or data.get("text_config", {}).get("quantization_config") or {}
    rows, columns = config.get("weight_block_size") or (128, 128)
    return int(rows), int(columns)
