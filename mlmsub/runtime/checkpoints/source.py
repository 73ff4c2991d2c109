"""The model that a stage starts from: a Hugging Face checkpoint, or a Megatron one where MLM_MODEL_CKPT is set."""

from pathlib import Path
from typing import Any

from mlmsub.runtime.checkpoints import checkpoint, hf_import
from mlmsub.runtime.models import eagle
from mlmsub.runtime.session import Job, Session


def model(job: Job, session: Session, start_from: Path | None) -> Any:
    """This rank's part of the model with its weights, in evaluation mode.

    ``start_from`` is the folder that a checkpoint's tracker names (``checkpoint.folder``); what modelopt has done
    to that model (quantizers, a draft) comes back with it. None imports ``session.source``.
    """
    from mlmsub.runtime.models.model import build, device

    made = build(session.args, session.conf, device(session.args))
    if start_from is None:
        with job.steps("import", f"from {session.source}"):
            hf_import.import_weights(made, session.source, session.conf, session.args.params_dtype, job.steps)
    else:
        with job.steps("load", f"from {start_from}"):
            checkpoint.load(made, start_from)
    return made


def joined(job: Job, session: Session, here: Path, base: Path | None) -> Any:
    """The model of a draft that was trained offline, with the whole base: ``here`` holds the draft alone.

    ``base``: the folder of a Megatron checkpoint; None imports ``session.source``.
    """
    config = checkpoint.draft(here)
    assert config is not None
    made = model(job, session, base)
    with job.steps("draft", f"from {here}"):
        eagle.add(made, session.args, eagle.Draft(config["eagle_architecture_config"], {}, False, None))
        checkpoint.load_draft(made, here)
    return made
