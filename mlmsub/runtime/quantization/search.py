"""Mixed precision: modelopt's search for a format per layer within a budget of bits (``mtq.auto_quantize``)."""

import copy
import math
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from mlmsub.runtime.errors import CheckFailed, StageError, first_line
from mlmsub.runtime.quantization import calibration, formats

BITS = "--auto-quantize-bits"


@dataclass(frozen=True)
class Search:
    """What to search: the budget in bits per weight, the candidate formats, how and on how many samples to score."""

    bits: float
    candidates: list[formats.Config]
    method: str
    score_size: int
    disabled_layers: list[str]
    checkpoint: str | None
    constraints: dict[str, Any] = field(default_factory=dict)
    spaces: list[dict[str, Any]] = field(default_factory=list)
    fixed: formats.Config | None = None

    @classmethod
    def from_flags(cls, args: Namespace) -> "Search":
        import modelopt.torch.quantization as mtq
        from modelopt.recipe import load_config

        if args.auto_quantize_bits is None:
            raise StageError(BITS, "automatic quantization needs the bits to reach.", f"add {BITS} 4.8, for example.")
        names = [formats.full_name(name, "--auto-quantize-formats") for name in args.auto_quantize_formats]
        disabled = list(load_config("configs/auto_quantize/units/base_disabled_layers"))
        return cls(
            bits=args.auto_quantize_bits,
            candidates=[copy.deepcopy(getattr(mtq, name)) for name in names],
            method=args.auto_quantize_method,
            score_size=args.auto_quantize_score_size,
            disabled_layers=disabled,
            checkpoint=args.auto_quantize_checkpoint,
        )

    @classmethod
    def from_recipe(cls, recipe: Any, args: Namespace) -> "Search":
        """Of a ModelOptAutoQuantizeRecipe."""
        asked = recipe.auto_quantize
        if asked.kv_cache is not None:
            raise StageError("recipe", "its kv_cache is not searched with the weights.", "remove it from the recipe.")
        cost = asked.constraints.cost.model_dump(exclude_none=True) if asked.constraints.cost else {}
        if asked.cost_excluded_layers:
            cost["excluded_module_name_patterns"] = list(asked.cost_excluded_layers)
        constraints = {"cost_model": asked.constraints.cost_model, **({"cost": cost} if cost else {})}
        return cls(
            bits=asked.constraints.effective_bits,
            candidates=[one.model_dump() for one in asked.candidate_formats],
            method=asked.auto_quantize_method,
            score_size=asked.score_size,
            disabled_layers=list(asked.disabled_layers),
            checkpoint=args.auto_quantize_checkpoint,
            constraints=constraints,
            spaces=[
                {
                    "module_name_patterns": list(space.module_name_patterns),
                    "quantization_formats": [one.model_dump() for one in space.candidate_formats],
                    "allow_no_quant": space.allow_no_quant,
                }
                for space in asked.module_search_spaces
            ],
            fixed=recipe.quantize.model_dump() if recipe.quantize is not None else None,
        )

    @property
    def configs(self) -> list[formats.Config]:
        fixed = [self.fixed] if self.fixed is not None else []
        return [*self.candidates, *fixed, *(one for space in self.spaces for one in space["quantization_formats"])]

    def check(self, device: str) -> None:
        """Raise StageError for a budget or a score size that cannot be met, whatever the model."""
        if not 0 < self.bits <= 16:
            raise StageError(
                BITS, f"{self.bits:g} is not above 0 and at most 16.", "give bits per weight, such as 4.8."
            )
        if self.score_size < 1:
            raise StageError("--auto-quantize-score-size", f"{self.score_size} samples score nothing.", "128, say.")
        if device == "cpu" and not all(formats.runs_on_cpu(one) for one in self.configs):
            raise StageError(
                "--auto-quantize-formats",
                "the search runs the model in each format, and NVFP4 and MX formats compute on a GPU only.",
                "search on a GPU, or over FP8_DEFAULT_CFG and INT8_DEFAULT_CFG.",
            )


def run(model: Any, search: Search, samples: Any, size: int, device: str) -> dict[str, Any]:
    """Quantize the model with the best formats found; returns the bits reached and each layer's format.

    samples: this rank's token ids [samples, length]. Raises StageError if the budget is below what the formats can
    reach, CheckFailed if no assignment meets it.
    """
    import modelopt.torch.quantization as mtq

    parts = [calibration.place(part, device) for part in calibration.batches(samples, size)]
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        _, state = mtq.auto_quantize(
            model,
            constraints={"effective_bits": search.bits, **search.constraints},
            quantization_formats=search.candidates or None,
            data_loader=parts,
            forward_step=_logits if search.method == "kl_div" else _hidden,
            forward_backward_step=_backward,
            disabled_layers=search.disabled_layers,
            num_calib_steps=len(parts),
            num_score_steps=min(len(parts), math.ceil(search.score_size / size)),
            method=search.method,
            checkpoint=search.checkpoint,
            module_search_spaces=search.spaces,
            fixed_quantization_config=search.fixed,
        )
    except (AssertionError, ValueError) as error:
        reason = first_line(error)
        if "effective_bits" in reason:
            raise StageError(BITS, reason, "give more bits, or a smaller format.") from error
        if "heckpoint" in reason:
            raise StageError("--auto-quantize-checkpoint", reason, "name another file.") from error
        raise CheckFailed("auto", f"modelopt's search failed: {reason}") from error
    best = state["best"]
    if not best["is_satisfied"]:
        raise CheckFailed("auto", f"no assignment of formats reaches {search.bits:g} bits.", f"give a larger {BITS}.")
    _save_as_chosen(model)
    layers = {name.removesuffix(".quant_recipe"): _short(recipe) for name, recipe in best["recipe"].items()}
    return {"bits": round(float(best["constraints"]["effective_bits"]), 4), "layers": layers}


def _save_as_chosen(model: Any) -> None:
    """modelopt 0.47: a layer that the search leaves alone comes back with quantizers that have no range.

    What is saved says "quantize by the defaults", and Megatron's output layer keeps no state of its own to say
    otherwise. Say "quantize nothing" instead: every other layer's state says what was chosen for it.
    """
    from modelopt.torch.opt.conversion import ModeloptStateManager

    mode, state = ModeloptStateManager(model).state_dict()[-1]
    assert mode == "auto_quantize", mode
    state["config"]["quant_cfg"] = [{"quantizer_name": "*", "enable": False}]


def summary(found: dict[str, Any]) -> str:
    kinds = Counter(found["layers"].values())
    return f"{found['bits']:.2f} bits per weight: " + ", ".join(
        f"{count} layers {kind}" for kind, count in sorted(kinds.items())
    )


def _short(recipe: Any) -> str:
    return str(recipe).partition("(")[0]


def _hidden(model: Any, batch: dict[str, Any]) -> Any:
    with calibration.without_logits(model):
        return model(batch["tokens"], batch["positions"], None)


def _logits(model: Any, batch: dict[str, Any]) -> Any:
    return model(batch["tokens"], batch["positions"], None)


def _backward(model: Any, batch: dict[str, Any]) -> None:
    losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    mask = batch["loss_mask"]
    ((losses.float() * mask).sum() / mask.sum()).backward()
