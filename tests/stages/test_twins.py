"""Per family: a tiny random model in float32, its conf made by core/hf_config, Megatron's logits against transformers'.

A twin has every trait of its family that the conf must say: grouped heads, biases, per-head norms, the RoPE scaling,
dense and expert layers, router scale and bias. Norms, biases and the router's correction are random too, since at
their initial values they would hide a missing one. A wrong conf is far off: in float32 only the order of sums differs.
"""

# ruff: noqa: C408 (fields of a config read best as keywords)

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from rig import MODEL, ROOT, Runner, logits

from mlmsub.core import hf_config, modelconf
from mlmsub.core.megatron_arguments import NAMES
from mlmsub.runtime.errors import StageError

IDS = torch.randint(0, 500, (2, 300), generator=torch.Generator().manual_seed(5))
CONFS = sorted((ROOT / "conf").glob("*/*.yaml"))

SMALL = dict(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024, rms_norm_eps=1e-3, tie_word_embeddings=False,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=50000.0, factor=32.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
    original_max_position_embeddings=64,
)  # fmt: skip
LATENT = dict(
    SMALL, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=16,
    v_head_dim=24, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32,
    first_k_dense_replace=1, max_position_embeddings=2048,
    rms_norm_eps=1e-6,  # transformers' norms of the low-rank projections have 1e-6 whatever the config says
)  # fmt: skip
V3 = dict(LATENT, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.827)

# family: (transformers' config class, what makes the twin)
TWINS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", dict(SMALL)),
    "llama-3.2": ("LlamaConfig", dict(SMALL, head_dim=32, max_position_embeddings=131072, rope_parameters=LLAMA3)),
    "llama-tied": (
        "LlamaConfig",
        dict(SMALL, tie_word_embeddings=True, max_position_embeddings=131072, rope_parameters=dict(LLAMA3, factor=8.0)),
    ),
    "qwen2": ("Qwen2Config", dict(SMALL)),
    "qwen3": ("Qwen3Config", dict(SMALL, head_dim=32)),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        dict(SMALL, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
    ),
    "qwen3-moe-mixed": (
        "Qwen3MoeConfig",
        dict(SMALL, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[1],
             norm_topk_prob=True),
    ),
    "deepseek-v2-lite": (
        "DeepseekV2Config",
        dict(LATENT, q_lora_rank=None, n_shared_experts=2, topk_method="greedy", norm_topk_prob=False,
             rope_parameters=dict(YARN, factor=40, beta_fast=32.0, mscale=0.707, mscale_all_dim=0.707)),
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        dict(V3, n_group=4, topk_group=2, num_experts_per_tok=4, routed_scaling_factor=2.5,
             rope_parameters=dict(YARN, factor=40, beta_fast=32.0, rope_theta=10000.0)),
    ),
    "deepseek-v3-plain-rope": ("DeepseekV3Config", dict(V3)),
    "kimi-k2": ("DeepseekV3Config", dict(V3, rope_parameters=YARN)),
}  # fmt: skip

LLAMA4 = dict(
    SMALL, num_hidden_layers=4, head_dim=32, intermediate_size=32, intermediate_size_mlp=128, num_local_experts=4,
    num_experts_per_tok=1, interleave_moe_layer_step=1, use_qk_norm=True, max_position_embeddings=131072,
    rope_parameters=dict(LLAMA3, factor=16.0), initializer_range=0.12,
)  # fmt: skip
EYE = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14,
    vision_output_dim=32, projector_input_dim=32, projector_output_dim=32,
)  # fmt: skip

TWINS["llama4-scout"] = ("Llama4Config", LLAMA4)
TWINS["llama4-no-qk-norm"] = ("Llama4Config", dict(LLAMA4, use_qk_norm=False))

GPT_OSS = dict(
    SMALL, num_hidden_layers=4, head_dim=32, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2,
    sliding_window=16, max_position_embeddings=4096,
    rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0,
                         truncate=False, original_max_position_embeddings=128),
)  # fmt: skip

NOT_HERE = {
    "nemotron": "ModelOpt 0.47 cannot import NemotronForCausalLM",
    "nemotron-h": "Megatron's Mamba layers need mamba-ssm, whose kernels are CUDA's; mlmsub's stages build no hybrids",
}


def make(folder: Path, kind: str, values: dict) -> torch.nn.Module:
    """Write a random model of this config in float32; returns it."""
    import transformers

    torch.manual_seed(3)
    if kind == "Llama4Config":
        config = transformers.Llama4Config(text_config=values, vision_config=EYE)
        made = transformers.Llama4ForConditionalGeneration._from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    else:
        config = getattr(transformers, kind)(initializer_range=0.12, **values)
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
            if kind == "Llama4Config" and "experts" in name:
                tensor.normal_(0, 0.12)  # transformers leaves them empty
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "e_score_correction_bias")):
                tensor.uniform_(-0.3, 0.3)
    made.save_pretrained(folder)
    return made.eval()


@contextmanager
def opened(tmp_path: Path, source: Path, change: dict[str, str] | None = None) -> Iterator:
    """A session on the twin in `source`, with the conf that hf_config makes of its config.json."""
    from mlmsub.runtime.env import Env
    from mlmsub.runtime.progress import Steps
    from mlmsub.runtime.session import Job, start

    conf = hf_config.convert(json.loads((source / "config.json").read_text()), MODEL)
    conf.megatron_args["seq-length"] = "512"
    conf.config.update(change or {})
    (tmp_path / "model.yaml").write_text(modelconf.render(conf))
    runner = Runner(tmp_path / "runs", tmp_path / "model.yaml")
    extra = "--moe-token-dispatcher-type allgather"  # the other one wants CUDA streams
    variables = runner.environment(runner.run_dir(), {"HF_MODEL_CKPT": source, "MLM_EXTRA_ARGS": extra})
    with mock.patch.dict(os.environ, variables, clear=True):
        job = Job("quantize", MODEL, [], Env(), Steps())
        with start(job, job.conf(), job.env.layout(), lambda parser: None, []) as session:
            yield session


def ours(tmp_path: Path, source: Path, dtype: torch.dtype, change: dict[str, str] | None = None) -> torch.Tensor:
    """Megatron's logits of the twin."""
    from mlmsub.runtime.checkpoints import hf_import
    from mlmsub.runtime.models import model

    with opened(tmp_path, source, change) as session:
        session.args.bf16, session.args.params_dtype = dtype == torch.bfloat16, dtype
        made = model.build(session.args, session.conf, "cpu")
        hf_import.import_weights(made, source, session.conf, dtype)
        return logits(made, IDS)


def theirs(made: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return made(IDS).logits.float()


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0))


@pytest.mark.parametrize("name", TWINS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind, values = TWINS[name]
    reference = make(tmp_path / "hf", kind, values)
    if kind == "DeepseekV2Config":
        _scale_as_deepseek_does(reference)
    got, want = ours(tmp_path, tmp_path / "hf", torch.float32), theirs(reference)
    assert want.std() > 0.3, "flat logits compare nothing"
    assert cosine(got, want) > 1 - 1e-6
    assert torch.allclose(got, want, atol=2e-3), float((got - want).abs().max())


def _scale_as_deepseek_does(made: torch.nn.Module) -> None:
    """DeepSeek's own V2 code multiplies the softmax scale by mscale squared; transformers' port leaves it out."""
    import math

    scale = 0.1 * 0.707 * math.log(40) + 1
    for layer in made.model.layers:
        layer.self_attn.scaling *= scale**2


@pytest.mark.parametrize("scales", [{}, dict(mscale=0.7, mscale_all_dim=1.0)], ids=["published", "with-mscale"])
def test_gpt_oss_logits_are_those_of_transformers(scales: dict, tmp_path: Path) -> None:
    reference = make(
        tmp_path / "hf", "GptOssConfig", dict(GPT_OSS, rope_parameters={**GPT_OSS["rope_parameters"], **scales})
    )
    _store_as_mxfp4(reference, tmp_path / "hf" / "model.safetensors")
    got, want = ours(tmp_path, tmp_path / "hf", torch.float32), theirs(reference)
    assert cosine(got, want) > 1 - 1e-6
    assert torch.allclose(got, want, atol=2e-3), float((got - want).abs().max())


def _store_as_mxfp4(made: torch.nn.Module, file: Path) -> None:
    """Give the experts random MXFP4 weights, in the model and, as blocks and scales, in the file (OCP MX v1.0)."""
    from safetensors.torch import load_file, save_file

    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # e2m1
    values, random = torch.tensor(half + [-value for value in half]), torch.Generator().manual_seed(7)
    stored = load_file(file)
    for index, layer in enumerate(made.model.layers):
        stored[f"model.layers.{index}.self_attn.sinks"] = layer.self_attn.sinks.detach().uniform_(-1, 1).clone()
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name).detach()  # [experts, in, out]; the file has [experts, out, in]
            shape = (weight.shape[0], weight.shape[2], weight.shape[1] // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
            scales = torch.randint(122, 125, shape, dtype=torch.uint8, generator=random)
            pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], -1).flatten(-2)
            weight.copy_((pairs * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2))
            key = f"model.layers.{index}.mlp.experts.{name}"
            del stored[key]
            stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    save_file(stored, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", NOT_HERE)
def test_families_that_cannot_run_here(name: str) -> None:
    pytest.skip(NOT_HERE[name])


def test_kimis_beta_fast_decides(tmp_path: Path) -> None:
    """What the reference's conf leaves at 32; the difference is no rounding."""
    reference = make(tmp_path / "hf", *TWINS["kimi-k2"])
    got = ours(tmp_path, tmp_path / "hf", torch.float32, {"beta_fast": "32.0"})
    assert cosine(got, theirs(reference)) < 0.99


# --- what mlmsub's runtime mends in the libraries: each fails when a library no longer needs it ---


def test_megatron_drops_the_rope_factor(tmp_path: Path) -> None:
    from megatron.training.argument_utils import gpt_config_from_args

    make(tmp_path / "hf", *TWINS["llama-3.2"])
    with opened(tmp_path, tmp_path / "hf") as session:
        assert session.args.rope_scaling_factor == 32.0
        assert gpt_config_from_args(session.args).rope_scaling_factor == 8.0


def test_megatron_refuses_latent_attention_with_full_rank_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from mlmsub.runtime.models import attention

    make(tmp_path / "hf", *TWINS["deepseek-v2-lite"])
    monkeypatch.setattr(attention, "FullRankMLASelfAttention", MLASelfAttention)
    with pytest.raises(RuntimeError, match="qk_layernorm requires"):
        ours(tmp_path, tmp_path / "hf", torch.float32)


def test_megatron_norms_queries_of_layers_without_rope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlmsub.runtime.models import model

    reference = make(tmp_path / "hf", *TWINS["llama4-scout"])
    monkeypatch.setattr(model, "_without_l2_norm", lambda layer: layer)
    assert cosine(ours(tmp_path, tmp_path / "hf", torch.float32), theirs(reference)) < 0.9999


def test_megatrons_fused_activation_clamps_too_early() -> None:
    from megatron.core.fusions.fused_bias_geglu import weighted_bias_quick_geglu_impl

    half, bias, one = torch.full((1, 2), 7.0), torch.full((2,), 7.0), torch.ones(1, 1)
    fused = weighted_bias_quick_geglu_impl(half, bias, one, False, 0.0, 7.0)
    clamped = weighted_bias_quick_geglu_impl(half, torch.zeros(2), one, False, 0.0, 7.0)
    assert not torch.equal(fused, clamped), "clamped after the bias, 14 is 7 again: take no-bias-gelu-fusion out"


def test_kimi_in_bf16_differs_by_rounding_alone(tmp_path: Path) -> None:
    """With many experts a rounded score picks another expert: transformers in bf16 is as far from its own float32."""
    from transformers import AutoModelForCausalLM

    values = dict(V3, rope_parameters=YARN, num_hidden_layers=6, n_routed_experts=32, num_experts_per_tok=8)
    exact = make(tmp_path / "hf", "DeepseekV3Config", values)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16, attn_implementation="eager")
    want = theirs(exact)
    for folder in ("fp32", "bf16"):
        (tmp_path / folder).mkdir()
    assert cosine(ours(tmp_path / "fp32", tmp_path / "hf", torch.float32), want) > 1 - 1e-6
    error = 1 - cosine(ours(tmp_path / "bf16", tmp_path / "hf", torch.bfloat16), want)
    assert 1e-3 < error < 1.5 * (1 - cosine(theirs(rounded.eval()), want))


def test_mavericks_dense_layers_cannot_be_imported(tmp_path: Path) -> None:
    """Why its conf says so; when this fails, take the stages out of its `unsupported`."""
    make(tmp_path / "hf", "Llama4Config", dict(LLAMA4, interleave_moe_layer_step=2, use_qk_norm=False))
    with pytest.raises(StageError, match="linear_fc1"):
        ours(tmp_path, tmp_path / "hf", torch.float32)


@pytest.mark.parametrize("file", CONFS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_megatron_takes_every_conf(file: Path, tmp_path: Path) -> None:
    """Megatron's parser and validation accept the conf's arguments, and its config has the conf's fields."""
    from mlmsub.runtime import megatron_args
    from mlmsub.runtime import modelconf as runtime_conf
    from mlmsub.runtime.env import Env, Layout
    from mlmsub.runtime.models import model

    model.prepare()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "model.yaml").write_bytes(file.read_bytes())
    conf = runtime_conf.load(Env({"MLMSUB_RUN_DIR": str(tmp_path)}), "m")
    words = ["--micro-batch-size", "1", "--vocab-size", "1000", "--tokenizer-type", "NullTokenizer"]
    args = megatron_args.parse(conf, Layout(), words, lambda parser: None, [])
    config = megatron_args.transformer_config(args, conf)
    for name, value in conf.config.items():
        assert getattr(config, name) == value


def test_the_list_of_argument_names_is_megatrons() -> None:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found = {flag[2:] for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    assert found == NAMES
