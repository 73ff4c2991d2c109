"""The multi-token prediction (MTP) layers of a source checkpoint: extra layers that draft tokens when it is served.

Megatron builds none of them here, so an export can only take them over from the source, or say that it has none.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlmsub.runtime.checkpoints import hf
from mlmsub.runtime.checkpoints.hf_headers import PLAIN, layer_of, source_headers

# how many there are: DeepSeek-V3 and its kind, Qwen3.5
FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class Plan:
    """``copied``: the tensors that an export takes over, by their files; ``text`` says it, empty if there is no MTP."""

    copied: dict[Path, list[str]] = field(default_factory=dict)
    text: str = ""


def plan(source: Path, layers: int) -> Plan:
    """What an export of ``layers`` decoder layers does with the MTP layers of ``source``: copy all, or leave all out.

    DeepSeek-V3 stores them as decoder layers behind the last one, ``model.layers.<num_hidden_layers>.*``;
    others as ``mtp.*``. Block-quantized ones would have to be dequantized to stand in a checkpoint of another
    format, so they are left out.
    """
    config = hf.config(source)
    promised = sum(config.get(name) or 0 for name in FIELDS)
    # the headers of a big checkpoint are many megabytes: only if there may be something
    if not promised:
        return Plan()
    stored = source_headers(source)
    names = [name for name in stored if is_mtp(name, config)]
    if not names:
        return Plan(text=f"MTP: the source promises {promised} layers and has no tensors of them; set to 0")
    if layers != config["num_hidden_layers"]:
        return Plan(
            {}, f"MTP: left out and set to 0, since the model has {layers} layers and the source another number"
        )
    kinds = sorted({stored[name].kind for name in names} - set(PLAIN))
    if kinds:
        return Plan(text=f"MTP: left out and set to 0, since the source's {len(names)} tensors hold {', '.join(kinds)}")
    copied: dict[Path, list[str]] = {}
    for name in names:
        copied.setdefault(source / stored[name].file, []).append(name)
    return Plan(copied, f"MTP: {len(names)} tensors copied from the source, unquantized")


def is_mtp(name: str, config: dict[str, Any]) -> bool:
    """Does this tensor belong to an MTP layer of a model with this config.json?"""
    layer = layer_of(name)
    return name.startswith("mtp.") or (layer is not None and layer >= config["num_hidden_layers"])
