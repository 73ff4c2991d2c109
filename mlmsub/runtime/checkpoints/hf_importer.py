"""modelopt's importer and its rules for every family, on a reader of our own.

modelopt 0.47's own reader parses the index and opens a file for each tensor, rounds FP8 scales to bf16 before it
multiplies, and wants slices that are multiples of the FP8 block.
"""

from typing import Any

import torch
from megatron.core import parallel_state as mpu
from modelopt.torch.export.plugins.mcore_custom import ParallelConfig
from modelopt.torch.export.plugins.megatron_importer import GPTModelImporter

from mlmsub.runtime.checkpoints.hf_reader import FIELD, Reader, Span
from mlmsub.runtime.checkpoints.hf_weights import Weights
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.modelconf import ModelConf

OUTPUT = "lm_head.weight"
ROWS = 8192  # to compare at a time


class Importer(GPTModelImporter):  # type: ignore[misc]
    """Fills this rank's part of ``model`` from ``reader``'s folder."""

    def __init__(self, model: Any, reader: Reader, conf: ModelConf, dtype: torch.dtype) -> None:
        try:
            super().__init__(
                model,
                str(reader.folder),
                dtype=dtype,
                trust_remote_code=conf.trust_remote_code,
                moe_router_dtype=model.config.moe_router_dtype,
            )
        except KeyError as error:
            raise StageError(FIELD, f"modelopt has no import rules for {error.args[0]}.") from error
        self._weights = Weights(reader, dtype, next(model.parameters()).device)
        self._embedding = ""  # its name in the source
        self._places = {
            "TP": (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()),
            "ETP": (mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()),
            "EP": (mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size()),
        }

    def run(self) -> None:
        """Import. No collective is called, so a rank may fail alone; ``resync`` comes after."""
        self.model.setup_embeddings_and_output_layer = lambda: None  # the import ends with it, and it all-reduces
        try:
            self._import_state_dict()
        finally:
            del self.model.setup_embeddings_and_output_layer

    def resync(self) -> None:
        """Give the last pipeline stage the embedding that the first has read, where they share it."""
        if self.model.share_embeddings_and_output_weights and self.model.config.pipeline_model_parallel_size > 1:
            self.model.setup_embeddings_and_output_layer()

    def check_tied(self, config: dict[str, Any]) -> None:
        """Raise StageError if the embedding is to be the output layer, and the source has another output layer.

        Rank 0 alone compares; the output layer then counts as read.
        """
        own = next((name for name in self._weights.reader.files if name.endswith(OUTPUT)), None)
        if own is None or torch.distributed.get_rank() or not self.model.share_embeddings_and_output_weights:
            return
        reader = self._weights.reader
        rows = reader.shape(own)[0]
        parts = (Span(0, start, min(start + ROWS, rows)) for start in range(0, rows, ROWS))
        if reader.shape(own) == reader.shape(self._embedding) and all(
            torch.equal(self._weights.get(own, part).float(), self._weights.get(self._embedding, part).float())
            for part in parts
        ):
            return
        said = "config.json says" if config.get("tie_word_embeddings") else "the model conf says"
        raise StageError(
            FIELD, f"{own} in {reader.where(own)} is not the embedding, though {said} that it is tied to it.",
            "say tie_word_embeddings: false in config.json and untie-embeddings-and-output-weights: true in the conf, "
            "or take that tensor out of the checkpoint.",
        )  # fmt: skip

    def _get_safetensor(self, key: str, parallel_config: ParallelConfig | None = None) -> torch.Tensor:
        return self._weights.get(key, self._span(key, parallel_config))

    def _span(self, key: str, config: ParallelConfig | None) -> Span | None:
        """The part of a tensor that this rank's place in the tensor, expert-tensor or expert group means."""
        if config is None or config.sharding_dim is None:
            return None
        rank, size = self._places[config.parallel_group]
        shape = self._weights.reader.shape(key)
        whole = shape[config.sharding_dim]
        if whole % size:
            problem = f"{key} {list(shape)} cannot be split over {config.parallel_group}={size}."
            raise StageError(config.parallel_group, problem, "choose a size that divides it.")
        part = whole // size
        return Span(config.sharding_dim % len(shape), rank * part, (rank + 1) * part) if size > 1 else None

    def _name_remapping(self, module: Any, prefix: str, mapping: Any = None, **options: Any) -> None:
        """The base class casts a router's correction bias as it does the weight, to bf16 by default."""
        if getattr(module, "expert_bias", None) is not None:
            options["dtype"] = torch.float32  # the parameters keep their own type, so the weight is rounded once
        if module is getattr(getattr(self.model, "embedding", None), "word_embeddings", None):
            self._embedding = f"{prefix}weight"
        super()._name_remapping(module, prefix, mapping or {}, **options)

    def _unpack_name_remapping_gpt_oss(
        self, module: Any, prefix: str, layer_type: str, parallel_config: Any = None, is_mtp: bool = False
    ) -> None:
        """The experts of gpt-oss, one at a time and only this rank's.

        Gate and up alternate in the output dimension; Megatron has one after the other.
        """
        span = self._span(f"{prefix}_blocks" if self._weights.is_mxfp4(prefix) else prefix, parallel_config)
        for expert, child in enumerate(module.children(), span.start if span else 0):
            linear = getattr(child, layer_type)
            state = linear.state_dict()
            for name, key in (("weight", prefix), ("bias", f"{prefix}_bias")):
                if state.get(name) is not None:
                    tensor = self._weights.expert(key, expert)
                    state[name] = torch.cat((tensor[::2], tensor[1::2])) if layer_type == "linear_fc1" else tensor
            linear.load_state_dict(state)  # rounds plain sources to the parameters' type
