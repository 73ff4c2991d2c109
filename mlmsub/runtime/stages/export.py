"""export: write the Megatron checkpoint MLM_MODEL_CKPT as a Hugging Face checkpoint, quantized or not."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from mlmsub.runtime import checkpoint, distributed, formats, hf, hf_check, outputs
from mlmsub.runtime.env import Env, Layout
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.progress import say
from mlmsub.runtime.session import Job, Session, start


def run(job: Job) -> None:
    """``export MODEL``"""
    env = job.env
    if job.words:
        raise StageError("export", f"takes a model only, not {job.words}.")
    conf = job.conf()
    ckpt = Path(env.required("MLM_MODEL_CKPT", "give the Megatron checkpoint to export."))
    here = checkpoint.folder(ckpt)
    local_source = hf.check_source(env.text("HF_MODEL_CKPT"))
    target = env.work_path("EXPORT_DIR", "_export", job.model)
    output = outputs.Output(env, "EXPORT_DIR", target, hf.INDEX)
    output.check(MLM_MODEL_CKPT=ckpt, HF_MODEL_CKPT=local_source)
    layout = _layout(env)
    if env.rank >= layout.pp:
        print(
            f"rank {env.rank}: export uses {layout.pp} of {env.world_size} processes; not this one",
            flush=True,
        )
        return

    with start(job, conf, layout, _add_arguments, ["--use-cpu-initialization"], world_size=layout.pp) as session:
        _refuse_split_tensors(session.args)
        checkpoint.require_complete(ckpt)
        if env.rank == 0:
            output.begin()
        distributed.barrier()
        model = _load(job, session, here)
        quantized = formats.check_calibrated(model)
        unknown = formats.not_exported(model)
        if unknown:
            raise StageError("MLM_MODEL_CKPT", f"{here} is in format {unknown}, which is not exported yet.")
        with job.steps("export", f"to {target}"):
            hf.export_weights(model, session.source, session.conf, session.args.params_dtype, output.part)
            distributed.barrier()
        if env.rank == 0:
            with job.steps("check"):
                say(hf_check.check(output.part, session.source, quantized > 0))
                for file in output.part.glob("model-*-of-*.json"):
                    file.unlink()  # the exporter's own notes, all of them in the index
                output.publish()
        distributed.barrier()
    outputs.finish(env, job.stage, job.model, {"EXPORT_DIR": str(target)}, job.steps)


def _layout(env: Env) -> Layout:
    """TP, EP and CP are 1 here: the exporter writes whole tensors, and splits the model by layers only."""
    asked = env.layout()
    layout = Layout(pp=asked.pp)
    if asked != layout:
        say(f"INFO: export runs with TP=1 CP=1 EP=1 ETP=1 (asked: {asked}); PP={layout.pp} is kept")
    if layout.pp > env.world_size:
        raise StageError("PP", f"{layout.pp} is more than the {env.world_size} processes of this run.")
    return layout


def _refuse_split_tensors(args: Namespace) -> None:
    """MLM_EXTRA_ARGS come last on Megatron's line, so they could bring back what ``_layout`` has set."""
    if args.tensor_model_parallel_size * args.expert_model_parallel_size * args.context_parallel_size > 1:
        raise StageError("MLM_EXTRA_ARGS", "export needs TP=1, EP=1 and CP=1.", "leave these sizes out.")


def _load(job: Job, session: Session, here: Path) -> Any:
    from mlmsub.runtime.model import build

    with job.steps("load", f"from {here}, into host memory"):
        model = build(session.args, session.conf, "cpu")
        checkpoint.load(model, here)
    return model


def _add_arguments(parser: ArgumentParser) -> None:
    """export has no flags of its own."""
