"""What a quantize run is asked to do: one format, a recipe of modelopt's, or a search over formats.

The reference's precedence: --auto-quantize-bits, then --recipe, then --export-quant-cfg or the format's word.
"""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from mlmsub.runtime.errors import StageError
from mlmsub.runtime.progress import warn, without_prints
from mlmsub.runtime.quantization import formats
from mlmsub.runtime.quantization.search import Search

AUTO = ("auto", "AUTO", "auto_quantize")


@dataclass(frozen=True)
class Plan:
    """One format for the whole model (``config``, modelopt's), or a ``search`` over formats."""

    name: str
    config: formats.Config | None = None
    search: Search | None = None

    @property
    def configs(self) -> list[formats.Config]:
        if self.search is not None:
            return self.search.configs
        return [self.config] if self.config is not None else []

    @property
    def needs_samples(self) -> bool:
        return self.search is not None or any(formats.needs_samples(one) for one in self.configs)

    @property
    def by_max(self) -> bool:
        return all(formats.method(one) in ("max", None) for one in self.configs)

    @property
    def wants_weights(self) -> bool:
        return any(formats.names_weights(one) for one in self.configs) and self.search is None

    def skip(self, modules: str) -> None:
        """Leave the modules of this pattern unquantized."""
        if self.search is not None:
            self.search.disabled_layers.append(modules)
        else:
            assert self.config is not None
            self.config["quant_cfg"].append({"quantizer_name": f"*{modules}", "enable": False})


def resolve(word: str | None, args: Namespace, device: str) -> Plan:
    """Make the plan of a run; raise StageError if what was asked for cannot be done."""
    plan = _asked(word, args)
    for made in plan.configs:
        for warning in formats.check_usable(made, plan.name, device, bool(args.multi_latent_attention)):
            warn(warning)
    if plan.search is not None:
        plan.search.check(device)
        if args.pipeline_model_parallel_size > 1:
            raise StageError("PP", "automatic quantization needs PP=1.", "set PP=1.")
    _check_layerwise(plan, args)
    return plan


def _asked(word: str | None, args: Namespace) -> Plan:
    format_word = args.export_quant_cfg or word or formats.DEFAULT
    if args.auto_quantize_bits is not None or format_word in AUTO:
        if format_word not in AUTO and (word or args.export_quant_cfg or args.recipe):
            warn(f"--auto-quantize-bits searches over formats; {args.recipe or format_word} is ignored.")
        _refuse(args, "automatic quantization", "choose the formats instead (--auto-quantize-formats)")
        return Plan("auto", search=Search.from_flags(args))
    is_recipe = "/" in format_word or format_word.endswith((".yaml", ".yml"))
    if args.recipe or is_recipe:
        return _from_recipe(args.recipe or format_word, args)
    name = formats.full_name(format_word)
    formats.check_kv_cache(args.export_kv_cache_quant)
    if args.compress and args.export_kv_cache_quant != "none":
        warn("--compress keeps no KV-cache quantization; --export-kv-cache-quant is ignored.")
        args.export_kv_cache_quant = "none"
    made = formats.config(name, args)
    formats.adapt_algorithm(made, args)
    return Plan(name, config=made)


def _from_recipe(name: str, args: Namespace) -> Plan:
    from modelopt.recipe import ModelOptAutoQuantizeRecipe, ModelOptPTQRecipe, load_recipe

    try:
        with without_prints():
            recipe = load_recipe(name)
    except Exception as error:  # YAML, pydantic and modelopt raise many kinds
        reason = " ".join(str(error).split())[:300]
        raise StageError(
            "recipe",
            f"{name}: {reason}",
            "give a YAML file, or a name under modelopt_recipes such as general/ptq/fp8_default-kv_fp8.",
        ) from error
    if args.export_kv_cache_quant != "none":
        warn(f"--export-kv-cache-quant is ignored: the recipe {name} says how the KV cache is kept.")
    _refuse(args, f"the recipe {name}", "put it into a recipe of your own", kv=False)
    if isinstance(recipe, ModelOptAutoQuantizeRecipe):
        return Plan(name, search=Search.from_recipe(recipe, args))
    if not isinstance(recipe, ModelOptPTQRecipe):
        raise StageError("recipe", f"{name} is a recipe for {type(recipe).__name__}, not for quantization.")
    made: dict[str, Any] = recipe.quantize.model_dump()
    formats.adapt_algorithm(made, args)
    return Plan(name, config=made)


def _refuse(args: Namespace, what: str, fix: str, kv: bool = True) -> None:
    """A flag that would be dropped without effect is refused, except where the reference documents that it is."""
    flags = {"--weight-only": args.weight_only, "--disable-qkv-quant": args.disable_qkv_quant}
    if kv:
        flags["--export-kv-cache-quant"] = args.export_kv_cache_quant != "none"
        flags["--sync-expert-weight-amax"] = args.sync_expert_weight_amax
        flags["--layerwise"] = args.layerwise or args.layerwise_checkpoint is not None
    for flag, given in flags.items():
        if given:
            raise StageError(flag, f"has no effect on {what}.", f"leave it out; {fix}.")


def _check_layerwise(plan: Plan, args: Namespace) -> None:
    """modelopt's layerwise calibration stops a forward early, which no pipeline survives, and saves for one process."""
    settings = formats.layerwise(plan.config) if plan.config is not None else {}
    if settings and args.pipeline_model_parallel_size > 1:
        raise StageError("--layerwise", "needs PP=1: a forward ends early on one stage.", "set PP=1.")
    if settings.get("checkpoint_dir") and args.world_size > 1:
        raise StageError(
            "--layerwise-checkpoint",
            "modelopt saves the progress of one process only.",
            "leave it out, or use one GPU.",
        )
