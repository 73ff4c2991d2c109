"""quantize: calibrate a model to a low-precision format and save it as a Megatron checkpoint.

The source is the Hugging Face checkpoint HF_MODEL_CKPT, or the Megatron checkpoint MLM_MODEL_CKPT if set.
"""

from argparse import ArgumentParser
from typing import Any

from mlmsub.runtime import calibration, checkpoint, distributed, formats, hf, outputs
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import CheckFailed, StageError
from mlmsub.runtime.progress import say, warn
from mlmsub.runtime.session import Job, Session, start

# flags of the reference's quantize.py that mean something and are not done here
NOT_DONE = (
    "--compress", "--disable-qkv-quant", "--num-first-layers-to-skip-quant", "--num-last-layers-to-skip-quant",
    "--prompts", "--references", "--calib-use-random-offset", "--export-real-quant-cfg",
)  # fmt: skip


def run(job: Job) -> None:
    """``quantize MODEL [QFORMAT]``"""
    env = job.env
    if len(job.words) > 1:
        raise StageError("quantize", f"takes a model and one format, not {job.words}.")
    asked = job.words[0] if job.words else env.text("QFORMAT") or formats.DEFAULT
    conf = job.conf()
    _refuse_flags_not_done(env)
    ckpt = env.path("MLM_MODEL_CKPT")
    start_from = checkpoint.folder(ckpt) if ckpt else None
    local_source = hf.check_source(env.text("HF_MODEL_CKPT"))
    target = env.work_path("MLM_MODEL_SAVE", "_quant", job.model)
    output = outputs.Output(env, "MLM_MODEL_SAVE", target, checkpoint.TRACKER)
    output.check(MLM_MODEL_CKPT=ckpt, HF_MODEL_CKPT=local_source)
    layout = env.layout()
    layout.check(env.world_size)
    calibration.check_file(env.text("MLM_CALIB_DATA"))

    with start(job, conf, layout, _add_arguments, []) as session:
        name = formats.full_name(asked)
        formats.check_kv_cache(session.args.export_kv_cache_quant)
        file = calibration.check_file(session.args.calib_data or env.text("MLM_CALIB_DATA"))
        if start_from is not None:
            checkpoint.require_complete(start_from.parent)
        if env.rank == 0:
            output.begin()
        distributed.barrier()
        model = _source_model(job, session, start_from)
        _quantize(job, session, model, name, file)
        with job.steps("save", f"to {target}"):
            checkpoint.save(model, session.args, output.part)
            if env.rank == 0:
                output.publish()
            distributed.barrier()
    outputs.finish(env, job.stage, job.model, {"MLM_MODEL_SAVE": str(target)}, job.steps)


def _source_model(job: Job, session: Session, start_from: Any) -> Any:
    from mlmsub.runtime.model import build, device

    model = build(session.args, session.conf, device(session.args))
    if start_from is not None:
        with job.steps("load", f"from {start_from}"):
            checkpoint.load(model, start_from)
    else:
        with job.steps("import", f"from {session.source}"):
            hf.import_weights(model, session.source, session.conf, session.args.params_dtype)
    if any(True for _ in formats.quantizers(model)):
        raise StageError("MLM_MODEL_CKPT", f"{start_from} is quantized already.", "start from the unquantized one.")
    return model


def _quantize(job: Job, session: Session, model: Any, name: str, file: Any) -> None:
    import modelopt.torch.quantization as mtq

    args = session.args
    config = formats.config(name, args)
    device = next(model.parameters()).device.type
    batch = args.calib_batch_size or (32 if device == "cuda" else 8)
    if device == "cpu" and "NVFP4" in name:
        warn(f"{name} can be calibrated and exported on a CPU, but its fake-quantized forward needs a GPU.")
    if args.weight_only and args.export_kv_cache_quant == "none" and config["algorithm"] in ("max", None):
        loop, shape = None, "weights only, no samples"
    else:
        tokenizer = hf.tokenizer(session.source, session.conf)
        samples = calibration.chunks(file, tokenizer, args.calib_max_sequence_length, args.calib_size)
        loop = calibration.forward_loop(calibration.share(samples), batch, device)
        shape = f"{len(samples)} samples of {samples.shape[1]} tokens, batches of {batch}"
    with job.steps("calibrate", f"{name}, {shape}"):
        mtq.quantize(model, config, loop)
        count = formats.check_calibrated(model)
    if not count:
        raise CheckFailed(name, "enabled no quantizer in this model; nothing would be quantized.")
    say(f"{count} quantizers calibrated")
    if formats.not_exported(model):
        warn(f"{name} can be used in Megatron; the export stage cannot write it as a Hugging Face checkpoint.")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(text)
    return int(text)


def _add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("quantize")
    group.add_argument("--calib-size", type=_count, default=512, help="number of samples")
    group.add_argument("--calib-batch-size", type=_count, help="default: 32 on a GPU, 8 on a CPU")
    group.add_argument("--calib-max-sequence-length", type=_count, default=512, help="tokens per sample")
    group.add_argument(
        "--calib-data",
        "--calib-dataset-path-or-name",
        "--calib-dataset",
        help="a local .jsonl, .parquet or .txt",
    )
    group.add_argument("--weight-only", action="store_true", help="do not quantize activations")
    group.add_argument("--export-kv-cache-quant", choices=sorted(formats.KV_FORMATS), default="none")


def _refuse_flags_not_done(env: Env) -> None:
    for word in env.arguments("MLM_EXTRA_ARGS"):
        if word.partition("=")[0] in NOT_DONE:
            raise StageError("MLM_EXTRA_ARGS", f"{word} is not implemented by mlmsub's quantize.", "leave it out.")
