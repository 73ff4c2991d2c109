"""The model conf: a model's architecture as Megatron arguments, plus what no argument reaches."""

import difflib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.progress import say

# beside a checkpoint's tracker: the Megatron arguments that pruning has changed, by name without dashes
PRUNED = "pruned.json"
SOURCE_FORMATS = ("bf16", "fp8_block", "mxfp4")


@dataclass(frozen=True)
class ModelConf:
    """One model conf. Unknown keys, and values of another type, are refused when it is read.

    ``pruned``: the arguments in which a pruned checkpoint differs from the conf; they are the checkpoint's, not a key.
    """

    model: str
    tokenizer: str = ""
    trust_remote_code: bool = False
    source_format: str = "bf16"
    megatron_args: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    restrictions: dict[str, str] = field(default_factory=dict)
    aliases: list[str] = field(default_factory=list)
    family: str = ""
    notes: list[str] = field(default_factory=list)
    checked: str = ""
    shell_args: tuple[str, ...] = ()
    pruned: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        """The Megatron command-line arguments of this model."""
        words = list(self.shell_args)
        for name, value in {**self.megatron_args, **self.pruned}.items():
            if value is False or value is None:
                continue
            words.append(f"--{name}")
            if value is not True:
                words.extend(str(item) for item in (value if isinstance(value, list) else [value]))
        return words

    def require_of(self, model: str) -> None:
        """Raise StageError if this is not the conf of the model that was asked for, by its name or another of them."""
        if model.lower() not in (name.lower() for name in (self.model, *self.aliases)):
            said = f"{model} was asked for, and the model conf is of {self.model}."
            raise StageError("MODEL", said, f"give that model's conf, or {self.model} as the model.")

    def require(self, stage: str) -> None:
        """Raise StageError if the conf says that ``stage`` cannot work for this model."""
        if stage in self.unsupported:
            raise StageError(f"stage {stage}", f"not supported for {self.model}: {self.unsupported[stage]}")


def load(env: Env, model: str) -> ModelConf:
    """The conf of this run: ``conf/model.yaml``, else the MODEL_ARGS that a sourced .sh conf has set.

    Where MLM_MODEL_CKPT is a pruned checkpoint, it has that checkpoint's sizes.
    """
    conf = _given(env, model)
    pruned = pruned_sizes(env.path("MLM_MODEL_CKPT"))
    new = [f"{name}={size}" for name, size in pruned.items() if str(conf.megatron_args.get(name)) != str(size)]
    if new:
        say(f"model conf: MLM_MODEL_CKPT was pruned, so {' '.join(new)}")
    return replace(conf, pruned=pruned)


def pruned_sizes(checkpoint: Path | None) -> dict[str, Any]:
    """The Megatron arguments that pruning has changed, where ``checkpoint`` is of a pruned model."""
    file = checkpoint / PRUNED if checkpoint else None
    if file is None or not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise StageError("MLM_MODEL_CKPT", f"{file} is not JSON: {error}", "prune the model again.") from error
    return dict(found)


def _given(env: Env, model: str) -> ModelConf:
    file = env.run_dir / "conf" / "model.yaml"
    if file.is_file():
        return from_yaml(file)
    words = tuple(env.arguments("MODEL_ARGS"))
    if not words:
        raise StageError(
            "model conf",
            f"no {file}, and MODEL_ARGS is not set.",
            f"give a conf for {model}: a YAML file or a Megatron-LM style .sh file.",
        )
    return ModelConf(
        model=model,
        tokenizer=env.text("TOKENIZER_MODEL", model) or model,
        trust_remote_code="--trust-remote-code" in words,
        shell_args=words,
    )


def from_yaml(file: Path) -> ModelConf:
    """The conf in a file; StageError names what is wrong with it."""
    import yaml

    try:
        data = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise StageError(str(file), f"is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise StageError(str(file), "is not a mapping of keys.", "see conf/ for examples.")
    types = {
        "model": str, "tokenizer": str, "trust_remote_code": bool, "source_format": str,
        "megatron_args": dict, "config": dict, "unsupported": dict, "notes": list, "checked": str,
        "restrictions": dict, "aliases": list, "family": str,
    }  # fmt: skip
    for key, value in data.items():
        if key not in types:
            near = difflib.get_close_matches(str(key), types, 1)
            raise StageError(
                f"{file}: {key}",
                "unknown key.",
                f"did you mean {near[0]}?" if near else f"keys: {', '.join(types)}",
            )
        if not isinstance(value, types[key]):
            raise StageError(f"{file}: {key}", f"{value!r} is not a {types[key].__name__}.")
    if not data.get("model") or not data.get("megatron_args"):
        raise StageError(str(file), "model and megatron_args are required.")
    if data.get("source_format", "bf16") not in SOURCE_FORMATS:
        raise StageError(
            f"{file}: source_format",
            f"{data['source_format']!r} is unknown.",
            f"one of {', '.join(SOURCE_FORMATS)}",
        )
    return ModelConf(**{"tokenizer": data["model"], **data})
