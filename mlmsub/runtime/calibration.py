"""Calibration data, and the forward passes that let quantizers see it.

The tokens of all texts make one stream that is cut into chunks of exactly the wanted length: no padding
enters a statistic and no attention mask is needed.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlmsub.runtime.errors import StageError
from mlmsub.runtime.progress import say, warn

BUILT_IN = Path(__file__).with_name("calibration.txt")
KINDS = (".jsonl", ".parquet", ".txt")
TEXT_KEYS = ("text", "content", "article", "document")
CHAT_KEYS = ("messages", "conversations")


def check_file(data: str | None) -> Path | None:
    """The calibration file that the user named; None for the built-in text."""
    if data is None:
        return None
    path = Path(data)
    if path.suffix not in KINDS or not path.is_file():
        raise StageError(
            "--calib-data",
            f"{data} is not a file of kind {', '.join(KINDS)}.",
            "give a local file with one text per line, row or blank-separated paragraph.",
        )
    return path


def chunks(file: Path | None, tokenizer: Any, length: int, count: int) -> Any:
    """Token ids [samples, length] with at most ``count`` samples."""
    import torch

    if file is None:
        warn(
            "no calibration data was given: using the few built-in texts. Give --calib-data FILE in "
            "MLM_EXTRA_ARGS (or MLM_CALIB_DATA=FILE) for a model that will be served."
        )
        file = BUILT_IN
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream: list[int] = []
    for text in _texts(file, tokenizer):
        stream += tokenizer(text, add_special_tokens=False)["input_ids"] + end
        if len(stream) >= length * count:
            break
    if not stream:
        raise StageError("--calib-data", f"{file} has no text.")
    length = min(length, len(stream))
    samples = min(count, len(stream) // length)
    if samples < count:
        say(f"calibration: {file.name} has {samples} samples of {length} tokens, fewer than the {count} asked for")
    return torch.tensor(stream[: samples * length], dtype=torch.long).view(samples, length)


def share(samples: Any) -> Any:
    """This data-parallel rank's samples; every rank gets equally many, since experts talk across ranks."""
    import torch
    from megatron.core import parallel_state

    ranks = parallel_state.get_data_parallel_world_size()
    wanted = -(-len(samples) // ranks) * ranks
    index = torch.arange(wanted) % len(samples)
    return samples[index[parallel_state.get_data_parallel_rank() :: ranks]]


def forward_loop(samples: Any, batch_size: int, device: str) -> Callable[[Any], None]:
    """The forward loop that modelopt calls: every sample once, through all pipeline stages."""
    import torch

    def loop(model: Any) -> None:
        with torch.no_grad(), _without_logits(model):
            whole = len(samples) // batch_size * batch_size
            _run(model, samples[:whole].split(batch_size), device)
            _run(model, samples[whole:].split(batch_size), device)

    return loop


def _run(model: Any, batches: tuple[Any, ...], device: str) -> None:
    """Forward batches of one size through the pipeline."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if not batches or not len(batches[0]):
        return
    size, length = batches[0].shape
    positions = torch.arange(length, device=device).expand(size, -1)

    def step(batch_iterator: Iterator[Any], stage: Any) -> tuple[Any, Callable[[Any], Any]]:
        hidden = stage(next(batch_iterator).to(device), positions, None)
        return hidden, lambda output: (output.new_zeros(()), {})

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=size,
        forward_only=True,
    )


class _without_logits:
    """Leave out the output layer, unless it is quantized: its logits are most of the memory and unused."""

    def __init__(self, model: Any) -> None:
        layer = getattr(model, "output_layer", None)
        quantized = layer is not None and any(
            getattr(module, "is_enabled", False) for name, module in layer.named_modules() if "quantizer" in name
        )
        self.model, self.skip = model, model.post_process and not quantized

    def __enter__(self) -> None:
        if self.skip:
            self.model.post_process = False

    def __exit__(self, *_error: object) -> None:
        if self.skip:
            self.model.post_process = True


def _texts(file: Path, tokenizer: Any) -> Iterator[str]:
    if file.suffix == ".txt":
        yield from (part.strip() for part in file.read_text().split("\n\n") if part.strip())
        return
    for row in _rows(file):
        yield _text_of(row, file, tokenizer)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        for batch in ParquetFile(file).iter_batches():
            yield from batch.to_pylist()
        return
    with file.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line) if line.strip() else None
            except ValueError as error:
                raise StageError("--calib-data", f"{file}, line {number}: not JSON ({error}).") from error
            if row is not None:
                yield row if isinstance(row, dict) else {"text": row}


def _text_of(row: dict[str, Any], file: Path, tokenizer: Any) -> str:
    for key in TEXT_KEYS:
        if isinstance(row.get(key), str):
            return str(row[key])
    for key in CHAT_KEYS:
        turns = row.get(key)
        if isinstance(turns, list) and turns:
            turns = [{"role": _role(turn), "content": turn.get("content", turn.get("value", ""))} for turn in turns]
            if tokenizer.chat_template:
                return str(tokenizer.apply_chat_template(turns, tokenize=False))
            return "\n".join(turn["content"] for turn in turns)
    keys = ", ".join(TEXT_KEYS + CHAT_KEYS)
    raise StageError("--calib-data", f"{file}: a row has keys {sorted(row)}.", f"one of these must hold text: {keys}.")


def _role(turn: dict[str, Any]) -> str:
    role = str(turn.get("role", turn.get("from", "user")))
    return {"human": "user", "gpt": "assistant"}.get(role, role)
