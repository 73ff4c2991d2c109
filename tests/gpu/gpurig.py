"""Small random models of three families on the GPU, their stages, and independent readers of what these write."""

# ruff: noqa: C408 (fields of a config read best as keywords)

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from rig import MODEL, Result, Runner, make_tokenizer, tensors

from mlmsub.core import hf_config, modelconf

COMMON = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=False, initializer_range=0.06,
    eos_token_id=0, bos_token_id=None, pad_token_id=0,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=50000.0, factor=32.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
    original_max_position_embeddings=64,
)  # fmt: skip
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", dict(COMMON, head_dim=64)),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        dict(COMMON, head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True),
    ),
    "kimi-k2": (
        "DeepseekV3Config",
        dict(COMMON, num_key_value_heads=4, q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32,
             v_head_dim=64, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=128,
             first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.827,
             rope_parameters=YARN),
    ),
}  # fmt: skip
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# what the machine sets for its libraries must reach the stages too
KEPT = ("NCCL_", "NVSHMEM_", "TORCH_", "CUDA_", "TRITON_", "MLMSUB_EXTENSIONS_DIR", "XDG_CACHE_HOME")


class GpuRunner(Runner):
    def environment(self, run_dir: Path, variables: dict[str, object]) -> dict[str, str]:
        machine = {key: value for key, value in os.environ.items() if key.startswith(KEPT)}
        return machine | super().environment(run_dir, variables)


class Chain:
    """One family's random model, and the stages' results on it, each made when it is first asked for."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.folder, self.source = family, folder, folder / "hf"
        kind, values = FAMILIES[family]
        make_model(self.source, kind, values)
        conf = hf_config.convert(json.loads((self.source / "config.json").read_text()), MODEL)
        conf.megatron_args["seq-length"] = "512"
        (folder / "model.yaml").write_text(modelconf.render(conf))
        self.stage = GpuRunner(folder / "runs", folder / "model.yaml")

    @property
    def experts(self) -> bool:
        return self.family != "llama"

    @cache  # noqa: B019 - as many as the session has families
    def convert(self) -> tuple[Result, Path]:
        made = self.folder / "mlm"
        return self.stage("convert", MLM_EXTRA_ARGS="", HF_MODEL_CKPT=self.source, MLM_MODEL_SAVE=made), made

    @cache  # noqa: B019
    def quantize(self, qformat: str, flags: str = "") -> tuple[Result, Path]:
        made = self.folder / f"{qformat}{flags.replace(' ', '')}"
        flags = f"--calib-size 32 --calib-max-sequence-length 128 {flags}"
        variables = {"MLM_EXTRA_ARGS": flags, "MLM_MODEL_CKPT": self.convert()[1], "HF_MODEL_CKPT": self.source}
        return self.stage("quantize", qformat, MLM_MODEL_SAVE=made, MLM_OVERWRITE=1, **variables), made

    @cache  # noqa: B019
    def export(self, qformat: str, flags: str = "") -> tuple[Result, Path]:
        result, ckpt = self.quantize(qformat, flags)
        assert result.code == 0, result.out
        made = ckpt.with_name(f"{ckpt.name}-hf")
        return self.stage("export", HF_MODEL_CKPT=self.source, MLM_MODEL_CKPT=ckpt, EXPORT_DIR=made), made

    @contextmanager
    def model(self, ckpt: Path) -> Iterator[torch.nn.Module]:
        """The Megatron model of a checkpoint, on the GPU."""
        from mlmsub.runtime.checkpoints import checkpoint
        from mlmsub.runtime.env import Env
        from mlmsub.runtime.models import model
        from mlmsub.runtime.progress import Steps
        from mlmsub.runtime.session import Job, start

        variables = {"HF_MODEL_CKPT": self.source, "MLM_MODEL_CKPT": ckpt, "MLM_EXTRA_ARGS": ""}
        with mock.patch.dict(os.environ, self.stage.environment(self.stage.run_dir(), variables), clear=True):
            job = Job("quantize", MODEL, [], Env(), Steps())
            with start(job, job.conf(), job.env.layout(), lambda parser: None, []) as session:
                made = model.build(session.args, session.conf, device())
                checkpoint.load(made, checkpoint.folder(ckpt))
                yield made


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def have_te() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


def make_model(folder: Path, kind: str, values: dict) -> None:
    """A random bf16 checkpoint whose norms and router biases are random too, with a tokenizer."""
    import transformers

    folder.mkdir(parents=True)
    config = getattr(transformers, kind)(vocab_size=make_tokenizer(folder), **values)
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.3, 0.3)
    made.to(torch.bfloat16).save_pretrained(folder)


def ids() -> torch.Tensor:
    """Token ids [4, 200]."""
    return torch.randint(1, 500, (4, 200), generator=torch.Generator().manual_seed(5)).to(device())


def megatron_logits(model: torch.nn.Module) -> torch.Tensor:
    """[4, 200, vocabulary] in fp32."""
    positions = torch.arange(200, device=device()).expand(4, -1)
    with torch.no_grad():
        return model(ids(), positions, None, runtime_gather_output=True).float()


def transformers_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        return model.to(device()).eval()(ids()).logits.float()


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0))


def dequantized(exported: Path, source: Path, folder: Path) -> Path:
    """The exported checkpoint as a bf16 one: its weights decoded by the formats' definitions, not by modelopt."""
    from safetensors.torch import save_file

    found = tensors(exported)
    plain = {name: decode(name, found) for name in found if not name.endswith("_scale") and "_scale_" not in name}
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def decode(name: str, found: dict[str, torch.Tensor]) -> torch.Tensor:
    tensor, base = found[name], name.removesuffix("weight")
    if tensor.dtype == torch.float8_e4m3fn:
        return (tensor.float() * found[f"{base}weight_scale"].float()).bfloat16()
    if tensor.dtype == torch.uint8:  # two e2m1 numbers a byte, the first in the low half; a scale for each 16
        codes = torch.stack([tensor & 15, tensor >> 4], -1).flatten(-2).long()
        values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        scales = found[f"{base}weight_scale"].float() * found[f"{base}weight_scale_2"].float()
        return (values * scales.repeat_interleave(16, -1)).bfloat16()
    return tensor


def ranges(ckpt: Chain, path: Path) -> dict[str, torch.Tensor]:
    """The calibrated ranges (amax) of a checkpoint's quantizers, in fp32 on the CPU."""
    from mlmsub.runtime.quantization import formats

    with ckpt.model(path) as model:
        return {name: q.amax.float().cpu() for name, q in formats.quantizers(model) if q.amax is not None}
