"""What a stage prints: steps with seconds and peak memory, from rank 0; warnings and errors."""

import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_main() -> bool:
    return os.environ.get("RANK", "0") in ("", "0")


def say(text: str) -> None:
    """One line in the log, from rank 0 only."""
    if is_main():
        print(text, flush=True)


def warn(text: str) -> None:
    say(f"WARNING: {text}")


def quiet() -> None:
    """Leave out what the libraries print on ranks other than 0, and about parts that are not installed."""
    if not is_main():
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for the process's life
        warnings.simplefilter("ignore")
    for message in (
        "torch.distributed is disabled",
        "The argument order of load",
        "(?s:.*)not installed",
        ".*transformer-engine",
        "Distributed training is initialized but no",
        "The given buffer is not",
        "Please use DTensor instead",
    ):
        warnings.filterwarnings("ignore", message=message)
    for name in (
        "torch.utils.cpp_extension",
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.dist_checkpointing.strategies.torch",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)


def peak_memory() -> str:
    """Highest memory use of this process so far, host and GPU, in GiB."""
    # ru_maxrss is in KiB on Linux
    parts = [f"host {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        parts.append(f"GPU {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return ", ".join(parts)


class Steps:
    """Times the steps of a stage, and prints one line when a step begins and one when it has ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, detail: str = "") -> Iterator[None]:
        say(f"[{name}] {detail}" if detail else f"[{name}]")
        start = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
        say(f"[{name}] done in {self.seconds[name]:.1f} s, peak {peak_memory()}")

    def summary(self, stage: str, outputs: dict[str, str]) -> None:
        say(f"{stage}: done. " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items()))
        for name, path in outputs.items():
            say(f"  {name} = {path}")
