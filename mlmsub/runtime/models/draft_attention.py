"""Attention of a draft through the steps of test-time training, without a mask over the keys of all steps.

A chain begins at each token. In a step its query sees the keys of step 0 up to its own beginning, and of each later
step the one key that the chain has made there. The first is causal attention, which a flash kernel does, the others are
a few products per token. All are one softmax: its parts are put together by the logarithms of their sums, and the
kernel's backward pass, given the output and the logarithm of the whole, gives the gradients of its part.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Kernel(Protocol):
    """Causal attention within documents, its two passes.

    query, out and their gradients: [tokens, heads, width], the rows of a batch one after the other; key and value:
    [tokens, groups, width]; total: [tokens, heads], the logarithm of the sum of the exponentials, in float32.
    """

    def forward(self, query: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """(out, total)"""

    def backward(self, grad: Any, query: Any, key: Any, value: Any, out: Any, total: Any) -> tuple[Any, Any, Any]:
        """Gradients of query, key and value."""


@dataclass(frozen=True)
class Flash:
    """On a GPU, in half precision. ``starts``: as of ``packing.cu_seqlens``, on the device; ``longest``: at least the
    tokens of the longest document.
    """

    starts: Any
    longest: int

    def forward(self, query: Any, key: Any, value: Any) -> tuple[Any, Any]:
        out, total, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, self.starts, self.starts, self.longest, self.longest, 0.0, True, False
        )
        return out, total.T

    def backward(self, grad: Any, query: Any, key: Any, value: Any, out: Any, total: Any) -> tuple[Any, Any, Any]:
        unused = torch.zeros(2, dtype=torch.uint64, device=grad.device), torch.empty(0, device=grad.device)  # dropout's
        total = total.T.contiguous()
        with _deterministic():
            grads: tuple[Any, Any, Any] = torch.ops.aten._flash_attention_backward(
                grad, query, key, value, out, total, self.starts, self.starts, self.longest, self.longest, 0.0, True,
                *unused,
            )  # fmt: skip
        return grads


@dataclass(frozen=True)
class Masked:
    """On a CPU. ``mask``: as of ``packing.attention_mask``."""

    mask: Any

    def forward(self, query: Any, key: Any, value: Any) -> tuple[Any, Any]:
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(self._rows, (query, key, value)), 0.0, False, attn_mask=self._bias(query)
        )
        return self._tokens(out), self._tokens(total)

    def backward(self, grad: Any, query: Any, key: Any, value: Any, out: Any, total: Any) -> tuple[Any, Any, Any]:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(self._rows, (grad, query, key, value, out, total)), 0.0, False, attn_mask=self._bias(query)
        )
        first, second, third = map(self._tokens, grads)
        return first, second, third

    def _bias(self, query: Any) -> Any:
        return torch.zeros_like(self.mask, dtype=query.dtype).masked_fill_(self.mask, -torch.inf)

    def _rows(self, tensor: Any) -> Any:
        """[tokens, heads, ...] to [batch, heads, sequence, ...]"""
        return tensor.unflatten(0, (len(self.mask), -1)).transpose(1, 2).contiguous()

    @staticmethod
    def _tokens(tensor: Any) -> Any:
        return tensor.transpose(1, 2).flatten(0, 1)


class Chains(torch.nn.Module):
    """Core attention of one layer of a draft for one batch: each call is the next step.

    ``own``: the layer's own, which may have modelopt's quantizers of queries, keys and values.
    """

    def __init__(self, kernel: Kernel, own: Any = None) -> None:
        super().__init__()
        self.kernel = kernel
        self.quantizers = [getattr(own, f"{part}_bmm_quantizer", torch.nn.Identity()) for part in "qkv"]
        self.made: list[Any] = []  # key and value of each step

    def forward(self, query: Any, key: Any, value: Any, *_mask: Any, **_unused: Any) -> Any:
        """[tokens, 1, heads or groups, width], slot ``i`` of every step being of the chain that begins at token ``i``.

        Returns [tokens, 1, heads x width].
        """
        given = zip(self.quantizers, (query, key, value), strict=True)
        query, *made = (quantizer(tensor)[:, 0] for quantizer, tensor in given)
        self.made += made
        out = _Attend.apply(self.kernel, query, *self.made)  # type: ignore[no-untyped-call]
        return out.flatten(1)[:, None]


@contextmanager
def chains(draft: Any, kernel: Kernel) -> Iterator[None]:
    """Within it the layers of ``draft`` attend by chains; what they have of their own stays as it is."""
    attentions = [layer.self_attention for layer in draft.decoder.layers]
    own = [attention.core_attention for attention in attentions]
    try:
        for attention, core in zip(attentions, own, strict=True):
            attention.core_attention = Chains(kernel, core)
        yield
    finally:
        for attention, core in zip(attentions, own, strict=True):
            attention.core_attention = core


class _Attend(torch.autograd.Function):
    """A query's attention to the keys of step 0 before it, and to those of its own chain.

    As in flash kernels, factors are in the model's type, and sums, scores and their exponentials in float32.
    """

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, query: Any, key: Any, value: Any, *chain: Any) -> Any:
        """``chain``: key and value of every later step, one after the other; all as ``Kernel`` has them."""
        out, total = kernel.forward(query, key, value)
        shares = None
        if chain:
            keys, values = _stacked(chain)
            scores = _dot(_grouped(query, key), keys).flatten(2) / query.shape[-1] ** 0.5  # [steps, tokens, heads]
            causal, total = total, torch.cat([total[None], scores]).logsumexp(0)
            shares = _grouped((scores - total).exp(), key, 2)[..., None]
            more = (shares.to(value.dtype) * values).sum(0, dtype=torch.float32).flatten(1, 2)
            out = (more + out * (causal - total).exp()[..., None]).to(query.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, out, total, shares, *chain)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        query, key, value, out, total, shares, *chain = ctx.saved_tensors
        to_query, *to_first = ctx.kernel.backward(grad, query, key, value, out, total)
        if not chain:
            return None, to_query, *to_first
        keys, values = _stacked(chain)
        heads, upstream, out = (_grouped(tensor, key) for tensor in (query, grad, out))
        change = shares * (_dot(upstream, values) - _dot(upstream, out))[..., None] / query.shape[-1] ** 0.5
        change, shares = change.to(key.dtype), shares.to(key.dtype)
        to_query = (to_query + (change * keys).sum(0, dtype=torch.float32).flatten(1, 2)).to(query.dtype)
        to_chain = zip((change * heads).sum(3), (shares * upstream).sum(3), strict=True)
        return None, to_query, *to_first, *(part for step in to_chain for part in step)


def _grouped(tensor: Any, key: Any, where: int = 1) -> Any:
    """[..., heads, ...] to [..., groups of ``key``, heads of a group, ...]"""
    return tensor.unflatten(where, (key.shape[1], -1))


def _dot(one: Any, other: Any) -> Any:
    return (one * other).sum(-1, dtype=torch.float32)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Without it the flash kernel adds up a query's gradient in the order in which its blocks happen to end, and a run
    that was cut off would not end as one without a break.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _stacked(chain: Any) -> tuple[Any, Any]:
    """Keys and values [steps, tokens, groups, 1, width]."""
    return torch.stack(chain[::2])[:, :, :, None], torch.stack(chain[1::2])[:, :, :, None]
