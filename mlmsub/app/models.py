"""Find a model's conf: in the catalogue by name or alias, or a file of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlmsub.app import resources
from mlmsub.app.config import read_yaml
from mlmsub.core import modelconf, stages
from mlmsub.core.errors import UsageError
from mlmsub.core.modelconf import ModelConf
from mlmsub.core.spec import to_text
from mlmsub.core.strict import build


@dataclass(frozen=True)
class Found:
    """A conf to ship as `file_name`. Of a `.sh` file `conf` is what reading it tells, or None; the job sources it."""

    model: str
    file_name: str
    text: str
    conf: ModelConf | None
    path: Path


def is_file(name: str) -> bool:
    """Whether a model is asked for by a conf's path."""
    return name.endswith((".yaml", ".yml", ".sh"))


def find(name: str, cwd: Path) -> Found:
    """The conf of a catalogue name, of an alias, or of a path that ends in .yaml, .yml or .sh."""
    if is_file(name):
        return read(cwd / name)
    known = resources.conf_names()
    exact = next((k for k in known if k.lower() == name.lower()), None)
    if exact is None:
        aliases = {alias.lower(): found for found in catalogue() if found.conf for alias in found.conf.aliases}
        if name.lower() in aliases:
            return aliases[name.lower()]
        raise modelconf.unknown(name, known, str(resources.root() / "conf"))
    return _shipped(exact)


@cache
def _shipped(name: str) -> Found:
    return read(resources.root() / "conf" / f"{name}.yaml")


def catalogue() -> list[Found]:
    """Every conf that comes with mlmsub."""
    return [_shipped(name) for name in resources.conf_names()]


def read(path: Path) -> Found:
    """The conf in this file. Raises UsageError if it is not there, or not a model conf."""
    if not path.is_file():
        raise UsageError(f"the model conf {path} does not exist")
    if path.suffix != ".sh":
        conf = build(ModelConf, read_yaml(path), str(path))
        return Found(conf.model, "model.yaml", to_text(path.read_bytes()), conf, path)
    text = to_text(path.read_bytes())
    if target := modelconf.link_target(text):
        linked = path.parent / target
        if not linked.is_file():
            raise UsageError(f"{path} is a symbolic link as a text file, and {linked} does not exist")
        text = to_text(linked.read_bytes())
    return Found(path.stem, "model.sh", text, modelconf.read_shell(text, path.stem), path)


def _of_example(script: str, model: str) -> Found | None:
    """For the checks: the catalogue's conf where the script has the name of one of Megatron-LM's examples."""
    example = script.rpartition("/")[2].removesuffix(".sh") in stages.STAGES
    return find(model, Path()) if example and model in resources.conf_names() else None


def conf_of(stage: stages.Stage, args: tuple[str, ...], cwd: Path) -> tuple[Found | None, tuple[str, ...], str]:
    """(conf, arguments for the job, model) of a stage's arguments; `script` has no conf of ours."""
    if stage.name == stages.SCRIPT:
        words = tuple(args[0].split()) if len(args) == 1 else args  # the reference's one quoted word
        if not words:
            raise UsageError("script needs a command", fix="mlmsub submit script ... -- eagle3.sh MODEL")
        model = words[1] if len(words) > 1 and not words[1].startswith("-") else ""
        return _of_example(words[0], model), words, model
    usage = " ".join(("mlmsub submit", stage.name, "MODEL", *(f"[{name}]" for name in stage.extra)))
    if not args:
        raise UsageError(f"{stage.name} needs a model", fix=usage)
    count = next((index for index, word in enumerate(args) if word.startswith("-")), len(args)) - 1
    if stage.words is not None and count > stage.words:
        raise UsageError(f"{stage.name}: unexpected argument {args[1 + stage.words]!r}", fix=usage)
    found = find(args[0], cwd)
    return found, (found.model, *args[1:]), found.model
