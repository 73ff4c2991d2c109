"""Several stages in one run, ``quantize+export+generate``: what each is given, and what it makes.

mlmsub.runtime's driver deals words and folders in the same way; tests/stages/test_compose.py compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mlmsub.core import stages
from mlmsub.core.spec import RunSpec
from mlmsub.core.stages import Stage

SAVE, CHECKPOINT = "MLM_MODEL_SAVE", "MLM_MODEL_CKPT"


@dataclass(frozen=True)
class Part:
    """One stage of a run, as a run of its own: its words, and the variables as it sees them."""

    stage: Stage
    spec: RunSpec
    values: dict[str, str]

    @property
    def source(self) -> str:
        """The checkpoint that it starts from."""
        return self.values.get(CHECKPOINT) or self.values.get("HF_MODEL_CKPT") or "the Hugging Face Hub"

    @property
    def target(self) -> str:
        return self.values.get(self.stage.writes, "")


def parts(spec: RunSpec, values: Mapping[str, str]) -> list[Part]:
    """The stages of a run in order, each starting from what the ones before it make."""
    made = stages.parts(spec.stage)
    if len(made) == 1:
        return [Part(made[0], spec, dict(values))]
    place = next((index for index, word in enumerate(spec.args) if word.startswith("-")), len(spec.args))
    words, flags = spec.args[1:place], spec.args[place:]
    known, found = dict(values), []
    for index, stage in enumerate(made):
        later = made[index + 1 :]
        count = stage.words if later and stage.words is not None else len(words)
        mine, words = words[:count], words[count:]
        seen = {**known, **_target(stage, known, spec.model, made[:index].count(stage), later)}
        own = replace(spec, stage=stage.name, args=(spec.model, *mine, *flags))
        found.append(Part(stage, own, seen))
        if stage.writes == SAVE:
            known[CHECKPOINT] = seen[SAVE]
    return found


def _target(stage: Stage, known: Mapping[str, str], model: str, earlier: int, later: Sequence[Stage]) -> dict[str, str]:
    """The folder that a stage writes: the user's MLM_MODEL_SAVE is the last checkpoint's."""
    if not stage.writes:
        return {}
    given = known.get(stage.writes, "")
    if stage.writes == SAVE and any(one.writes == SAVE for one in later):
        given = ""
    folder = given or f"{known.get('MLM_WORK_DIR', '')}/{model}{stage.suffix}"
    return {stage.writes: f"{folder}-{earlier + 1}" if earlier else folder}


def outputs(name: str, said: Mapping[str, str]) -> tuple[str, ...]:
    """The variables whose folders a run promises to fill: a checkpoint between stages only where it was asked for."""
    made = stages.parts(name)
    promised = [
        stage.writes for index, stage in enumerate(made)
        if stage.writes and (stage.writes != SAVE or index == len(made) - 1 or said.get(SAVE))
    ]  # fmt: skip
    return tuple(dict.fromkeys(promised))
