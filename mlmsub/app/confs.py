"""The catalogue of model confs: list it, look at one, check files, make one from a Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mlmsub.app import models
from mlmsub.app.models import Found
from mlmsub.core import architecture, confcheck, hf_config, modelconf
from mlmsub.core.errors import UsageError
from mlmsub.core.issues import Issue, error, info, warning


@dataclass(frozen=True)
class Entry:
    """One line of the catalogue; `parameters` counts weights, and is 0 where the conf does not tell."""

    name: str
    family: str
    layers: int
    experts: int
    parameters: int
    source_format: str
    verified: bool


def entries() -> list[Entry]:
    return [entry(found) for found in models.catalogue()]


def entry(found: Found) -> Entry:
    """What the list says of a conf; of a `.sh` file that cannot be read, its name alone."""
    conf = found.conf
    if conf is None:
        return Entry(found.model, "", 0, 0, 0, "", False)
    shape = architecture.read(conf.megatron_args)
    layers, experts, parameters = (len(shape.layers), shape.experts, shape.parameters) if shape else (0, 0, 0)
    return Entry(conf.model, conf.family, layers, experts, parameters, conf.source_format, bool(conf.checked))


def check(name: str, cwd: Path) -> list[Issue]:
    """The issues of a conf: a file, or a model of the catalogue. A file that cannot be read is an issue too."""
    try:
        found = models.find(name, cwd)
    except UsageError as problem:
        return [error("conf-parse", name, problem.message, problem.fix)]
    if found.conf is None:
        return [warning("conf-unread", name, "it sets no MODEL_ARGS that can be read without running it")]
    issues = list(confcheck.run(found.conf))
    if found.file_name == "model.sh":
        issues += [warning("conf-checkpoint", "HF_MODEL_CKPT", note) for note in found.conf.notes]
    elif not found.conf.checked:
        issues.append(info("conf-unverified", "checked", "it was compared with no public config.json and no logits"))
    return issues


def from_hf(path: Path, name: str) -> str:
    """The conf, as YAML, of the model whose config.json, or the folder that holds it, is `path`.

    Without `name` the model is called as config.json's `_name_or_path` says, or as its folder.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_bytes())
    except OSError as problem:
        raise UsageError(
            f"cannot read {file}: {problem.strerror}", fix="give a local config.json, or the checkpoint's folder"
        ) from None
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{file} is not JSON: {problem}") from None
    said = str(data.get("_name_or_path", "")) if isinstance(data, dict) else ""
    if not name and (said.count("/") != 1 or said.startswith(("/", "."))):
        name = file.resolve().parent.name
    return modelconf.render(hf_config.convert(data, name))


def write(path: Path, text: str) -> None:
    """Write a new file; UsageError if there is one."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists", fix="remove it, or choose another name") from None
    except OSError as problem:
        raise UsageError(f"cannot write {path}: {problem.strerror}") from None
