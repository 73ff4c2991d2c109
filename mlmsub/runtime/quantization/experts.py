"""How many tokens each expert saw during calibration: an expert that saw none has no range of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.progress import Steps, say, warn

FEW = 16  # tokens: fewer make no statistic


class TokenCounts:
    """Counts the routed tokens of every expert in this rank's pipeline stage, on the device, without a sync."""

    def __init__(self, args: Any) -> None:
        self._counts: dict[int, Any] = {}
        self._args = args

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Count while the model runs in this context."""
        from megatron.core.transformer.moe.router import TopKRouter

        def count(router: Any, _inputs: Any, outputs: Any) -> None:
            seen = outputs[1].sum(dim=0)  # the routing map [tokens, experts]
            layer = router.layer_number - 1
            self._counts[layer] = self._counts[layer] + seen if layer in self._counts else seen

        handles = [module.register_forward_hook(count) for module in model.modules() if isinstance(module, TopKRouter)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def gather(self, tokens: int) -> dict[int, list[int]]:
        """Per layer (from 0) the tokens of each expert, over all ranks. All ranks call this.

        ``tokens``: this rank's calibration tokens. A method that runs them several times counts as one run.
        """
        from megatron.core import parallel_state

        # tensor-parallel ranks route the same tokens, unless the sequence is split among them
        ours = self._args.sequence_parallel or parallel_state.get_tensor_model_parallel_rank() == 0
        mine = {layer: self._per_run(counts.tolist(), tokens) for layer, counts in self._counts.items()} if ours else {}
        found: dict[int, list[int]] = {}
        for part in distributed.gather(mine):
            for layer, counts in part.items():
                before = found.get(layer, [0] * len(counts))
                found[layer] = [one + other for one, other in zip(before, counts, strict=True)]
        return dict(sorted(found.items()))

    def _per_run(self, counts: list[int], tokens: int) -> list[int]:
        share = self._args.tensor_model_parallel_size if self._args.sequence_parallel else 1
        routed = tokens * self._args.moe_router_topk // (share * self._args.context_parallel_size)
        runs = max(1, round(sum(counts) / routed))
        return [seen // runs for seen in counts]


def report(counts: dict[int, list[int]], steps: Steps) -> None:
    """One line and one entry of the event per layer with experts; a warning that names the starved ones."""
    layers = []
    for layer, tokens in counts.items():
        starved = [expert for expert, seen in enumerate(tokens) if seen < FEW]
        row = {"layer": layer, "min": min(tokens), "median": median(tokens), "max": max(tokens), "starved": starved}
        layers.append(row)
        say(
            f"layer {layer}: tokens of {len(tokens)} experts: min {row['min']}, median {row['median']:g}, "
            f"max {row['max']}"
        )
        if starved:
            shown = ", ".join(f"{expert} ({tokens[expert]})" for expert in starved[:8])
            more = f" and {len(starved) - 8} more" if len(starved) > 8 else ""
            warn(
                f"layer {layer}: experts starved of calibration tokens (fewer than {FEW}): {shown}{more}. "
                "They take the range of the layer's other experts; give more samples (--calib-size)."
            )
    if layers:
        steps.event("experts", layers=layers)
