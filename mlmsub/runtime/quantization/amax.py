"""Quantization ranges (amax) that must be equal on several ranks: are they?

A checkpoint keeps one copy of what is replicated; a rank that differs would silently lose, or give the others its
own. modelopt syncs these ranges itself; this looks at the result.
"""

from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.errors import CheckFailed
from mlmsub.runtime.quantization import formats

Prints = dict[str, tuple[int, float, float]]


def check_equal_across_ranks(model: Any, shared_by_experts: bool) -> None:
    """Raise CheckFailed, naming the quantizer, where ranks disagree. All ranks call this.

    - data-parallel replicas (of experts: expert-data-parallel ones): every range;
    - tensor-parallel ranks: ranges of whole tensors, inputs and weights (``max_calibrate`` of modelopt 0.47);
    - expert-parallel ranks, where the experts of a layer share them: input ranges of whole tensors.
    """
    from megatron.core import parallel_state as state

    prints = _prints(model)
    dense = {name: value for name, value in prints.items() if ".experts." not in name}
    experts = {name: value for name, value in prints.items() if ".experts." in name}
    shared = _inputs(_whole(experts)) if shared_by_experts else {}
    groups = (
        ("data-parallel", state.get_data_parallel_group(with_context_parallel=True), dense),
        ("tensor-parallel", state.get_tensor_model_parallel_group(), _whole(dense)),
        ("expert-data-parallel", state.get_expert_data_parallel_group(), experts),
        ("expert-tensor-parallel", state.get_expert_tensor_parallel_group(), _whole(experts)),
        (
            "expert-parallel",
            state.get_expert_model_parallel_group(),
            shared,
        ),
    )
    wrong = [f"{name} among {kind} ranks" for kind, group, mine in groups for name in _differing(mine, group)]
    found = sorted({text for part in distributed.gather(wrong) for text in part})
    if found:
        raise CheckFailed(
            "calibration",
            f"ranks disagree on the ranges of {len(found)} quantizers: {', '.join(found[:3])}.",
            "this is a fault of the library's synchronisation; run again with this axis of parallelism at 1.",
        )


def _prints(model: Any) -> Prints:
    """Of each enabled quantizer with a range: its elements, their sum and their maximum."""
    found: Prints = {}
    for name, quantizer in formats.quantizers(model):
        amax = getattr(quantizer, "_amax", None)
        if amax is not None:
            found[name] = (amax.numel(), float(amax.double().sum()), float(amax.max()))
    return found


def _whole(prints: Prints) -> Prints:
    return {name: value for name, value in prints.items() if value[0] == 1}


def _inputs(prints: Prints) -> Prints:
    return {name: value for name, value in prints.items() if "input_quantizer" in name}


def _differing(mine: Prints, group: Any) -> list[str]:
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, mine, group=group)
    names = {name for part in parts for name in part}
    return sorted(name for name in names if len({part.get(name) for part in parts}) > 1)
