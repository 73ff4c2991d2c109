"""The loss of supervised fine-tuning on packed rows, of logits that are never there all at once."""

from typing import Any

from mlmsub.runtime.data import packing
from mlmsub.runtime.data.packing import Batch
from mlmsub.runtime.training.trainer import Forward, Trainer

NAME = "lm loss"  # Megatron's word for it
# logits of a chunk on a rank: 1 GiB in float32, and a few tensors of this size exist at a time. Smaller ones are kept,
# since making them again costs time
CHUNK = 2**28


def supervised(trainer: Trainer, whole_logits: bool = False) -> Forward:
    """Cross-entropy of the next token, summed over the tokens that are learned.

    Documents of a row do not attend to each other. Torch's attention gets a mask for that; Transformer Engine's gets
    the rows of a micro-batch as one sequence and where its documents begin. Rotary embeddings turn by the index in the
    row: attention depends on differences of positions alone, also where YaRN or Llama 3 scale the frequencies.
    ``whole_logits``: for what reads the output layer's output; else they exist for a chunk of tokens at a time.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.gpt import GPTModel

    if HAVE_TE:
        trainer.shape = (trainer.args.seq_length * trainer.args.micro_batch_size, 1)
    chunked = isinstance(trainer.module, GPTModel) and not whole_logits  # HybridModel has no place for it
    more = {"output_processor": in_chunks} if chunked else {}

    def forward(model: Any, batch: Batch) -> tuple[Any, Any]:
        starts = packing.cu_seqlens(batch.document_ids) if HAVE_TE else None
        batch = _on_device(model, batch)
        output = _rows(model, batch, more) if starts is None else _one_sequence(model, batch, starts, more)
        return output, lambda losses: summed(losses, batch.loss_mask)

    return forward


def in_chunks(
    *, hidden_states: Any, output_layer: Any, output_weight: Any, labels: Any, compute_language_model_loss: Any,
    scale_logits: Any, **_unused: Any,
) -> Any:  # fmt: skip
    """GPTModel's output processor: losses per token [batch, seq], of logits that exist for ``CHUNK`` values at a time.

    Those of a chunk are made again in its backward pass. With sequence parallelism a rank has a part of the sequence
    [seq / ranks, batch, hidden], and a chunk is the same piece of each rank's part.
    """
    import torch
    from megatron.core import parallel_state
    from torch.utils.checkpoint import checkpoint

    length, rows, _ = hidden_states.shape
    ranks = parallel_state.get_tensor_model_parallel_world_size() if output_layer.sequence_parallel else 1
    wanted = labels.view(rows, ranks, length)

    def of(hidden: Any, part: Any) -> Any:
        logits, _ = output_layer(hidden, weight=output_weight)
        return compute_language_model_loss(part.flatten(1), scale_logits(logits)).view(part.shape)

    vocabulary = len(output_layer.weight if output_weight is None else output_weight)
    size = max(1, CHUNK // (vocabulary * rows * ranks))
    if size >= length:
        return of(hidden_states, wanted).view_as(labels)
    losses = [
        checkpoint(of, hidden, part, use_reentrant=False, preserve_rng_state=False)
        for hidden, part in zip(hidden_states.split(size), wanted.split(size, dim=-1), strict=True)
    ]
    return torch.cat(losses, dim=-1).view_as(labels)


def summed(losses: Any, mask: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Losses per token and the mask of those that count: what ``Trainer`` takes."""
    mask = mask.to(losses.device, non_blocking=True).view_as(losses)
    total, tokens = (losses.float() * mask).sum(), mask.sum()
    return total, tokens.int(), {NAME: (total.detach(), tokens)}


def _rows(model: Any, batch: Batch, more: dict[str, Any]) -> Any:
    mask = packing.attention_mask(batch.document_ids)
    return model(batch.tokens, batch.position_ids, mask, labels=batch.labels, **more)


def _one_sequence(model: Any, batch: Batch, starts: Any, more: dict[str, Any]) -> Any:
    """``starts``: of the documents, in host memory."""
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = int(starts.diff().max())
    device = batch.tokens.device
    starts = (starts.pin_memory() if device.type == "cuda" else starts).to(device, non_blocking=True)
    packed = PackedSeqParams("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest)
    tokens, positions, labels = (one.view(1, -1) for one in (batch.tokens, batch.position_ids, batch.labels))
    return model(tokens, positions, None, labels=labels, packed_seq_params=packed, **more)


def _on_device(model: Any, batch: Batch) -> Batch:
    device = next(model.parameters()).device
    return batch.pin().to(device) if device.type == "cuda" else batch
