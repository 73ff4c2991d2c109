"""Quantize a model in place by modelopt, and check the result: ranges, ranks, experts."""

import hashlib
import json
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.errors import CheckFailed, StageError, first_line
from mlmsub.runtime.outputs import write_json
from mlmsub.runtime.progress import say, without_prints
from mlmsub.runtime.quantization import amax, calibration, experts, extensions, formats, search
from mlmsub.runtime.quantization.recipes import Plan
from mlmsub.runtime.session import Job

PROGRESS_OF = "of.json"  # in the folder of layerwise progress: what that progress belongs to


def check_weights(model: Any) -> None:
    """Raise CheckFailed on every rank, naming the parameter, if a weight is NaN or infinite."""
    import torch

    bad = [name for name, weight in model.named_parameters() if not bool(torch.isfinite(weight).all())]
    found = [name for part in distributed.gather(bad) for name in part]
    if found:
        raise CheckFailed(
            "weights", f"{len(found)} parameters hold NaN or infinity: {', '.join(found[:3])}.",
            "make the checkpoint again from a whole source.",
        )  # fmt: skip


def quantize(model: Any, plan: Plan, samples: Any, args: Namespace, device: str, job: Job) -> int:
    """Calibrate or search as ``plan`` says; returns the number of enabled quantizers on all ranks.

    ``samples``: token ids [samples, length] of the whole run, None where the plan needs none. Raises StageError or
    CheckFailed on all ranks alike, except from within a forward pass: then this rank's exit ends the others.
    """
    _skip_layers(model, plan, args)
    steps = job.steps
    if not plan.by_max or plan.search is not None:
        extensions.prepare_formats(job.env, plan.configs)
    shape, size = "weights only, no samples", 1
    if samples is not None:
        size = args.calib_batch_size or calibration.batch_size(samples.shape[1], device)
        shape = f"{len(samples)} samples of {samples.shape[1]} tokens, batches of {size}"
        steps.event("calibration", samples=len(samples), length=samples.shape[1], batch=size)
        samples = calibration.share(samples)
    counts = experts.TokenCounts(args)
    with steps("calibrate", f"{plan.name}, {shape}"), counts.watching(model):
        if plan.search is not None:
            if plan.search.checkpoint:
                of = Path(f"{plan.search.checkpoint}.{PROGRESS_OF}")
                # the budget may be another one: scores serve any
                _claim(of, "--auto-quantize-checkpoint", replace(plan.search, bits=0.0), samples, model)
            with without_prints():
                found = search.run(model, plan.search, samples, size, device)
            say(search.summary(found))
            steps.event("auto_quantize", **found)
        else:
            _calibrate(model, plan, samples, size, device)
    if samples is not None:
        experts.report(counts.gather(samples.numel()), steps)
    formats.refuse_cut_blocks(model)
    count = formats.check_calibrated(model)
    _check_effect(model, plan)
    amax.check_equal_across_ranks(model, shared_by_experts=plan.by_max)
    return count


def compress(model: Any) -> int:
    """Store the weights in their format's bits; returns the number of weights on all ranks."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.qtensor import QTensorWrapper

    try:
        with without_prints():
            mtq.compress(model)
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise StageError("--compress", f"modelopt cannot: {first_line(error)[:300]}", "leave it out.") from error
    count = sum(distributed.gather(sum(isinstance(weight, QTensorWrapper) for weight in model.parameters())))
    if not count:
        raise CheckFailed("--compress", "no weight of this format can be stored in low precision.", "leave it out.")
    return int(count)


def _calibrate(model: Any, plan: Plan, samples: Any, size: int, device: str) -> None:
    import modelopt.torch.quantization as mtq

    assert plan.config is not None
    settings = formats.layerwise(plan.config)
    if settings.get("checkpoint_dir"):
        of = Path(settings["checkpoint_dir"]) / PROGRESS_OF
        _claim(of, "--layerwise-checkpoint", plan.config, samples, model)
    loop = None
    if samples is not None:
        forward = calibration.forward_loop(samples, size, device, logits=bool(settings))

        def loop(quantized: Any) -> None:
            formats.refuse_cut_blocks(quantized)
            forward(quantized)

    # modelopt's check looks at one rank, where a pipeline stage may rightly have nothing to quantize; see _check_effect
    os.environ["MODELOPT_SKIP_WEIGHT_QUANT_CHECK"] = "1"
    try:
        with without_prints(but="resuming"):
            mtq.quantize(model, plan.config, loop)
    # After an error inside a quantized forward modelopt leaves torch's functions patched (no try/finally in its
    # replace_function): nothing may go on in this process, and what is raised here ends it.
    except (AssertionError, NotImplementedError, ValueError) as error:
        reason = first_line(error)[:300]
        if "nan" in reason.lower():
            raise CheckFailed(
                "calibration", f"the model computes NaN on the calibration data ({reason})",
                "check the checkpoint and the model conf.",
            ) from error  # fmt: skip
        raise CheckFailed(plan.name, f"modelopt cannot quantize this model with it: {reason}") from error
    except RuntimeError as error:
        if "MoE calibration incomplete" in str(error):
            raise CheckFailed(
                "calibration", "on some ranks no expert of a layer saw a token, and so has no range.",
                "give more samples (--calib-size, --calib-data), or fewer expert-parallel ranks.",
            ) from error  # fmt: skip
        raise


def _skip_layers(model: Any, plan: Plan, args: Namespace) -> None:
    """Turn off the first and last layers of the whole model, by the names that they have in this pipeline stage."""
    first, last = args.num_first_layers_to_skip_quant or 0, args.num_last_layers_to_skip_quant or 0
    if first + last == 0:
        return
    total = args.num_layers
    if first + last >= total:
        raise StageError(
            "--num-first-layers-to-skip-quant",
            f"with {first} first and {last} last layers skipped, none of {total} is left to quantize.",
            "skip fewer.",
        )
    for place, layer in enumerate(model.decoder.layers):
        if layer.layer_number <= first or layer.layer_number > total - last:
            plan.skip(f"decoder.layers.{place}.*")


def _check_effect(model: Any, plan: Plan) -> None:
    """Raise CheckFailed if a format enabled nothing in this model, or no weight although it names weights."""
    names = [name for name, _ in formats.quantizers(model)]
    weights = any("weight_quantizer" in name for name in names)
    found = distributed.gather((bool(names), weights))
    if not any(some for some, _ in found):
        raise CheckFailed(plan.name, "enabled no quantizer in this model; nothing would be quantized.")
    if plan.wants_weights and not any(some for _, some in found):
        raise CheckFailed(
            plan.name, "asks for quantized weights, and its patterns match none in this model.",
            "take a recipe made for Megatron's names (linear_qkv, linear_fc1, experts.local_experts).",
        )  # fmt: skip


def _claim(file: Path, field: str, what: object, samples: Any, model: Any) -> None:
    """Refuse the saved progress of another model, format or data; modelopt would go on with it.

    ``file`` keeps the fingerprint of what the progress beside it belongs to.
    """
    digest = hashlib.sha256(repr(what).encode())
    digest.update(samples.numpy().tobytes())
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {float(weight.double().sum())}".encode())
    ours = digest.hexdigest()
    if any(distributed.gather(file.is_file() and json.loads(file.read_text()).get(_place()) not in (None, ours))):
        raise StageError(
            field, f"{file.parent} holds the progress of another model, format or data.",
            "name another place, or remove what is there.",
        )  # fmt: skip
    prints = {place: digest for part in distributed.gather({_place(): ours}) for place, digest in part.items()}
    distributed.on_main(lambda: write_json(file, prints))


def _place() -> str:
    """This rank's, as modelopt keeps one file of progress per rank."""
    import torch.distributed as dist

    return str(dist.get_rank())
