"""What makes a training the one that it is: noted in each of its iterations, and compared before a run goes on.

What counts is content, never a path: a checkpoint that has moved is the same, another of the same sizes is not. Of
what is not noted nothing is known, and it is not compared.
"""

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmsub.runtime.checkpoints import checkpoint, identity
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.progress import warn

if TYPE_CHECKING:
    from mlmsub.runtime.session import Session
    from mlmsub.runtime.stage import BaseStage

FIELD, SOURCE, FILE = "MLM_MODEL_SAVE", "HF_MODEL_CKPT", "training.json"
# what is noted -> what the user has said it with
FIELDS = {
    "stage": FIELD,
    "source": "",  # one of two variables: it says itself which
    "data": "--finetune-hf-dataset",
    "global_batch_size": "--global-batch-size",
    "seed": "--seed",
    "optimizer": "--optimizer",
    "distributed_optimizer": "--use-distributed-optimizer",
    "teacher": "--export-kd-teacher-load",
    "distillation": "--export-kd-cfg",
}


def of(stage: "BaseStage", session: "Session", *, in_place: bool = False, **more: Any) -> dict[str, Any]:
    """What makes this training; one process only, since it reads from the disk. ``more``: what the stage knows."""
    made = {"stage": stage.job.stage, **_of_arguments(session.args), **more}
    found = None if in_place else source(stage, session)  # else the iterations lie in it
    return made if found is None else {**made, "source": found}


def source(stage: "BaseStage", session: "Session") -> dict[str, str | None] | None:
    """What a stage starts from; None: a stage of this run makes it, and may make it anew, or its weights are gone."""
    if stage.job.made_by:
        return None
    if stage.start_from is not None:
        return content(checkpoint.FIELD, stage.start_from)
    found = content(SOURCE, session.source)
    return None if found["is"] is None else found


def content(field: str, path: Path) -> dict[str, str | None]:
    """A checkpoint as it is noted: what it is, and for messages where it was found."""
    known = identity.of_source(path) if field == SOURCE else identity.of_checkpoint(path)
    return {"is": known, "field": field, "path": str(path)}


def read(here: Path) -> dict[str, Any]:
    """What the iteration ``here`` has noted; nothing if it is of an older version. Light: torch is not imported."""
    file = here / FILE
    try:
        noted = json.loads(file.read_text())
        contents = [noted[name] for name in ("source", "data", "teacher") if noted.get(name) is not None]
        if not all(isinstance(one["is"], str) and isinstance(one["path"], str) for one in contents):
            raise ValueError("it names no contents")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        problem = f"{file} is damaged: {error}."
        raise StageError(FIELD, problem, "remove it, if you know that this is the training to go on with.") from error
    return dict(noted)


def base(here: Path, given: Path) -> Path | None:
    """Where the base is that a draft in ``here`` was trained offline for: a Megatron checkpoint's folder, or None.

    None: it is the Hugging Face folder ``given``. StageError where it is gone, or another one; one process only.
    """
    noted = read(here).get("source")
    if noted is None:
        warn(f"{here} does not say what its base was: {given} is taken for it.")
        return None
    found = Path(noted["path"]) if noted["field"] == checkpoint.FIELD else None
    if found is not None and not found.is_dir():
        raise StageError(checkpoint.FIELD, f"the base of {here} is not in {found}.", "put it back.")
    now = content(noted["field"], found or given)
    if now["is"] != noted["is"]:
        problem = f"{_told(now)} is not the base of {here}: {_told(noted)}."
        raise StageError(noted["field"], problem, "give that one.")
    return found


def check(now: dict[str, Any], here: Path) -> None:
    """Raise StageError if what is in ``here``, an iteration or a release, is of another training; one process only."""
    was = read(here)
    if not was and checkpoint.iteration(here) is not None:
        from megatron.core import dist_checkpointing

        warn(f"{here} has no {FILE}, as of an older version: what the training began with is not compared.")
        was = _of_arguments(dist_checkpointing.load_common_state_dict(str(here))["args"])
    for name, field in FIELDS.items():
        if name in was and name in now and _known(was[name]) != _known(now[name]):
            field = field or now[name]["field"]
            raise StageError(
                field, f"{_told(now[name])} is not what the training in {here} has: {_told(was[name])}.",
                f"give that to go on with it, or another {FIELD} for a new training.",
            )  # fmt: skip


def check_stage(stage: str, here: Path) -> None:
    """The same of the stage alone, which is known before anything else is. Light: torch is not imported."""
    was = read(here).get("stage", stage)
    if was != stage:
        problem = f"{here} is of a training with {was}, and this is {stage}."
        raise StageError(FIELD, problem, f"give another {FIELD}, or start {was} to go on with that.")


def _of_arguments(args: Namespace) -> dict[str, Any]:
    """What Megatron's arguments say, of this run or in a checkpoint."""
    data = getattr(args, "mlmsub_data", None)
    known = {} if data is None else {"data": {"is": data, "path": args.finetune_hf_dataset}}
    return {
        **known,
        "global_batch_size": args.global_batch_size,
        "seed": args.seed,
        "optimizer": args.optimizer,
        "distributed_optimizer": args.use_distributed_optimizer,
    }


def _known(value: Any) -> Any:
    return value.get("is") if isinstance(value, dict) and "path" in value else value


def _told(value: Any) -> str:
    if not isinstance(value, dict) or "path" not in value:
        return "nothing" if value is None else str(value)
    kind, _, digest = str(value["is"]).rpartition(":")
    return f"{value['path']} ({kind or 'content'} {digest[:12]})"
