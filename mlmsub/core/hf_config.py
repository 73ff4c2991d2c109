"""A model conf from a Hugging Face config.json: pure data in, pure data out, no torch.

Each family has one function that names the Megatron arguments of its layers. What Megatron cannot express is an
error when the logits would be wrong everywhere, and a note of the conf when they would be wrong in places.
Both layouts of the rotary embedding are read: `rope_scaling` (transformers 4) and `rope_parameters` (5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlmsub.core import hf_fields
from mlmsub.core.errors import UsageError
from mlmsub.core.modelconf import ModelConf
from mlmsub.core.strict import nearest

SEQ_LENGTH = 4096  # a default for training; MLM_EXTRA_ARGS may say another
_LETTERS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip


@dataclass
class _Reader:
    """One config.json on its way to a conf."""

    data: Mapping[str, Any]
    args: dict[str, str] = field(default_factory=dict)
    config: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def need(self, key: str) -> Any:
        if self.data.get(key) is None:
            raise UsageError(f"config.json has no {key!r}, which {self.data['model_type']} models have")
        return self.data[key]

    def get(self, key: str, default: Any = None) -> Any:
        value = self.data.get(key)
        return default if value is None else value

    def put(self, **values: Any) -> None:
        """Arguments by name (`_` for `-`); None and False leave one out."""
        for name, value in values.items():
            if value is not None and value is not False:
                self.args[name.replace("_", "-")] = _text(value)

    def refuse(self, what: str) -> UsageError:
        return UsageError(f"config.json: {what}, which Megatron-Core's {self.data['model_type']} layers do not have")


def convert(data: object, name: str = "") -> ModelConf:
    """The conf of a parsed config.json. `name` is the model's name; without it `_name_or_path` says it.

    Raises UsageError for an unknown model_type (with the list), a missing field, or what Megatron lacks.
    """
    if not isinstance(data, Mapping):
        raise UsageError("config.json does not hold a mapping of fields")
    if isinstance(data.get("text_config"), Mapping):  # a multimodal wrapper: the language model is inside
        data = {**data["text_config"], **{k: data[k] for k in ("quantization_config", "auto_map") if k in data}}
    family = str(data.get("model_type", ""))
    if family not in FAMILIES:
        raise UsageError(
            f"config.json's model_type is {family!r}{nearest(family, FAMILIES)}",
            fix=f"the families known here are: {', '.join(FAMILIES)}; or write the conf by hand (docs/models.md)",
        )
    reader = _Reader(data)
    hf_fields.check(data)
    try:
        FAMILIES[family](reader)
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, OverflowError) as problem:
        raise UsageError(f"config.json is not one of a {family} model: {problem!r}") from None
    hf_fields.check_finite(reader.args)
    name = name or str(data.get("_name_or_path", ""))
    return ModelConf(
        model=name,
        tokenizer=name,
        family=family,
        trust_remote_code=family in ("kimi_k2", "nemotron_h"),
        source_format=_source_format(data.get("quantization_config")),  # type: ignore[arg-type]
        megatron_args=reader.args,
        config=reader.config,
        notes=tuple(reader.notes),
    )


# --- the families -------------------------------------------------------------------------


def _common(r: _Reader, *, activation: str = "silu", norm_key: str = "rms_norm_eps") -> None:
    """Sizes, heads, norm, vocabulary: what all families call alike."""
    heads = r.need("num_attention_heads")
    groups = r.get("num_key_value_heads", heads)
    found = r.get("hidden_act", r.get("mlp_hidden_act", activation))
    if found != activation:
        raise r.refuse(f"the activation is {found!r}")
    r.put(
        num_layers=r.get("num_hidden_layers"),
        hidden_size=r.need("hidden_size"),
        ffn_hidden_size=r.need("intermediate_size"),
        num_attention_heads=heads,
        group_query_attention=groups != heads,
        num_query_groups=groups if groups != heads else None,
        kv_channels=r.get("head_dim", r.get("attention_head_dim", r.need("hidden_size") // heads)),
        normalization="RMSNorm",
        norm_epsilon=float(r.get(norm_key, 1e-5)),
        swiglu=activation == "silu",
        squared_relu=activation == "relu2",
        disable_bias_linear=True,
        seq_length=min(SEQ_LENGTH, r.need("max_position_embeddings")),
        max_position_embeddings=r.need("max_position_embeddings"),
        padded_vocab_size=r.need("vocab_size"),
        make_vocab_size_divisible_by=1,
        untie_embeddings_and_output_weights=not r.get("tie_word_embeddings", False),
        attention_dropout=0.0, hidden_dropout=0.0, bf16=True,
    )  # fmt: skip


def _llama(r: _Reader) -> None:
    _common(r)
    _rope(r)
    for key in ("attention_bias", "mlp_bias"):
        if r.get(key, False):
            raise r.refuse(f"{key} is true")
    if window := r.get("sliding_window"):
        r.put(window_size=f"{window - 1},0")


def _qwen2(r: _Reader) -> None:
    _common(r)
    _rope(r)
    r.put(add_qkv_bias=True)
    if r.get("use_sliding_window", False):
        raise r.refuse("use_sliding_window is true")


def _qwen3(r: _Reader) -> None:
    _qwen2(r)
    del r.args["add-qkv-bias"]
    if r.get("attention_bias", False):
        raise r.refuse("attention_bias is true")
    r.put(qk_layernorm=True)


def _qwen3_moe(r: _Reader) -> None:
    _qwen3(r)
    if not r.get("norm_topk_prob", False):
        r.put(moe_router_pre_softmax=True)
    dense = set(r.get("mlp_only_layers", []))
    step = r.get("decoder_sparse_step", 1)
    _experts(
        r, r.get("num_experts") or r.need("num_local_experts"),  # transformers 5 writes the second name
        [int(i not in dense and (i + 1) % step == 0) for i in range(r.need("num_hidden_layers"))],
    )  # fmt: skip


def _deepseek(r: _Reader) -> None:
    """Multi-head latent attention; V2 routes by softmax, V3 and Kimi-K2 by sigmoid with a bias per expert."""
    _common(r)
    _latent_attention(r)
    v2 = r.data["model_type"] == "deepseek_v2"
    if r.get("scoring_func", "softmax" if v2 else "sigmoid") != ("softmax" if v2 else "sigmoid"):
        raise r.refuse(f"scoring_func is {r.data['scoring_func']!r}")
    if v2 and r.get("topk_method", "greedy") != "greedy":
        raise r.refuse(f"topk_method is {r.data['topk_method']!r}, which scores a group by its best expert")
    if not v2 and not r.get("norm_topk_prob", True):
        raise r.refuse("norm_topk_prob is false")
    layers, dense = r.need("num_hidden_layers"), r.get("first_k_dense_replace", 0 if v2 else 3)
    _experts(r, r.need("n_routed_experts"), [0] * dense + [1] * (layers - dense))
    _shared(r, r.need("moe_intermediate_size") * r.get("n_shared_experts", 0))
    r.put(
        moe_router_score_function="softmax" if v2 else "sigmoid",
        moe_router_pre_softmax=v2 and not r.get("norm_topk_prob", False),
        moe_router_enable_expert_bias=not v2,
    )
    _router_scale_and_groups(r)
    if r.get("num_nextn_predict_layers", 0):
        r.notes.append("the multi-token prediction layer is not imported")


def _llama4(r: _Reader) -> None:
    # intermediate_size is the experts' and the shared expert's, intermediate_size_mlp the dense layers'
    width = r.need("intermediate_size")
    _common(r)
    _rope(r)
    layers, step = r.need("num_hidden_layers"), r.get("interleave_moe_layer_step", 1)
    moe = r.get("moe_layers", list(range(step - 1, layers, step)))
    _experts(r, r.need("num_local_experts"), [int(i in moe) for i in range(layers)], width=width)
    _shared(r, width)
    if r.need("num_experts_per_tok") != 1:
        raise r.refuse("more than one expert per token")
    skips = [int(not rope) for rope in r.get("no_rope_layers", [])] or [int((i + 1) % 4 == 0) for i in range(layers)]
    if r.get("attn_temperature_tuning", True):
        r.notes.append("Megatron-Core has no attention temperature tuning: positions from 8192 on differ")
    if chunk := r.get("attention_chunk_size"):
        r.notes.append(f"Megatron-Core has no chunked attention: sequences longer than {chunk} tokens differ")
    r.put(
        ffn_hidden_size=r.get("intermediate_size_mlp", width),
        qk_l2_norm=r.get("use_qk_norm", True),
        rotary_interleaved=True,
        no_rope_freq=4 if skips == [0, 0, 0, 1] * (layers // 4) else _runs(skips),
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=1.0,
        moe_apply_probs_on_input=True,
    )


def _gpt_oss(r: _Reader) -> None:
    _common(r)
    _rope(r, theta=150000)
    del r.args["swiglu"], r.args["disable-bias-linear"]
    _experts(r, r.need("num_local_experts"), [1] * r.need("num_hidden_layers"), width=r.need("intermediate_size"))
    kinds = r.get("layer_types", [])
    if kinds and kinds != ["sliding_attention", "full_attention"] * (len(kinds) // 2):
        raise r.refuse("the layers do not alternate between sliding and full attention")
    r.put(
        quick_geglu=True, glu_linear_offset=1.0, activation_func_clamp_value=float(r.get("swiglu_limit", 7.0)),
        no_bias_gelu_fusion=True,  # the fused kernel of megatron-core 0.19.2 clamps before it adds the bias
        softmax_type="learnable", window_size=f"{r.get('sliding_window', 128) - 1},0", window_attn_skip_freq=2,
        moe_router_score_function="softmax",
    )  # fmt: skip


def _nemotron(r: _Reader) -> None:
    _common(r, activation="relu2", norm_key="norm_eps")
    _rope(r)
    r.put(normalization="LayerNorm", apply_layernorm_1p=True)
    percent = {**(r.get("rope_parameters", {})), **r.data}.get("partial_rotary_factor", 0.5)
    r.put(rotary_percent=float(percent))


def _nemotron_h(r: _Reader) -> None:
    """Mamba-2, attention without positions, and an MLP or experts, each as a layer of its own."""
    _common(r, activation="relu2", norm_key="layer_norm_epsilon")
    r.args.pop("num-layers", None)  # the pattern says it
    blocks = r.get("layers_block_type", r.get("layer_types", []))
    pattern = r.get("hybrid_override_pattern") or "".join(_LETTERS.get(block, "?") for block in blocks)
    if not pattern or "?" in pattern:
        raise UsageError("config.json has no hybrid_override_pattern, and no layers_block_type with known names")
    if r.get("conv_kernel", 4) != 4:
        raise r.refuse(f"conv_kernel is {r.data['conv_kernel']}")
    for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        if r.get(key, False):
            raise r.refuse(f"{key} is true")
    r.put(
        hybrid_layer_pattern=pattern,
        position_embedding_type="none",
        mamba_num_heads=r.need("mamba_num_heads"), mamba_head_dim=r.need("mamba_head_dim"),
        mamba_num_groups=r.get("n_groups", 8), mamba_state_dim=r.get("ssm_state_size", 128),
    )  # fmt: skip
    if "E" in pattern:
        _experts(r, r.need("n_routed_experts"), [])
        _shared(r, r.get("moe_shared_expert_intermediate_size", 0) * r.get("n_shared_experts", 1))
        r.put(
            moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
            moe_latent_size=r.get("moe_latent_size"),
        )  # fmt: skip
        _router_scale_and_groups(r)
    if r.get("num_nextn_predict_layers", 0):
        r.notes.append("the multi-token prediction layers are not imported")


FAMILIES: dict[str, Callable[[_Reader], None]] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek, "deepseek_v3": _deepseek, "kimi_k2": _deepseek, "llama4_text": _llama4,
    "gpt_oss": _gpt_oss, "nemotron": _nemotron, "nemotron_h": _nemotron_h,
}  # fmt: skip


# --- parts of several families ------------------------------------------------------------


def _rotary(r: _Reader, theta: float = 10000) -> tuple[str, dict[str, Any]]:
    """(type, parameters with rope_theta); transformers 5 writes rope_parameters, 4 rope_scaling and rope_theta."""
    found = {"rope_theta": r.get("rope_theta", theta), **r.get("rope_scaling", {}), **r.get("rope_parameters", {})}
    return str(found.get("rope_type", found.get("type", "default"))), found


def _rope(r: _Reader, theta: float = 10000) -> None:
    kind, found = _rotary(r, theta)
    r.put(position_embedding_type="rope", rotary_base=int(found["rope_theta"]), rotary_percent=1.0)
    if kind == "llama3":
        r.put(use_rope_scaling=True, rope_scaling_factor=float(found["factor"]))
        # core/models/common/embeddings/rotary_pos_embedding.py has these three as constants
        given = [found.get(k) for k in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")]
        if given != [1, 4, 8192]:
            r.notes.append(
                f"the RoPE scaling has low and high frequency factors {given[0]} and {given[1]} over {given[2]} "
                "positions; Megatron-Core's are always 1, 4 and 8192, so that some frequencies differ"
            )
    elif kind == "yarn":
        original = found.get("original_max_position_embeddings", r.need("max_position_embeddings"))
        r.put(
            position_embedding_type="yarn",
            rotary_scaling_factor=float(found["factor"]),
            yarn_original_max_position_embeddings=original,
            yarn_beta_fast=float(found.get("beta_fast", 32)),
            yarn_beta_slow=float(found.get("beta_slow", 1)),
            no_yarn_correction_range_round_to_int=found.get("truncate") is False,
        )
        if found.get("mscale") and found.get("mscale_all_dim"):  # transformers heeds both or neither
            r.put(mscale=float(found["mscale"]), mscale_all_dim=float(found["mscale_all_dim"]))
    elif kind == "linear":
        r.put(rotary_seq_len_interpolation_factor=int(found["factor"]))
    elif kind != "default":
        raise r.refuse(f"the RoPE scaling is {kind!r}")


def _latent_attention(r: _Reader) -> None:
    if r.get("attention_bias", False):
        raise r.refuse("attention_bias is true")
    kind, found = _rotary(r)
    for name in ("group-query-attention", "num-query-groups"):
        r.args.pop(name, None)
    r.put(
        kv_channels=r.need("v_head_dim"),
        multi_latent_attention=True,
        q_lora_rank=r.get("q_lora_rank"),
        kv_lora_rank=r.need("kv_lora_rank"),
        qk_head_dim=r.need("qk_nope_head_dim"),
        qk_pos_emb_head_dim=r.need("qk_rope_head_dim"),
        v_head_dim=r.need("v_head_dim"),
        qk_layernorm=True,
        position_embedding_type="rope",
        rotary_base=int(found["rope_theta"]),
        rotary_percent=1.0,
    )
    if kind == "default":
        r.put(rope_type="rope")
        return
    if kind != "yarn":
        raise r.refuse(f"the RoPE scaling is {kind!r}")
    r.put(
        rope_type="yarn",
        rotary_scaling_factor=float(found["factor"]),
        mscale=float(found.get("mscale", 1.0)),
        mscale_all_dim=float(found.get("mscale_all_dim", 0.0)),
    )
    # no argument reaches these three fields of MLATransformerConfig
    r.config["beta_fast"] = _text(float(found.get("beta_fast", 32)))
    r.config["beta_slow"] = _text(float(found.get("beta_slow", 1)))
    r.config["original_max_position_embeddings"] = _text(int(found.get("original_max_position_embeddings", 4096)))


def _experts(r: _Reader, count: int, moe_layers: list[int], width: int | None = None) -> None:
    r.put(
        num_experts=count,
        moe_layer_freq=_runs(moe_layers) if 0 in moe_layers else None,
        moe_ffn_hidden_size=width or r.need("moe_intermediate_size"),
        moe_router_topk=r.need("num_experts_per_tok"),
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
    )


def _shared(r: _Reader, width: int) -> None:
    r.put(moe_shared_expert_intermediate_size=width or None)


def _router_scale_and_groups(r: _Reader) -> None:
    if r.get("n_group", 1) > 1:
        r.put(moe_router_num_groups=r.data["n_group"], moe_router_group_topk=r.need("topk_group"))
    if (scale := float(r.get("routed_scaling_factor", 1.0))) != 1.0:
        r.put(moe_router_topk_scaling_factor=scale)


def _runs(flags: list[int]) -> str:
    """`[0]*3+[1]*58`, Megatron's way to write a list of layers."""
    if flags[:2] * (len(flags) // 2) == flags and flags[:1] != flags[1:2]:
        return f"[{flags[0]},{flags[1]}]*{len(flags) // 2}"
    parts: list[tuple[int, int]] = []
    for flag in flags:
        if parts and parts[-1][0] == flag:
            parts[-1] = (flag, parts[-1][1] + 1)
        else:
            parts.append((flag, 1))
    return "+".join(f"[{flag}]*{count}" for flag, count in parts)


def _source_format(quantization: object) -> str:
    if not quantization:
        return "bf16"
    found = quantization if isinstance(quantization, Mapping) else {}
    if found.get("quant_method") == "fp8" and list(found.get("weight_block_size") or []) == [128, 128]:
        return "fp8_block"
    if found.get("quant_method") == "mxfp4":
        return "mxfp4"
    raise UsageError(
        f"config.json: the checkpoint is quantized by {found.get('quant_method', quantization)!r}, which the importer "
        "does not read",
        fix="start from the bf16, FP8-block or MXFP4 checkpoint",
    )


def _text(value: object) -> str:
    if value is True:
        return "true"
    mantissa, e, exponent = str(value).partition("e")
    return f"{mantissa}.0e{exponent}" if e and isinstance(value, float) and "." not in mantissa else str(value)
