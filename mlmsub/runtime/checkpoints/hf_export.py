"""Write a Megatron model as a Hugging Face checkpoint."""

import json
import warnings
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import mtp
from mlmsub.runtime.errors import CheckFailed, StageError, writing
from mlmsub.runtime.modelconf import ModelConf
from mlmsub.runtime.outputs import write_json
from mlmsub.runtime.progress import is_main, say, without_prints
from mlmsub.runtime.quantization import formats

QUANTIZATION = "hf_quant_config.json"
RANGES = "quantizer_state.pth"


def export_weights(
    model: Any, source_folder: Path, conf: ModelConf, dtype: Any, folder: Path, fake_quant: bool = False
) -> None:
    """Write the model as a Hugging Face checkpoint into ``folder``, which exists (all ranks call it).

    ``fake_quant``: weights are quantized and dequantized, in ``dtype``, and the ranges of the activations go to
    quantizer_state.pth, for vLLM with modelopt's fake quantizers; else they are stored in their format.

    Raises StageError for an architecture that modelopt has no rules for, CheckFailed with the tensor's name if
    one cannot be written or has a NaN; on all ranks alike.
    """
    from mlmsub.runtime.checkpoints import exporters

    extra = mtp.plan(source_folder, model.config.num_layers)
    if extra.text:
        say(extra.text)
    kind = exporters.FakeQuantExporter if fake_quant else exporters.Exporter
    try:
        options = {"dtype": dtype, "trust_remote_code": conf.trust_remote_code}
        with without_prints():
            exporter = kind(model, str(source_folder), extra.copied, **options)
    except (KeyError, ValueError, OSError) as error:
        reason = f"has no rules for {error}" if isinstance(error, KeyError) else f"cannot read its config: {error}"
        raise StageError("HF_MODEL_CKPT", f"modelopt's exporter {' '.join(reason.split())[:300]}") from error
    _convert(exporter)
    with writing("EXPORT_DIR", folder):  # modelopt's save has collectives: the other ranks end with this one
        with without_prints(), warnings.catch_warnings():
            warnings.filterwarnings("error", "Failed to copy checkpoint sidecar")
            exporter.save_pretrained(str(folder), str(source_folder))
        if is_main():
            for note in folder.glob("model-*-of-*.json"):
                note.unlink()  # one beside each file; the index holds all of them
            write_config(folder, source_folder, dtype, sizes(model.config), keep_mtp=bool(extra.copied))
    distributed.barrier()


def has_kv_cache(model: Any) -> bool:
    """Are keys or values quantized, on any rank?"""
    names = [name for name, _ in formats.quantizers(model) if name.endswith(("k_bmm_quantizer", "v_bmm_quantizer"))]
    return any(distributed.gather(bool(names)))


def _convert(exporter: Any) -> None:
    """Make this rank's tensors, and look at each of them before anything is written."""
    import torch

    problem: CheckFailed | None = None
    try:
        for tensors in exporter.layer_state_dicts.values():
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
                    raise ValueError(f"{name} has a NaN")
    except (AssertionError, AttributeError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        problem = CheckFailed("export", f"modelopt cannot write this model: {reason}")
    distributed.agree(problem)


def sizes(config: Any) -> dict[str, int]:
    """What pruning changes, by the names of a Hugging Face config, from Megatron's config.

    Latent attention gives the heads' widths by names of its own, and a model with experts the MLP's. Families have
    several names for the number of experts.
    """
    found = {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
    }
    if not config.multi_latent_attention:
        found["head_dim"] = config.kv_channels
    if config.num_moe_experts is None:
        found["intermediate_size"] = config.ffn_hidden_size
        return found
    found |= dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), config.num_moe_experts)
    found["moe_intermediate_size"] = config.moe_ffn_hidden_size
    if config.moe_shared_expert_intermediate_size:
        found["shared_expert_intermediate_size"] = config.moe_shared_expert_intermediate_size
    return found


def resize(text: dict[str, Any], model_sizes: dict[str, int]) -> None:
    """Give the language model's part of a config.json other sizes, where it has these fields.

    Lists with an entry per layer lose their last ones, since only layers of the last kind are pruned. A config without
    ``head_dim`` means that the heads share the hidden size, which a pruned model's may not.
    """
    text.update({name: size for name, size in model_sizes.items() if name in text})
    width = model_sizes.get("head_dim")
    if width is not None and width * model_sizes["num_attention_heads"] != model_sizes["hidden_size"]:
        text["head_dim"] = width
    for name in {"layer_types", "mlp_layer_types"} & set(text):
        if text[name] is not None:
            text[name] = text[name][: model_sizes["num_hidden_layers"]]


def write_config(folder: Path, source: Path, dtype: Any, model_sizes: dict[str, int], keep_mtp: bool) -> None:
    """Put the source's own config.json into ``folder``, changed where the export differs from the source.

    modelopt writes what transformers makes of it: keys of this transformers' version, which the server's may
    not read (``rope_parameters`` for ``rope_scaling``); the source's ``quantization_config`` beside weights that
    are no longer so; a ``head_dim`` that latent attention does not have.
    """
    made = json.loads((folder / "config.json").read_text())
    data = json.loads((source / "config.json").read_text())
    text = data.get("text_config", data)
    for part in (data, text):
        part.pop("quantization_config", None)
        for name in {"dtype", "torch_dtype"} & set(part):
            part[name] = str(dtype).removeprefix("torch.")
    if not {"dtype", "torch_dtype"} & (set(data) | set(text)):
        data["torch_dtype"] = str(dtype).removeprefix("torch.")  # every version of transformers knows this one
    resize(text, model_sizes)
    if not keep_mtp:
        text.update(dict.fromkeys(set(mtp.FIELDS) & set(text), 0))
    if (folder / QUANTIZATION).is_file():
        data["quantization_config"] = made["quantization_config"]
    write_json(folder / "config.json", data)
