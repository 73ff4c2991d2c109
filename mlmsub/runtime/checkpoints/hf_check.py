"""Is an exported Hugging Face checkpoint what it claims to be? Read from its files, not from the exporter."""

import fnmatch
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlmsub.runtime.checkpoints import hf, mtp
from mlmsub.runtime.checkpoints.hf import INDEX
from mlmsub.runtime.checkpoints.hf_headers import PLAIN, Stored, headers, layer_of, source_headers
from mlmsub.runtime.errors import CheckFailed

# storage type of a quantized weight, and the scales that must stand beside it; servers read an input_scale
# wherever the format says that activations are quantized
STORAGE = {
    "FP8": ("F8_E4M3", ("weight_scale", "input_scale")),
    "FP8_PB_WO": ("F8_E4M3", ("weight_scale",)),
    "NVFP4": ("U8", ("weight_scale", "weight_scale_2", "input_scale")),
    "W4A16_NVFP4": ("U8", ("weight_scale", "weight_scale_2")),
}
FILES = ("config.json", "tokenizer_config.json")
KINDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
SCALES = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")
ROUTER_BIAS = "e_score_correction_bias"
# what a source may have that no export needs: buffers of old conversions, the scales of a quantized source
NOT_EXPORTED = ("*rotary_emb.inv_freq", "*_scale_inv", "*_blocks", "*_scales", "*.weight_scale", "*.input_scale")


def check(folder: Path, source: Path, quantized: bool, kv_cache: bool = False) -> str:
    """Raise CheckFailed unless ``folder`` is a complete export of ``source``; else one line of what is in it.

    ``quantized``: the model had enabled quantizers. Then hf_quant_config.json must be there, and every
    decoder weight that it does not exclude must be stored in its format with its scales. All else has the
    source's type. ``kv_cache``: the model had quantizers of keys and values, so their scales must be there.
    """
    tensors = headers(folder)
    _check_files(folder, source, tensors)
    config = json.loads((folder / "config.json").read_text())
    quantization: dict[str, Any] = {}
    note = folder / "hf_quant_config.json"
    if quantized:
        if not note.is_file():
            raise CheckFailed("export", "modelopt cannot write this format: there is no hf_quant_config.json.")
        quantization = json.loads(note.read_text())["quantization"]
    elif note.exists():
        raise CheckFailed("export", f"an unquantized model was written as quantized: there is {note.name}.")
    if ("quantization_config" in config) != quantized:
        raise CheckFailed("export", f"config.json has {'no' if quantized else 'a'} quantization_config.")
    promised = _check_quantized(tensors, quantization) if quantized else set()
    kept = _check_plain(tensors, promised, source, hf.config(folder), config)
    _check_scales(folder, tensors)
    if kv_cache:
        _check_kv_cache(tensors, quantization, hf.config(folder)["num_hidden_layers"])
    return _summary(tensors, quantization.get("quant_algo") or "not quantized", kept)


def check_ranges(file: Path) -> int:
    """Number of ranges in a quantizer_state.pth; raise CheckFailed if there is none or one is not usable."""
    import torch

    ranges = torch.load(file, weights_only=True)
    if not ranges:
        raise CheckFailed("export", f"{file.name} is empty: no activation is quantized.")
    for name, value in ranges.items():
        if name.endswith("amax") and not bool((torch.isfinite(value) & (value > 0)).all()):
            raise CheckFailed("export", f"{name} of {file.name} is not a positive number.")
    return len(ranges)


def _check_files(folder: Path, source: Path, tensors: dict[str, Stored]) -> None:
    for name in FILES:
        if (source / name).is_file() and not (folder / name).is_file():
            raise CheckFailed("export", f"{name} is missing.")
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    if set(index) != set(tensors):
        odd = sorted(set(index) ^ set(tensors))
        raise CheckFailed("export", f"{INDEX} and the files disagree on {len(odd)} tensors: {odd[:3]}.")
    wrong = [name for name, file in index.items() if tensors[name].file != file]
    if wrong:
        raise CheckFailed("export", f"{INDEX} names another file for {wrong[:3]}.")


def _check_quantized(tensors: dict[str, Stored], quantization: dict[str, Any]) -> set[str]:
    """The names of the quantized weights, each stored as hf_quant_config.json promises."""
    excluded = set(quantization.get("exclude_modules") or [])
    patterns = [pattern for pattern in excluded if "*" in pattern]
    layers = quantization.get("quantized_layers") or {}
    promised = set()
    for name, stored in tensors.items():
        module = name.removesuffix(".weight")
        if not _is_linear(name, stored) or module in excluded or _matches(module, patterns):
            continue
        algorithm = layers.get(module, {}).get("quant_algo") if layers else quantization["quant_algo"]
        if algorithm not in STORAGE:
            raise CheckFailed(
                "export", f"hf_quant_config.json says {algorithm} of {module}: this stage cannot check it."
            )
        kind, scales = STORAGE[algorithm]
        if stored.kind != kind:
            raise CheckFailed(
                "export", f"{name} is {stored.kind}, but hf_quant_config.json promises {algorithm} ({kind})."
            )
        join = "." if module != name else "_"  # experts packed into one tensor have no module of their own
        missing = [scale for scale in scales if f"{module}{join}{scale}" not in tensors]
        if missing:
            hint = (
                "servers have no such format of weights alone; quantize without --weight-only, or to W4A16_NVFP4_CFG."
            )
            raise CheckFailed("export", f"{module} has no {missing}.", hint if missing == ["input_scale"] else "")
        scale = tensors[f"{module}{join}weight_scale"].shape
        want = _scale_shape(algorithm, stored.shape)
        if scale != want and not (want == () and scale == (1,)):
            raise CheckFailed("export", f"{module}{join}weight_scale is {list(scale)}, not {list(want)}.")
        promised.add(name)
    if not promised:
        raise CheckFailed(
            "export", f"hf_quant_config.json promises {quantization['quant_algo']}; nothing is quantized."
        )
    return promised


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _scale_shape(algorithm: str, weight: tuple[int, ...]) -> tuple[int, ...]:
    if algorithm == "FP8_PB_WO":  # blocks of 128 x 128
        return (-(-weight[0] // 128), 1, -(-weight[1] // 128), 1)
    if algorithm == "FP8":
        return ()
    return (*weight[:-1], weight[-1] // 8)  # NVFP4: two values in a byte, 16 to a scale


def _is_linear(name: str, stored: Stored) -> bool:
    """A matrix, or experts packed into one: what servers take for quantized unless it is excluded."""
    return name.endswith(".weight" if len(stored.shape) == 2 else (".experts.gate_up_proj", ".experts.down_proj"))


def _check_plain(
    tensors: dict[str, Stored], promised: set[str], source: Path, text: dict[str, Any], config: dict[str, Any]
) -> int:
    """Everything of the source is there and, unless quantized, in the source's type; returns the MTP tensors."""
    given = source_headers(source)
    main = KINDS[config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text["torch_dtype"]]
    kinds = Counter(stored.kind for name, stored in given.items() if not _matches(name, NOT_EXPORTED))
    usual = next(kind for kind, _ in kinds.most_common() if kind in PLAIN)
    for name, stored in tensors.items():
        if name in promised or name.rpartition(".")[2].endswith(SCALES):
            continue
        had = given[name].kind if name in given else usual
        # a whole source in another precision is rounded to this one's; what stands out in a source is kept
        want = had if had in PLAIN and had != usual else main
        if name.endswith(ROUTER_BIAS):
            want = "F32"  # as Megatron holds it, whatever the source has
        if stored.kind != want:
            raise CheckFailed("export", f"{name} is {stored.kind}, and should be {want} (in the source: {had}).")
    source_text = hf.config(source)
    drafts = {name for name in given if mtp.is_mtp(name, source_text)}
    lost = sorted(name for name in set(given) - set(tensors) - drafts if not _needs_no_export(name, text))
    if lost:
        raise CheckFailed("export", f"{len(lost)} tensors of the source are missing: {lost[:3]}.")
    kept, says = drafts & set(tensors), sum(text.get(field) or 0 for field in mtp.FIELDS)
    if bool(kept) != bool(says):
        raise CheckFailed("export", f"config.json says {says} MTP layers, and there are {len(kept)} tensors of them.")
    return len(kept)


def _needs_no_export(name: str, text: dict[str, Any]) -> bool:
    layer = layer_of(name)
    return (
        _matches(name, NOT_EXPORTED)
        or (layer is not None and layer >= text["num_hidden_layers"])  # a model with fewer layers than the source
        or _pruned_expert(name, text)
        or (name == "lm_head.weight" and bool(text.get("tie_word_embeddings")))
    )


def _pruned_expert(name: str, text: dict[str, Any]) -> bool:
    expert = re.search(r"\.experts\.(\d+)\.", name)
    counts = [text[field] for field in ("num_experts", "n_routed_experts", "num_local_experts") if field in text]
    return expert is not None and bool(counts) and int(expert[1]) >= counts[0]


def _check_scales(folder: Path, tensors: dict[str, Stored]) -> None:
    """Per-tensor scales are positive numbers; those of blocks are many, and were looked at when they were made."""
    from safetensors import safe_open

    files: dict[str, list[str]] = {}
    for name, stored in tensors.items():
        if name.rpartition(".")[2].endswith(SCALES) and math.prod(stored.shape) == 1:
            files.setdefault(stored.file, []).append(name)
    for file, names in files.items():
        with safe_open(folder / file, framework="pt") as opened:
            for name in names:
                scale = float(opened.get_tensor(name))
                if not (math.isfinite(scale) and scale > 0):
                    raise CheckFailed("export", f"{name} is {scale}, not a positive number.")


def _check_kv_cache(tensors: dict[str, Stored], quantization: dict[str, Any], layers: int) -> None:
    """modelopt has no rule for the attention of some models (latent attention), and says nothing about it."""
    found = sum(name.endswith(("self_attn.k_scale", "self_attn.v_scale")) for name in tensors)
    if not quantization.get("kv_cache_quant_algo") or found != 2 * layers:
        raise CheckFailed(
            "export",
            f"keys and values are quantized, and {found} of their {2 * layers} scales were written.",
            "modelopt cannot export them for this model: quantize it without --export-kv-cache-quant.",
        )


def _summary(tensors: dict[str, Stored], what: str, drafts: int) -> str:
    kinds = Counter(stored.kind for stored in tensors.values())
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{what}: {len(tensors)} tensors, {counts}" + (f" ({drafts} of MTP layers)" if drafts else "")
