"""modelopt's exporters of Megatron models, with what their 0.47 gets wrong put right.

Imports Megatron and modelopt: import it inside functions. tests/stages/test_export_compat.py fails when modelopt
no longer needs one of these.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from modelopt.torch.export import unified_export_megatron
from modelopt.torch.export.model_config import QUANTIZATION_FP8, QUANTIZATION_FP8_PB_WO, QUANTIZATION_NONE
from modelopt.torch.export.plugins.hf_checkpoint_utils import copy_non_safetensor_files_from_ckpt
from modelopt.torch.export.plugins.mcore_custom import LLAVA_VISION_PREFIXES
from modelopt.torch.export.plugins.vllm_fakequant_megatron import VllmFqGPTModelExporter
from modelopt.torch.export.unified_export_megatron import GPTModelExporter
from modelopt.torch.quantization.utils import get_quantizer_state_dict
from safetensors import safe_open

from mlmsub.runtime.checkpoints.hf_headers import layer_of

# Weights in other containers (hundreds of GB next to the safetensors) and notes on how the source was quantized
# are not sidecar files of the export; modelopt would copy them.
NOT_COPIED = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "hf_quant_config.json")

# modelopt's and vLLM's name of block FP8 in hf_quant_config.json, and its block
BLOCK_FP8, BLOCK = "FP8_PB_WO", 128


class Exporter(GPTModelExporter):  # type: ignore[misc]
    """Writes weights in the format that their quantizers have, with their scales."""

    exclude_modules: list[str]

    def __init__(self, model: Any, source: str, mtp: dict[Path, list[str]], **options: Any) -> None:
        # The router's type is not given: modelopt would store its weights in the type that Megatron *computes*
        # them in (fp32), which is not the source's and twice its size.
        super().__init__(model, source, **options)
        self._mtp = mtp
        self._plain = False
        if self.arch == "Llama4ForConditionalGeneration":
            # modelopt takes the vision tower over only if Megatron's model has one; else its own check fails
            self.vision_passthrough_prefixes = LLAVA_VISION_PREFIXES
            self.exclude_modules += [f"{prefix}*" for prefix in LLAVA_VISION_PREFIXES]

    def save_pretrained(self, save_directory: str, pretrained_model_name_or_path: str) -> None:
        module: Any = unified_export_megatron
        module.copy_non_safetensor_files_from_ckpt = partial(
            copy_non_safetensor_files_from_ckpt, exclude_patterns=NOT_COPIED
        )
        super().save_pretrained(save_directory, pretrained_model_name_or_path)

    def _verify_exported_keys(self, save_directory: str, pretrained_model_name_or_path: str) -> None:
        """modelopt takes pruned experts for lost ones; ``hf_check`` looks for every tensor, and knows them."""

    def _get_weight_bias(self, module: Any, dtype: Any = None, name_to_value: Any = None) -> dict[str, Any]:
        """The router's correction bias stays in fp32, in which Megatron holds it: bf16 would reorder experts."""
        found: dict[str, Any] = super()._get_weight_bias(module, dtype, name_to_value)
        if "expert_bias" in found:
            found["expert_bias"] = module.expert_bias.cpu()
        return found

    def _get_quantized_state(self, module: Any, dtype: Any = None, prefix: str = "") -> Any:
        """FP8 weights are divided by their scale in fp32: in bf16 they are rounded twice, and 3 % are a step off.

        An assertion of modelopt on a scale gets the name of its tensor.
        """
        try:
            state, kind, block = super()._get_quantized_state(module, dtype, prefix)
        except (AssertionError, ValueError, RuntimeError) as error:
            raise ValueError(f"{prefix.removesuffix('.')}: {error}") from error
        if kind == QUANTIZATION_FP8:
            state["weight"] = state["weight"].float()
        return state, kind, block

    def _qkv_slicing(self, module: Any, prefix: str, *names: str, **more: Any) -> None:
        self._in_blocks(super()._qkv_slicing, module, prefix, *names, **more)

    def _name_remapping(self, module: Any, prefix: str, *words: Any, **more: Any) -> None:
        self._in_blocks(super()._name_remapping, module, prefix, *words, **more)

    def _in_blocks(self, write: Callable[..., None], module: Any, prefix: str, *words: Any, **more: Any) -> None:
        """Write a module; one in block FP8 part by part, since modelopt slices its scales as if they were per row.

        A block of q, k or v holds other rows than one of Megatron's fused tensor, unless a head's width is a
        multiple of the block; so the scales are those of the parts, by their largest values.
        """
        if isinstance(module, torch.Tensor) or self._get_quantization_format(module) != QUANTIZATION_FP8_PB_WO:
            write(module, prefix, *words, **more)
            return
        known, excluded = set(self._state_dict), list(self.exclude_modules)
        self._plain = True
        try:
            write(module, prefix, *words, **more)
        finally:
            self._plain, self.exclude_modules = False, excluded
        for name in [name for name in self._state_dict if name not in known and name.endswith(".weight")]:
            self._state_dict[name], self._state_dict[f"{name}_scale"] = fp8_blocks(self._state_dict[name])
            self._record_layer_quant_config(name.removesuffix("weight"), BLOCK_FP8, BLOCK)

    def _get_quantization_format(self, module: Any) -> Any:
        return QUANTIZATION_NONE if self._plain else super()._get_quantization_format(module)

    def _pack_name_remapping(self, module: Any, prefix: str, layer_type: str = "", **more: Any) -> None:
        """modelopt transposes packed experts before it makes blocks, so NVFP4's would lie along the wrong axis."""
        self._refuse_blocks(getattr(module[0], layer_type), prefix)
        super()._pack_name_remapping(module, prefix, layer_type, **more)

    def _pack_name_remapping_gpt_oss(self, module: Any, prefix: str, layer_type: str = "", **more: Any) -> None:
        self._refuse_blocks(getattr(module[0], layer_type), prefix)
        super()._pack_name_remapping_gpt_oss(module, prefix, layer_type, **more)

    def _refuse_blocks(self, expert: Any, prefix: str) -> None:
        kind = self._get_quantization_format(expert)
        if kind not in (QUANTIZATION_NONE, QUANTIZATION_FP8):
            raise ValueError(f"{prefix}: {self.arch} packs its experts, which is done for FP8 only, not for {kind}")

    def _gated_mlp_slicing(
        self, module: Any, prefix: str, gate_proj_name: str = "gate_proj", up_proj_name: str = "up_proj", **more: Any
    ) -> None:
        """An unquantized gate and up projection is excluded under these two names, not as the whole MLP."""
        known = set(self.exclude_modules)
        write = super()._gated_mlp_slicing
        self._in_blocks(write, module, prefix, gate_proj_name=gate_proj_name, up_proj_name=up_proj_name, **more)
        parent = prefix.removesuffix(".")
        if parent in set(self.exclude_modules) - known:
            self.exclude_modules.remove(parent)
            self.exclude_modules += [f"{prefix}{gate_proj_name}", f"{prefix}{up_proj_name}"]

    def _copy_mtp_state_dict_from_pretrained(self) -> dict[str, Any]:
        """modelopt knows the names ``mtp.*`` only, not DeepSeek's, and takes them whatever their format."""
        found: dict[str, Any] = {}
        for file, names in self._mtp.items():
            with safe_open(file, framework="pt") as stored:
                found |= {name: stored.get_tensor(name) for name in names}
        for layer in sorted({layer for layer in map(layer_of, found) if layer is not None}):
            self.exclude_modules.append(f"model.layers.{layer}.*")
        return found


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in E4M3 with one fp32 scale for each block of 128 x 128: [rows / 128, 1, columns / 128, 1]."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    amax = tiles.abs().amax((1, 3), keepdim=True)
    scale = torch.where(amax > 0, amax / 448, 1.0)
    stored = (tiles / scale).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
    return stored[:rows, :columns].contiguous(), scale


class FakeQuantExporter(Exporter, VllmFqGPTModelExporter):  # type: ignore[misc]
    """Writes weights quantized and dequantized, and the ranges of the other quantizers in quantizer_state.pth."""

    def _get_quantized_state(self, module: Any, dtype: Any = None, prefix: str = "") -> Any:
        """The ranges in fp32, as they were calibrated: modelopt rounds them to the weights' type."""
        state, *more = super()._get_quantized_state(module, dtype, prefix)
        for quantizer, values in get_quantizer_state_dict(module).items():
            for name, value in values.items():
                if f"{quantizer}.{name}" in state:
                    state[f"{quantizer}.{name}"] = value.cpu()
        return state, *more
