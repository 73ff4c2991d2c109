"""Forward passes of a Megatron GPTModel with a key/value cache: a prompt, then a few tokens at a time.

Megatron's own inference contexts want CUDA and one length for all rows; here each row stands at its own position.
Prompts are padded on the right: under causal attention a pad influences nothing before it, and the row's next token
is written over it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import utils as transformer_utils
from megatron.core.transformer.enums import AttnMaskType

from mlmsub.runtime.errors import StageError
from mlmsub.runtime.generation.kv_cache import CacheCursor, KeyValueCache
from mlmsub.runtime.models.attention import TorchAttention


class Decoder:
    """A model that remembers what it read, as a context manager; on leaving, the model is as it was.

    Every rank of a model-parallel group makes the same calls with the same tokens. The number of rows is that of the
    first call. Logits are whole on every rank of the last pipeline stage, and None on the others. Nothing here waits
    for the GPU: positions are tensors, and the caches' addresses stay.

    Raises StageError for a model whose layers keep another state (Mamba) and for context parallelism.
    """

    def __init__(self, model: Any, capacity: int) -> None:
        """``capacity``: tokens that a row can have, prompt and completion together."""
        if not isinstance(model, GPTModel) or model.position_embedding_type == "mrope":
            raise StageError("model conf", f"{type(model).__name__} of this kind has no key/value cache here.")
        if getattr(model, "eagle_offline", False):
            raise StageError("MLM_MODEL_CKPT", "the base of an offline draft has no layers.", "give the whole model.")
        if model.config.softmax_type == "off-by-one":
            raise StageError("model conf", "softmax off-by-one has no attention with a key/value cache here.")
        if model.config.context_parallel_size > 1:
            raise StageError("CP", "a key/value cache is not split by context parallelism.", "set CP=1.")
        self.model, self.cursor = model, CacheCursor(capacity)
        self.device = next(model.parameters()).device
        # what an EAGLE3 base's hooks gathered in the last pass, a [new, batch, hidden] for each layer they watch
        self.hidden_states: list[torch.Tensor] = []
        self._undo = ExitStack()

    def __enter__(self) -> "Decoder":
        self._undo.enter_context(whole_sequences(self.model))
        for module in [self.model, *self.model.decoder.modules()]:
            if isinstance(getattr(module, "rotary_pos_emb", None), RotaryEmbedding):
                swap(self._undo, module, "rotary_pos_emb", RotaryAtPositions(module.rotary_pos_emb, self.cursor))
            if hasattr(module, "core_attention"):
                give_cache(self._undo, module, self.cursor)
        return self

    def __exit__(self, *_error: object) -> None:
        self._undo.close()

    def prefill(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        """Read prompts [batch, seq], right-padded; returns the logits [batch, vocabulary] after each row's last token.

        ``lengths`` [batch] are the prompts' own. The output layer sees one position of each row.
        """
        self.cursor.move(None)
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        logits = self._forward(tokens, positions, lengths - 1)
        return None if logits is None else logits[:, 0]

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, reach: int | None = None) -> torch.Tensor | None:
        """Read tokens [batch, new], which stand at ``positions`` [batch, new]; returns logits [batch, new, vocabulary].

        To go back, give an earlier position. ``reach``: no position of any row is beyond it (default: the capacity);
        a smaller one costs less.
        """
        self.cursor.move(positions, reach)
        logits: torch.Tensor | None = self._forward(tokens, positions, None)
        return logits

    @torch.no_grad()
    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor | None) -> Any:
        model = self.model
        if not model.pre_process:
            model.set_input_tensor(self._receive(tokens))
        # GPTModel's own forward: that of a model with an EAGLE draft runs the draft too
        out = GPTModel.forward(
            model, tokens, positions, None, output_processor=_logits, output_processor_context=ends
        )  # fmt: skip
        gathered = getattr(model, "_aux_hidden_states", None)
        if gathered is not None:
            self.hidden_states = list(gathered)
            gathered.clear()
        if model.post_process:
            return out
        dist.send(
            out.contiguous(),
            parallel_state.get_pipeline_model_parallel_next_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        return None

    def _receive(self, tokens: torch.Tensor) -> torch.Tensor:
        """The hidden states [new, batch, hidden] from the pipeline stage before this one."""
        config = self.model.config
        kind = torch.float32 if config.fp32_residual_connection else config.pipeline_dtype
        hidden = torch.empty(tokens.shape[1], tokens.shape[0], config.hidden_size, dtype=kind, device=self.device)
        dist.recv(
            hidden,
            parallel_state.get_pipeline_model_parallel_prev_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        return hidden


class RotaryAtPositions(torch.nn.Module):
    """Megatron's rotary embedding, which knows lengths only, at the cursor's positions."""

    def __init__(self, original: Any, cursor: CacheCursor) -> None:
        super().__init__()
        self.original, self.cursor = original, cursor
        made = original.get_emb(cursor.capacity)
        # YaRN's comes with a factor
        self.angles, self.rest = (made[0], made[1:]) if isinstance(made, tuple) else (made, ())

    def get_rotary_seq_len(self, *args: Any, **options: Any) -> Any:
        return self.original.get_rotary_seq_len(*args, **options)

    def forward(self, length: int, **options: Any) -> Any:
        """Angles [length, 1, 1, width], or [new, batch, 1, width] at positions; as a tuple where the original's is."""
        if self.cursor.positions is None:
            return self.original(length, **options)
        angles = self.angles[:, 0][self.cursor.positions.t()]
        return (angles, *self.rest) if self.rest else angles


@contextmanager
def whole_sequences(model: Any) -> Iterator[None]:
    """The model in evaluation mode and without sequence parallelism; on leaving, it is as it was.

    A step of one token cannot be split along the sequence, and hidden states are then whole on every rank.
    """
    split, trained = model.config.sequence_parallel, [module for module in model.modules() if module.training]
    if split:
        transformer_utils.set_model_to_sequence_parallel(model, False)
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True
        if split:
            transformer_utils.set_model_to_sequence_parallel(model, True)
            # Megatron keeps the list of modules by the model's address, where another model may lie later
            transformer_utils._sequence_parallel_attr_cache.pop(id(model), None)


def swap(undo: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Set an attribute until ``undo`` is closed."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, new)


def give_cache(undo: ExitStack, layer: Any, cursor: CacheCursor) -> None:
    """Give a self-attention layer's core a cache; Transformer Engine's core is replaced by torch's meanwhile."""
    core = layer.core_attention
    if not isinstance(core, TorchAttention):
        core = _torch_core(layer).train(False)
        swap(undo, layer, "core_attention", core)
    core.cache = KeyValueCache(cursor)
    undo.callback(setattr, core, "cache", None)


def on_any_rank(value: bool, group: Any, device: Any) -> bool:
    """Whether ``value`` is true on some rank of ``group``."""
    if dist.get_world_size(group) == 1:
        return value
    flag = torch.tensor([int(value)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def cache_bytes(model: Any) -> int:
    """Bytes of one token of one row in the caches of this rank's layers."""
    width = 0
    for module in model.decoder.modules():
        if hasattr(module, "core_attention"):
            if model.config.multi_latent_attention:
                width += module.num_attention_heads_per_partition * (module.q_head_dim + model.config.v_head_dim)
            else:
                width += 2 * module.num_query_groups_per_partition * module.hidden_size_per_attention_head
    return width * int(model.config.params_dtype.itemsize)


def _logits(
    *, hidden_states: Any, output_layer: Any, output_weight: Any, scale_logits: Any, context: Any, **_unused: Any
) -> torch.Tensor:
    """What GPTModel does with its last hidden states [seq, batch, hidden]; with ``context``, at those places only."""
    if context is not None:
        rows = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        hidden_states = hidden_states[context, rows][None]
    logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=True)
    result: torch.Tensor = scale_logits(logits).transpose(0, 1)
    return result


def _torch_core(layer: Any) -> TorchAttention:
    """A core like that of ``layer``, which is Transformer Engine's, with its softmax offset and KV-cache quantizers."""
    old, config = layer.core_attention, layer.config
    scale = layer.softmax_scale if config.multi_latent_attention else config.softmax_scale
    core = TorchAttention(config, layer.layer_number, AttnMaskType.causal, "self", softmax_scale=scale)
    core.softmax_offset = getattr(old, "softmax_offset", None)
    names = ("q_bmm_quantizer", "k_bmm_quantizer", "v_bmm_quantizer")
    if hasattr(old, names[0]):
        core.quantizers = tuple(getattr(old, name) for name in names)
    return core
