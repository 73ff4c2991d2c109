"""Megatron distributed checkpoints: a tracker file and the folder it names."""

import json
import re
import shutil
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed, modelconf
from mlmsub.runtime.checkpoints import frozen_base
from mlmsub.runtime.checkpoints.frozen_base import Base
from mlmsub.runtime.errors import CheckFailed, StageError, writing
from mlmsub.runtime.models import compat, imports
from mlmsub.runtime.outputs import write_json
from mlmsub.runtime.progress import without_prints
from mlmsub.runtime.quantization import formats

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # Megatron's word in it for a model to start from; a number is a training to go on with
# torch.distributed.checkpoint's plan of the files, and megatron-core's note of the format, written last
PLAN, FORMAT = ".metadata", "metadata.json"
COMMON = "common.pt"  # what is no tensor, in checkpoints of older Megatron versions
FIELD = frozen_base.FIELD
AGAIN, CONF = "run the stage that writes it again.", "use the model conf that it was made with."


def tracker(path: Path, field: str = FIELD) -> str:
    """What the tracker of ``path`` says: ``release``, a number, or nothing where there is none.

    Raises StageError on ``field`` where it cannot be read or says something else. Light: torch is not imported.
    """
    file = path / TRACKER
    try:
        word = file.read_text().strip()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        problem = f"{file} cannot be read: {error}."
    else:
        if word == RELEASE or re.fullmatch("[0-9]+", word):
            return word
        problem = f"{file} says {word[:40]!r}, and not {RELEASE} or the number of an iteration."
    words = [*map(str, iterations(path)), *([RELEASE] if (path / RELEASE).is_dir() else [])]
    fix = f"write into it the one that counts: {' or '.join(words)}." if words else f"give another {field}."
    raise StageError(field, problem, fix)


def iteration(here: Path) -> int | None:
    """The number of an iteration by the name of its folder; None: it is another folder."""
    found = re.fullmatch("iter_([0-9]{7,})", here.name)
    return int(found[1]) if found else None


def iterations(path: Path) -> dict[int, Path]:
    """The folders of iterations in ``path`` by their numbers, which rise."""
    there = ((iteration(here), here) for here in path.glob("iter_*"))
    return dict(sorted((number, here) for number, here in there if number is not None))


def folder(path: Path, field: str = FIELD) -> Path:
    """The folder that the tracker of ``path`` names (``release`` or ``iter_NNNNNNN``).

    Raises StageError on ``field`` with the reason if there is none. Light: torch is not imported.
    """
    if not path.is_dir():
        raise StageError(field, f"{path} does not exist.", "give a Megatron checkpoint folder.")
    if (path / FORMAT).is_file():
        raise StageError(
            field, f"{path} is one iteration of a checkpoint.",
            f"give the folder above, {path.parent}: its {TRACKER} says which iteration is read.",
        )  # fmt: skip
    word = tracker(path, field)
    if not word:
        raise StageError(field, f"{path} is not a complete checkpoint: no {TRACKER}.", AGAIN)
    return path / named(word)


def require_complete(path: Path, field: str = FIELD) -> None:
    """Raise StageError on every rank unless ``path`` is a complete checkpoint. Rank 0 alone looks."""
    reason = distributed.on_main(lambda: incomplete(path, field))
    if reason:
        fix = AGAIN if iteration(folder(path, field)) is None else frozen_base.OTHER
        raise distributed.told_once(StageError(field, f"{path} is not a complete checkpoint: {reason}", fix))


def incomplete(path: Path, field: str = FIELD) -> str:
    """Why ``path`` is not a complete checkpoint, or an empty string if it is one.

    Complete: the tracker names a folder whose plan is there, and every file of the plan has the bytes that
    the plan reads from it. The same holds for modelopt's part.
    """
    word = tracker(path, field)
    return incomplete_part(path / named(word)) if word else f"no {TRACKER}."


def incomplete_part(here: Path) -> str:
    """The same for the folder of one iteration, whatever the tracker names."""
    reason, keys = _read_plan(here)
    if reason:
        return reason
    if (here / "modelopt_state").is_dir():
        return _read_plan(here / "modelopt_state")[0]
    if any("_quantizer." in key for key in keys):
        return f"it is quantized, and {here.name}/modelopt_state is missing."
    return ""


def modes(here: Path) -> dict[str, Any]:
    """What modelopt has done to the model in the folder ``here`` of a whole checkpoint: the configs, by its names."""
    from megatron.core import dist_checkpointing

    state = here / "modelopt_state"
    if not (state / PLAN).is_file():
        return {}
    found = dist_checkpointing.load_common_state_dict(str(state))["modelopt_state_dict"]
    return {name: mode["config"] for name, mode in found}


def quantized(here: Path) -> bool:
    """Whether the model in the folder ``here`` of a whole checkpoint has quantizers."""
    return any("quantize" in name for name in modes(here))


def draft(here: Path) -> dict[str, Any] | None:
    """modelopt's config of the draft in the folder ``here`` of a whole checkpoint; None: it has none."""
    return modes(here).get("eagle")


def save(model: Any, args: Namespace, part: Path, notes: Mapping[str, dict[str, Any]] | None = None) -> None:
    """Write the weights and modelopt's state as a release checkpoint into the existing folder ``part``.

    The tracker is written last, by rank 0. All ranks call this; it ends with all of them done. CheckFailed: it
    could not be written, or is not what was to be written. ``notes``: see ``write``.
    """
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 0, "model": _sharded_state(model)}
    write(model, state, part, RELEASE, metadata(), notes)


def write(
    model: Any, state: dict[str, Any], path: Path, name: str, content: dict[str, Any],
    notes: Mapping[str, dict[str, Any]] | None = None,
) -> None:  # fmt: skip
    """Write ``state`` and modelopt's state of ``model`` as folder ``name`` of ``path``, then name it in the tracker.

    What an earlier try left of the folder is removed first. ``content``: Megatron's note of how the state is laid out.
    ``notes``: JSON files of the folder, such as where the frozen weights are that ``state`` leaves out.
    """
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from modelopt.torch.opt.plugins import save_sharded_modelopt_state
    from torch.distributed.checkpoint.api import CheckpointException

    from mlmsub.runtime.checkpoints import checkpoint_writer

    here = path / name
    distributed.on_main(lambda: _make_empty(here))
    strategy = checkpoint_writer.for_state(state["model"])
    try:
        # plans and copies of modelopt's state are a hundred thousand objects, looked at for a third of a small save
        with imports.uncollected():
            dist_checkpointing.save(
                state,
                str(here),
                strategy,
                content_metadata=content,
                preprocess_common_before_consistancy_check=_without_rank,
            )
            save_sharded_modelopt_state([model], str(here), checkpoint_writer.Writer("torch_dist", 1))
    except CheckpointException as error:  # torch raises it on every rank
        raise CheckFailed("checkpoint", f"{here} cannot be written: {last_line(error)}") from error
    dist.barrier()
    distributed.on_main(lambda: _name(path, here, getattr(state["args"], "pruned", {}), notes or {}))


def _make_empty(here: Path) -> None:
    try:
        if here.exists():
            shutil.rmtree(here)
        here.mkdir(parents=True)
    except OSError as error:
        raise CheckFailed("checkpoint", f"{here} cannot be written: {error.strerror}") from error


def _name(path: Path, here: Path, pruned: dict[str, Any], notes: Mapping[str, dict[str, Any]]) -> None:
    """Let the tracker name a folder that is complete, in one step: a reader sees the old name or the new one.

    ``pruned``: the sizes in which the model differs from its conf; later stages find them beside the tracker.
    """
    reason = incomplete_part(here)
    if reason:
        raise CheckFailed("checkpoint", f"what was written to {here} is incomplete: {reason}")
    with writing("checkpoint", here):
        for name, note in notes.items():
            write_json(here / name, note)
        if pruned:
            write_json(path / modelconf.PRUNED, pruned)
        number, scratch = iteration(here), path / f".{TRACKER}"
        scratch.write_text(here.name if number is None else str(number))
        scratch.replace(path / TRACKER)


def load(model: Any, here: Path) -> None:
    """Load weights and modelopt's state from ``here``; raise unless every tensor of the model was there.

    A frozen base that ``here`` refers to is loaded from where it is. A model without layers, for training offline,
    takes what it has from a whole base too. All ranks call this.
    """
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from modelopt.torch.opt.plugins import restore_sharded_modelopt_state
    from torch.distributed.checkpoint.api import CheckpointException

    offline = not len(model.decoder.layers) and parallel_state.get_pipeline_model_parallel_world_size() == 1
    base: Path = distributed.on_main(lambda: _base_of(here, offline))
    compat.zero_parameters(model)
    state: dict[str, Any] = {}
    lost: list[str] = []
    unused: list[str] = []
    try:
        with without_prints():
            # the base's, where quantizers keep theirs; the draft beside it is of the same kind from its beginning on
            if not offline or draft(here) is not None:  # else the quantizers of layers
                restore_sharded_modelopt_state([model], str(base))
        formats.refuse_cut_blocks(model)
        for folder, part in frozen_base.parts(_sharded_state(model), here, base).items():
            # Megatron's words: missing is what the checkpoint has and no rank asked for, unexpected is what this
            # rank asked for and the checkpoint lacks
            loaded, missing, unexpected = dist_checkpointing.load(
                {"model": part}, str(folder), strict=StrictHandling.RETURN_ALL
            )
            state |= loaded.get("model", {})  # a pipeline stage may have no part of it
            # Transformer Engine's modules keep an _extra_state that torch's do not have
            lost += sorted(key for key in unexpected if not key.endswith("_extra_state"))
            more: tuple[str, ...] = ("decoder.layers.",) if offline else ()
            if folder != here:  # the base's folder has a draft as it was at first
                more += (frozen_base.PART,)
            unused += sorted(key for key in missing if _is_weight(key) and not key.startswith(more))
    except (CheckpointingException, CheckpointException, ValueError) as error:
        raise StageError(FIELD, f"{here} does not fit the model conf: {last_line(error)}", CONF) from error
    if lost or unused:
        raise StageError(
            FIELD,
            f"{here} is another model: it lacks {len(lost)} tensors of the conf {lost[:3]} "
            f"and has {len(unused)} more {unused[:3]}.",
            CONF,
        )
    model.load_state_dict(state, strict=False)


def referred(here: Path) -> Base | None:
    """The base that the whole folder ``here`` refers to; None: it holds its own. StageError: this is not to be told."""
    base = Base.of(here)
    if base is None and not any(key.startswith(frozen_base.WEIGHTS) for key in _read_plan(here)[1]):
        problem = f"{here / frozen_base.FILE} is missing, which says where the base is."
        raise StageError(FIELD, problem, frozen_base.OTHER)
    return base


def load_draft(model: Any, here: Path) -> None:
    """Load the draft of ``here`` into a whole model that has one of the same architecture; all ranks call this."""
    from megatron.core import dist_checkpointing

    # of the draft alone: modelopt's quantized layers change the metadata on its way, and so the keys of what follows
    state = model.eagle_module.sharded_state_dict(prefix=frozen_base.PART, metadata=metadata(group=True))
    model.load_state_dict(dist_checkpointing.load({"model": state}, str(here))["model"], strict=False)


def _base_of(here: Path, offline: bool) -> Path:
    """The folder with the frozen base of ``here``, looked at; ``here`` itself where it holds its own.

    One process only. Raises StageError where the base is gone, incomplete, another one, or has no layers.
    """
    if not offline and (draft(here) or {}).get("eagle_offline"):
        problem = f"{here} is of a draft that was trained offline, and its base has no layers."
        raise StageError(FIELD, problem, "measure it with validate, export it with --export-extra-modules.")
    base = referred(here)
    if base is None:
        return here
    folder = here.parent / base.folder
    again = (
        f"put back the {base.folder} that was saved there, or that of a convert from the same source at the same"
        " layout; export --export-extra-modules needs the draft alone."
    )
    reason = incomplete_part(folder)
    if reason:
        raise StageError(FIELD, f"{here} holds a draft, and its base is not in {folder}: {reason}", again)
    found = frozen_base.digest(folder)
    if found != base.sha256:
        told = f"{here} was trained on the base {base.sha256[:16]}, and {folder} holds another, {found[:16]}."
        raise StageError(FIELD, told, again)
    return folder


def last_line(error: BaseException) -> str:
    """The error itself: torch's exceptions carry the tracebacks of all ranks as text."""
    return str(error).strip().rpartition("\n")[2][:300]


def _is_weight(key: str) -> bool:
    """Part of the model, unlike the optimizer, generator and argument state of a training checkpoint."""
    return key.startswith((*frozen_base.WEIGHTS, frozen_base.PART)) and key.endswith((".weight", ".bias", ".d2t"))


def _sharded_state(model: Any) -> dict[str, Any]:
    state: dict[str, Any] = model.sharded_state_dict(prefix="", metadata=metadata(group=True))
    compat.tell_replicas_of_expert_ranges(state)
    return state


def metadata(group: bool = False) -> dict[str, Any]:
    """How Megatron lays out the state, as megatron.training 0.19 writes it (its content_metadata)."""
    from megatron.core import parallel_state

    made: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if group:
        made["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return made


def _without_rank(state: dict[str, Any]) -> dict[str, Any]:
    """The common state without what differs by rank, for megatron-core's check that all ranks agree."""
    words = {name: value for name, value in vars(state["args"]).items() if name not in ("rank", "local_rank")}
    return {**state, "args": words}


def named(word: str) -> str:
    """The folder that a tracker with this word names."""
    return word if word == RELEASE else f"iter_{int(word):07d}"


def _read_plan(here: Path) -> tuple[str, list[str]]:
    """Why the files of one part are not those of its plan (or an empty string), and the plan's keys."""
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if not here.is_dir():
        return f"no {here.name}/.", []
    for name in (FORMAT, PLAN):
        if not (here / name).is_file():
            return f"no {name} in {here.name}/.", []
    reading = FORMAT
    try:
        if "sharded_backend" not in json.loads((here / FORMAT).read_text()):
            raise ValueError("it says no sharded_backend")
        reading = PLAN
        plan = FileSystemReader(here).read_metadata()
        needed: dict[str, int] = {}
        for item in plan.storage_data.values():
            needed[item.relative_path] = max(needed.get(item.relative_path, 0), item.offset + item.length)
        for name, size in sorted(needed.items()):
            file = here / name
            if not file.is_file() or file.stat().st_size < size:
                return f"{here.name}/{name} is missing or shorter than {size} bytes.", []
        reading = COMMON if (here / COMMON).is_file() else "its common state"
        dist_checkpointing.load_common_state_dict(str(here))
    except Exception as error:  # bytes that are no pickle, or another one, raise of every kind
        return f"{here.name}/{reading} is damaged ({type(error).__name__}: {last_line(error)}).", []
    return "", list(plan.state_dict_metadata)
