"""The state of a training on disk, in Megatron's layout: what a restarted run needs to go on as if never stopped.

``<folder>/iter_NNNNNNN`` holds arguments, iteration, model, optimizer, schedule and generators, and of a frozen base a
reference (``frozen_base``); the tracker, written last, names the newest. ``release`` in the tracker is a model to start
from, a number a training to go on with.
"""

import random
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import checkpoint, frozen_base
from mlmsub.runtime.checkpoints.frozen_base import Base
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.progress import say, warn
from mlmsub.runtime.training import record
from mlmsub.runtime.training.trainer import Trainer

FIELD = record.FIELD
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
}


def save(trainer: Trainer, folder: Path, noted: dict[str, Any], keep: int = 0, base: Base | None = None) -> None:
    """Write this iteration and let the tracker name it; of ours keep the last ``keep`` (0: all). All ranks call it.

    ``noted``: the training's ``record``. ``base``: the frozen weights, which are referred to and not written again.
    Raises CheckFailed on all ranks if it cannot be written, or a weight is not finite; the tracker then names the one
    before.
    """
    from megatron.training.checkpointing import generate_state_dict

    trainer.check_weights()
    args = trainer.args
    args.iteration, args.consumed_train_samples = trainer.iteration, trainer.consumed
    content = {**checkpoint.metadata(), **_optimizer_layout(args)}
    layout = {**checkpoint.metadata(group=True), **content}
    state = generate_state_dict(
        args,
        [trainer.module],
        trainer.optimizer,
        trainer.schedule,
        _generators(args),
        iteration=trainer.iteration,
        optim_sd_kwargs={"metadata": layout},
        model_sd_kwargs={"metadata": layout},
    )
    if base is not None:
        state["model"] = {name: part for name, part in state["model"].items() if name.startswith(frozen_base.PART)}
    state["num_floating_point_operations_so_far"] = 0  # Megatron's loader asks for it
    notes = {record.FILE: noted} | ({} if base is None else {frozen_base.FILE: base.note()})
    checkpoint.write(trainer.module, state, folder, f"iter_{trainer.iteration:07d}", content, notes)
    say(f"  successfully saved checkpoint from iteration {trainer.iteration:7d} to {folder}")
    if keep:
        distributed.on_main(lambda: _remove_old(folder, trainer.iteration, keep))


def latest(folder: Path, noted: dict[str, Any]) -> Path | None:
    """The newest complete iteration that the tracker has reached, or None: a first start. All ranks call it.

    Folders that are incomplete are named and passed over. StageError if there are iterations and none is complete, if
    the tracker says nothing that makes sense, or if the training is another one than ``noted``.
    """
    found: Path | None = distributed.on_main(lambda: _latest(folder, noted))
    return found


def load(trainer: Trainer, here: Path) -> None:
    """Go on from ``here``, whose weights the model has already: optimizer, schedule, generators and iteration.

    Raises StageError if it is laid out for another layout, or by other settings of the optimizer.
    """
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.training.checkpointing import generate_state_dict
    from torch.distributed.checkpoint.api import CheckpointException

    args = trainer.args
    was = dist_checkpointing.load_common_state_dict(str(here))
    content = dist_checkpointing.load_content_metadata(str(here)) or {}
    same_layout = _check(args, was["args"], content, here)
    with_optimizer = not (args.no_load_optim or was["args"].no_save_optim)
    with_generators = same_layout and not (args.no_load_rng or was["args"].no_save_rng)
    if not with_optimizer:
        warn(f"the optimizer's state is not that of {here}: it begins anew.")
    if not with_generators:
        warn(f"the random generators are not those of {here}: dropout, if there is any, draws other numbers.")
    if with_optimizer:
        _fill_optimizer(trainer.optimizer)
    layout = {**checkpoint.metadata(group=True), **content}
    state = generate_state_dict(
        Namespace(**{**vars(args), "no_save_optim": False, "no_save_rng": False}),  # what is there is what counts
        [trainer.module],
        trainer.optimizer if with_optimizer else None,
        trainer.schedule,
        _generators(args) if with_generators else None,
        optim_sd_kwargs={"metadata": layout, "is_loading": True},
        model_sd_kwargs={"metadata": layout},
    )
    del state["model"]  # the optimizer's part is made from it
    try:
        loaded = dist_checkpointing.load(state, str(here))
    except (CheckpointingException, CheckpointException, RuntimeError, KeyError, ValueError) as error:
        raise StageError(FIELD, f"{here} does not fit: {checkpoint.last_line(error)}", checkpoint.CONF) from error
    try:
        if was["args"].no_save_optim:  # Megatron leaves the schedule out too, which follows from the samples
            trainer.schedule.step(increment=was["args"].consumed_train_samples)
        else:
            trainer.schedule.load_state_dict(loaded["opt_param_scheduler"])
        if with_optimizer:
            with torch.no_grad():  # in float32 its parameters are views of the model's
                trainer.optimizer.load_state_dict(loaded["optimizer"])
            _restore_step(trainer.optimizer)
    except (AssertionError, KeyError, ValueError) as error:
        raise StageError(
            "MLM_DATA_ARGS" if "iterations" in str(error) else "MLM_OPTIM_ARGS",
            f"not those of {here}: {checkpoint.last_line(error)}",
            "give those of the first start; --override-opt-param-scheduler allows another length, no other --lr.",
        ) from error  # fmt: skip
    if with_generators:
        _set_generators(loaded["rng_state"][0])
    trainer.iteration = was["iteration"]


def _latest(folder: Path, noted: dict[str, Any]) -> Path | None:
    word, tracker = checkpoint.tracker(folder, FIELD), folder / checkpoint.TRACKER
    reached, first = int(word) if word.isdigit() else -1, ""
    for number, here in reversed(checkpoint.iterations(folder).items()):
        # one that is whole, where the tracker names none at all: what a kill just before, or a lost tracker, leaves
        beyond = number > reached and not (reached < 0 and record.read(here))
        reason = "it was being written." if beyond else _damage(here)
        first = first or reason
        if reason:
            warn(f"{here} is ignored, it is not a complete checkpoint: {reason}")
            continue
        if reached < 0 or not (folder / checkpoint.named(word)).is_dir():
            says = f"says {word}" if word else "is not there"
            warn(f"{tracker} {says}; the newest whole iteration is {number}, and is gone on from.")
        record.check(noted, here)
        return here
    if reached >= 0:
        problem = f"{tracker} says {reached}, and no complete iteration is there. {first}".rstrip()
        raise StageError(FIELD, problem, f"put one back, or give another {FIELD} to start anew.")
    return None


def _damage(here: Path) -> str:
    """Why an iteration cannot be gone on from, as far as its own files show it; or an empty string."""
    reason = checkpoint.incomplete_part(here)
    try:
        if not reason:
            checkpoint.referred(here)
    except StageError as error:
        reason = error.problem
    return reason


def _remove_old(folder: Path, iteration: int, keep: int) -> None:
    ours = [here for number, here in checkpoint.iterations(folder).items() if number <= iteration]
    for here in ours[:-keep]:
        shutil.rmtree(here, ignore_errors=True)


def _check(args: Namespace, was: Namespace, content: dict[str, Any], here: Path) -> bool:
    """Whether the layout is that of the checkpoint; StageError where that forbids to go on."""
    changed = {name: getattr(was, size) for name, size in SIZES.items() if getattr(was, size) != getattr(args, size)}
    kind = content.get("distrib_optim_sharding_type")
    if changed and kind == "dp_reshardable":
        old = " ".join(f"{name}={size}" for name, size in changed.items())
        raise StageError(
            " ".join(changed), f"{here} was saved with {old}, and its optimizer's state is cut by data-parallel rank.",
            f"resume with {old}. {RESHARDABLE} at the save would have allowed this; it needs Transformer Engine.",
        )  # fmt: skip
    return not changed


def _optimizer_layout(args: Namespace) -> dict[str, Any]:
    """How a distributed optimizer's state is saved. megatron-core 0.19.2 can make it fit for any layout (fully
    reshardable) with Transformer Engine's or Apex's Adam only: torch's ends in KeyError 'step'."""
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    if not args.use_distributed_optimizer:
        return {}
    if args.dist_ckpt_optim_fully_reshardable and not HAVE_APEX_OR_TE:
        raise StageError(RESHARDABLE, "needs Transformer Engine or Apex.", "leave it out.")
    args.dist_ckpt_optim_fully_reshardable = HAVE_APEX_OR_TE
    if not HAVE_APEX_OR_TE:
        return {"distrib_optim_sharding_type": "dp_reshardable"}
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": args.distrib_optim_fully_reshardable_mem_efficient,
    }


def _torch_optimizers(optimizer: Any) -> list[Any]:
    """torch's own optimizers inside of Megatron's."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one.optimizer for one in chained if getattr(one, "optimizer", None) is not None]


def _fill_optimizer(optimizer: Any) -> None:
    """Give a fresh torch optimizer its state, of zeros, by a step that changes nothing.

    megatron-core 0.19.2's distributed optimizer makes it for Transformer Engine's and Apex's Adam only, and asserts
    for torch's that it is there (``state_dict``: ``assert len(steps) == 1``).
    """
    import torch
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer

    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    if HAVE_APEX_OR_TE or not any(isinstance(one, DistributedOptimizer) for one in chained):
        return
    for one in _torch_optimizers(optimizer):
        rates = [group["lr"] for group in one.param_groups]
        for group in one.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        one.step()
        one.zero_grad(set_to_none=True)
        for group, rate in zip(one.param_groups, rates, strict=True):
            group["lr"] = rate


def _restore_step(optimizer: Any) -> None:
    """megatron-core 0.19.2's distributed optimizer loads torch's Adam with the step count that it had before the load,
    which its bias correction would then begin with; the checkpoint's is in the parameter groups, where Transformer
    Engine's Adam keeps its own."""
    import torch

    for one in _torch_optimizers(optimizer):
        for group in one.param_groups if isinstance(one, torch.optim.Adam) else ():
            step = group.pop("step", None)
            for parameter in group["params"] if step is not None else ():
                one.state[parameter]["step"] = torch.tensor(float(step))


def _generators(args: Namespace) -> Any:
    """The states of all random generators, as Megatron keeps them: by pipeline and tensor-parallel rank."""
    import numpy as np
    import torch
    from megatron.core import parallel_state as groups
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject(
        "rng_state",
        [states],
        (args.pipeline_model_parallel_size, args.tensor_model_parallel_size),
        (groups.get_pipeline_model_parallel_rank(), groups.get_tensor_model_parallel_rank()),
        replica_id=groups.get_data_parallel_rank(with_context_parallel=True),
    )


def _set_generators(states: dict[str, Any]) -> None:
    import numpy as np
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    torch.cuda.set_rng_state(states["cuda_rng_state"])
    get_cuda_rng_tracker().set_states(states["rng_tracker_states"])
