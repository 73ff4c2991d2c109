"""The EAGLE3 draft of a model: its architecture, its first weights, its vocabulary.

modelopt's ``mtsp.convert`` adds the draft as ``model.eagle_module`` on the last pipeline stage: one decoder layer
that reads three hidden states of the base through ``fc``, beside the embedding of the next token.
"""

import copy
import math
import zlib
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlmsub.runtime.errors import StageError, first_line
from mlmsub.runtime.megatron_args import positive
from mlmsub.runtime.modelconf import ModelConf
from mlmsub.runtime.models import eagle_config
from mlmsub.runtime.models.eagle_config import FLAG, LAYERS
from mlmsub.runtime.progress import say


@dataclass(frozen=True)
class Draft:
    """A draft to be made: modelopt's architecture dict, and the file of weights to start from, if any.

    ``given``: what of the architecture the user has asked for.
    """

    architecture: dict[str, Any]
    given: dict[str, Any]
    offline: bool
    weights: Path | None

    def describe(self) -> str:
        own = self.architecture
        return (
            f"EAGLE3{' offline' if self.offline else ''}: {own['num_hidden_layers']} layer, "
            f"{own['num_attention_heads']} heads of {own['head_dim']} in {own['num_key_value_heads']} groups, "
            f"MLP {own['intermediate_size']}, vocabulary {own['draft_vocab_size']}, "
            f"hidden states of layers {own[LAYERS]}"
        )


def add_arguments(parser: Any) -> None:
    """The reference's flags of a draft, and ``--draft-vocab-size``."""
    parser.add_argument("--algorithm", choices=("eagle3", "None"), default="None", help="make a draft of this kind")
    parser.add_argument(
        FLAG, type=Path, help="a JSON file of the draft's architecture; what it leaves out fits the base"
    )
    parser.add_argument("--draft-vocab-size", type=positive, help="tokens that the draft can propose; default: all")
    parser.add_argument("--extra-model-path", type=Path, help="weights for the draft, .safetensors or torch.save's")
    parser.add_argument(
        "--export-offline-model",
        action="store_true",
        help="the base keeps its embedding, final norm and output layer only: train the draft on stored hidden states",
    )


def asked(args: Namespace, conf: ModelConf, *, from_hf: bool) -> Draft | None:
    """The draft that the arguments ask for, checked as far as it can be without a model; None without --algorithm.

    ``from_hf``: the source is a Hugging Face checkpoint; a Megatron one may hold an offline model already.
    Raises StageError; one process asks this, and tells the others (``distributed.on_main``).
    """
    if args.algorithm == "None":
        for flag in ("eagle_config", "draft_vocab_size", "extra_model_path", "export_offline_model"):
            if getattr(args, flag) and (from_hf or flag != "export_offline_model"):
                name = f"--{flag.replace('_', '-')}"
                raise StageError(name, "means something with a draft only.", "add --algorithm eagle3.")
        return None
    conf.require("eagle3")
    if args.hybrid_layer_pattern is not None:
        raise StageError("--algorithm eagle3", "modelopt makes drafts for Megatron's GPTModel, not for hybrid models.")
    if args.export_offline_model and args.pipeline_model_parallel_size > 1:
        raise StageError("PP", "an offline model has no layers to put on pipeline stages.", "set PP=1.")
    if args.extra_model_path is not None:
        _weights(args.extra_model_path)
    wanted = given(args)
    return Draft(architecture(args, wanted), wanted, args.export_offline_model, args.extra_model_path)


def check_layout(pp: int, cp: int) -> None:
    """Raise StageError where a draft's inputs would lie on several ranks."""
    for name, size in (("PP", pp), ("CP", cp)):
        if size > 1:
            problem = f"{size}: a draft reads hidden states of several layers, whole rows of them."
            raise StageError(name, problem, f"set {name}=1, and split by TP, EP and DP instead.")


def given(args: Namespace) -> dict[str, Any]:
    """What the user asks of the draft's architecture, by file and by flag; checked each for itself."""
    asked, unused = eagle_config.read(args.eagle_config) if args.eagle_config else ({}, [])
    if unused:
        say(f"{args.eagle_config}: {', '.join(unused)} are not read; an exported draft has the base's, or its own")
    tokens = args.draft_vocab_size
    if tokens is not None and asked.get("draft_vocab_size", tokens) != tokens:
        problem = f"{tokens}, and {args.eagle_config} says draft_vocab_size {asked['draft_vocab_size']}."
        raise StageError("--draft-vocab-size", problem, "say it once.")
    return asked if tokens is None else {**asked, "draft_vocab_size": tokens}


def architecture(args: Namespace, wanted: dict[str, Any]) -> dict[str, Any]:
    """modelopt's architecture dict of the draft: its defaults, what fits the base, then what is ``wanted`` of it.

    The draft has the base's hidden size, heads, norm epsilon and rotary base. Latent attention has no groups, and
    EAGLE3's attention is an ordinary one, so there the groups are modelopt's default of 8 where 8 divides the heads.
    The MLP is as wide as the one that a token passes in the base: a dense layer's, or where all layers have experts
    the chosen and the shared ones'. YaRN stretches a base beyond the length that it was trained at; a draft, trained
    at that length, has the plain rotary embedding.
    """
    from modelopt.torch.speculative.config import EAGLE3_DEFAULT_CFG

    made: dict[str, Any] = copy.deepcopy(EAGLE3_DEFAULT_CFG["config"]["eagle_architecture_config"])
    heads = args.num_attention_heads
    groups = math.gcd(heads, made["num_key_value_heads"]) if args.multi_latent_attention else args.num_query_groups
    made |= {
        "hidden_size": args.hidden_size,
        "vocab_size": args.padded_vocab_size,
        "draft_vocab_size": args.padded_vocab_size,
        "num_attention_heads": heads,
        "num_key_value_heads": groups or heads,
        "head_dim": args.v_head_dim if args.multi_latent_attention else args.kv_channels,
        "intermediate_size": _mlp_width(args),
        "rms_norm_eps": args.layernorm_epsilon,
        "torch_dtype": str(args.params_dtype).removeprefix("torch."),
        "rope_theta": args.rotary_base,
        "rope_scaling": _rope(args),
        LAYERS: eagle_config.default_layers(args.num_layers),
    }
    return eagle_config.merge(made, wanted, args)


def add(model: Any, args: Namespace, draft: Draft) -> int:
    """Make the draft in ``model`` (in place, all ranks); returns its number of parameters.

    Its weights depend on the seed alone: they are the same at any layout.
    """
    import modelopt.torch.speculative as mtsp
    from modelopt.torch.speculative.config import EAGLE3_DEFAULT_CFG

    from mlmsub.runtime import distributed

    if hasattr(model, "eagle_module"):
        raise StageError("--algorithm", "the source has a draft already.", "leave --algorithm out to keep it.")
    config = copy.deepcopy(EAGLE3_DEFAULT_CFG)
    config["config"]["eagle_architecture_config"] = copy.deepcopy(draft.architecture)
    config["config"]["eagle_offline"] = draft.offline
    config["config"]["eagle_export_rope_scaling"] = {}  # else the export claims YaRN, which it was not trained with
    mtsp.convert(model, config)
    module = getattr(model, "eagle_module", None)
    problem, count = "", 0
    if module is not None:
        module.to(device=next(model.parameters()).device)
        initialize(module, args.seed, draft.architecture["initializer_range"])
        problem = _load_weights(module, draft.weights) if draft.weights is not None else ""
        count = sum(_whole_shape(parameter).numel() for parameter in module.parameters())
    model.eval()
    told = distributed.gather((problem, count))
    for problem, _ in told:
        if problem:
            raise StageError("--extra-model-path", problem)
    return int(max(count for _, count in told))


def initialize(module: Any, seed: int, std: float) -> None:
    """Draw every matrix of a draft from N(0, std) and set its norms to one.

    modelopt leaves ``fc`` at zero with Transformer Engine, and draws the rest by rank. Here each whole matrix is
    drawn on the CPU from the seed and its name, and a rank takes its slice.
    """
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            random = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            whole = torch.empty(_whole_shape(parameter), dtype=torch.float32).normal_(0.0, std, generator=random)
            parameter.copy_(_slice(name, whole, parameter))


def set_vocabulary(model: Any, counts: Any) -> float:
    """Let a draft with a reduced vocabulary propose the most frequent tokens; returns the share that they cover.

    ``counts`` [the tokenizer's or the base's vocabulary]: how often each token is in the training data. Fills ``d2t``
    with what modelopt and the servers add to a draft's token id to get the base's. Until then it is zero: the first ids
    of the vocabulary.
    """
    import numpy as np
    import torch

    from mlmsub.runtime.data.packing import draft_vocabulary

    module = model.eagle_module
    if not hasattr(module, "d2t"):
        raise StageError("--draft-vocab-size", "the draft has the whole vocabulary.")
    d2t, _, coverage = draft_vocabulary(np.asarray(counts), len(module.d2t), module.config.vocab_size)
    module.d2t.copy_(torch.from_numpy(d2t))
    return coverage


def _mlp_width(args: Namespace) -> int:
    every = args.moe_layer_freq  # a period, or one number per layer: 1 for experts
    dense = args.num_experts is None or (any(not layer for layer in every) if isinstance(every, list) else every > 1)
    if dense:
        return int(args.ffn_hidden_size)
    shared = args.moe_shared_expert_intermediate_size or 0
    return int(args.moe_router_topk * (args.moe_ffn_hidden_size or args.ffn_hidden_size) + shared)


def _rope(args: Namespace) -> dict[str, Any]:
    """Megatron's --use-rope-scaling is Llama 3's; its draft gets the same (RotaryEmbedding's fixed constants)."""
    if not args.use_rope_scaling:
        return {"rope_type": "default", "rope_theta": args.rotary_base}
    return {
        "rope_type": "llama3", "rope_theta": args.rotary_base, "factor": args.rope_scaling_factor,
        **eagle_config.LLAMA3,
    }  # fmt: skip


def _weights(file: Path) -> dict[str, Any]:
    """The tensors of a draft's file of weights, mapped and not read. StageError: it is none."""
    import torch
    from safetensors.torch import load_file

    if not file.is_file():
        raise StageError("--extra-model-path", f"{file} is not a file.")
    try:
        found = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True, mmap=True)
    except Exception as error:  # pickle and safetensors raise many kinds
        reason = first_line(error)
        raise StageError("--extra-model-path", f"{file} cannot be read: {reason}.") from error
    if not isinstance(found, dict) or not torch.is_tensor(found.get("fc.weight")):
        raise StageError("--extra-model-path", f"{file} holds no draft: there is no fc.weight in it.")
    return found


def _load_weights(module: Any, file: Path) -> str:
    """Copy whole tensors from ``file`` into this rank's draft; returns why that failed, or an empty string."""
    import torch

    given = _weights(file)
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    strange = sorted(name for name in given if name not in own and not name.endswith("_extra_state"))
    lost = sorted(name for name, _ in module.named_parameters() if name not in given)
    wrong = sorted(name for name in given if name in own and given[name].shape != _whole_shape(own[name]))
    if strange or lost or wrong:
        return f"{file} is another draft's: it lacks {lost[:3]}, has {strange[:3]}, and other shapes of {wrong[:3]}."
    with torch.no_grad():
        for name, tensor in given.items():
            if name in own:
                own[name].copy_(_slice(name, tensor, own[name]))
    return ""


def _whole_shape(tensor: Any) -> Any:
    """The shape of a parameter before tensor parallelism splits it."""
    import torch
    from megatron.core import parallel_state

    shape = list(tensor.shape)
    if getattr(tensor, "tensor_model_parallel", False):
        shape[tensor.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()
    return torch.Size(shape)


def _slice(name: str, whole: Any, own: Any) -> Any:
    """This tensor-parallel rank's slice; of a gated MLP's first matrix, gate over up, it has a part of each."""
    import torch
    from megatron.core import parallel_state

    if not getattr(own, "tensor_model_parallel", False):
        return whole
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    parts = whole.chunk(2) if name.endswith("linear_fc1.weight") else (whole,)
    return torch.cat([part.chunk(ranks, own.partition_dim)[rank] for part in parts], own.partition_dim)
