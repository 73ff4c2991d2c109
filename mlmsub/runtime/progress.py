"""What a stage prints: steps with seconds and peak memory, from rank 0; warnings and errors."""

import json
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

from mlmsub.runtime.errors import writing


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
    # torch reads it when it is imported; its store prints C++ frames as a warning where a peer is gone
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _bars()
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
        # the experts and layers that a format leaves alone
        ".*is not calibrated, skip smoothing",
        "Real quantization has been applied",
        "RealQuantLinear: No real-quant GEMM",  # it computes in bf16 then
        # ranks that hold the same weights find the same ranges; blocks that are cut are refused
        "Found block-quantized padded weight_quantizer",
    ):
        warnings.filterwarnings("ignore", message=message)
    for name in (
        "torch.utils.cpp_extension",
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.dist_checkpointing.strategies.torch",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)


def _bars() -> None:
    """Progress bars in a log: none of a short loop, a line every half minute of a long one, and on rank 0 alone.

    tqdm reads these when it is imported.
    """
    if not is_main():
        os.environ["TQDM_DISABLE"] = "1"
    elif not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DELAY", "30")
        os.environ.setdefault("TQDM_MININTERVAL", "30")


@contextmanager
def without_prints(but: str | None = None) -> Iterator[None]:
    """Leave out what a library prints in the body to stdout: counts and versions, which say nothing to the user.

    Lines with ``but`` in them do, and are said when the body has ended.
    """
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            if but is not None and but in line:
                say(line)


def peak_memory() -> dict[str, float]:
    """Highest memory use of this process so far, in GiB: ``host``, and ``GPU`` where there is one."""
    # ru_maxrss is in KiB on Linux
    peak = {"host": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        peak["GPU"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return peak


def _wait_for_gpu() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Steps:
    """Times the steps of a stage, and tells them: a line in the log and, from rank 0, one in ``events``.

    ``events`` is a file of one JSON object per line, for programs that watch a run:
    ``{"time": UNIX seconds, "event": "step", "name": ..., "seconds": ..., "peak_gib": {...}}``. It is appended
    to, so that a requeued job continues it. ``stage`` stands in every line where it is given.
    """

    def __init__(self, events: Path | None = None, stage: str = "") -> None:
        self.stage = stage
        self.seconds: dict[str, float] = {}
        self.total = 0.0
        self.outputs: dict[str, str] = {}
        self._events = events if is_main() else None

    @contextmanager
    def __call__(self, name: str, detail: str = "") -> Iterator[None]:
        say(f"[{name}] {detail}" if detail else f"[{name}]")
        start = time.monotonic()
        yield
        _wait_for_gpu()  # a step's kernels may still run
        seconds = time.monotonic() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        peak = peak_memory()
        say(f"[{name}] done in {seconds:.1f} s, peak {', '.join(f'{key} {gib:.1f} GiB' for key, gib in peak.items())}")
        self.event("step", name=name, seconds=round(seconds, 3), peak_gib=peak)

    def event(self, event: str, **values: object) -> None:
        """Append one event; ``values`` are JSON-able."""
        if self._events is not None:
            named = {"stage": self.stage} if self.stage else {}
            with writing("MLMSUB_RUN_DIR", self._events):
                self._events.parent.mkdir(parents=True, exist_ok=True)
                with self._events.open("a") as file:
                    file.write(json.dumps({"time": round(time.time(), 3), "event": event, **named, **values}) + "\n")

    def finish(self, outputs: dict[str, str], total: float) -> None:
        """The stage has made and checked ``outputs`` (variable -> path), in ``total`` seconds: say so."""
        self.outputs, self.total = outputs, total
        say(f"{self.stage}: done. " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items()))
        for name, path in outputs.items():
            say(f"  {name} = {path}")
        self.event("done", outputs=outputs)
