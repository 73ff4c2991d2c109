"""The Hugging Face source of a run: its folder, its config and its tokenizer."""

import json
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import prefetch
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError, first_line
from mlmsub.runtime.modelconf import ModelConf
from mlmsub.runtime.models import compat

INDEX = "model.safetensors.index.json"
AGAIN = "fetch the checkpoint again; a Git LFS pointer is a text in a file's place."


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


def source(env: Env, conf: ModelConf) -> Path:
    """The local folder of the source checkpoint; a hub repository is fetched first (all ranks call it).

    Where the weights come from a Megatron checkpoint, only the configs and the tokenizer are fetched.
    """
    value = env.text("HF_MODEL_CKPT")
    path = check_source(value)
    if path is not None:
        return path
    weights = env.text("MLM_MODEL_CKPT") is None
    return prefetch.model(value or conf.tokenizer, env, weights=weights, unset=value is None)


def load_code(folder: Path, trusted: bool, local_rank: int) -> None:
    """Deal with Python code that a checkpoint brings along (``auto_map``), before anything of it could run.

    Where it is not trusted and the config cannot be read without it, StageError. Where it is, one process of a node
    puts it into transformers' module cache and the others follow, since that cache takes no two writers.
    """
    references = _own_code(folder)
    if not references:
        return
    if not trusted:
        _read_without_code(folder)
        return
    from transformers.dynamic_module_utils import get_cached_module_file

    compat.old_place_of_bytes_to_unicode()
    problem = ""
    for turn in (local_rank == 0, local_rank != 0):
        try:
            for reference in references if turn else ():
                get_cached_module_file(str(folder), f"{reference.partition('.')[0]}.py")
        except (ImportError, OSError) as error:
            problem = f"{type(error).__name__}: {error}".replace("\n", " ")
        distributed.barrier()
    said = f"the code of {folder} cannot be loaded: {problem}"
    distributed.agree(StageError("HF_MODEL_CKPT", said) if problem else None)


def _own_code(folder: Path) -> list[str]:
    """``module.Class`` of the config's and the tokenizer's own classes, as their ``auto_map`` names them."""
    found: list[str] = []
    for name, kind in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        file = folder / name
        classes = _json_object(file).get("auto_map") or {} if file.is_file() else {}
        if not isinstance(classes, dict):
            raise StageError("HF_MODEL_CKPT", f"{file}: auto_map is not a mapping.", AGAIN)
        reference = classes.get(kind)
        # a tokenizer has one class, or a slow and a fast one
        found += [word for word in (reference if isinstance(reference, list) else [reference]) if word]
    return found


def _read_without_code(folder: Path) -> None:
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        raise _untrusted(folder) from error


def _untrusted(folder: Path) -> StageError:
    return StageError(
        "trust_remote_code",
        f"{folder} cannot be read without running its own Python code ({', '.join(_own_code(folder))}).",
        "look at that code, then add --trust-remote-code to MLM_EXTRA_ARGS or trust_remote_code: true to the conf.",
    )


def config(folder: Path) -> dict[str, Any]:
    """The language model's part of config.json. StageError if it is not one."""
    file = folder / "config.json"
    data = _json_object(file)
    text = data.get("text_config", data)
    if not isinstance(text, dict) or not isinstance(text.get("vocab_size"), int):
        raise StageError("HF_MODEL_CKPT", f"{file} says no vocab_size.", AGAIN)
    return dict(text)


def _json_object(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise StageError("HF_MODEL_CKPT", f"{file} cannot be read: {error}.", AGAIN) from error
    if not isinstance(data, dict):
        raise StageError("HF_MODEL_CKPT", f"{file} is not a JSON object.", AGAIN)
    return data


def tokenizer(folder: Path, conf: ModelConf) -> Any:
    from mlmsub.runtime.models import imports

    with imports.without_generation():
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=conf.trust_remote_code)
    except Exception as error:  # each tokenizer class reads its files in its own way
        if _own_code(folder) and not conf.trust_remote_code:
            raise _untrusted(folder) from error
        reason = first_line(error)
        raise StageError("HF_MODEL_CKPT", f"{folder} has no usable tokenizer: {reason}") from error
