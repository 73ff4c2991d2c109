"""Rules on pruning: what is asked for against what the model has. The prune stage checks the same again.

Each function yields (field, message, fix) for what it finds; core/rules.py says when it is asked.
"""

from __future__ import annotations

from mlmsub.core.facts import Facts, Found
from mlmsub.core.values import number

# what can be pruned, by the name in --target-NAME and TARGET_NAME -> the Megatron argument that says how much there is
TARGETS = {
    "num-layers": "num-layers", "hidden-size": "hidden-size", "ffn-hidden-size": "ffn-hidden-size",
    "num-attention-heads": "num-attention-heads", "num-moe-experts": "num-experts",
    "moe-ffn-hidden-size": "moe-ffn-hidden-size",
    "moe-shared-expert-intermediate-size": "moe-shared-expert-intermediate-size",
}  # fmt: skip
DROP = "layers-to-drop"
VARIABLES = (*(f"TARGET_{name.upper().replace('-', '_')}" for name in TARGETS), "LAYERS_TO_DROP")


def layout(facts: Facts) -> Found:
    at = facts.layout
    if at.tp > 1 or at.expert_tp > 1:
        yield "TP", f"prune needs TP=1, not TP={at.tp} ETP={at.expert_tp}", "set TP=1 ETP=1, and use PP instead"
    if at.cp > 1 or at.ep > 1:
        yield "EP", f"prune needs CP=1 and EP=1, not CP={at.cp} EP={at.ep}", "set CP=1 EP=1, and use PP instead"


def targets(facts: Facts) -> Found:
    """Whether something is asked for, and whether the model has more of it."""
    asked, dropped = _asked(facts), _dropped(facts)
    if not asked and not dropped:
        yield "TARGET_NUM_LAYERS", "nothing says what to prune", f"set one of {', '.join(VARIABLES)}"
    if asked and dropped:
        yield "LAYERS_TO_DROP", "goes with no other target", "prune twice, or set TARGET_NUM_LAYERS"
    for name, text in asked.items():
        field, has = _field(name), facts.args.get(TARGETS[name], "")
        if not number(text):
            yield field, f"{text!r} is no number from 1 on", f"set {field} to the size that is to be left"
        elif int(text) > (number(has) or int(text)):
            yield field, f"{text} is more than the model has: {has}", f"set it to at most {has}"
        elif not has and facts.conf:
            yield field, f"the model has no {TARGETS[name]}", "leave it out"
    if asked and all(text == facts.args.get(TARGETS[name]) for name, text in asked.items()):
        yield _field(next(iter(asked))), "is what the model has: nothing would be pruned", "give a smaller size"


def widths(facts: Facts) -> Found:
    """Whether heads, experts and the hidden size still fit together."""
    arch, asked = facts.arch, _numbers(facts)
    if arch is None:
        return
    heads, experts = asked.get("num-attention-heads"), asked.get("num-moe-experts")
    if heads is not None and arch.mla:
        yield _field("num-attention-heads"), "ModelOpt cannot prune the heads of latent attention", "leave it out"
    elif heads is not None and arch.groups and heads % arch.groups:
        message = f"{heads} heads cannot be shared by the {arch.groups} query groups, which all stay"
        yield _field("num-attention-heads"), message, f"give a multiple of {arch.groups}"
    if "ffn-hidden-size" in asked and arch.experts:
        yield _field("ffn-hidden-size"), "the MLPs are experts", f"set {_field('moe-ffn-hidden-size')}"
    if experts is not None and experts < arch.topk:
        yield _field("num-moe-experts"), f"a token goes to {arch.topk} experts", f"keep at least {arch.topk}"
    hidden, left = asked.get("hidden-size", arch.hidden), heads or arch.heads
    changed = not {"hidden-size", "num-attention-heads"}.isdisjoint(asked)
    if changed and facts.conf and facts.conf.family == "llama" and hidden % left:
        message = f"the hidden size {hidden} is no multiple of {left} heads: transformers refuses such a Llama"
        yield _field("hidden-size"), message, f"give a multiple of {left}, or prune the heads too"


def layers(facts: Facts) -> Found:
    """Whether layers can be left out, and what is left divides over the pipeline."""
    asked, dropped = _numbers(facts), _dropped(facts)
    if facts.arch is None:
        return
    if facts.args.get("hybrid-layer-pattern"):
        yield "stage", "prune takes models of attention and MLPs, not hybrid ones", "choose another model"
        return
    has, field = len(facts.arch.layers), "LAYERS_TO_DROP" if dropped else _field("num-layers")
    strange = [word for word in dropped if not 1 <= (number(word) or 0) <= has]
    if strange:
        yield field, f"there is no layer {strange[0]}: the model has {has}, counted from 1", "give numbers of layers"
        return
    left = has - len(set(dropped)) if dropped else asked.get("num-layers")
    if left is not None and left < 1:
        yield field, "no layer would be left", "keep some"
    elif left is not None and left % facts.layout.pp:
        message = f"the {left} layers that are left do not divide over PP={facts.layout.pp}"
        yield "PP", message, f"choose a PP that divides {left}, or another number of layers"


def transformer_engine(facts: Facts) -> Found:
    names = sorted(set(_asked(facts)) - {"num-layers"})
    if names:
        yield _field(names[0]), "ModelOpt prunes width in Transformer Engine's layers: the image must have it", ""


def _asked(facts: Facts) -> dict[str, str]:
    found = {name: facts.args.get(f"target-{name}") or facts.values.get(_field(name), "").strip() for name in TARGETS}
    return {name: text for name, text in found.items() if text}


def _numbers(facts: Facts) -> dict[str, int]:
    return {name: size for name, text in _asked(facts).items() if (size := number(text))}


def _dropped(facts: Facts) -> list[str]:
    return (facts.args.get(DROP) or facts.values.get("LAYERS_TO_DROP", "")).split()


def _field(name: str) -> str:
    return f"TARGET_{name.upper().replace('-', '_')}"
