"""Score multiple-choice prompts: the logits of the letters' tokens after the last token of each prompt.

Only those last positions go through the output layer. Prompts run in batches of close lengths, padded at their
right end, through any layout of tensor, pipeline, expert and data parallelism.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.errors import CheckFailed
from mlmsub.runtime.evaluation.mmlu import LETTERS, Exam
from mlmsub.runtime.progress import say

# a batch holds prompts of at least this part of its longest one, so padding is at most the rest
CLOSE = 7 / 8


@dataclass(frozen=True)
class Bucket:
    """Prompts of close lengths, in batches of one shape [rows, length] on all data-parallel ranks.

    ``index`` names prompts, batches x ranks x rows of them; the last one is repeated to fill the last batch. Equal
    shapes everywhere are what a pipeline and experts on other ranks expect.
    """

    length: int
    rows: int
    index: list[int]


def buckets(lengths: list[int], ranks: int, tokens: int, rows: int | None, multiple: int) -> list[Bucket]:
    """Sort prompts into batches of at most ``tokens`` tokens (or one prompt) and ``rows`` prompts per rank."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    made: list[Bucket] = []
    while order:
        longest = lengths[order[0]]
        here = [index for index in order if lengths[index] >= longest * CLOSE]
        order = order[len(here) :]
        length = math.ceil(longest / multiple) * multiple
        most = max(1, min(tokens // length, rows or len(here)))
        batches = math.ceil(len(here) / (most * ranks))
        even = math.ceil(len(here) / (batches * ranks))
        here += here[-1:] * (batches * ranks * even - len(here))
        made.append(Bucket(length, even, here))
    return made


def scores(model: Any, exam: Exam, tokens: int, rows: int | None) -> Any:
    """Logits of the four letters [prompts, 4], fp32 on the CPU, on every rank. All ranks call it."""
    import torch
    from megatron.core import parallel_state

    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    multiple = parallel_state.get_tensor_model_parallel_world_size() if model.config.sequence_parallel else 1
    index: list[int] = []
    values: list[Any] = []
    plan = buckets([len(ids) for ids in exam.prompts], ranks, tokens, rows, multiple)
    total, told = sum(len(bucket.index) for bucket in plan), 0
    for bucket in plan:
        share = torch.tensor(bucket.index).view(-1, ranks, bucket.rows)[:, rank]
        values += _run(model, [[exam.prompts[i] for i in batch] for batch in share.tolist()], bucket, exam.letters)
        index += share.flatten().tolist()
        if (len(index) * ranks - told) * 10 >= total:
            told = len(index) * ranks
            say(f"mmlu: {told} of {total} prompts")
    # the ranks of a tensor-parallel group have the same logits
    tells = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
    mine = (index, torch.cat(values).cpu()) if tells else ([], torch.empty(0, len(LETTERS)))
    made = torch.full((len(exam.prompts), len(LETTERS)), torch.nan)
    for places, logits in distributed.gather(mine):
        made[places] = logits
    if not bool(torch.isfinite(made).all()):
        raise CheckFailed("mmlu", "the model's logits are not finite.", "check the checkpoint that was loaded.")
    return made


def _run(model: Any, batches: list[list[list[int]]], bucket: Bucket, letters: list[int]) -> list[Any]:
    """Forward batches of one shape through the pipeline; the last stage gets [rows, 4] of each."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    device = next(model.parameters()).device
    positions = torch.arange(bucket.length, device=device).expand(bucket.rows, -1)

    def step(iterator: Iterator[list[list[int]]], stage: Any) -> tuple[Any, Callable[..., Any]]:
        prompts = next(iterator)
        # padding at the right end: causal attention never looks there, and experts take every token
        ids = torch.tensor([ids + [0] * (bucket.length - len(ids)) for ids in prompts], device=device)
        ends = torch.tensor([len(ids) - 1 for ids in prompts], device=device)
        processor = partial(_letter_logits, ends=ends, letters=letters)
        return stage(ids, positions, None, output_processor=processor), lambda logits, **_: logits

    with torch.no_grad():
        return list(
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(batches),
                model=[model],
                num_microbatches=len(batches),
                seq_length=bucket.length,
                micro_batch_size=bucket.rows,
                forward_only=True,
                collect_non_loss_data=True,
            )
        )


def _letter_logits(
    hidden_states: Any,
    output_layer: Any,
    output_weight: Any,
    scale_logits: Any,
    ends: Any,
    letters: list[int],
    **_: Any,
) -> Any:
    """Logits [rows, 4] at the positions ``ends`` of hidden states [seq, rows, width]: megatron's output_processor."""
    import torch
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    if output_layer.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states)
    last = hidden_states[ends, torch.arange(len(ends), device=ends.device)].unsqueeze(0)
    # with sequence parallelism the layer gathers its input from all ranks; they all have this one, the first counts
    logits, _bias = output_layer(last, weight=output_weight, runtime_gather_output=True)
    return scale_logits(logits)[0][:, letters].float()
