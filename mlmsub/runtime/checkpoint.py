"""Megatron distributed checkpoints: a tracker file and the folder it names."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from mlmsub.runtime import compat
from mlmsub.runtime.errors import CheckFailed, StageError

TRACKER = "latest_checkpointed_iteration.txt"
# torch.distributed.checkpoint's plan of the files, and megatron-core's note of the format, written last
PLAN, FORMAT = ".metadata", "metadata.json"
FIELD = "MLM_MODEL_CKPT"
AGAIN, CONF = "run the stage that writes it again.", "use the model conf that it was made with."


def folder(path: Path) -> Path:
    """The folder that the tracker of ``path`` names (``release`` or ``iter_NNNNNNN``).

    Raises StageError with the reason if there is none. Light: torch is not imported.
    """
    if not path.is_dir():
        raise StageError(FIELD, f"{path} does not exist.", "give a Megatron checkpoint folder.")
    if (path / FORMAT).is_file():
        raise StageError(FIELD, f"{path} is one iteration of a checkpoint.", f"give the folder above: {path.parent}")
    if not (path / TRACKER).is_file():
        raise StageError(FIELD, f"{path} is not a complete checkpoint: no {TRACKER}.", AGAIN)
    return path / _named(path)


def require_complete(path: Path) -> None:
    """Raise StageError on every rank unless ``path`` is a complete checkpoint. Rank 0 alone looks."""
    import torch.distributed as dist

    told = [incomplete(path) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told, src=0)
    if told[0]:
        raise StageError(FIELD, f"{path} is not a complete checkpoint: {told[0]}", AGAIN)


def incomplete(path: Path) -> str:
    """Why ``path`` is not a complete checkpoint, or an empty string if it is one.

    Complete: the tracker names a folder whose plan is there, and every file of the plan has the bytes that
    the plan reads from it. The same holds for modelopt's part.
    """
    if not (path / TRACKER).is_file():
        return f"no {TRACKER}."
    here = path / _named(path)
    reason, keys = _read_plan(here)
    if reason:
        return reason
    if (here / "modelopt_state").is_dir():
        return _read_plan(here / "modelopt_state")[0]
    if any("_quantizer." in key for key in keys):
        return f"it is quantized, and {here.name}/modelopt_state is missing."
    return ""


def save(model: Any, args: Namespace, part: Path) -> None:
    """Write the weights and modelopt's state as a release checkpoint into the existing folder ``part``.

    The tracker is written last, by rank 0. All ranks call this; it ends with all of them done.
    """
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from modelopt.torch.opt.plugins import save_sharded_modelopt_state

    here = part / "release"
    if dist.get_rank() == 0:
        here.mkdir()
    dist.barrier()
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 0, "model": _sharded_state(model)}
    dist_checkpointing.save(
        state,
        str(here),
        ("torch_dist", 1),
        content_metadata=_metadata(),
        preprocess_common_before_consistancy_check=_without_rank,
    )
    save_sharded_modelopt_state([model], str(here), ("torch_dist", 1))
    dist.barrier()
    if dist.get_rank() == 0:
        (part / TRACKER).write_text("release")
        reason = incomplete(part)
        if reason:
            raise CheckFailed("checkpoint", f"what was written to {part} is incomplete: {reason}")
    dist.barrier()


def load(model: Any, here: Path) -> None:
    """Load weights and modelopt's state from ``here``; raise unless every tensor of the model was there."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from modelopt.torch.opt.plugins import restore_sharded_modelopt_state
    from torch.distributed.checkpoint.api import CheckpointException

    compat.zero_parameters(model)
    try:
        restore_sharded_modelopt_state([model], str(here))
        # Megatron's words: missing is what the checkpoint has and no rank asked for, unexpected is what this
        # rank asked for and the checkpoint lacks
        loaded, missing, unexpected = dist_checkpointing.load(
            {"model": _sharded_state(model)}, str(here), strict=StrictHandling.RETURN_ALL
        )
    except (CheckpointingException, CheckpointException, ValueError) as error:
        reason = str(error).strip().rpartition("\n")[2][:300]  # torch's carries a traceback as text
        raise StageError(FIELD, f"{here} does not fit the model conf: {reason}", CONF) from error
    # Transformer Engine's modules keep an _extra_state that torch's do not have
    lost = sorted(key for key in unexpected if not key.endswith("_extra_state"))
    unused = sorted(key for key in missing if _is_weight(key))
    if lost or unused:
        raise StageError(
            FIELD,
            f"{here} is another model: it lacks {len(lost)} tensors of the conf {lost[:3]} "
            f"and has {len(unused)} more {unused[:3]}.",
            CONF,
        )
    model.load_state_dict(loaded["model"], strict=False)


def _is_weight(key: str) -> bool:
    """Part of the model, unlike the optimizer, generator and argument state of a training checkpoint."""
    return key.startswith(("embedding.", "decoder.", "output_layer.")) and key.endswith((".weight", ".bias"))


def _sharded_state(model: Any) -> dict[str, Any]:
    state: dict[str, Any] = model.sharded_state_dict(prefix="", metadata=_metadata(group=True))
    return state


def _metadata(group: bool = False) -> dict[str, Any]:
    """How Megatron lays out the state, as megatron.training 0.19 writes it (its content_metadata)."""
    from megatron.core import parallel_state

    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if group:
        metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return metadata


def _without_rank(state: dict[str, Any]) -> dict[str, Any]:
    """The common state without what differs by rank, for megatron-core's check that all ranks agree."""
    words = {name: value for name, value in vars(state["args"]).items() if name not in ("rank", "local_rank")}
    return {**state, "args": words}


def _named(path: Path) -> str:
    word = (path / TRACKER).read_text().strip()
    return f"iter_{int(word):07d}" if word.isdigit() else word


def _read_plan(here: Path) -> tuple[str, list[str]]:
    """Why the files of one part are not those of its plan (or an empty string), and the plan's keys."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    for name in (FORMAT, PLAN):
        if not (here / name).is_file():
            return f"no {name} in {here.name}/.", []
    plan = FileSystemReader(here).read_metadata()
    needed: dict[str, int] = {}
    for item in plan.storage_data.values():
        needed[item.relative_path] = max(needed.get(item.relative_path, 0), item.offset + item.length)
    for name, size in sorted(needed.items()):
        file = here / name
        if not file.is_file() or file.stat().st_size < size:
            return f"{here.name}/{name} is missing or shorter than {size} bytes.", []
    return "", list(plan.state_dict_metadata)
