"""Attention that Megatron-Core lacks: on plain torch without Transformer Engine, and DeepSeek-V2-Lite's queries."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from mlmsub.runtime.generation.kv_cache import KeyValueCache, visible


class TorchAttention(MegatronModule):  # type: ignore[misc]
    """Scaled dot-product attention through ``torch.nn.functional``, on CPU and GPU.

    Megatron's own local DotProductAttention refuses multi-latent attention (``unexpected keyword argument
    'k_channels'``) and builds a mask of batch x seq x seq; this one takes values of another width than the
    keys, grouped queries without repeating them, and a causal mask that is never built. Sliding windows and
    the softmax's learnable offset (gpt-oss) do build one.

    With a ``cache`` (``decoding.Decoder`` sets it) keys and values are kept, and a pass that the cursor puts at
    positions looks at all that came before them. ``quantizers`` are modelopt's, of queries, keys and values.
    """

    cache: KeyValueCache | None = None
    quantizers: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1 or config.softmax_type == "off-by-one":
            raise NotImplementedError("context parallelism and softmax off-by-one need Transformer Engine")
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int | None = config.window_size[0] if windowed and config.window_size[0] >= 0 else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """query, key, value: [seq, batch, heads, width]; mask: True where attention is forbidden.

        Returns [seq, batch, heads x width of the value].
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise NotImplementedError("attention bias and packed sequences need Transformer Engine")
        if self.attn_mask_type == AttnMaskType.arbitrary and torch.is_grad_enabled():
            # The steps of an EAGLE draft share one key/value cache. The next step extends it in place, and autograd
            # then refuses what it saved: "modified by an inplace operation".
            key, value = key.clone(), value.clone()
        if self.quantizers:
            query, key, value = (
                quantizer(tensor) for quantizer, tensor in zip(self.quantizers, (query, key, value), strict=True)
            )
        if self.cache is not None:
            self.cache.write(key, value)
            if self.cache.cursor.positions is not None:
                return _joined(self._attend_cache(query.permute(1, 2, 0, 3), self.cache))
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        causal = attention_mask is None and (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal
        allowed = None if attention_mask is None else ~attention_mask
        if allowed is not None and key.shape[1] != query.shape[1]:
            # torch's memory-efficient kernel takes a mask or shared heads, not both; the one that takes both keeps the
            # scores of all heads
            key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        if self.window is not None or (causal and self.softmax_offset is not None):
            positions = torch.arange(key.shape[2], device=key.device)
            near = visible(positions[-query.shape[2] :, None], positions, self.window)
            allowed = near if allowed is None else allowed & near
            causal = False
        return _joined(self._attend(query, key, value, allowed, causal))

    def _attend_cache(self, query: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """query: [batch, heads, new, width]; attends to the cache up to each query's own position."""
        key, value = cache.read()
        allowed = cache.cursor.visible(self.window)
        batch, heads, new, width = query.shape
        groups = key.shape[1]
        if groups == heads or self.softmax_offset is not None:
            return self._attend(query, key, value, allowed)
        # Heads that share keys become more queries of one head: torch's memory-efficient kernel takes a mask or
        # shared heads, not both, and without it each step would copy the cache once per head.
        share = heads // groups
        query = query.reshape(batch, groups, share * new, width)
        allowed = allowed.expand(-1, share, -1, -1).reshape(batch, 1, share * new, -1)
        return self._attend(query, key, value, allowed).reshape(batch, heads, new, -1)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor | None,
        causal: bool = False,
    ) -> torch.Tensor:
        """query, key, value, result: [batch, heads, seq, width]; allowed: True where attention is, [..., seq, keys]."""
        mask = allowed
        if self.softmax_offset is not None:
            if allowed is None:
                allowed = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool)
            # a key of zeros whose score is the offset and whose value is zero: it takes its share of the sum only
            key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
            bias = torch.zeros_like(allowed, dtype=query.dtype).masked_fill_(~allowed, -torch.inf)
            shape = (*bias.shape[:-3], query.shape[1], query.shape[2], 1)  # the mask is the same for all heads
            offset = self.softmax_offset.to(query.dtype).view(-1, 1, 1).expand(shape)
            mask = torch.cat((bias.expand(*shape[:-1], -1), offset), dim=-1)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal and query.shape[2] > 1,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The softmax offset is split by heads over the tensor-parallel ranks, as Megatron's own attention has it."""
        state = self.state_dict(prefix="", keep_vars=True)
        made: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return made


def _joined(out: torch.Tensor) -> torch.Tensor:
    """[batch, heads, seq, width] to Megatron's [seq, batch, heads x width]."""
    return out.permute(2, 0, 1, 3).flatten(2)


def torch_norm(config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> torch.nn.Module:
    """RMSNorm or LayerNorm of torch, with the mark that Megatron's sequence parallelism looks for."""
    if config.layernorm_zero_centered_gamma:
        raise NotImplementedError("--apply-layernorm-1p needs Transformer Engine")
    kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
    norm: torch.nn.Module = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


class ReplicatedLinear(Linear):  # type: ignore[misc]
    """A linear layer that every tensor-parallel rank holds whole, such as a draft's ``fc``.

    megatron-core 0.19.2's own forgets, where it saves, that the ranks are replicas: a save at TP > 1 ends with
    ``Invalid access pattern for ShardedTensor``, since two ranks want to write the same tensor.
    """

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        try:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        finally:
            self.tp_group = None  # a group in a module would keep it from being copied


class FullRankMLASelfAttention(MLASelfAttention):  # type: ignore[misc]
    """Latent attention whose queries have no low rank, and so no norm (``q_lora_rank: null``, DeepSeek-V2-Lite).

    megatron-core 0.19.2 knows norms for queries and keys together only: it refuses the spec, or would put a norm
    before the query projection that the model does not have. modelopt looks for "MLASelfAttention" in the name.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }
