"""The model conf: a model's architecture as Megatron arguments, plus what no argument reaches."""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError

SOURCE_FORMATS = ("bf16", "fp8_block", "mxfp4")


@dataclass(frozen=True)
class ModelConf:
    """One model conf. Unknown keys, and values of another type, are refused when it is read."""

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

    def arguments(self) -> list[str]:
        """The Megatron command-line arguments of this model."""
        words = list(self.shell_args)
        for name, value in self.megatron_args.items():
            if value is False or value is None:
                continue
            words.append(f"--{name}")
            if value is not True:
                words.extend(str(item) for item in (value if isinstance(value, list) else [value]))
        return words

    def require(self, stage: str) -> None:
        """Raise StageError if the conf says that ``stage`` cannot work for this model."""
        if stage in self.unsupported:
            raise StageError(f"stage {stage}", f"not supported for {self.model}: {self.unsupported[stage]}")


def load(env: Env, model: str) -> ModelConf:
    """The conf of this run: ``conf/model.yaml``, else the MODEL_ARGS that a sourced .sh conf has set."""
    file = env.run_dir / "conf" / "model.yaml"
    if file.is_file():
        return _from_yaml(file)
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


def _from_yaml(file: Path) -> ModelConf:
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
