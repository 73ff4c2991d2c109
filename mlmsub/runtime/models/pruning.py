"""Pruning a GPTModel: what was asked for, which layers go, and the model without them.

Depth is pruned here, by block influence (https://arxiv.org/abs/2403.03853), on whatever layers the model has. Width is
pruned by modelopt's Minitron, which knows Transformer Engine's layers only and imports it. Torch is imported inside
functions, so that targets can be read and checked before it.
"""

import copy
import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.errors import CheckFailed, StageError
from mlmsub.runtime.outputs import write_json
from mlmsub.runtime.quantization import calibration

# what modelopt 0.47 can cut in a GPTModel (its SUPPORTED_HPARAMS), by the name of Megatron's argument
WIDTHS = {
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_experts": "num_moe_experts",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}
# layers that follow a pattern: without some of them the pattern would fall on other layers
PATTERNS = ("window_attn_skip_freq", "no_rope_freq", "linear_attention_freq", "heterogeneous_layers_config_path")

SCORES, AGAIN = "--pruning-scores-path", "give another path to have them made."


@dataclass(frozen=True)
class Targets:
    """What is left after pruning. ``widths``: Megatron's argument -> size; ``dropped``: numbers of layers, from 1."""

    widths: Mapping[str, int] = field(default_factory=dict)
    num_layers: int | None = None
    dropped: tuple[int, ...] = ()

    def require(self) -> None:
        """Raise StageError unless something is to be pruned, in one way; nothing of the model is known yet."""
        if not self.widths and self.num_layers is None and not self.dropped:
            raise StageError(
                "prune",
                "nothing says what to prune.",
                "set TARGET_NUM_LAYERS, TARGET_FFN_HIDDEN_SIZE, ... or LAYERS_TO_DROP, or give the flag of that name.",
            )
        if self.dropped and (self.widths or self.num_layers is not None):
            raise StageError(
                "--layers-to-drop", "goes with no other target.", "prune twice, or give --target-num-layers."
            )

    def check(self, args: Namespace) -> None:
        """Raise StageError if the model of these arguments cannot be pruned so."""
        if args.hybrid_layer_pattern is not None:
            raise StageError("model conf", "prune takes models of attention and MLPs, not hybrid ones.")
        for name, size in self.widths.items():
            has = getattr(args, name)
            if has is None:
                raise StageError(_flag(name), f"the model has no {name.replace('_', '-')}.", "leave it out.")
            if size > has:
                raise StageError(_flag(name), f"{size} is more than the model has: {has}.", f"give at most {has}.")
        had = {name: getattr(args, name) for name in self.widths}
        if not self.dropped and had == self.widths and self.num_layers in (None, args.num_layers):
            raise StageError("prune", "the model has these sizes: nothing would be pruned.", "give smaller ones.")
        _check_widths(self.widths, args)
        if self.num_layers is not None or self.dropped:
            self._check_layers(args)

    def left(self, args: Namespace) -> int:
        """The number of layers after pruning."""
        if self.num_layers is not None:
            return self.num_layers
        return int(args.num_layers) - len(self.dropped)

    def _check_layers(self, args: Namespace) -> None:
        name = "--layers-to-drop" if self.dropped else "--target-num-layers"
        strange = [layer for layer in self.dropped if layer > args.num_layers]
        if strange:
            raise StageError(name, f"there is no layer {strange[0]}: the model has {args.num_layers}, counted from 1.")
        left, pp = self.left(args), args.pipeline_model_parallel_size
        if not 1 <= left <= args.num_layers:
            raise StageError(name, f"{left} layers would be left of {args.num_layers}.", "give a number between.")
        if left % pp:
            raise StageError(name, f"PP={pp} does not divide the {left} layers that are left.", "change PP or it.")
        for pattern in PATTERNS:
            if getattr(args, pattern, None):
                raise StageError(
                    name,
                    f"layers of this model differ (--{pattern.replace('_', '-')}), and would change their kind.",
                    "prune its width.",
                )
        self._check_experts(name, args)

    def _check_experts(self, name: str, args: Namespace) -> None:
        """Dense layers before the experts stay: an export holds, layer by layer, the kinds of the source's layers."""
        freq, dense = args.moe_layer_freq, dense_layers(args)
        lost = [layer for layer in self.dropped if layer in dense]
        if lost or (dense and self.left(args) <= len(dense)):
            problem = f"layer {lost[0]} is dense." if lost else f"the model has {len(dense)} dense layers alone."
            raise StageError(name, problem, f"keep layers {', '.join(map(str, dense))} and some with experts.")
        if dense and self.widths:
            raise StageError(name, "modelopt could take a dense layer.", "prune depth and width one after the other.")
        if args.num_experts and (freq > 1 if isinstance(freq, int) else list(freq) != sorted(freq)):
            raise StageError(name, f"dense and expert layers alternate (--moe-layer-freq {freq}).", "prune its width.")


def dense_layers(args: Namespace) -> tuple[int, ...]:
    """The layers of a model with experts that have none, counted from 1."""
    freq = args.moe_layer_freq
    return tuple(layer for layer, kind in enumerate(freq, 1) if not kind) if isinstance(freq, list) else ()


def _check_widths(widths: Mapping[str, int], args: Namespace) -> None:
    heads = widths.get("num_attention_heads")
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if heads is not None and args.multi_latent_attention:
        raise StageError(_flag("num_attention_heads"), "modelopt cannot cut latent attention.", "leave it out.")
    if heads is not None and heads % groups:
        raise StageError(
            _flag("num_attention_heads"),
            f"{heads} heads cannot be shared by {groups} query groups, which all stay.",
            f"give a multiple of {groups}.",
        )
    if "ffn_hidden_size" in widths and args.num_experts:
        raise StageError(_flag("ffn_hidden_size"), "the MLPs are experts.", "give --target-moe-ffn-hidden-size.")
    experts = widths.get("num_experts")
    if experts is not None and experts < args.moe_router_topk:
        raise StageError(_flag("num_experts"), f"a token goes to {args.moe_router_topk} experts; {experts} are fewer.")
    if widths and args.context_parallel_size * args.expert_model_parallel_size > 1:
        raise StageError("CP, EP", "modelopt prunes width with CP=1 and EP=1 only.", "use PP to spread the model.")


def _flag(name: str) -> str:
    return f"--target-{WIDTHS[name].replace('_', '-')}"


def pruned_arguments(args: Namespace, targets: Targets, dropped: tuple[int, ...]) -> Namespace:
    """The arguments of the model after pruning. Fields that Megatron derived from the old sizes are fixed at these."""
    made = copy.copy(args)
    for name, size in targets.widths.items():
        setattr(made, name, size)
    made.num_layers = args.num_layers - len(dropped)
    if isinstance(args.moe_layer_freq, list):
        made.moe_layer_freq = [kind for layer, kind in enumerate(args.moe_layer_freq, 1) if layer not in dropped]
    made.pruned = changes(made)
    return made


def changes(args: Namespace) -> dict[str, Any]:
    """The Megatron arguments that pruning may change, by name without dashes, as they stand in a model conf.

    The widths of heads are among them: unset, they would follow from the pruned hidden size.
    """
    found = {name.replace("_", "-"): getattr(args, name) for name in ("num_layers", *WIDTHS)}
    if not args.multi_latent_attention:
        found["kv-channels"] = args.kv_channels
    if isinstance(args.moe_layer_freq, list):
        found["moe-layer-freq"] = json.dumps(args.moe_layer_freq, separators=(",", ":"))
    return {name: value for name, value in found.items() if value is not None}


def block_influence(model: Any, samples: Any, size: int, device: str) -> dict[int, float]:
    """How much each layer changes what passes through it: 1 - cosine(input, output), the mean over all tokens.

    The measure of modelopt's Minitron. By layer, counted from 1, the same on every rank (all ranks call it);
    ``samples``: token ids [samples, length] of this data-parallel rank.
    """
    sums: dict[int, list[float]] = {}
    with _watching(model, sums):
        calibration.forward_loop(samples, size, device)(model)
    told: dict[int, list[float]] = {}
    for part in distributed.gather(sums):
        for layer, (total, tokens) in part.items():
            before = told.get(layer, [0.0, 0.0])
            told[layer] = [before[0] + total, before[1] + tokens]
    return {layer: total / tokens for layer, (total, tokens) in sorted(told.items())}


@contextmanager
def _watching(model: Any, sums: dict[int, list[float]]) -> Iterator[None]:
    """Add each layer's sum of influences, and its tokens, to ``sums`` while the model runs."""
    import torch

    def watch(layer: Any, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        before = (named["hidden_states"] if "hidden_states" in named else given[0]).float()
        alike = torch.nn.functional.cosine_similarity(before, out[0].float(), dim=-1)  # [sequence, batch]
        total = sums.setdefault(layer.layer_number, [0.0, 0.0])
        total[0] += float((1 - alike).double().sum())
        total[1] += alike.numel()

    hooks = [layer.register_forward_hook(watch, with_kwargs=True) for layer in model.decoder.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def least_influential(scores: Mapping[int, float], left: int, stay: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The layers to drop so that ``left`` remain, ``stay`` among them; of equal ones the later goes."""
    order = sorted(set(scores) - set(stay), key=lambda layer: (scores[layer], -layer))
    return tuple(sorted(order[: len(scores) - left]))


def drop_layers(model: Any, dropped: tuple[int, ...]) -> None:
    """Take layers, counted from 1, out of this rank's part of the model, and number the others anew.

    Pipeline stages may be left with different numbers of layers: the model still runs and is saved by layer.
    """
    import torch

    kept = [layer for layer in model.decoder.layers if layer.layer_number not in dropped]
    for layer in kept:
        number = layer.layer_number - sum(other < layer.layer_number for other in dropped)
        layer.layer_number = layer.self_attention.layer_number = number
        if hasattr(layer.mlp, "set_layer_number"):
            layer.mlp.set_layer_number(number)
    model.decoder.layers = torch.nn.ModuleList(kept)
    model.decoder.num_layers_per_pipeline_rank = len(kept)
    config = model.config
    config.num_layers -= len(dropped)
    if isinstance(config.moe_layer_freq, list):
        config.moe_layer_freq = [kind for layer, kind in enumerate(config.moe_layer_freq, 1) if layer not in dropped]


def read_scores(file: Path, model: str, layers: int) -> dict[int, float] | None:
    """The scores that an earlier run has written, or None if there are none. StageError: they are of another model."""
    if not file.exists():
        return None
    try:
        data = json.loads(file.read_text())
        scores = {int(layer): float(score) for layer, score in data["block_influence"].items()}
        of = data["model"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StageError(SCORES, f"{file} holds no scores of layers.", AGAIN) from error
    if of != model or sorted(scores) != list(range(1, layers + 1)):
        raise StageError(
            SCORES,
            f"{file} holds scores of {len(scores)} layers of {of}, not of {layers} of {model}.",
            AGAIN,
        )
    return scores


def write_scores(file: Path, model: str, scores: Mapping[int, float]) -> None:
    """Keep the scores of ``model``'s layers for ``read_scores``. StageError: the file cannot be written."""
    data = {"model": model, "block_influence": {str(layer): score for layer, score in scores.items()}}
    try:
        write_json(file, data)
    except OSError as error:
        raise StageError(SCORES, f"{file} cannot be written: {error.strerror}.") from error


def transformer_engine_layers(model_config: Any) -> Any:
    """The layers that modelopt prunes: Transformer Engine's, whose norms are part of the linears behind them.

    In a checkpoint their keys are those of the other stages' layers.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(model_config.transformer, use_transformer_engine=True)


def copy_weights(whole: Any, model: Any) -> None:
    """Give ``model`` the weights of ``whole``, the same model of other layers: by their keys in a checkpoint.

    modelopt's importer fills no experts of Transformer Engine's (``Missing key(s) in state_dict: "_extra_state"``).
    """
    import torch

    given, wanted = _by_key(whole), _by_key(model)
    if given.keys() != wanted.keys():
        raise CheckFailed("prune", f"the layers differ in {sorted(given.keys() ^ wanted.keys())[:3]}.")
    with torch.no_grad():
        for key, tensor in wanted.items():
            tensor.copy_(given[key])


def _by_key(model: Any) -> dict[tuple[str, tuple[int, ...]], Any]:
    """This rank's weights, by their key in a checkpoint and their place in the tensor that is stored under it."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from mlmsub.runtime.checkpoints import checkpoint

    state = model.sharded_state_dict(prefix="", metadata=checkpoint.metadata(group=True))
    apply_factories(state)
    return {
        (leaf.key, leaf.global_offset): leaf.data for leaf in nested_values(state) if isinstance(leaf, ShardedTensor)
    }


def prune_width(model: Any, targets: Targets, forward_loop: Any, scores: Path | None) -> tuple[int, ...]:
    """Prune by modelopt's Minitron, in place; returns the layers that went too, counted from 1.

    ``scores``: a file or folder of modelopt's for the importances, one per rank; those found there are used. Any
    size is taken (modelopt's steps of 256 and 512 are for its search). CheckFailed: modelopt refuses.
    """
    import modelopt.torch.prune as mtp
    from modelopt.torch.opt.conversion import ModeloptStateManager
    from modelopt.torch.prune.plugins.mcore_minitron import get_mcore_minitron_config

    sizes = {WIDTHS[name]: size for name, size in targets.widths.items()}
    if targets.num_layers is not None:
        sizes["num_layers"] = targets.num_layers
    steps = get_mcore_minitron_config(
        hidden_size_divisor=1, ffn_hidden_size_divisor=1, num_moe_experts_divisor=1, num_layers_divisor=1
    )
    search: dict[str, Any] = {"forward_loop": forward_loop}
    if scores is not None:
        search["scores_path"] = str(scores)
    try:
        _, found = mtp.prune(
            model, mode=[("mcore_minitron", steps)], constraints={"export_config": sizes}, dummy_input=None,
            config=search,
        )  # fmt: skip
    except (AssertionError, KeyError, ValueError) as error:
        raise CheckFailed("prune", f"modelopt cannot prune this: {' '.join(str(error).split())[:400]}") from error
    # the pruned model is an ordinary one; a state of modelopt's would have every later stage restore it
    ModeloptStateManager.remove_state(model)
    order = found["sorted_layers"] or []
    return tuple(sorted(order[targets.num_layers :])) if targets.num_layers is not None else ()
