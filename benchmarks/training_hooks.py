"""Copied beside the reference's training scripts by training.py: what convert_model.py and finetune.py need to start.

``install(names)`` gets a script's global names. Nothing here touches a training step. On a machine without a GPU, which
Megatron's scripts refuse, mlmsub's stand-ins for CUDA and Transformer Engine are put in, to try training.py there.
"""

import functools
import queue
from typing import Any


def install(names: dict[str, Any]) -> None:
    import megatron.core.datasets.utils
    import torch
    import transformers
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # the wheel has the compiled helper, but not the Makefile that is always run
    megatron.core.datasets.utils.compile_helpers = lambda: None
    # transformers 5 returns a dict, to which finetune.py adds a list
    base: Any = transformers.PreTrainedTokenizerBase
    base.apply_chat_template = functools.partialmethod(base.apply_chat_template, return_dict=False)
    # it takes every tokenizer that ends a turn with <|im_end|> for Qwen's, whose number is beyond other vocabularies
    if "get_eos_token_id" in names:
        names["get_eos_token_id"] = lambda tokenizer=None: (tokenizer or names["get_hf_tokenizer"]()).eos_token_id
    # the save's second Python, which takes half a minute and is not what is measured here
    results: queue.Queue[Any] = queue.Queue()
    saving: Any = filesystem_async
    saving.get_write_results_queue = lambda *_args, **_kwargs: results
    if not torch.cuda.is_available():
        _on_cpu(names)


def _on_cpu(names: dict[str, Any]) -> None:
    import torch
    from megatron.training import initialize, training

    from mlmsub.runtime.models import model

    model.prepare()
    cuda: Any = torch.cuda
    cuda.mem_get_info = lambda *_args: (1, 1)
    cuda.memory_stats = lambda *_args: {}
    for name in ("max_memory_allocated", "memory_allocated", "max_memory_reserved", "memory_reserved"):
        setattr(cuda, name, lambda *_args: 0)
    plain = initialize.initialize_megatron

    def with_cuda(*args: Any, **kwargs: Any) -> Any:
        cuda.is_available = lambda: True
        try:
            return plain(*args, **kwargs)
        finally:
            cuda.is_available = lambda: False

    scripts: Any = training
    scripts.initialize_megatron = with_cuda
    if "initialize_megatron" in names:
        names["initialize_megatron"] = with_cuda
