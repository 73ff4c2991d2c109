"""One training step of an EAGLE3 draft on packed documents: the base frozen, the draft unrolled, the loss chunked.

A chain begins at each token ``i``, with the base's states there. In step ``t`` of test-time training the draft goes on
from the chain's own state, beside the embedding of token ``i + t + 1``, and predicts what the base says at that token.
It sees the beginnings of the chains up to its own, and its own slots in between (``draft_attention``).

modelopt's forward pass does the same for one document in a row. It also computes the base's cross entropy and
multiplies it by zero, gathers the whole vocabulary on every tensor-parallel rank, keeps the logits of all steps, and
attends to the keys of all steps through masks that it builds in a Python loop over positions. Here the base runs
without gradients, and the logits exist for a chunk of the tokens that training learns at a time.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)

from mlmsub.runtime.data.packing import Batch, attention_mask, cu_seqlens
from mlmsub.runtime.models.draft_attention import Flash, Kernel, Masked, chains
from mlmsub.runtime.training.losses import NAME

# Logits of a chunk by the kind of device. On a GPU 2^27 take 0.5 GiB in float32, and a few tensors of this size exist
# at a time; on a CPU 2^22 take 16 MiB, which malloc uses again, where it maps larger ones anew each time.
CHUNK = {"cuda": 2**27, "cpu": 2**22}


class DraftStep:
    """``training.Forward`` of a model with a draft. Make it when the draft's vocabulary is final.

    Per token of the loss mask: the sum over the steps of decay^t times the cross entropy between the draft's and the
    base's distribution over the draft's vocabulary. Reports it as Megatron's ``lm loss``, and for each step
    ``loss_t`` and ``top1_t``, the share of tokens where both have the same most likely token of the draft's vocabulary.

    All of a batch is one sequence, its rows one after the other: states are [tokens, 1, width], with sequence
    parallelism a rank's part of them.
    """

    def __init__(self, model: Any) -> None:
        self.steps: int = model.eagle_ttt_steps
        self.decay: float = model.eagle_loss_decay_factor
        self.offline: bool = model.eagle_offline
        self.parallel = model.config.sequence_parallel
        self.target_head = _target_head(model)

    def __call__(self, model: Any, batch: Batch) -> tuple[Any, Callable[[Any], tuple[Any, Any, dict[str, Any]]]]:
        """Megatron's forward step: (output, function of it that gives loss sum, tokens and reports).

        ``batch`` lies in host memory, where its documents and the tokens that are learned can be counted.
        """
        model.eval()  # dropout, and the router's bias, which Megatron moves in modules that train
        model.eagle_module.train(torch.is_grad_enabled())
        device = next(model.parameters()).device
        weights = _weights(batch, self.steps)
        learned = torch.from_numpy(np.flatnonzero(weights.numpy().any(0)))
        weights, learned = _moved(weights[:, learned], device), _moved(learned, device)
        starts = _moved(cu_seqlens(batch.document_ids), device) if device.type == "cuda" else None
        batch = (batch.pin() if device.type == "cuda" else batch).to(device)
        mask = None if starts is not None and HAVE_TE else attention_mask(batch.document_ids)
        with torch.no_grad():
            states, last = self.base(model, batch, mask, starts)
        kernel = Masked(mask) if starts is None else Flash(starts, batch.tokens.shape[1])
        drafts = torch.stack(self._unroll(model, batch, states, kernel))
        loss, stats = _SoftTargets.apply(  # type: ignore[no-untyped-call]
            self._whole(drafts)[:, :, 0], _head(model), self._whole(last[None])[0, :, 0], self.target_head, learned,
            weights, self.decay, torch.is_grad_enabled(),
        )  # fmt: skip
        tokens = batch.loss_mask.sum()
        counts = weights.sum(1)
        reports = {NAME: (loss.detach(), tokens)}
        for step in range(self.steps):
            reports[f"loss_{step}"] = (stats[0, step], counts[step])
            reports[f"top1_{step}"] = (stats[1, step], counts[step])
        return loss, lambda total: (total, tokens.int(), reports)

    def base(self, model: Any, batch: Any, mask: Any, starts: Any) -> tuple[Any, Any]:
        """The states that the draft reads [tokens, 1, 3 x hidden], and the base's last [tokens, 1, hidden].

        A batch of an offline draft has both. ``mask`` keeps the documents apart; without it Transformer Engine
        attends, whose causal kernels take none, by ``starts``: ``cu_seqlens`` of the rows.
        """
        if self.offline:
            return batch.aux_hidden_states.flatten(0, 1)[:, None], batch.hidden_states.flatten(0, 1)[:, None]
        if mask is not None:
            packed, tokens, positions = None, batch.tokens, batch.position_ids
        else:
            longest = batch.tokens.shape[1]
            packed = PackedSeqParams("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest)
            tokens, positions = batch.tokens.view(1, -1), batch.position_ids.view(1, -1)
        last, _ = model._base_model_forward(tokens, positions, mask, packed_seq_params=packed)
        states = torch.cat(model._aux_hidden_states, dim=-1)
        model._aux_hidden_states.clear()
        return (states, last) if mask is None else (self._one_sequence(states), self._one_sequence(last))

    def _one_sequence(self, rows: Any) -> Any:
        """[seq, batch, width] to [batch x seq, 1, width]."""
        whole = gather_from_sequence_parallel_region(rows) if self.parallel else rows
        flat = whole.transpose(0, 1).flatten(0, 1)[:, None]
        return scatter_to_sequence_parallel_region(flat) if self.parallel else flat

    def _unroll(self, model: Any, batch: Batch, states: Any, kernel: Kernel) -> list[Any]:
        """The chains' states after the draft's last norm, of each step: [tokens, 1, hidden]."""
        module, (rows, length) = model.eagle_module, batch.tokens.shape
        hidden, outputs = module.fc(states)[0], []
        with chains(module, kernel):
            for step in range(self.steps):
                tokens = F.pad(batch.tokens[:, step + 1 :], (0, step + 1)).view(1, -1)
                embedding = model.embedding(input_ids=tokens, position_ids=batch.position_ids.view(1, -1))
                rotary = module.rotary_pos_emb(length, offset=step).repeat(rows, 1, 1, 1)
                output, hidden = module(embedding, hidden, None, rotary)
                outputs.append(output)
        return outputs

    def _whole(self, stacked: Any) -> Any:
        """[steps, tokens, 1, hidden] with all tokens; its gradient is a sum over the ranks' vocabularies."""
        if not self.parallel:
            return copy_to_tensor_model_parallel_region(stacked)
        return gather_from_sequence_parallel_region(stacked.transpose(0, 1).contiguous()).transpose(0, 1)


def _moved(tensor: Any, device: Any) -> Any:
    """On the device, from pinned memory without waiting."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _weights(batch: Batch, steps: int) -> Any:
    """The loss mask of each step, [steps, batch x seq]: a chain counts that began in its target's document."""
    ids, length = batch.document_ids, batch.document_ids.shape[1]
    kept = [F.pad(ids, (step + 1, 0), value=-1)[:, :length] == ids for step in range(steps)]
    return (torch.stack(kept) * batch.loss_mask).flatten(1)


def _output_weight(model: Any) -> Any:
    shared = model.share_embeddings_and_output_weights
    return model.shared_embedding_or_output_weight() if shared else model.output_layer.weight


def _head(model: Any) -> Any:
    own = getattr(model.eagle_module, "eagle_output_layer", None)
    return _output_weight(model) if own is None else own.weight


def _target_head(model: Any) -> Any:
    """The base's output layer for this rank's part of the draft's vocabulary, [tokens, hidden]."""
    weight = _output_weight(model).detach()
    d2t = getattr(model.eagle_module, "d2t", None)
    if d2t is None:
        return weight
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    tokens = torch.arange(len(d2t), device=weight.device) + d2t.to(weight.device) - rank * len(weight)
    here = ((tokens >= 0) & (tokens < len(weight))).nonzero().flatten()
    rows = weight.new_zeros(len(d2t), weight.shape[1])
    rows[here] = weight[tokens[here]]
    dist.all_reduce(rows, group=parallel_state.get_tensor_model_parallel_group())
    return rows.chunk(ranks)[rank].contiguous()


class _SoftTargets(torch.autograd.Function):
    """Cross entropy between the base's and the draft's distributions, with the vocabulary split over ranks.

    The gradient with respect to the states and the head is made together with the loss, chunk by chunk, so that no
    logits are kept for the backward pass and none are computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any, drafts: Any, head: Any, base: Any, base_head: Any, learned: Any, weights: Any, decay: float,
        train: bool,
    ) -> tuple[Any, Any]:  # fmt: skip
        """drafts [steps, tokens, hidden] by the token where a chain begins, base [tokens, hidden], heads [vocabulary,
        hidden], learned: the tokens that the loss of a step counts, weights [steps, learned].

        Returns the weighted sum, and [2, steps]: each step's sums of cross entropy and of equal most likely tokens.
        """
        steps, tokens, _ = drafts.shape
        found: Any = torch.empty(2, *weights.shape, device=drafts.device)
        to_head = train and head.requires_grad
        grad = torch.zeros_like(drafts) if train else None
        grad_head = torch.zeros_like(head, dtype=torch.float32) if to_head else None
        size = max(1, CHUNK[drafts.device.type] // len(head))
        chunks = zip(learned.split(size), weights.split(size, dim=1), found.split(size, dim=2), strict=True)
        for chunk, weight, (losses, equal) in chunks:
            target, best, _ = _softmax(F.linear(base[chunk], base_head))
            for step in range(steps):
                # a chain that began before the first token has no weight; here it is one of the last
                begin = (chunk - step - 1) % tokens
                states = drafts[step, begin]
                logits = F.linear(states, head)
                chosen, own, normal = _softmax(logits)
                losses[step] = normal - _sum((target * logits).sum(dim=-1))
                equal[step] = own == best
                if grad is None:
                    continue
                change = torch.sub(chosen, target, out=logits)
                scale = (weight[step] * decay**step)[:, None]
                grad[step, begin] = (change @ head * scale).to(grad.dtype)
                if grad_head is not None:
                    grad_head += change.T @ (states * scale).to(grad.dtype)
        ctx.save_for_backward(*([grad, grad_head] if to_head else [grad] if train else []))
        sums = (found * weights).sum(dim=-1)
        ctx.mark_non_differentiable(sums)
        factors = decay ** torch.arange(steps, device=sums.device)
        ctx.dtype = head.dtype
        return (sums[0] * factors).sum(), sums

    @staticmethod
    def backward(ctx: Any, upstream: Any, _sums: Any) -> tuple[Any, ...]:
        made = ctx.saved_tensors
        head = (made[1] * upstream).to(ctx.dtype) if len(made) == 2 else None
        return made[0] * upstream.to(made[0].dtype), head, None, None, None, None, None, None


def _softmax(logits: Any) -> tuple[Any, Any, Any]:
    """Of logits [tokens, vocabulary of this rank]: the probabilities in float32, and for each token the most likely one
    and the logarithm of the sum of the exponentials.
    """
    likely = torch.softmax(logits, dim=-1, dtype=torch.float32)
    top, best = logits.max(dim=-1)
    top = top.float()
    normal = top - likely.gather(1, best[:, None])[:, 0].log()
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        own, largest = normal, _reduce(top, dist.ReduceOp.MAX)
        normal = largest + _sum((own - largest).exp()).log()
        likely *= (own - normal).exp()[:, None]
        offset = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        best = _reduce(torch.where(top == largest, best + offset, -1), dist.ReduceOp.MAX)
    return likely, best, normal


def _sum(tensor: Any) -> Any:
    return _reduce(tensor, dist.ReduceOp.SUM)


def _reduce(tensor: Any, how: Any) -> Any:
    """Over the tensor-parallel ranks, which hold parts of the vocabulary."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor, how, group=group)
    return tensor
