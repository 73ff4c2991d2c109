"""Typed reading of the variables that the entrypoint hands to every rank."""

import math
import os
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlmsub.runtime.errors import StageError


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups: tensor, pipeline, context, expert, expert-tensor."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def check(self, world_size: int) -> None:
        """Raise StageError unless ``world_size`` processes can form these groups.

        The rule is megatron.core.parallel_state's: both TP x PP x CP (dense layers) and ETP x EP x PP
        (experts) divide the number of processes.
        """
        for names, sizes in (
            ("TP x PP x CP", (self.tp, self.pp, self.cp)),
            ("ETP x EP x PP", (self.etp, self.ep, self.pp)),
        ):
            if world_size % math.prod(sizes):
                shown = " x ".join(map(str, sizes))
                raise StageError(
                    names,
                    f"{shown} = {math.prod(sizes)} does not divide the {world_size} processes of this run.",
                    "change the layout or the number of nodes and GPUs.",
                )


class Env:
    """The variables of one run. An empty value counts as unset, as in the reference's shell scripts."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = os.environ if variables is None else variables

    def changed(self, **values: str) -> "Env":
        """These variables with some others in their place; "" unsets one."""
        return Env(ChainMap(values, dict(self._variables)))

    def text(self, name: str, default: str | None = None) -> str | None:
        return self._variables.get(name, "").strip() or default

    def required(self, name: str, fix: str) -> str:
        value = self.text(name)
        if value is None:
            raise StageError(name, "is not set.", fix)
        return value

    def integer(self, name: str, default: int, minimum: int = 0) -> int:
        value = self.text(name)
        if value is None:
            return default
        if not (value.isascii() and value.isdigit()) or int(value) < minimum:
            raise StageError(name, f"{value!r} is not an integer of at least {minimum}.", f"set {name} to a number.")
        return int(value)

    def flag(self, name: str) -> bool:
        value = (self.text(name) or "0").lower()
        if value not in ("0", "1", "true", "false", "yes", "no"):
            raise StageError(name, f"{value!r} is neither 0 nor 1.", f"set {name}=1 or leave it unset.")
        return value in ("1", "true", "yes")

    def path(self, name: str, default: Path | None = None) -> Path | None:
        value = self.text(name)
        return default if value is None else Path(value)

    def arguments(self, name: str) -> list[str]:
        """An argument variable: a bash array's elements exactly, else a string split on white space.

        A string is split as an unquoted ``$NAME`` would be, but without globbing; quotes stay in the
        words, as they would in the shell.
        """
        arrays = self.text("MLMSUB_ARRAYS")
        file = Path(arrays) / name if arrays else None
        if file is not None and file.is_file():
            return [element.decode() for element in file.read_bytes().split(b"\0")[:-1]]
        return self._variables.get(name, "").split()

    @property
    def rank(self) -> int:
        return self.integer("RANK", 0)

    @property
    def local_rank(self) -> int:
        return self.integer("LOCAL_RANK", 0)

    @property
    def world_size(self) -> int:
        return self.integer("WORLD_SIZE", 1, minimum=1)

    @property
    def run_dir(self) -> Path:
        return Path(self.required("MLMSUB_RUN_DIR", "run through mlmsub, or name a folder for conf/ and state/."))

    def layout(self) -> Layout:
        tp = self.integer("TP", 1, minimum=1)
        return Layout(
            tp=tp,
            pp=self.integer("PP", 1, minimum=1),
            cp=self.integer("CP", 1, minimum=1),
            ep=self.integer("EP", 1, minimum=1),
            # Megatron: --expert-tensor-parallel-size follows the tensor-parallel size when it is not given.
            etp=self.integer("ETP", tp, minimum=1),
        )

    def work_path(self, name: str, suffix: str, model: str) -> Path:
        """The folder that variable ``name`` gives, else ``$MLM_WORK_DIR/<model><suffix>``."""
        value = self.path(name)
        if value is not None:
            return value
        work_dir = self.path("MLM_WORK_DIR")
        if work_dir is None:
            raise StageError(name, "is not set, and neither is MLM_WORK_DIR.", f"set {name} to the folder to write.")
        return work_dir / f"{model}{suffix}"
