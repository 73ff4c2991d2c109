"""Copied beside the reference's scripts by stages.py: notes when their steps begin and end, and lets them start.

``install(names)`` gets a script's global names. Lines of JSON go to the file ``$BENCH_LOG``: step, begin and end in
seconds since the epoch, peak GPU memory in GiB. The GPU is idle at both ends. ``$BENCH_STOP`` names a step whose end is
the process's.
"""

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def install(names: dict[str, Any]) -> None:
    import megatron.core.datasets.utils
    import modelopt.torch.export as export
    import modelopt.torch.quantization as mtq
    import modelopt.torch.quantization.extensions as extensions

    # the wheel has the compiled helper, but not the Makefile that is always run
    megatron.core.datasets.utils.compile_helpers = lambda: None
    names["import_mcore_gpt_from_hf"] = _timed("import", export.import_mcore_gpt_from_hf)
    export.import_mcore_gpt_from_hf = names["import_mcore_gpt_from_hf"]
    export.export_mcore_gpt_to_hf = _timed("export", export.export_mcore_gpt_to_hf)
    extensions.load_cpp_extension = _timed("jit", extensions.load_cpp_extension)
    mtq.quantize = _timed("calibrate", mtq.quantize)
    if "load_modelopt_checkpoint" in names:
        names["load_modelopt_checkpoint"] = _timed("load", names["load_modelopt_checkpoint"])
    if "megatron_generate" in names:
        names["megatron_generate"] = _timed("generate", names["megatron_generate"])
    if "save_checkpoint" in names:
        names["save_checkpoint"] = _timed("save", names["save_checkpoint"])
        if os.environ.get("BENCH_NO_SAVE"):
            names["save_checkpoint"] = lambda *_args, **_kwargs: None


def _timed(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        begin = time.time()
        result = function(*args, **kwargs)
        torch.cuda.synchronize()
        note = {"step": step, "begin": begin, "end": time.time(), "peak": torch.cuda.max_memory_allocated() / 2**30}
        with Path(os.environ["BENCH_LOG"]).open("a") as log:
            log.write(json.dumps(note) + "\n")
        if step == os.environ.get("BENCH_STOP"):
            os._exit(0)
        return result

    return call
