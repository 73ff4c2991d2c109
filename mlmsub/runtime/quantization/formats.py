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
EXPORTED = (None, "fp8", "fp8_pb_wo", "nvfp4", "w4a16_nvfp4")
# modelopt's methods that set ranges and leave the weights as they are
SETS_RANGES_ONLY = ("max", "mse", "local_hessian")

Config = dict[str, Any]


def full_name(name: str, field: str = "QFORMAT") -> str:
    """The modelopt config name of a format given by its full or short name."""
    import modelopt.torch.quantization as mtq

    known = {choice for choice in mtq.config.choices if "_KV_" not in choice}
    full = ALIASES.get(name.lower(), name)
    if full in known:
        return full
    near = difflib.get_close_matches(name.upper(), sorted(known), 3, cutoff=0.4)
    raise StageError(field, f"modelopt has no format {name!r}.", f"use one of: {', '.join(near or sorted(known))}")


def check_kv_cache(kind: str) -> None:
    """Raise StageError if the KV cache cannot be quantized here."""
    if KV_FORMATS[kind] is not None:
        _require_attention_that_quantizes("--export-kv-cache-quant", "leave the flag out")


def _require_attention_that_quantizes(field: str, otherwise: str) -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise StageError(
            field,
            "modelopt quantizes the KV cache inside Transformer Engine's attention, which is not installed.",
            f"use an image with Transformer Engine, or {otherwise}.",
        )


def config(name: str, args: Namespace) -> Config:
    """The modelopt config of format ``name`` with the changes that the stage's flags ask for."""
    import modelopt.torch.quantization as mtq

    made: Config = copy.deepcopy(getattr(mtq, name))
    entries: list[Config] = made["quant_cfg"]
    if args.disable_qkv_quant:
        # as the reference: all of the attention block, before the KV cache's own entries
        entries.append({"quantizer_name": "*self_attention*", "enable": False})
    kv = KV_FORMATS[args.export_kv_cache_quant]
    if kv is not None:
        entries.extend(copy.deepcopy(getattr(mtq, kv)["quant_cfg"]))
        made["algorithm"] = made.get("algorithm") or "max"
    if args.weight_only:
        entries.append({"quantizer_name": "*input_quantizer", "enable": False})
    return made


def adapt_algorithm(made: Config, args: Namespace) -> None:
    """Put the flags on the calibration method into a config; raise StageError where its method has none of them."""
    algorithm = made.get("algorithm")
    if isinstance(algorithm, (str, type(None))):
        algorithm = {"method": algorithm}
    method = algorithm.get("method") if isinstance(algorithm, dict) else "a list of methods"
    if args.sync_expert_weight_amax:
        if method != "max":
            raise StageError(
                "--sync-expert-weight-amax", f"only calibration by max has it, not by {method}.", "leave it out."
            )
        algorithm["sync_expert_weight_amax"] = True
    if args.layerwise or args.layerwise_checkpoint:
        if not isinstance(algorithm, dict) or method is None:
            raise StageError("--layerwise", f"this format is calibrated by {method}, not by a method.", "leave it out.")
        layerwise = {"enable": True, "checkpoint_dir": args.layerwise_checkpoint}
        if method in SETS_RANGES_ONLY:
            layerwise["calib_mutates_weights"] = False  # smaller files
        algorithm["layerwise"] = {**(algorithm.get("layerwise") or {}), **layerwise}
    if method is not None:
        made["algorithm"] = algorithm


def layerwise(made: Config) -> Config:
    """The layerwise settings of a config; empty if it calibrates all layers at once."""
    algorithm = made.get("algorithm")
    found = algorithm.get("layerwise") if isinstance(algorithm, dict) else None
    return dict(found) if found and found.get("enable") else {}


def method(made: Config) -> str | None:
    """The calibration method of a config: ``max``, ``awq_lite``, ...; None if nothing is calibrated."""
    algorithm = made.get("algorithm")
    if isinstance(algorithm, list):
        return "+".join(str(method({"algorithm": one})) for one in algorithm)
    return algorithm.get("method") if isinstance(algorithm, dict) else algorithm


def _enabled(made: Config) -> dict[str, Config]:
    """The entries of a config that no later entry of the same name turns off."""
    last = {entry["quantizer_name"]: entry for entry in made["quant_cfg"]}
    return {name: entry for name, entry in last.items() if entry.get("enable", True)}


def needs_samples(made: Config) -> bool:
    """Does calibration look at activations? Weights are calibrated from themselves."""
    how = method(made)
    if how is None:
        return False
    return how != "max" or any("weight_quantizer" not in name for name in _enabled(made))


def names_weights(made: Config) -> bool:
    """Does the config name weights to quantize? ``*`` and the like do not count."""
    return any("weight_quantizer" in name for name in _enabled(made))


def check_usable(made: Config, name: str, device: str, latent: bool) -> list[str]:
    """Warnings on a config; StageError if it is empty or cannot work on this device. ``latent``: MLA attention."""
    enabled = _enabled(made)
    if not enabled:
        raise StageError(name, "enables no quantizer; nothing would be quantized.", "take another format or recipe.")
    warnings = []
    if any("bmm_quantizer" in pattern for pattern in enabled):
        _require_attention_that_quantizes(name, "take a format or recipe that leaves the KV cache alone")
        if latent:
            warnings.append(f"{name}: the export has no KV-cache scales of multi-head latent attention.")
    if device == "cpu" and not runs_on_cpu(made):
        if method(made) not in ("max", None):
            raise StageError(name, f"its calibration by {method(made)} needs a GPU: the kernels run on CUDA only.")
        warnings.append(f"{name} can be calibrated and exported on a CPU, but its fake-quantized forward needs a GPU.")
    return warnings


def runs_on_cpu(made: Config) -> bool:
    """False for blocks whose scales are computed when they are used (NVFP4, MX): those kernels are CUDA only."""
    return not any((one.get("block_sizes") or {}).get("type") == "dynamic" for one in numerics(made))


def numerics(made: Config) -> list[Config]:
    """``num_bits``, ``block_sizes`` and so on of each kind of quantizer that a config enables."""
    found: list[Config] = []
    for entry in _enabled(made).values():
        cfg = entry.get("cfg") or {}
        found += cfg if isinstance(cfg, list) else [cfg]
    return found


def can_run(model: Any, device: str) -> bool:
    """Can the quantized model compute on this device? Asked on all ranks, the same answer on all."""
    here = device != "cpu" or not any(
        (quantizer.block_sizes or {}).get("type") == "dynamic" for _, quantizer in quantizers(model)
    )
    return all(distributed.gather(here))


def not_exported(model: Any) -> str:
    """The name of a format in this model that modelopt's Megatron exporter cannot write; empty if it can write all."""
    from modelopt.torch.export.quant_utils import get_quantization_format

    mine = set()
    for module in model.modules():
        if hasattr(module, "weight_quantizer"):
            name = get_quantization_format(module)
            # servers expect a range of the activations beside each FP8 weight
            alone = name == "fp8" and not getattr(module.input_quantizer, "is_enabled", False)
            mine.add("fp8 of the weights alone" if alone else name)
    names = {name for part in distributed.gather(mine) for name in part}
    return next(iter(sorted(str(name) for name in names.difference(EXPORTED))), "")


def compressed(model: Any) -> bool:
    """Are weights stored in low precision (--compress), on any rank?"""
    from modelopt.torch.quantization.qtensor import QTensorWrapper

    return any(distributed.gather(any(isinstance(weight, QTensorWrapper) for weight in model.parameters())))


def quantizers(model: Any) -> Iterator[tuple[str, Any]]:
    """The enabled quantizers of this rank's part of a model."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer) and module.is_enabled:
            yield name, module


def refuse_cut_blocks(model: Any) -> None:
    """Raise StageError on every rank if tensor parallelism cuts a weight's blocks.

    Each rank's blocks begin at its own slice: with another layout the saved ranges would belong to other blocks.
    """
    from megatron.core import parallel_state

    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    cut = []
    for name, quantizer in quantizers(model):
        module = model.get_submodule(name.rpartition(".weight_quantizer")[0]) if ".weight_quantizer" in name else None
        blocks = quantizer.block_sizes or {}
        if module is None or blocks.get("type") == "dynamic" or sizes[bool(getattr(module, "is_expert", False))] == 1:
            continue
        split = -2 if getattr(module, "_is_column_parallel", False) else -1
        parted = split == -2 or getattr(module, "_is_row_parallel", False)
        side, block = module.weight.shape[split], blocks.get(split)
        if parted and block and side % block:
            shown = f"{side} {'rows' if split == -2 else 'columns'} per rank, blocks of {block}"
            cut.append(f"{name.rpartition('.')[0]} ({shown})")
    found = sorted({name for part in distributed.gather(cut) for name in part})
    if found:
        said = f"cuts the blocks of {len(found)} weights, such as {', '.join(found[:3])}."
        fix = "choose a TP and ETP that leave whole blocks to each rank: 1, if in doubt."
        raise distributed.told_once(StageError("TP", said, fix))


def check_calibrated(model: Any) -> int:
    """Number of enabled quantizers on all ranks; raise CheckFailed on every rank if one has no usable range.

    A quantizer without a finite range (its amax) quantizes to garbage or is exported as unquantized. Formats
    whose scales are all computed when they are used (MX formats) have none by design, and some have a constant.
    """
    bad: list[str] = []
    count = 0
    for name, quantizer in quantizers(model):
        count += 1
        if quantizer.is_mx_format or getattr(quantizer, "_dynamic", False) or quantizer._use_constant_amax:
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
