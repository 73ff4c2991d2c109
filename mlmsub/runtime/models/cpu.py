"""Lets megatron-core's and modelopt's code run on a machine without a GPU.

Both name ``torch.cuda`` in places that compute nothing on a GPU: the device of the rotary embedding's
buffers, the random-number tracker, a synchronize per saved module state, counters of the pipeline schedule.
``install`` answers those calls for the CPU. Collectives then go through gloo. Nothing is replaced when a GPU
is there.
"""

from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any


@cache
def install() -> None:
    """Answer for the CPU wherever CUDA is named, for this process. Call before any model is built."""
    import torch
    from megatron.core.tensor_parallel import random

    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim is for machines without a GPU")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.device_count = lambda: 1
    cuda.get_device_properties = lambda *_args: SimpleNamespace(major=0, minor=0, name="cpu")
    cuda.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    # one function per name: torch._dynamo refuses an object that stands for two torch functions
    for owner, name in (
        (cuda, "set_device"), (cuda, "synchronize"), (cuda, "empty_cache"), (cuda, "manual_seed"),
        (cuda, "set_rng_state"), (cuda, "reset_peak_memory_stats"), (cuda.nvtx, "range_push"), (cuda.nvtx, "range_pop"),
    ):  # fmt: skip
        setattr(owner, name, _nothing())
    # streams and events order work on a GPU; on a CPU it is done when the call returns
    stream = SimpleNamespace(
        wait_stream=_nothing(), wait_event=_nothing(), record_event=_nothing(), synchronize=_nothing()
    )
    cuda.current_stream = lambda *_args, **_kwargs: stream
    # a class, since annotations name it
    cuda.Stream = type("Stream", (), {"__new__": lambda *_args, **_kwargs: stream})
    cuda.stream = lambda *_args, **_kwargs: nullcontext()
    torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]
    tracker: Any = random.CudaRNGStatesTracker
    tracker.add = _nothing()
    tracker.fork = lambda *_args, **_kwargs: nullcontext()
    _redirect_mode().__enter__()


def _nothing() -> Any:
    return lambda *_args, **_kwargs: None


def _redirect_mode() -> Any:
    """A mode in which ``torch.zeros(..., device="cuda")``, ``tensor.to("cuda")`` and the like use the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    def moved(value: Any) -> Any:
        named = isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda"
        return "cpu" if named else value

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if function is torch.Tensor.cuda:
                return args[0]
            if "device" in kwargs:
                kwargs["device"] = moved(kwargs["device"])
            if function is torch.Tensor.to:
                args = tuple(moved(value) for value in args)
            if function is torch.Tensor.type and len(args) == 1:
                # the optimizers tell half precision by the names of CUDA's tensor types
                return function(*args, **kwargs).replace("torch.", "torch.cuda.", 1)
            return function(*args, **kwargs)

    return OnCpu()
