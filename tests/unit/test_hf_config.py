"""A model conf from a config.json: facts of public models, the classes of transformers, and what is refused.

SOURCES name where each config was read; the dicts hold the fields that describe the architecture, written anew.
"""

# ruff: noqa: C408 (fields of a config read best as keywords)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlmsub.app import confs
from mlmsub.core import hf_config, modelconf
from mlmsub.core.architecture import read as read_architecture
from mlmsub.core.errors import UsageError

AICONFIGURATOR = (
    "its config.json in ai-dynamo/aiconfigurator at 095f58a, aic-core/src/aiconfigurator_core/model_configs"
)
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge at 067f987"
BRIDGE_H = "the model's provider in NVIDIA-NeMo/Megatron-Bridge at 160cccc, models/nemotronh/nemotron_h_provider.py"

LLAMA = dict(
    model_type="llama", hidden_act="silu", num_key_value_heads=8, rms_norm_eps=1e-05, rope_theta=500000.0,
    rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=8192, rope_type="llama3"),
    attention_bias=False, mlp_bias=False, max_position_embeddings=131072, vocab_size=128256,
    tie_word_embeddings=False,
)  # fmt: skip
QWEN2 = dict(
    model_type="qwen2", hidden_act="silu", rms_norm_eps=1e-06, rope_theta=1000000.0, max_position_embeddings=32768,
    use_sliding_window=False,
)  # fmt: skip
QWEN3 = dict(
    QWEN2, model_type="qwen3", head_dim=128, max_position_embeddings=40960, vocab_size=151936, rope_scaling=None,
    attention_bias=False, sliding_window=None,
)  # fmt: skip
QWEN3_MOE = dict(
    QWEN3, model_type="qwen3_moe", num_experts=128, num_experts_per_tok=8, num_key_value_heads=4, norm_topk_prob=True,
    decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False,
)  # fmt: skip
FP8 = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128], activation_scheme="dynamic")
DEEPSEEK_V3 = dict(
    model_type="deepseek_v3", hidden_act="silu", hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
    num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    moe_intermediate_size=2048, first_k_dense_replace=3, n_group=8, topk_group=4, topk_method="noaux_tc",
    scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5, num_nextn_predict_layers=1,
    rms_norm_eps=1e-06, rope_theta=10000, max_position_embeddings=163840, vocab_size=129280,
    rope_scaling=dict(type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
                      original_max_position_embeddings=4096),
    tie_word_embeddings=False, attention_bias=False, quantization_config=FP8,
)  # fmt: skip
LLAMA4 = dict(
    model_type="llama4_text", hidden_act="silu", hidden_size=5120, intermediate_size=8192, intermediate_size_mlp=16384,
    num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, head_dim=128, num_experts_per_tok=1,
    attention_chunk_size=8192, rms_norm_eps=1e-05, rope_theta=500000.0, vocab_size=202048,
)  # fmt: skip
GPT_OSS = dict(
    model_type="gpt_oss", hidden_act="silu", hidden_size=2880, intermediate_size=2880, num_attention_heads=64,
    num_key_value_heads=8, head_dim=64, num_experts_per_tok=4, sliding_window=128, swiglu_limit=7.0,
    attention_bias=True, rms_norm_eps=1e-05, rope_theta=150000, max_position_embeddings=131072, vocab_size=201088,
    rope_scaling=dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                      original_max_position_embeddings=4096),
    tie_word_embeddings=False, quantization_config=dict(quant_method="mxfp4"),
)  # fmt: skip
NEMOTRON_H = dict(
    model_type="nemotron_h", mlp_hidden_act="relu2", head_dim=128, layer_norm_epsilon=1e-05, mamba_head_dim=64,
    n_groups=8, ssm_state_size=128, conv_kernel=4, num_key_value_heads=8, vocab_size=131072,
    max_position_embeddings=8192, use_bias=False, attention_bias=False, mlp_bias=False, mamba_proj_bias=False,
    tie_word_embeddings=False,
)  # fmt: skip
NEMOTRON_3 = dict(
    NEMOTRON_H, num_key_value_heads=2, max_position_embeddings=262144, n_shared_experts=1, n_group=1, topk_group=1,
    norm_topk_prob=True,
)  # fmt: skip
H_52 = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NANO_V2 = dict(
    NEMOTRON_H, hidden_size=4480, intermediate_size=15680, num_attention_heads=40, mamba_num_heads=128,
    mamba_head_dim=80, max_position_embeddings=131072,
    hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
)  # fmt: skip
_ULTRA = "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_BLOCKS = {"M": "mamba", "E": "moe", "*": "attention"}


def llama(hidden: int, ffn: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return dict(
        LLAMA, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads, **more
    )


def sized(base: dict[str, Any], hidden: int, ffn: int, layers: int, heads: int, groups: int, **more: Any) -> dict:
    return {
        **base, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, **more,
    }  # fmt: skip


FACTS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": llama(4096, 14336, 32, 32),
    "meta-llama/Llama-3.1-405B-Instruct": llama(16384, 53248, 126, 128),
    "meta-llama/Llama-3.2-1B-Instruct": {
        **llama(2048, 8192, 16, 32, head_dim=64),
        "tie_word_embeddings": True,
        "rope_scaling": dict(LLAMA["rope_scaling"], factor=32.0),
    },
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": dict(
        LLAMA4, num_local_experts=16, interleave_moe_layer_step=1, use_qk_norm=True, max_position_embeddings=10485760,
        rope_scaling=dict(factor=16.0, high_freq_factor=1.0, low_freq_factor=1.0,
                          original_max_position_embeddings=8192, rope_type="llama3"),
    ),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": dict(
        LLAMA4, num_local_experts=128, interleave_moe_layer_step=2, use_qk_norm=False, max_position_embeddings=1048576,
        rope_scaling=None,
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": sized(QWEN2, 896, 4864, 24, 14, 2, vocab_size=151936, tie_word_embeddings=True),
    "Qwen/Qwen2.5-7B-Instruct": sized(QWEN2, 3584, 18944, 28, 28, 4, vocab_size=152064, tie_word_embeddings=False),
    "Qwen/Qwen3-0.6B": sized(QWEN3, 1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "Qwen/Qwen3-8B": sized(QWEN3, 4096, 12288, 36, 32, 8, tie_word_embeddings=False),
    "Qwen/Qwen3-30B-A3B": sized(QWEN3_MOE, 2048, 6144, 48, 32, 4, moe_intermediate_size=768),
    "Qwen/Qwen3-235B-A22B": sized(QWEN3_MOE, 4096, 12288, 94, 64, 4, moe_intermediate_size=1536),
    "deepseek-ai/DeepSeek-R1": DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-V2-Lite": {
        **DEEPSEEK_V3, "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0, "vocab_size": 102400,
        "rope_scaling": dict(DEEPSEEK_V3["rope_scaling"], mscale=0.707, mscale_all_dim=0.707),
        "quantization_config": None,
    },
    "moonshotai/Kimi-K2-Instruct": {
        **DEEPSEEK_V3, "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64,
        "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
        "max_position_embeddings": 131072, "vocab_size": 163840,
        "rope_scaling": dict(DEEPSEEK_V3["rope_scaling"], factor=32.0, beta_fast=1.0, beta_slow=1.0),
    },
    "openai/gpt-oss-20b": dict(
        GPT_OSS, num_hidden_layers=24, num_local_experts=32, layer_types=["sliding_attention", "full_attention"] * 12
    ),
    "openai/gpt-oss-120b": dict(
        GPT_OSS, num_hidden_layers=36, num_local_experts=128, layer_types=["sliding_attention", "full_attention"] * 18
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": dict(
        NEMOTRON_3, hidden_size=2688, intermediate_size=1856, num_hidden_layers=52, num_attention_heads=32,
        mamba_num_heads=64, n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712, routed_scaling_factor=2.5,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": dict(
        NEMOTRON_3, hidden_size=4096, intermediate_size=2688, num_hidden_layers=88, num_attention_heads=32,
        mamba_num_heads=128, n_routed_experts=512, num_experts_per_tok=22, moe_intermediate_size=2688,
        moe_shared_expert_intermediate_size=5376, routed_scaling_factor=5.0, moe_latent_size=1024,
        num_nextn_predict_layers=1,
        hybrid_override_pattern="MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    ),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": dict(
        NEMOTRON_3, hidden_size=8192, intermediate_size=5120, num_attention_heads=64, mamba_num_heads=256,
        n_routed_experts=512, num_experts_per_tok=22, moe_intermediate_size=5120,
        moe_shared_expert_intermediate_size=10240, routed_scaling_factor=5.0, moe_latent_size=2048,
        num_nextn_predict_layers=1, layers_block_type=[_BLOCKS[letter] for letter in _ULTRA],
    ),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": NANO_V2,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2-Base": NANO_V2,
    "nvidia/Nemotron-H-4B-Instruct": dict(
        NEMOTRON_H, hidden_size=3072, intermediate_size=12288, num_attention_heads=32, mamba_num_heads=112,
        hybrid_override_pattern=H_52,
    ),
    "nvidia/Nemotron-H-8B-Base-8K": dict(
        NEMOTRON_H, hidden_size=4096, intermediate_size=21504, num_attention_heads=32, mamba_num_heads=128,
        hybrid_override_pattern=H_52,
    ),
    "nvidia/Nemotron-H-47B-Reasoning-128K": dict(
        NEMOTRON_H, hidden_size=8192, intermediate_size=30720, num_attention_heads=64, mamba_num_heads=256,
        ssm_state_size=256,
        hybrid_override_pattern="M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*"
        "-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
    ),
    "nvidia/Nemotron-H-56B-Base-8K": dict(
        NEMOTRON_H, hidden_size=8192, intermediate_size=32768, num_attention_heads=64, mamba_num_heads=256,
        ssm_state_size=256, num_hidden_layers=118, head_dim=None, attention_head_dim=128,
        hybrid_override_pattern="M-M-M-M*" + "-M-M-M-M-M*" * 9 + "-M-M-M-M-M-",
    ),
    "nvidia/Nemotron-Mini-4B-Instruct": dict(
        model_type="nemotron", hidden_act="relu2", hidden_size=3072, intermediate_size=9216, num_hidden_layers=32,
        num_attention_heads=24, num_key_value_heads=8, head_dim=128, norm_eps=1e-05, rope_theta=10000.0,
        partial_rotary_factor=0.5, max_position_embeddings=4096, vocab_size=256000, tie_word_embeddings=False,
    ),
}  # fmt: skip

SOURCES = {
    **dict.fromkeys(FACTS, AICONFIGURATOR),
    "meta-llama/Llama-3.1-8B-Instruct": AICONFIGURATOR.replace("its", "the base model's"),
    "meta-llama/Llama-3.1-405B-Instruct": AICONFIGURATOR.replace("its", "the base model's"),
    "meta-llama/Llama-3.2-1B-Instruct": f"the model's config in {BRIDGE}, unit_tests/models/llama/test_llama_bridge.py",
    "Qwen/Qwen2.5-0.5B-Instruct": f"the model's provider in {BRIDGE.replace('067f987', 'fb8a4d6')}, "
    "models/qwen/qwen_provider.py",
    "Qwen/Qwen2.5-7B-Instruct": "its config.json in NVIDIA/Fuser at 3515140, benchmarks/python/rope_ops.py",
    "deepseek-ai/DeepSeek-V2-Lite": "its config.json in mlc-ai/pith-train at 5ac3a99, "
    "examples/pretrain_lm/deepseek-v2-lite, its YaRN from a printed config of the Chat model",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": AICONFIGURATOR.replace("its", "the FP8 model's"),
    **dict.fromkeys((name for name in FACTS if "Nano-9B-v2" in name or "Nemotron-H-" in name), BRIDGE_H),
    "nvidia/Nemotron-H-56B-Base-8K": AICONFIGURATOR,
    "nvidia/Nemotron-Mini-4B-Instruct": "",
}

# what the models are called after, or what their publishers say, in 1e9 parameters
SIZES = {
    "deepseek-ai/DeepSeek-R1": 671, "deepseek-ai/DeepSeek-V2-Lite": 15.7, "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "meta-llama/Llama-3.1-405B-Instruct": 405.9, "meta-llama/Llama-3.2-1B-Instruct": 1.24,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 107.8, "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 400.7,
    "moonshotai/Kimi-K2-Instruct": 1026, "openai/gpt-oss-20b": 20.9, "openai/gpt-oss-120b": 116.8,
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494, "Qwen/Qwen2.5-7B-Instruct": 7.62, "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-8B": 8.19, "Qwen/Qwen3-30B-A3B": 30.5, "Qwen/Qwen3-235B-A22B": 235.1,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6, "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": 120.7,
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": 549, "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 8.89,
    "nvidia/Nemotron-H-8B-Base-8K": 8.1, "nvidia/Nemotron-H-56B-Base-8K": 56.3,
    "nvidia/Nemotron-H-47B-Reasoning-128K": 46.8, "nvidia/Nemotron-Mini-4B-Instruct": 4.19,
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_the_conf_has_the_models_number_of_parameters(name: str) -> None:
    shape = read_architecture(hf_config.convert(FACTS[name], name).megatron_args)
    assert shape is not None
    assert shape.parameters / 1e9 == pytest.approx(SIZES[name], rel=0.005)


def args(name: str, **changed: Any) -> dict[str, str]:
    return hf_config.convert({**FACTS[name], **changed}, name).megatron_args


# --- what each family says --------------------------------------------------------------


def test_kimis_rope_reaches_the_fields_that_no_argument_sets() -> None:
    conf = hf_config.convert(FACTS["moonshotai/Kimi-K2-Instruct"], "k")
    assert conf.config == {"beta_fast": "1.0", "beta_slow": "1.0", "original_max_position_embeddings": "4096"}
    assert conf.megatron_args["rotary-scaling-factor"] == "32.0"
    assert conf.megatron_args["moe-layer-freq"] == "[0]*1+[1]*60"
    assert (conf.source_format, conf.trust_remote_code, conf.family) == ("fp8_block", True, "kimi_k2")


def test_llama_3_2_scales_rope_by_its_own_factor() -> None:
    assert args("meta-llama/Llama-3.2-1B-Instruct")["rope-scaling-factor"] == "32.0"
    assert "untie-embeddings-and-output-weights" not in args("meta-llama/Llama-3.2-1B-Instruct")


def test_both_ways_to_write_rope_mean_the_same() -> None:
    old = FACTS["meta-llama/Llama-3.1-8B-Instruct"]
    new = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
    assert hf_config.convert(new, "m") == hf_config.convert(old, "m")


def test_qwen_families_differ_in_bias_and_norms() -> None:
    qwen2, qwen3 = args("Qwen/Qwen2.5-7B-Instruct"), args("Qwen/Qwen3-8B")
    assert "add-qkv-bias" in qwen2 and "qk-layernorm" not in qwen2
    assert "add-qkv-bias" not in qwen3 and "qk-layernorm" in qwen3
    assert qwen2["norm-epsilon"] == qwen3["norm-epsilon"] == "1.0e-06"


def test_experts_whose_weights_are_not_normalized_take_softmax_first() -> None:
    assert "moe-router-pre-softmax" not in args("Qwen/Qwen3-30B-A3B")
    assert "moe-router-pre-softmax" in args("Qwen/Qwen3-30B-A3B", norm_topk_prob=False)
    assert "moe-router-pre-softmax" in args("deepseek-ai/DeepSeek-V2-Lite")


def test_llama_4_has_its_layers_and_its_limits() -> None:
    maverick, scout = (args(f"meta-llama/Llama-4-{name}-Instruct") for name in ("Maverick-17B-128E", "Scout-17B-16E"))
    assert maverick["moe-layer-freq"] == "[0,1]*24" and "moe-layer-freq" not in scout
    assert (maverick["ffn-hidden-size"], maverick["moe-ffn-hidden-size"]) == ("16384", "8192")
    assert scout["no-rope-freq"] == maverick["no-rope-freq"] == "4"
    assert "qk-l2-norm" in scout and "qk-l2-norm" not in maverick
    notes = hf_config.convert(FACTS["meta-llama/Llama-4-Scout-17B-16E-Instruct"], "m").notes
    assert any("frequency factors 1.0 and 1.0" in note for note in notes)


def test_a_multimodal_config_holds_the_language_model_inside() -> None:
    inner = FACTS["meta-llama/Llama-4-Scout-17B-16E-Instruct"]
    outer = {"model_type": "llama4", "text_config": inner, "vision_config": {"hidden_size": 1}}
    assert hf_config.convert(outer, "m") == hf_config.convert(inner, "m")


def test_gpt_oss_has_windows_sinks_and_yarn() -> None:
    found = args("openai/gpt-oss-20b")
    assert found["window-size"] == "127,0" and found["softmax-type"] == "learnable"
    assert found["position-embedding-type"] == "yarn" and "no-yarn-correction-range-round-to-int" in found
    assert not {"swiglu", "disable-bias-linear"} & set(found)


def test_a_hybrid_pattern_is_read_in_both_notations() -> None:
    assert args("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16")["hybrid-layer-pattern"] == _ULTRA
    assert "num-experts" not in args("nvidia/Nemotron-H-8B-Base-8K", n_routed_experts=8)
    assert args("nvidia/Nemotron-H-8B-Base-8K")["position-embedding-type"] == "none"


# --- what is refused ----------------------------------------------------------------------


def test_an_unknown_family_lists_the_known() -> None:
    with pytest.raises(UsageError, match="'qwen3_moee'; did you mean 'qwen3_moe'") as caught:
        hf_config.convert({"model_type": "qwen3_moee"}, "m")
    assert "deepseek_v3" in caught.value.fix and "nemotron_h" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("Qwen/Qwen3-8B", dict(hidden_size=None), "no 'hidden_size'"),
        ("Qwen/Qwen3-8B", dict(hidden_act="gelu"), "'gelu'"),
        ("Qwen/Qwen3-8B", dict(rope_scaling=dict(rope_type="dynamic", factor=2)), "'dynamic'"),
        ("Qwen/Qwen2.5-7B-Instruct", dict(use_sliding_window=True), "use_sliding_window"),
        ("meta-llama/Llama-3.1-8B-Instruct", dict(mlp_bias=True), "mlp_bias"),
        ("meta-llama/Llama-3.1-8B-Instruct", dict(quantization_config=dict(quant_method="awq")), "'awq'"),
        ("deepseek-ai/DeepSeek-V2-Lite", dict(topk_method="group_limited_greedy"), "group_limited_greedy"),
        ("deepseek-ai/DeepSeek-R1", dict(scoring_func="softmax"), "scoring_func"),
        ("nvidia/Nemotron-H-8B-Base-8K", dict(hybrid_override_pattern=None), "hybrid_override_pattern"),
    ],
)
def test_what_megatron_lacks_is_refused_by_name(name: str, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        args(name, **changed)


# --- transformers' own classes, and files -------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name in FACTS if FACTS[name]["model_type"] not in ("kimi_k2", "llama4_text")]
)
def test_what_transformers_makes_of_the_config_gives_the_same_conf(name: str) -> None:
    """transformers 5 reads the published fields, renames some, fills in its defaults, and writes them as its own."""
    transformers = pytest.importorskip("transformers", minversion="5")
    facts = {key: value for key, value in FACTS[name].items() if value is not None or key == "q_lora_rank"}
    made = transformers.AutoConfig.for_model(**facts).to_dict()
    made["quantization_config"] = FACTS[name].get("quantization_config")
    got, want = hf_config.convert(made, name), hf_config.convert(FACTS[name], name)
    assert got.megatron_args == want.megatron_args
    assert got.config == want.config


def test_a_file_becomes_a_conf_that_reads_back(tmp_path: Path) -> None:
    folder = tmp_path / "org" / "DeepSeek-R1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(FACTS["deepseek-ai/DeepSeek-R1"]))
    text = confs.from_hf(folder, "")
    confs.write(tmp_path / "made.yaml", text)
    assert [issue.code for issue in confs.check("made.yaml", tmp_path)] == ["conf-unverified"]
    assert text == modelconf.render(hf_config.convert(FACTS["deepseek-ai/DeepSeek-R1"], "DeepSeek-R1"))
    with pytest.raises(UsageError, match="exists"):
        confs.write(tmp_path / "made.yaml", text)


@pytest.mark.parametrize(("content", "said"), [(None, "cannot read"), ("{", "not JSON"), ("[]", "mapping")])
def test_a_bad_file_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=said):
        confs.from_hf(tmp_path / "config.json", "m")


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "4096"}, {"num_attention_heads": 0}, {"num_hidden_layers": -2}, {"num_hidden_layers": 32.5},
        {"num_hidden_layers": True}, {"rms_norm_eps": float("inf")}, {"rope_theta": float("nan")},
        {"rope_scaling": "yarn"}, {"rope_scaling": {"rope_type": "llama3"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_field_of_another_kind_is_a_message_and_no_traceback(change: dict[str, object]) -> None:
    data = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    }  # fmt: skip
    hf_config.convert(data, "a/b")
    with pytest.raises(UsageError, match=r"config\.json"):
        hf_config.convert(data | change, "a/b")
