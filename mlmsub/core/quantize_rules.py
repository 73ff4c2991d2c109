"""Rules on quantizing: the format that is asked for, by the names that ModelOpt has. The quantize stage asks ModelOpt.

Each function yields (field, message, fix) for what it finds; core/rules.py says when it is asked.
"""

from __future__ import annotations

from mlmsub.core.facts import Facts, Found
from mlmsub.core.strict import nearest

# modelopt 0.47's mtq.config.choices but those of the KV cache; tests/stages/test_format_names.py holds it against it
_FORMATS = """
FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG FP8_DEFAULT_CFG FP8_PER_CHANNEL_PER_TOKEN_CFG INT4_AWQ_CFG
INT4_BLOCKWISE_WEIGHT_ONLY_CFG INT8_DEFAULT_CFG INT8_SMOOTHQUANT_CFG INT8_WEIGHT_ONLY_CFG MAMBA_MOE_FP8_AGGRESSIVE_CFG
MAMBA_MOE_FP8_CONSERVATIVE_CFG MAMBA_MOE_NVFP4_AGGRESSIVE_CFG MAMBA_MOE_NVFP4_CONSERVATIVE_CFG MXFP4_DEFAULT_CFG
MXFP4_MLP_WEIGHT_ONLY_CFG MXFP6_DEFAULT_CFG MXFP8_DEFAULT_CFG MXINT8_DEFAULT_CFG NVFP4_AWQ_CLIP_CFG NVFP4_AWQ_FULL_CFG
NVFP4_AWQ_LITE_CFG NVFP4_DEFAULT_CFG NVFP4_EXPERTS_ONLY_CFG NVFP4_FOUR_OVER_SIX_CFG NVFP4_FP8_MHA_CONFIG
NVFP4_MLP_ONLY_CFG NVFP4_MLP_WEIGHT_ONLY_CFG NVFP4_OMLP_ONLY_CFG NVFP4_SVDQUANT_DEFAULT_CFG
NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG W4A16_NVFP4_CFG W4A8_AWQ_BETA_CFG
W4A8_MXFP4_FP8_CFG W4A8_NVFP4_FP8_CFG
"""
FORMATS = frozenset(_FORMATS.split())
# the short names of Megatron-LM's quantize.py, and its words for a search
ALIASES = frozenset(("fp8", "nvfp4", "int8", "int8_sq", "int4", "int4_awq", "w4a8"))
AUTO = ("auto", "AUTO", "auto_quantize")
METHODS = ("gradient", "kl_div")
KV_FORMATS = ("none", "fp8", "fp8_affine", "nvfp4", "nvfp4_affine", "nvfp4_rotate")
_BITS, _SPACE, _METHOD = "auto-quantize-bits", "auto-quantize-formats", "auto-quantize-method"


def formats(facts: Facts) -> Found:
    """Whether ModelOpt has the format; a recipe is a path, or a name with a slash, and is looked at in the job."""
    field, word = _word(facts)
    if _searches(facts):
        yield from _search(facts)
    elif word and not facts.has("recipe") and not _is_recipe(word):
        yield from _unknown(field, word)
    yield from _choice(facts, "export-kv-cache-quant", KV_FORMATS)


def search_layout(facts: Facts) -> Found:
    if _searches(facts) and facts.layout.pp > 1:
        yield "PP", f"automatic quantization needs PP=1, not {facts.layout.pp}", "set PP=1"


def _search(facts: Facts) -> Found:
    """Whether the search's budget can be met, and its formats and method are there."""
    bits = facts.args.get(_BITS)
    if bits is None:
        message = "automatic quantization needs the bits to reach"
        yield "MLM_EXTRA_ARGS", message, f"add --{_BITS} 4.8 (or another number)"
    elif not _is_budget(bits):
        yield f"--{_BITS}", f"{bits!r} is no number above 0 and at most 16", "give bits per weight, such as 4.8"
    for word in facts.args.get(_SPACE, "").split():
        yield from _unknown(f"--{_SPACE}", word)
    yield from _choice(facts, _METHOD, METHODS)


def _word(facts: Facts) -> tuple[str, str]:
    """What names the format, and where; the stage's precedence."""
    if "export-quant-cfg" in facts.args:
        return "--export-quant-cfg", facts.args["export-quant-cfg"]
    return "QFORMAT", facts.words[0] if facts.words else facts.values.get("QFORMAT", "").strip()


def _searches(facts: Facts) -> bool:
    return facts.has(_BITS) or _word(facts)[1] in AUTO


def _is_recipe(word: str) -> bool:
    return "/" in word or word.endswith((".yaml", ".yml"))


def _is_budget(text: str) -> bool:
    try:
        return 0 < float(text) <= 16
    except ValueError:
        return False


def _unknown(field: str, word: str) -> Found:
    if word not in FORMATS and word.lower() not in ALIASES:
        near = nearest(word.upper(), FORMATS) or nearest(word.lower(), ALIASES)
        fix = f"give one of {', '.join(sorted(ALIASES))}, a name of ModelOpt's that ends with _CFG, or a recipe's path"
        yield field, f"ModelOpt has no format {word!r}{near}", fix


def _choice(facts: Facts, name: str, known: tuple[str, ...]) -> Found:
    word = facts.args.get(name, known[0])
    if word not in known:
        yield f"--{name}", f"there is no {word!r}{nearest(word, known)}", f"give one of {', '.join(known)}"
