"""export: write a Megatron model as a Hugging Face checkpoint, quantized or not.

The model is the checkpoint MLM_MODEL_CKPT, or that of the stage before in the same run.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed, outputs
from mlmsub.runtime.checkpoints import checkpoint, draft_export, hf, hf_check, hf_export
from mlmsub.runtime.env import Env, Layout
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.progress import say
from mlmsub.runtime.quantization import formats
from mlmsub.runtime.session import Job, Session
from mlmsub.runtime.stage import BaseStage


class Stage(BaseStage):
    """``export MODEL``"""

    makes = "EXPORT_DIR"
    takes_live = gives_live = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.ckpt: Path = Path(self.env.required(checkpoint.FIELD, "give the Megatron checkpoint to export."))
        self.target = self.output("_export", hf.INDEX)
        asked = self.env.layout()
        if asked != self.layout:
            say(f"INFO: export runs with TP=1 CP=1 EP=1 ETP=1 (asked: {asked}); PP={self.layout.pp} is kept")
        if self.layout.pp > self.env.world_size:
            raise StageError("PP", f"{self.layout.pp} is more than the {self.env.world_size} processes of this run.")
        self.defaults = ["--use-cpu-initialization"]

    @classmethod
    def place(cls, env: Env) -> tuple[Layout, int | None]:
        """TP, EP and CP are 1: the exporter writes whole tensors, and splits the model by layers only."""
        layout = Layout(pp=env.layout().pp)
        return layout, layout.pp

    def add_arguments(self, parser: ArgumentParser) -> None:
        group = parser.add_argument_group("export")
        group.add_argument(
            "--export-vllm-fq",
            action="store_true",
            help="weights quantized and dequantized, and quantizer_state.pth, for vLLM with modelopt's fake quantizers",
        )
        group.add_argument(draft_export.FLAG, action="store_true", help="write the draft alone, for vLLM and SGLang")

    def run(self, session: Session, model: Any = None) -> Any:
        """Write the model, and read what was written; the model is as it was."""
        _refuse_split_tensors(session.args)
        if session.args.export_extra_modules:
            draft_export.run(self, self.target, session.source)
            return model
        self.begin(self.target)
        fake_quant = session.args.export_vllm_fq
        with self._on_cpu(session, model) as here:
            quantized = _check_formats(here, self.origin(session), fake_quant)
            kv_cache = hf_export.has_kv_cache(here)
            with self.job.steps("export", f"to {self.target.target}"):
                hf_export.export_weights(
                    here, session.source, session.conf, session.args.params_dtype, self.target.part, fake_quant
                )
        with self.job.steps("check", "what was written"):
            _check(self.target, session.source, quantized, kv_cache, fake_quant)
        self.publish(self.target)
        return model

    @contextmanager
    def _on_cpu(self, session: Session, live: Any) -> Iterator[Any]:
        """The model in host memory, where the formats are computed the same whatever GPU there is."""
        from mlmsub.runtime.models.model import build

        if live is None:
            folder = checkpoint.folder(self.ckpt)
            with self.job.steps("load", f"from {folder}, into host memory"):
                model = build(session.args, session.conf, "cpu")
                checkpoint.load(model, folder)
            yield model
            return
        device = next(live.parameters()).device
        live.to("cpu")
        yield live
        live.to(device)


def _refuse_split_tensors(args: Namespace) -> None:
    """MLM_EXTRA_ARGS come last on Megatron's line, so they could bring back what ``_layout`` has set."""
    if args.tensor_model_parallel_size * args.expert_model_parallel_size * args.context_parallel_size > 1:
        raise StageError("MLM_EXTRA_ARGS", "export needs TP=1, EP=1 and CP=1.", "leave these sizes out.")


def _check_formats(model: Any, origin: str, fake_quant: bool) -> bool:
    """Is the model quantized? Raise if it lacks a range, or is in a format that cannot be written."""
    quantized = formats.check_calibrated(model) > 0
    if formats.compressed(model):
        raise StageError("MLM_MODEL_CKPT", f"{origin} was made with --compress.", "quantize again without it.")
    if fake_quant and not quantized:
        raise StageError("--export-vllm-fq", f"{origin} is not quantized.", "quantize it first, or leave the flag out.")
    unknown = "" if fake_quant else formats.not_exported(model)
    if unknown:
        raise StageError("MLM_MODEL_CKPT", f"{origin} is in format {unknown}, which is not exported yet.")
    return quantized


def _check(output: outputs.Output, source: Path, quantized: bool, kv_cache: bool, fake_quant: bool) -> None:
    """Rank 0 reads what was written; all ranks raise what it finds, since they are about to meet again."""

    def look() -> None:
        if fake_quant:
            say(f"{hf_check.check_ranges(output.part / hf_export.RANGES)} ranges in {hf_export.RANGES}")
        say(hf_check.check(output.part, source, quantized and not fake_quant, kv_cache and not fake_quant))

    distributed.on_main(look)
