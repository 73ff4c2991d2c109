"""Attention that Megatron-Core lacks: on plain torch without Transformer Engine, and DeepSeek-V2-Lite's queries."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class TorchAttention(MegatronModule):  # type: ignore[misc]
    """Scaled dot-product attention through ``torch.nn.functional``, on CPU and GPU.

    Megatron's own local DotProductAttention refuses multi-latent attention (``unexpected keyword argument
    'k_channels'``) and builds a mask of batch x seq x seq; this one takes values of another width than the
    keys, grouped queries without repeating them, and a causal mask that is never built.
    """

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
        for name, off in (("window_size", None), ("softmax_type", "vanilla"), ("context_parallel_size", 1)):
            if getattr(config, name, off) != off:
                raise NotImplementedError(f"{name}={getattr(config, name)} needs Transformer Engine")
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

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
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        causal = attention_mask is None and (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if attention_mask is None else ~attention_mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal and query.shape[2] > 1,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
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
