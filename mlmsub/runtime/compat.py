"""Workarounds for the libraries, each with the versions it was seen in, its reason and its test.

``apply`` installs the ones that are process-wide; tests/stages/test_compat.py fails when a library no
longer needs one.
"""

import queue
from typing import Any


def apply() -> None:
    """Install the process-wide workarounds. Call once, before a model is built."""
    in_process_results_queue()
    norm_without_transformer_engine()
    latent_attention_without_transformer_engine()


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
        from mlmsub.runtime.attention import torch_norm

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


def zero_parameters(model: Any) -> None:
    """modelopt 0.47: restoring a quantized model calibrates whatever the weights hold at that moment.

    Uninitialised memory may hold NaN: ``AssertionError: detected nan values in amax``. The checkpoint's
    weights and amax come after it, so zero is as good as anything.
    """
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
