"""The fields of an EAGLE3 draft's architecture: which can be chosen, which are fixed, and what a file says of them.

A draft is trained as modelopt 0.47 builds it (megatron_eagle.dict_to_config), and served as vLLM and SGLang build it.
What one of them takes for granted is refused here if it is said otherwise: else a config.json would tell of another
draft than the one that was trained.
"""

import difflib
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mlmsub.runtime.errors import StageError

FLAG = "--eagle-config"
LAYERS, SERVED_LAYERS = "eagle_aux_hidden_state_layer_ids", 3
# what modelopt trains and the servers run, whatever a configuration says
FIXED: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "has_lm_head": False, "hidden_act": "silu", "mlp_bias": False,
    "num_hidden_layers": 1, "parallel_draft_heads_num_layers": 1, "parallel_draft_step": 1,
    "position_embedding_type": "rope", "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True, "use_mtp_layernorm": False,
}  # fmt: skip
# the same in a Hugging Face config.json, which modelopt does not know
FIXED_IN_FILE = {"model_type": "llama", "pretraining_tp": 1, "tie_word_embeddings": False}
# what an exported draft has from the base, and what says nothing about a draft
UNUSED = (
    "architectures", "auto_map", "bos_token_id", "eos_token_id", "max_position_embeddings", "pad_token_id",
    "transformers_version", "use_cache",
)  # fmt: skip
OTHER_NAMES = {"dtype": "torch_dtype", "rope_parameters": "rope_scaling"}  # those of transformers 5
# Megatron's RotaryEmbedding has these numbers of Llama 3's scaling, and takes its factor
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Kind(NamedTuple):
    """What a field may be."""

    holds: Callable[[Any], bool]
    text: str


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30  # no NaN


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


SIZE = Kind(lambda value: _whole(value) and 0 < value <= 10**6, "a whole number from 1 to a million")
FRACTION = Kind(lambda value: _number(value) and 0 < value <= 1, "a number above 0, up to 1")
POSITIVE = Kind(lambda value: _number(value) and value > 0, "a number above 0")
FREE = {
    "draft_vocab_size": SIZE, "head_dim": SIZE, "initializer_range": FRACTION, "intermediate_size": SIZE,
    "num_attention_heads": SIZE, "num_key_value_heads": SIZE, "rms_norm_eps": FRACTION, "rope_theta": POSITIVE,
}  # fmt: skip
OF_THE_BASE = ("hidden_size", "torch_dtype", "vocab_size")
KNOWN = (*FIXED, *FREE, *OF_THE_BASE, "rope_scaling", LAYERS)


def read(file: Path) -> tuple[dict[str, Any], list[str]]:
    """What a JSON file says of a draft, by modelopt's names; and the names in it that nothing is taken from.

    A config.json that was exported names the layers twice: at the top as vLLM counts them, and in ``eagle_config`` as
    modelopt does, which holds.
    """
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise StageError(FLAG, f"{file} cannot be read: {error}.") from error
    if not isinstance(data, dict):
        raise StageError(FLAG, f"{file} is not a JSON object.")
    inner = data.pop("eagle_config", {})
    if not isinstance(inner, dict):
        raise StageError(FLAG, f"{file}: eagle_config is not a JSON object.", "leave it out.")
    found: dict[str, Any] = {}
    for key, value in {**data, **inner}.items():
        name = OTHER_NAMES.get(key, key)
        if name not in KNOWN and name not in FIXED_IN_FILE and name not in UNUSED:
            near = difflib.get_close_matches(name, KNOWN, 1)
            raise StageError(FLAG, f"{file}: unknown key {key!r}.", f"did you mean {near[0]}?" if near else "")
        if name in found and found[name] != value:
            raise StageError(FLAG, f"{file}: {key} is {value}, and {found[name]} under another name.", "say it once.")
        found[name] = value
    _refuse_other(FIXED_IN_FILE, found)
    given = {name: value for name, value in found.items() if name in KNOWN}
    if given.get("rope_scaling", 0) in (None, {}):
        given["rope_scaling"] = {"rope_type": "default"}
    return given, sorted(set(found) & set(UNUSED))


def merge(fits: dict[str, Any], given: dict[str, Any], args: Namespace) -> dict[str, Any]:
    """The architecture of a draft that has what is ``given``, and else what ``fits`` the base; checked.

    Raises StageError for a value that is not trained or not served as it is said.
    """
    fixed = {**FIXED, **{name: fits[name] for name in OF_THE_BASE}}
    _refuse_other(fixed, given)
    made = {**fits, **given, **fixed}
    if made["draft_vocab_size"] is None:
        made["draft_vocab_size"] = fits["vocab_size"]
    made |= _rope(fits, given)
    for name, kind in FREE.items():
        if not kind.holds(made[name]):
            raise StageError(FLAG, f"{name} is {made[name]!r}, and not {kind.text}.", f"correct {name}.")
    made[LAYERS] = layers(made[LAYERS], args.num_layers)
    _check_sizes(made, args)
    return made


def served(own: dict[str, Any], place: Path) -> dict[str, Any]:
    """``own``, the architecture of the draft in ``place``, with its rope as it was trained.

    Raises StageError if it is none that vLLM and SGLang can be told of.
    """
    try:
        _refuse_other(FIXED, own)
        scaling = {name: value for name, value in (own["rope_scaling"] or {}).items() if name != "rope_theta"}
        return {**own, **_rope(own, {"rope_theta": own["rope_theta"], "rope_scaling": scaling})}
    except StageError as error:
        raise StageError("MLM_MODEL_CKPT", f"the draft in {place}: {error.problem}", "train another.") from error


def require_same(given: dict[str, Any], own: dict[str, Any], place: Path) -> None:
    """Raise StageError if ``given``, what is asked of a draft, is not so in the one of the checkpoint ``place``."""
    for name, value in given.items():
        if name in own and own[name] != value:
            field = "--draft-vocab-size" if name == "draft_vocab_size" else FLAG
            problem = f"{name} of the draft in {place} is {own[name]}, not {value}."
            raise StageError(field, problem, "give that, leave it out, or give another folder.")


def layers(ids: Any, count: int) -> list[int]:
    """The layers of a base with ``count`` of them whose states a draft reads, in the order of their states."""
    if count < SERVED_LAYERS:
        problem = f"the base has {count} layers, and a draft reads {SERVED_LAYERS} different ones."
        raise StageError("--num-layers", problem, "train a draft for a deeper model.")
    good = isinstance(ids, list) and all(map(_whole, ids)) and len(ids) == len(set(ids)) == SERVED_LAYERS
    if not good or not all(0 <= layer < count for layer in ids):
        raise StageError(
            FLAG, f"{LAYERS} is {ids!r}, and a draft reads {SERVED_LAYERS} different layers of the base.",
            f"give {SERVED_LAYERS} of 0 to {count - 1}, or leave it out.",
        )  # fmt: skip
    return sorted(ids)


def default_layers(count: int) -> list[int]:
    """An early, a middle and a late layer, as EAGLE3 and modelopt choose them; of a small base those before the last.

    The last layer's own states are what the draft is to predict from; only a base of three layers has no others.
    """
    first = max(0, count - 1 - SERVED_LAYERS)
    return [1, count // 2 - 1, count - 4] if count > 6 else list(range(first, first + SERVED_LAYERS))


def _refuse_other(fixed: dict[str, Any], given: dict[str, Any]) -> None:
    for name, value in fixed.items():
        if name in given and given[name] != value:
            problem = f"{name} is {given[name]!r}, and a draft is trained and served with {value!r} alone."
            raise StageError(FLAG, problem, f"leave {name} out.")


def _rope(fits: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling as modelopt trains them: plain, or Llama 3's with any factor."""
    scaling = given.get("rope_scaling", fits["rope_scaling"])
    if not isinstance(scaling, dict):
        raise StageError(FLAG, f"rope_scaling is {scaling!r}, and no JSON object.", "leave it out, or give null.")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "llama3"):
        problem = f"rope_scaling is of the kind {kind!r}, and a draft is trained with default or llama3."
        raise StageError(FLAG, problem, "give one of them, or null.")
    own = scaling if "rope_scaling" in given else {}
    theta = given.get("rope_theta", own.get("rope_theta", fits["rope_theta"]))
    made = {"rope_type": kind, "rope_theta": theta}
    if kind == "llama3":
        made |= {"factor": scaling.get("factor"), **LLAMA3}
    for name, value in own.items():
        if name != "type" and (name not in made or made[name] != value):
            problem = f"rope_scaling.{name} is {value!r}, and a draft of this kind has {made.get(name, 'no such')!r}."
            raise StageError(FLAG, problem, f"leave {name} out.")
    for name in ("rope_theta", "factor"):
        if name in made and not POSITIVE.holds(made[name]):
            raise StageError(FLAG, f"{name} is {made[name]!r}, and not {POSITIVE.text}.", f"correct {name}.")
    return {"rope_theta": theta, "rope_scaling": made}


def _check_sizes(made: dict[str, Any], args: Namespace) -> None:
    """Raise StageError where sizes do not go together, or not with the base and the layout."""
    heads, groups = made["num_attention_heads"], made["num_key_value_heads"]
    if heads % groups:
        problem = f"num_key_value_heads {groups} does not divide num_attention_heads {heads}."
        raise StageError(FLAG, problem, "change one of them.")
    if made["head_dim"] % 2:
        problem = f"head_dim is {made['head_dim']}, and rotary embedding turns pairs."
        raise StageError(FLAG, problem, "give an even number.")
    if made["draft_vocab_size"] > args.padded_vocab_size:
        problem = f"{made['draft_vocab_size']} is not within the base's {args.padded_vocab_size}."
        raise StageError("draft_vocab_size", problem, "give less, or leave it out.")
    split = args.tensor_model_parallel_size
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "draft_vocab_size"):
        if made[name] % split:
            raise StageError("TP", f"{split} does not divide the draft's {name} {made[name]}.", f"change TP or {FLAG}.")
