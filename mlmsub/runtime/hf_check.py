"""Is an exported Hugging Face checkpoint what it claims to be? Read from its files, not from the exporter."""

import fnmatch
import json
from collections import Counter
from pathlib import Path
from typing import Any

from mlmsub.runtime.errors import CheckFailed
from mlmsub.runtime.hf import INDEX

# storage type of a quantized weight, and the scales that must stand beside it
STORAGE = {
    "FP8": ("F8_E4M3", ("weight_scale",)),
    "NVFP4": ("U8", ("weight_scale", "weight_scale_2")),
    "W4A16_NVFP4": ("U8", ("weight_scale", "weight_scale_2")),
}
FILES = ("config.json", "tokenizer_config.json")


def check(folder: Path, source: Path, quantized: bool) -> str:
    """Raise CheckFailed unless ``folder`` is a complete export of ``source``; else one line of what is in it.

    ``quantized``: the model had enabled quantizers. Then hf_quant_config.json must be there, and every
    decoder weight that it does not exclude must be stored in its format with its scales.
    """
    tensors = _headers(folder)
    _check_files(folder, source, tensors)
    config = folder / "hf_quant_config.json"
    if not quantized:
        low = [name for name, (kind, _) in tensors.items() if kind not in ("BF16", "F16", "F32")]
        if config.exists() or low:
            raise CheckFailed("export", f"an unquantized model was written as quantized: {low[:3] or config.name}.")
        return _summary(tensors, "not quantized")
    if not config.is_file():
        raise CheckFailed("export", "modelopt cannot write this format: there is no hf_quant_config.json.")
    quantization = json.loads(config.read_text())["quantization"]
    algorithm = quantization["quant_algo"]
    if algorithm not in STORAGE:
        raise CheckFailed("export", f"hf_quant_config.json says {algorithm}, which this stage cannot check.")
    _check_quantized(tensors, algorithm, quantization.get("exclude_modules") or [])
    if "quantization_config" not in json.loads((folder / "config.json").read_text()):
        raise CheckFailed("export", "config.json has no quantization_config.")
    return _summary(tensors, algorithm)


def _check_files(folder: Path, source: Path, tensors: dict[str, Any]) -> None:
    for name in FILES:
        if (source / name).is_file() and not (folder / name).is_file():
            raise CheckFailed("export", f"{name} is missing.")
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    if set(index) != set(tensors):
        odd = sorted(set(index) ^ set(tensors))
        raise CheckFailed("export", f"{INDEX} and the files disagree on {len(odd)} tensors: {odd[:3]}.")
    wrong = [name for name, file in index.items() if tensors[name][1] != file]
    if wrong:
        raise CheckFailed("export", f"{INDEX} names another file for {wrong[:3]}.")


def _check_quantized(tensors: dict[str, Any], algorithm: str, excluded: list[str]) -> None:
    kind, scales = STORAGE[algorithm]
    promised = 0
    for name, (stored, _) in tensors.items():
        module = name.removesuffix(".weight")
        if module == name or ".layers." not in name or "norm" in module.rpartition(".")[2]:
            continue
        if any(fnmatch.fnmatch(module, pattern) for pattern in excluded):
            continue
        promised += 1
        if stored != kind:
            raise CheckFailed("export", f"{name} is {stored}, but hf_quant_config.json promises {algorithm} ({kind}).")
        missing = [scale for scale in scales if f"{module}.{scale}" not in tensors]
        if missing:
            raise CheckFailed("export", f"{module} has no {missing}.")
    if not promised:
        raise CheckFailed("export", f"hf_quant_config.json promises {algorithm}, and no weight is quantized.")


def _headers(folder: Path) -> dict[str, tuple[str, str]]:
    """Storage type and file of every tensor, from the files' headers."""
    found: dict[str, tuple[str, str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if file.stat().st_size != 8 + size + end:
            raise CheckFailed("export", f"{file.name} is cut off.")
        found.update({name: (entry["dtype"], file.name) for name, entry in header.items()})
    return found


def _summary(tensors: dict[str, tuple[str, str]], what: str) -> str:
    kinds = Counter(kind for kind, _ in tensors.values())
    return f"{what}: {len(tensors)} tensors, " + ", ".join(f"{count} {kind}" for kind, count in kinds.items())
