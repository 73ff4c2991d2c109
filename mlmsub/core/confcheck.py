"""Is a model conf plausible? The checks behind `mlmsub conf check`; they need no GPU, no network and no Megatron."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mlmsub.core import architecture, stages
from mlmsub.core.issues import Issue, error, warning
from mlmsub.core.megatron_arguments import EXAMPLES, NAMES
from mlmsub.core.modelconf import ModelConf
from mlmsub.core.strict import nearest
from mlmsub.core.values import number


def run(conf: ModelConf) -> Iterator[Issue]:
    """All issues of a conf, by where in it they stand."""
    yield from _names(conf)
    yield from _heads(conf.megatron_args)
    yield from _layers(conf.megatron_args)
    yield from _experts(conf.megatron_args)
    yield from _positions(conf)
    if not conf.tokenizer:
        yield warning("conf-tokenizer", "tokenizer", "is not set, so that HF_MODEL_CKPT must be")


def of_name(asked: str, conf: ModelConf, *, is_file: bool) -> Iterator[Issue]:
    """Is this the conf of the model that was asked for? Of a file only what its name says can be compared."""
    if not is_file and asked.lower() not in (name.lower() for name in (conf.model, *conf.aliases)):
        yield error(
            "conf-model", "model", f"{asked} was asked for, and the conf of that name is of {conf.model}",
            f"write model: {asked} into it, or ask for {conf.model}",
        )  # fmt: skip
    elif is_file and (odd := architecture.unlike(asked, conf.model)):
        yield warning(
            "conf-model", "model", f"{asked} is a conf of {conf.model}: {odd}", "is it a copy with the old name in it?"
        )


def _names(conf: ModelConf) -> Iterator[Issue]:
    for name in conf.megatron_args:
        field = f"megatron_args.{name}"
        if name in EXAMPLES:
            yield warning(
                "conf-example-argument", field, "only Megatron-LM's own examples have it; mlmsub's stages refuse it",
                "leave it out, or run the example: mlmsub submit script",
            )  # fmt: skip
        elif name not in NAMES:
            yield error("conf-argument", field, f"Megatron 0.19 has no --{name}{nearest(name, NAMES)}")
    if "hybrid-override-pattern" in conf.megatron_args:
        yield warning(
            "conf-old-argument", "megatron_args.hybrid-override-pattern", "the old name of an argument",
            "write hybrid-layer-pattern",
        )  # fmt: skip
    for key, reasons in (("unsupported", conf.unsupported), ("restrictions", conf.restrictions)):
        for stage in reasons:
            if stage not in stages.STAGES:
                yield error("conf-stage", f"{key}.{stage}", f"there is no such stage{nearest(stage, stages.STAGES)}")


def _heads(args: Mapping[str, str]) -> Iterator[Issue]:
    hidden, heads, groups = (_int(args, name) for name in ("hidden-size", "num-attention-heads", "num-query-groups"))
    if groups and heads % groups:
        yield error(
            "conf-heads", "megatron_args.num-query-groups", f"{groups} groups do not divide {heads} attention heads"
        )
    if groups and "group-query-attention" not in args:
        yield warning(
            "conf-heads", "megatron_args.num-query-groups", "without group-query-attention Megatron ignores it",
            "add group-query-attention: true",
        )  # fmt: skip
    width = _int(args, "kv-channels")
    if not width and heads and hidden % heads:
        yield error(
            "conf-heads", "megatron_args.num-attention-heads", f"{heads} heads do not divide a hidden size of {hidden}",
            "say kv-channels, the width of a head",
        )  # fmt: skip
    if width and hidden and not hidden / 2 <= width * heads <= hidden * 4:
        yield warning(
            "conf-heads", "megatron_args.kv-channels",
            f"{heads} heads of {width} channels are {width * heads} wide, beside a hidden size of {hidden}",
            "is it the head_dim of config.json?",
        )  # fmt: skip


def _layers(args: Mapping[str, str]) -> Iterator[Issue]:
    for name in ("hidden-size", "num-attention-heads"):
        if name not in args:
            yield error("conf-missing", f"megatron_args.{name}", "is missing")
    try:
        letters = architecture.layer_letters(args)
    except KeyError:
        yield error("conf-missing", "megatron_args.num-layers", "is missing, and there is no hybrid-layer-pattern")
        return
    except (ValueError, SyntaxError) as problem:
        yield error("conf-layers", "megatron_args", f"the layers cannot be counted: {problem}")
        return
    said = _int(args, "num-layers")
    if said and said != len(letters):
        yield error(
            "conf-layers", "megatron_args.num-layers", f"says {said}; the hybrid pattern has {len(letters)} letters",
            "leave num-layers out",
        )  # fmt: skip
    if "E" in letters and not _int(args, "num-experts"):
        yield error("conf-experts", "megatron_args.num-experts", "is missing, and the pattern has layers of experts")


def _experts(args: Mapping[str, str]) -> Iterator[Issue]:
    experts = _int(args, "num-experts")
    if not experts:
        idle = [name for name in args if name.startswith("moe-")]
        if idle:
            yield warning("conf-experts", f"megatron_args.{idle[0]}", "has no effect without num-experts")
        return
    topk, groups, group_topk = (
        _int(args, name) for name in ("moe-router-topk", "moe-router-num-groups", "moe-router-group-topk")
    )
    if topk > experts:
        yield error("conf-experts", "megatron_args.moe-router-topk", f"{topk} of {experts} experts")
    if groups and experts % groups:
        yield error("conf-experts", "megatron_args.moe-router-num-groups", f"{groups} do not divide {experts} experts")
    if groups and group_topk > groups:
        yield error("conf-experts", "megatron_args.moe-router-group-topk", f"{group_topk} of {groups} groups")


def _positions(conf: ModelConf) -> Iterator[Issue]:
    length, positions = _int(conf.megatron_args, "seq-length"), _int(conf.megatron_args, "max-position-embeddings")
    if length and positions and length > positions:
        yield error("conf-positions", "megatron_args.seq-length", f"{length} is longer than {positions} positions")
    latent = architecture.flag(conf.megatron_args, "multi-latent-attention")
    if latent and conf.megatron_args.get("rope-type", "yarn") == "yarn" and "beta_fast" not in conf.config:
        yield warning(
            "conf-yarn", "config.beta_fast",
            "not said, so 32; no argument reaches it, and where the model has another value the logits are wrong",
            "write beta_fast, beta_slow and original_max_position_embeddings from config.json",
        )  # fmt: skip


def _int(args: Mapping[str, str], name: str) -> int:
    return number(args.get(name, "")) or 0
