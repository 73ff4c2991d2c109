"""Hugging Face checkpoints: find the source, take its weights into a Megatron model, write one back."""

import json
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.errors import CheckFailed, StageError
from mlmsub.runtime.modelconf import ModelConf

INDEX = "model.safetensors.index.json"


def check_source(value: str | None) -> Path | None:
    """The local folder that HF_MODEL_CKPT names; None if it is unset or the id of a hub repository."""
    if value is None:
        return None
    path = Path(value)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise StageError("HF_MODEL_CKPT", f"{path} has no config.json.", "give a Hugging Face checkpoint folder.")
        return path
    # owner/name with no further slash may be a hub id; anything else is a path
    if value.startswith((".", "/", "~")) or value.count("/") != 1:
        raise StageError("HF_MODEL_CKPT", f"{value} does not exist here.", "check the path and the container's mounts.")
    return None


def source(value: str | None, conf: ModelConf, local_rank: int) -> Path:
    """The local folder of the source checkpoint; a hub repository is fetched once per node."""
    path = check_source(value)
    if path is not None:
        return path
    from huggingface_hub import snapshot_download

    repository = value or conf.tokenizer
    found: Path | None = None
    problem = ""
    # one process of a node fetches, then all look it up in the node's cache
    for turn in (local_rank == 0, local_rank != 0):
        if turn:
            try:
                found = Path(snapshot_download(repository, local_files_only=local_rank != 0))
            except Exception as error:  # the hub's client raises many kinds
                problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        distributed.barrier()
    if found is None:
        raise StageError(
            "HF_MODEL_CKPT",
            f"{'is not set, and ' if value is None else ''}{repository} cannot be fetched ({problem}).",
            "set HF_MODEL_CKPT to a local Hugging Face checkpoint folder.",
        )
    return found


def config(folder: Path) -> dict[str, Any]:
    """The language model's part of config.json."""
    data = json.loads((folder / "config.json").read_text())
    return dict(data.get("text_config", data))


def tokenizer(folder: Path, conf: ModelConf) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=conf.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise StageError("HF_MODEL_CKPT", f"{folder} has no usable tokenizer: {reason}") from error


def import_weights(model: Any, folder: Path, conf: ModelConf, dtype: Any) -> None:
    """Fill a Megatron model from a Hugging Face folder; raise CheckFailed if a parameter got no weights."""
    import torch
    from modelopt.torch.export import import_mcore_gpt_from_hf

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    try:
        with redirect_stderr(StringIO()):  # progress bars that no flag turns off
            import_mcore_gpt_from_hf(
                model,
                str(folder),
                dtype=dtype,
                trust_remote_code=conf.trust_remote_code,
                moe_router_dtype=model.config.moe_router_dtype,
            )
    except (RuntimeError, KeyError, ValueError, OSError) as error:
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:400]
        raise StageError(
            "HF_MODEL_CKPT", f"{folder} does not fit the model conf of {conf.model}: {reason}",
            "check that both are the same model, and that the checkpoint is whole.",
        ) from error  # fmt: skip
    empty = [name for name, parameter in model.named_parameters() if not bool(torch.isfinite(parameter).all())]
    if empty:
        raise CheckFailed(
            "HF_MODEL_CKPT", f"{folder} left {len(empty)} parameters without finite weights: {empty[:3]}."
        )


def export_weights(model: Any, source_folder: Path, conf: ModelConf, dtype: Any, folder: Path) -> None:
    """Write the model as a Hugging Face checkpoint into ``folder``, which exists (all ranks call it)."""
    from modelopt.torch.export import export_mcore_gpt_to_hf

    export_mcore_gpt_to_hf(
        model,
        str(source_folder),
        dtype=dtype,
        export_dir=str(folder),
        trust_remote_code=conf.trust_remote_code,
        moe_router_dtype=model.config.moe_router_dtype,
    )
