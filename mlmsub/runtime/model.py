"""Build the GPTModel of a model conf, ready to take weights."""

import copy
import importlib
import os
from argparse import Namespace
from typing import Any

from mlmsub.runtime import compat, cpu
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.megatron_args import transformer_config
from mlmsub.runtime.modelconf import ModelConf


def prepare() -> None:
    """What must be in place before Megatron builds anything in this process."""
    import torch

    # Megatron asks for it before Blackwell when tensors are split, and CUDA reads it when it starts
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not torch.cuda.is_available():
        cpu.install()
    compat.apply()
    # the slow imports, here so that their seconds are counted as such
    for name in ("megatron.training.arguments", "modelopt.torch.quantization", "modelopt.torch.export"):
        importlib.import_module(name)


def build(args: Namespace, conf: ModelConf, device: str) -> Any:
    """This rank's part of the model in evaluation mode on ``device``; its weights hold nothing yet."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    config = transformer_config(args, conf)
    if args.hybrid_layer_pattern is not None or args.spec is not None:
        raise StageError("model conf", "hybrid models and --spec are not built by this stage yet.")
    model_config = gpt_config_from_args(args, config)
    model_config.transformer_layer_spec = _layer_spec
    model_config.rope_scaling_factor = args.rope_scaling_factor  # gpt_config_from_args of 0.19.2 leaves it at 8
    groups = ProcessGroupCollection.use_mpu_process_groups()
    try:
        with torch.device("meta" if args.init_model_with_meta_device else device):
            model = GPTModelBuilder(model_config).build_model(groups)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise StageError("model conf and layout", str(error).strip().partition("\n")[0]) from error
    if args.init_model_with_meta_device:
        model = model.to_empty(device=device)
        for buffer in model.buffers():
            buffer.zero_()
    # no cast here: Megatron makes weights in params_dtype, and the router's bias must stay in fp32
    return model.to(device=device).eval()


def device(args: Namespace) -> str:
    """Where the model of these arguments lives: on the GPU unless there is none."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _layer_spec(model_config: Any) -> Any:
    """modelopt's layer spec: plain Megatron linears, which modelopt can quantize and the exporter knows.

    Attention and norms are Transformer Engine's where it is installed, else torch's; the keys in a
    checkpoint are the same for both (``remap_te_layernorm``), and the same as Megatron's TE models'.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.post_training.modelopt.gpt.model_specs import get_gpt_modelopt_spec
    from megatron.core.transformer.identity_op import IdentityOp

    from mlmsub.runtime.attention import FullRankMLASelfAttention, TorchAttention

    spec = get_gpt_modelopt_spec(model_config.transformer, local_core_attention=not HAVE_TE, remap_te_layernorm=True)
    transformer = model_config.transformer
    spec.layer_specs = [
        _without_l2_norm(layer) if transformer.qk_l2_norm and skips_rope else layer
        for layer, skips_rope in zip(spec.layer_specs, _layers_without_rope(transformer), strict=False)
    ]
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        if not HAVE_TE:
            attention.core_attention = TorchAttention
        if transformer.multi_latent_attention and transformer.q_lora_rank is None:
            layer.submodules.self_attention.module = FullRankMLASelfAttention
            attention.q_layernorm = IdentityOp
    return spec


def _layers_without_rope(config: Any) -> list[bool]:
    """For this pipeline stage's layers and on: is each one without rotary embedding?"""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    skips = config.no_rope_freq or [0] * config.num_layers  # the config has made a list of a number
    return [bool(skip) for skip in skips[get_transformer_layer_offset(config) :]]


def _without_l2_norm(layer: Any) -> Any:
    """Llama 4 norms queries and keys only where it rotates them; Megatron's --qk-l2-norm knows all layers or none."""
    from megatron.core.transformer.identity_op import IdentityOp

    layer = copy.deepcopy(layer)
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = IdentityOp
    return layer
