"""Workarounds for the libraries, each with the versions it was seen in, its reason and its test.

``apply`` installs the ones that are process-wide; tests/stages/test_compat.py fails when a library no
longer needs one.
"""

import queue
from contextlib import nullcontext
from typing import Any


def apply() -> None:
    """Install the process-wide workarounds. Call once, before a model is built."""
    in_process_results_queue()
    norm_without_transformer_engine()
    latent_attention_without_transformer_engine()
    draft_without_transformer_engine()
    range_of_a_weight_of_one_block()
    gradient_norm_on_device()


def in_process_results_queue() -> None:
    """megatron-core 0.19.2: a synchronous save starts a *spawn* Manager for a queue within one process.

    The child imports ``__main__`` again with all of torch and modelopt: 4 to 30 s for a queue that only
    this process reads. Saves here are synchronous, so a plain queue does.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: queue.Queue[Any] = queue.Queue()
    module: Any = filesystem_async
    module.get_write_results_queue = lambda *_args, **_kwargs: results


def norm_without_transformer_engine() -> None:
    """megatron-core 0.19.2: modelopt's layer spec takes its norms from Transformer Engine or raises.

    ``ImportError: Transformer-Engine is not installed`` out of ``post_training.modelopt.layers.Norm``.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.post_training.modelopt.gpt import model_specs

    if not HAVE_TE:
        from mlmsub.runtime.models.attention import torch_norm

        module: Any = model_specs
        module.Norm = torch_norm


def latent_attention_without_transformer_engine() -> None:
    """megatron-core 0.19.2: latent attention knows modelopt's Linear only if Transformer Engine is there.

    ``ValueError: Unsupported linear_q_down_proj``: the name is imported together with Transformer Engine's
    layers and is None without them. The replicated Linear is what the importer fills under tensor
    parallelism; the local spec's column-parallel one is not.
    """
    from megatron.core.post_training.modelopt import layers
    from megatron.core.transformer import multi_latent_attention

    module: Any = multi_latent_attention
    if module.Linear is None:
        module.Linear = layers.Linear


def draft_without_transformer_engine() -> None:
    """modelopt 0.47: its EAGLE module is built from Transformer Engine's parts, whether they are there or not.

    ``AttributeError: Mock object has no attribute 'forward'``: without Transformer Engine the names that it imports
    are mocks. Norms, ``fc`` and attention become torch's; the last norm is the transformer block's default, which would
    be in float32 and unfit for sequence parallelism. The context of context parallelism has nothing to wrap.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer import transformer_block
    from modelopt.torch.speculative.plugins import megatron_eagle

    if not HAVE_TE:
        from mlmsub.runtime.models.attention import ReplicatedLinear, torch_norm

        block: Any = transformer_block
        block.LayerNormImpl = torch_norm
        module: Any = megatron_eagle
        module.TENorm, module.TELinear = torch_norm, ReplicatedLinear
        module.te_dot_product_attention_with_cp = lambda *_args: nullcontext()
        module.get_gpt_modelopt_spec = _torch_layer_spec


def _torch_layer_spec(config: Any, **options: Any) -> Any:
    from megatron.core.post_training.modelopt.gpt.model_specs import get_gpt_modelopt_spec

    from mlmsub.runtime.models.attention import TorchAttention

    spec = get_gpt_modelopt_spec(config, **{**options, "local_core_attention": True})
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = TorchAttention
    return spec


def gradient_norm_on_device() -> None:
    """megatron-core 0.19.2: without Transformer Engine the host reads each gradient's norm, and that of all.

    So every iteration waits for the GPU, once for each parameter. With an operation that scales by a tensor, such as
    Transformer Engine's, Megatron leaves the norm where it is.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    module: Any = clip_grads
    if module.multi_tensor_scale_tensor_impl is None:
        module.multi_tensor_scale_tensor_impl = _scale
        if module.l2_norm_impl is local_multi_tensor_l2_norm:
            module.l2_norm_impl = _norm


def _norm(_chunk: int, _overflow: Any, lists: list[list[Any]], _per_tensor: bool) -> tuple[Any, None]:
    import torch

    return torch.stack(torch._foreach_norm(lists[0])).norm().view(1), None


def _scale(_chunk: int, _overflow: Any, lists: list[list[Any]], factor: Any) -> None:
    """``lists``: what is scaled and where to, which for gradients is the same."""
    import torch

    torch._foreach_mul_(lists[1], factor.view(()))


def range_of_a_weight_of_one_block() -> None:
    """modelopt 0.47: a weight that is one block of a two-dimensional format has its range saved as if it were a row's.

    ``IndexError: tuple index out of range`` when it is split by columns (a projection of at most 128 x 128); split by
    rows it is saved in another shape than at another tensor parallelism. Ranges by blocks have a row and a column each.
    """
    from modelopt.torch.quantization.plugins import megatron

    shipped = megatron._MegatronParallelLinear._process_quantizer_amax

    def process(self: Any, key: str, amax: Any, state: dict[str, Any]) -> None:
        shipped(self, key, amax, state)
        axis = self.get_submodule(key.rpartition(".")[0]).axis
        if amax.numel() == 1 and isinstance(axis, tuple) and len(axis) == 2:
            state[key] = amax.view(1, 1)

    module: Any = megatron._MegatronParallelLinear
    module._process_quantizer_amax = process


def old_place_of_bytes_to_unicode() -> None:
    """transformers 5.14: GPT-2's module no longer has ``bytes_to_unicode``, which moved when its tokenizer did.

    ``ImportError: cannot import name 'bytes_to_unicode'`` out of the tokenizer that Kimi-K2's checkpoints bring.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from transformers.models.gpt2 import tokenization_gpt2

    if not hasattr(tokenization_gpt2, "bytes_to_unicode"):
        module: Any = tokenization_gpt2
        module.bytes_to_unicode = bytes_to_unicode


def zero_parameters(model: Any) -> None:
    """modelopt 0.47: restoring a quantized model calibrates whatever the weights hold at that moment.

    Uninitialised memory may hold NaN: ``AssertionError: detected nan values in amax``. The checkpoint's
    weights and amax come after it, so zero is as good as anything.
    """
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def tell_replicas_of_expert_ranges(state: dict[str, Any]) -> None:
    """modelopt 0.47: an expert's quantizer ranges are numbered by tensor-parallel rank, not by expert-tensor rank.

    ``Invalid access pattern for ShardedTensor``: with ETP > TP every rank of an expert claims to be the one that
    writes the range that they share.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    rank = parallel_state.get_expert_tensor_parallel_rank()
    for part in state.values():
        if isinstance(part, ShardedTensor) and ".experts." in part.key and "_quantizer." in part.key:
            whole = part.global_shape[part.prepend_axis_num :] == part.local_shape
            if whole and isinstance(part.replica_id, tuple):
                part.replica_id = (part.replica_id[0], rank, *part.replica_id[2:])
