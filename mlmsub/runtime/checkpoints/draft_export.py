"""Write the EAGLE3 draft of a checkpoint as vLLM and SGLang load it: config.json and model.safetensors.

Only the draft's tensors are read, whole, whatever layout they were saved at: no base, no GPU, one process. modelopt
0.47's own export builds the whole model, asks the Hub for an unrelated model's config.json and takes the draft's rotary
values from it, and leaves ``d2t`` out.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import checkpoint
from mlmsub.runtime.checkpoints.checkpoint import FIELD
from mlmsub.runtime.errors import CheckFailed, StageError, writing
from mlmsub.runtime.models import eagle_config
from mlmsub.runtime.models.eagle_config import LAYERS, SERVED_LAYERS
from mlmsub.runtime.outputs import Output, write_json
from mlmsub.runtime.progress import say, warn

if TYPE_CHECKING:
    from mlmsub.runtime.stage import BaseStage

FLAG = "--export-extra-modules"  # the reference's
MARKER = "config.json"  # written last
PREFIX = "eagle_module."
LAYER = "decoder.layers."
# Megatron's names -> those of the servers' one decoder layer; what is cut in parts is in _parts
NAMES = {
    "fc.weight": "fc.weight",
    "enorm.weight": "midlayer.input_layernorm.weight",
    LAYER + "self_attention.linear_qkv.layer_norm_weight": "midlayer.hidden_norm.weight",
    LAYER + "self_attention.linear_proj.weight": "midlayer.self_attn.o_proj.weight",
    LAYER + "mlp.linear_fc1.layer_norm_weight": "midlayer.post_attention_layernorm.weight",
    LAYER + "mlp.linear_fc2.weight": "midlayer.mlp.down_proj.weight",
    "decoder.final_layernorm.weight": "norm.weight",
    "eagle_output_layer.weight": "lm_head.weight",
    "d2t": "d2t",
}
QKV = LAYER + "self_attention.linear_qkv.weight"
GATED = LAYER + "mlp.linear_fc1.weight"


def run(stage: "BaseStage", output: Output, source: Path) -> None:
    """The work of ``export --export-extra-modules``: one process reads and writes, whatever PP is; all call this."""
    if stage.job.live or stage.ckpt is None:
        raise StageError(FLAG, "reads the draft from a checkpoint.", "run export apart from the stage before it.")
    here = checkpoint.folder(stage.ckpt)
    output.marker = MARKER
    stage.begin(output)
    with stage.job.steps("export", f"the draft of {here} to {output.target}"):
        distributed.on_main(lambda: export(here, source, output.part))
    stage.publish(output)


def export(here: Path, source: Path, folder: Path) -> None:
    """Write the draft of the checkpoint folder ``here`` into the existing ``folder``; one process only.

    ``source``: the base's Hugging Face folder, of which config.json alone is read. Raises StageError where ``here`` has
    no draft or one that the servers have no format for, CheckFailed where what was written is not what was read.
    """
    import torch
    from safetensors.torch import load_file, save_file

    own = architecture(here)
    made = {name: tensor.contiguous() for name, tensor in _converted(_read(here), own).items()}
    with writing("EXPORT_DIR", folder):
        save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    written = load_file(folder / "model.safetensors")
    wrong = [name for name, tensor in made.items() if not torch.equal(written[name], tensor)]
    infinite = [name for name, tensor in written.items() if not torch.isfinite(tensor.float()).all()]
    if wrong or infinite:
        raise CheckFailed("EXPORT_DIR", f"{folder}: not as they were read {wrong}, not finite {infinite}.")
    config = _config(own, json.loads((source / "config.json").read_text()), "lm_head.weight" in made)
    with writing("EXPORT_DIR", folder):
        write_json(folder / MARKER, config)
    tokens, total = own["draft_vocab_size"], own["vocab_size"]
    layers = own[LAYERS]
    say(
        f"draft: {sum(tensor.numel() for tensor in made.values()):,} values in {len(made)} tensors, hidden states after"
        f" the base's layers {layers}, vocabulary {tokens} of {total}"
    )
    if len(layers) != SERVED_LAYERS:
        warn(f"the draft reads the hidden states of {len(layers)} layers; vLLM and SGLang give it {SERVED_LAYERS}.")


def architecture(here: Path) -> dict[str, Any]:
    """modelopt's architecture dict of the draft in ``here``; StageError if there is none, or no server could run it."""
    config = checkpoint.draft(here)
    if config is None:
        raise StageError(FIELD, f"{here} has no draft.", f"train one with eagle3, or leave {FLAG} out.")
    return eagle_config.served(config["eagle_architecture_config"], here)


def _read(here: Path) -> dict[str, Any]:
    """The draft's tensors, whole; those of its one layer without the dimension of layers."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    plan = FileSystemReader(here).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in plan.items()
        if key.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=FileSystemReader(here), no_dist=True)  # each process for itself
    tensors = {key.removeprefix(PREFIX): tensor for key, tensor in state.items()}
    if GATED not in tensors:  # beside a quantized base Megatron keeps gate and up projection apart
        tensors[GATED] = torch.cat([tensors.pop(f"{GATED}_{half}") for half in "wv"], dim=-2)
    return {name: tensor[0] if name.startswith(LAYER) else tensor for name, tensor in tensors.items()}


def _converted(tensors: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    import torch

    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name in NAMES:
            made[NAMES[name]] = tensor
        elif name in (QKV, GATED):
            made |= _parts(name, tensor, own)
        else:
            raise StageError(FIELD, f"{PREFIX}{name} has no place in a served draft.")
    lost = {NAMES[name] for name in NAMES} - {"lm_head.weight", "d2t"} - set(made)
    if lost:
        raise StageError(FIELD, f"the draft lacks {sorted(lost)}.")
    if "d2t" in made:
        known = torch.zeros(own["vocab_size"], dtype=torch.bool)
        known[made["d2t"] + torch.arange(len(made["d2t"]))] = True
        if int(known.sum()) != len(made["d2t"]):
            raise CheckFailed("d2t", "two tokens of the draft are the same token of the base.")
        made["t2d"] = known
    return made


def _parts(name: str, tensor: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Megatron keeps queries, keys and values together, group by group, and the gate above the up projection."""
    if name == GATED:
        gate, up = tensor.chunk(2)
        return {"midlayer.mlp.gate_proj.weight": gate, "midlayer.mlp.up_proj.weight": up}
    groups, width = own["num_key_value_heads"], own["head_dim"]
    share = own["num_attention_heads"] // groups
    by_group = tensor.view(groups, share + 2, width, -1)
    cut = {"q": by_group[:, :share], "k": by_group[:, share], "v": by_group[:, share + 1]}
    return {f"midlayer.self_attn.{key}_proj.weight": part.reshape(-1, tensor.shape[1]) for key, part in cut.items()}


def _config(own: dict[str, Any], base: dict[str, Any], has_head: bool) -> dict[str, Any]:
    """The draft's config.json.

    ``draft_vocab_size`` is null for a draft without an output layer: SGLang then takes the base's (a number makes it
    leave a new one unset), and vLLM does for every draft without one. The layers are named twice, since the servers
    count them differently: SGLang takes modelopt's in ``eagle_config``, after which a state is read; vLLM takes the top
    level's, before which it is.
    """
    base = base.get("text_config", base)
    layers = sorted(own[LAYERS])
    scaled = "factor" in own["rope_scaling"]  # as modelopt decides it where it makes the rotary embedding
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: own[name] for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "initializer_range", "attention_bias",
            "mlp_bias", "attention_dropout", "rope_theta", "torch_dtype",
        )},
        "rope_scaling": own["rope_scaling"] if scaled else None,
        "max_position_embeddings": base["max_position_embeddings"],
        "draft_vocab_size": own["draft_vocab_size"] if has_head else None,
        "tie_word_embeddings": False,
        "bos_token_id": base.get("bos_token_id"),
        "eos_token_id": base.get("eos_token_id"),
        "pad_token_id": None,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layers,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
    }  # fmt: skip
