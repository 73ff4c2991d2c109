"""Perplexity of a fixed text, before and after quantization: the cheapest sign that a model still works."""

import math
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.errors import CheckFailed
from mlmsub.runtime.progress import Steps, say, warn
from mlmsub.runtime.quantization import calibration, calibration_data

CHUNKS, LENGTH = 8, 512  # at most: 4096 tokens


class Perplexity:
    """Measures a model on the built-in text, whatever it is calibrated with, so that runs can be compared."""

    def __init__(self, open_tokenizer: Any, args: Any, device: str) -> None:
        multiple = calibration.sequence_multiple(args)
        self.samples = calibration_data.chunks([calibration_data.BUILT_IN], open_tokenizer, LENGTH, CHUNKS, multiple)
        self.device = device
        self.before = math.nan

    def measure(self, model: Any) -> float:
        """exp of the mean loss per token, the same on every rank. Every data-parallel rank sees all of the text."""
        parts = calibration.batches(self.samples, 1)  # fp32 logits of a large vocabulary are big
        losses = calibration.forward(model, parts, self.device, labels=True)
        mine = (sum(float(part.double().sum()) for part in losses), sum(part.numel() for part in losses))
        total, tokens = (sum(values) for values in zip(*distributed.gather(mine), strict=True))
        mean = total / tokens
        return math.exp(min(mean, 700.0)) if math.isfinite(mean) else math.nan

    def measure_before(self, model: Any) -> None:
        """Raise CheckFailed if the model to quantize has no finite perplexity itself."""
        self.before = self.measure(model)
        if not math.isfinite(self.before):
            raise CheckFailed(
                "perplexity",
                "the model computes NaN or infinity before anything is quantized.",
                "check that the checkpoint is whole and that the model conf is its own.",
            )

    def compare(self, model: Any, steps: Steps) -> None:
        """Tell both numbers; raise CheckFailed if the quantized model's is not finite."""
        after = self.measure(model)
        finite = math.isfinite(after)
        steps.event("perplexity", before=self.before, after=after if finite else None, tokens=self.samples.numel())
        if not finite:
            raise CheckFailed(
                "perplexity",
                f"the quantized model computes NaN or infinity (perplexity before: {self.before:.4g}).",
                "take another format, or leave the layers that overflow unquantized.",
            )
        change = 100 * (after / self.before - 1)
        say(f"perplexity of the fixed text: {self.before:.4g} before, {after:.4g} after ({change:+.1f} %)")
        if after > 2 * self.before:
            warn("quantization has more than doubled the perplexity: look at the format and the calibration data.")
