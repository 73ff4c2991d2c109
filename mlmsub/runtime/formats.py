"""Quantization formats: names, the modelopt config of a run, the check that a model is calibrated."""

import copy
import difflib
import math
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.errors import CheckFailed, StageError

DEFAULT = "FP8_DEFAULT_CFG"
# the reference's short names
ALIASES = {
    "fp8": "FP8_DEFAULT_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "int8": "INT8_DEFAULT_CFG",
    "int8_sq": "INT8_SMOOTHQUANT_CFG",
    "int4": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int4_awq": "INT4_AWQ_CFG",
    "w4a8": "W4A8_AWQ_BETA_CFG",
}
KV_FORMATS = {
    "none": None, "fp8": "FP8_KV_CFG", "fp8_affine": "FP8_AFFINE_KV_CFG", "nvfp4": "NVFP4_KV_CFG",
    "nvfp4_affine": "NVFP4_AFFINE_KV_CFG", "nvfp4_rotate": "NVFP4_KV_ROTATE_CFG",
}  # fmt: skip
# modelopt 0.47's names of the formats that its Megatron exporter writes and hf_check can check
EXPORTED = (None, "fp8", "nvfp4", "w4a16_nvfp4")


def full_name(name: str) -> str:
    """The modelopt config name of a format given by its full or short name."""
    import modelopt.torch.quantization as mtq

    known = {choice for choice in mtq.config.choices if "_KV_" not in choice}
    full = ALIASES.get(name.lower(), name)
    if full in known:
        return full
    near = difflib.get_close_matches(name.upper(), sorted(known), 3, cutoff=0.4)
    raise StageError("QFORMAT", f"modelopt has no format {name!r}.", f"use one of: {', '.join(near or sorted(known))}")


def check_kv_cache(kind: str) -> None:
    """Raise StageError if the KV cache cannot be quantized here."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if KV_FORMATS[kind] is not None and not HAVE_TE:
        raise StageError(
            "--export-kv-cache-quant",
            "modelopt does it inside Transformer Engine's attention, which is not installed.",
            "use an image with Transformer Engine, or leave the flag out.",
        )


def config(name: str, args: Namespace) -> dict[str, Any]:
    """The modelopt config of format ``name`` with the changes that the stage's flags ask for."""
    import modelopt.torch.quantization as mtq

    made: dict[str, Any] = copy.deepcopy(getattr(mtq, name))
    entries: list[dict[str, Any]] = made["quant_cfg"]
    if args.weight_only:
        entries.append({"quantizer_name": "*input_quantizer", "enable": False})
    kv = KV_FORMATS[args.export_kv_cache_quant]
    if kv is not None:
        entries.extend(copy.deepcopy(getattr(mtq, kv)["quant_cfg"]))
    return made


def not_exported(model: Any) -> str:
    """The name of this model's format if modelopt's Megatron exporter cannot write it; empty if it can."""
    from modelopt.torch.export.quant_utils import get_quantization_format

    names = distributed.gather(get_quantization_format(model))
    return next((str(name) for name in names if name not in EXPORTED), "")


def quantizers(model: Any) -> Iterator[tuple[str, Any]]:
    """The enabled quantizers of this rank's part of a model."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer) and module.is_enabled:
            yield name, module


def check_calibrated(model: Any) -> int:
    """Number of enabled quantizers on all ranks; raise CheckFailed on every rank if one has no usable range.

    A quantizer without a finite range (its amax) quantizes to garbage or is exported as unquantized. Formats
    whose scales are all computed when they are used (MX formats) have none by design.
    """
    bad: list[str] = []
    count = 0
    for name, quantizer in quantizers(model):
        count += 1
        if quantizer.is_mx_format or getattr(quantizer, "_dynamic", False):
            continue
        amax = getattr(quantizer, "amax", None)
        if amax is None:
            bad.append(f"{name} (no amax)")
        elif not all(math.isfinite(value) and value >= 0 for value in (float(amax.min()), float(amax.max()))):
            bad.append(f"{name} (amax not finite)")
    found = distributed.gather((count, bad))
    total: int = sum(number for number, _ in found)
    names = [name for _, part in found for name in part]
    if names:
        raise CheckFailed(
            "calibration",
            f"{len(names)} of {total} enabled quantizers have no usable range: {', '.join(names[:3])}.",
            "calibrate with data that reaches every layer and expert (quantize, --calib-data, --calib-size).",
        )
    return total
