"""Build the GPTModel or HybridModel of a model conf, ready to take weights."""

import copy
import importlib
import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from mlmsub.runtime.errors import StageError, first_line
from mlmsub.runtime.megatron_args import transformer_config
from mlmsub.runtime.modelconf import ModelConf
from mlmsub.runtime.models import compat, cpu, imports


def prepare() -> None:
    """Import the libraries, and put in place what must be there before Megatron builds anything in this process."""
    # Megatron asks for it before Blackwell when tensors are split, and CUDA reads it when it starts
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with imports.lean():
        import torch

        if not torch.cuda.is_available():
            cpu.install()
        compat.apply()
        # here, so that their seconds are counted as such
        for name in ("megatron.training.arguments", "modelopt.torch.quantization", "modelopt.torch.export"):
            importlib.import_module(name)


def build(args: Namespace, conf: ModelConf, device: str, layers: Callable[[Any], Any] | None = None) -> Any:
    """This rank's part of the model in evaluation mode on ``device``; its weights hold nothing yet.

    ``layers`` makes other layers of a GPTModel than modelopt's, from Megatron's model config.
    """
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection

    if args.spec is not None:
        raise StageError("--spec", "the stages choose the layers themselves.", "leave it out.")
    config = transformer_config(args, conf)
    builder = _gpt_builder(args, config, layers) if args.hybrid_layer_pattern is None else _hybrid_builder(args, config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    try:
        with torch.device("meta" if args.init_model_with_meta_device else device):
            model = builder.build_model(groups)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise StageError("model conf and layout", first_line(error)) from error
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


def _gpt_builder(args: Namespace, config: Any, layers: Callable[[Any], Any] | None) -> Any:
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    model_config = gpt_config_from_args(args, config)
    offline = getattr(args, "export_offline_model", False)
    model_config.transformer_layer_spec = layers or (_no_layers if offline else _layer_spec)
    model_config.rope_scaling_factor = args.rope_scaling_factor  # gpt_config_from_args of 0.19.2 leaves it at 8
    return GPTModelBuilder(model_config)


def _hybrid_builder(args: Namespace, config: Any) -> Any:
    """The builder of a model with Mamba layers, whose scan is mamba-ssm's and whose last norm Transformer Engine's."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.post_training.modelopt.hybrid.model_specs import get_hybrid_stack_modelopt_spec
    from megatron.training.argument_utils import hybrid_config_from_args
    from megatron.training.models.hybrid import HybridModelBuilder

    missing = [name for name in ("mamba_ssm", "einops") if importlib.util.find_spec(name) is None]
    missing += [] if HAVE_TE else ["transformer_engine"]
    if missing:
        raise StageError(
            "model conf",
            f"a hybrid model (--hybrid-layer-pattern) needs {', '.join(missing)}, which this Python does not have.",
            "use an image that has mamba-ssm and Transformer Engine.",
        )
    model_config = hybrid_config_from_args(args, config)
    model_config.hybrid_stack_spec = get_hybrid_stack_modelopt_spec(remap_te_layernorm=True)
    return HybridModelBuilder(model_config)


def _no_layers(model_config: Any) -> Any:
    """The base of an offline draft: embedding, final norm and output layer; its hidden states come from files."""
    spec = _layer_spec(model_config)
    spec.layer_specs = []
    return spec


def _layer_spec(model_config: Any) -> Any:
    """modelopt's layer spec: plain Megatron linears, which modelopt can quantize and the exporter knows.

    Attention and norms are Transformer Engine's where it is installed, else torch's; the keys in a
    checkpoint are the same for both (``remap_te_layernorm``), and the same as Megatron's TE models'.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.post_training.modelopt.gpt.model_specs import get_gpt_modelopt_spec
    from megatron.core.transformer.identity_op import IdentityOp

    from mlmsub.runtime.models.attention import FullRankMLASelfAttention, TorchAttention

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
