"""Choosing the next token from logits: the likeliest, or drawn by temperature, top-k and top-p."""

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy. ``top_k`` 0 and ``top_p`` 1 leave all tokens in."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    def draws(self, name: str, count: int) -> list[float]:
        """The random numbers in [0, 1) of one completion, which depend on the seed and its name alone."""
        stream = random.Random(f"{self.seed} {name}")
        return [stream.random() for _ in range(count)]

    def describe(self) -> str:
        if self.greedy:
            return "greedy"
        return f"temperature {self.temperature:g}, top-k {self.top_k or 'all'}, top-p {self.top_p:g}, seed {self.seed}"


def choose(logits: Any, sampling: Sampling, draws: Any) -> Any:
    """Token ids [rows] from logits [rows, vocabulary] and one number in [0, 1) a row.

    As in transformers, top-p counts the probabilities that temperature and top-k leave. The draw picks the token in
    whose share of the sorted probabilities it falls: no generator has a state, so the step can be a CUDA graph.
    """
    import torch

    if sampling.greedy:
        return logits.argmax(-1)
    count = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    scores, ids = (logits.float() / sampling.temperature).topk(count)
    shares = torch.softmax(scores, -1, dtype=torch.float64)
    sums = shares.cumsum(-1)
    kept = (sums - shares < sampling.top_p).sum(-1, keepdim=True)
    drawn = draws[:, None] * sums.gather(-1, kept - 1)
    place = torch.minimum((sums <= drawn).sum(-1, keepdim=True), kept - 1)
    return ids.gather(-1, place)[:, 0]
