"""Several stages in one run, on the submit side: what is refused, what each stage is given, what is promised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from modelfacts import LLAMA, QWEN_MOE

from mlmsub.app import plan, submit
from mlmsub.app.config import User
from mlmsub.app.records import Records
from mlmsub.app.resolve import Resolved, resolve
from mlmsub.app.sources import Request
from mlmsub.cli import completion
from mlmsub.cli import plan as screen
from mlmsub.core import composition, script, stages
from mlmsub.core.errors import UsageError

THREE = "quantize+export+generate"
WORK = "/workspace/scratch/megatron_workspace"


@pytest.fixture
def lab(user: User, write_profile: Callable[[str, str], Path]) -> User:
    write_profile("lab", "account: proj\npartition: batch\nimage: /images/m.sqsh\ngpu_type: h100\n")
    return user


def resolved(user: User, stage: str, *args: str, sets: tuple[str, ...] = (), **changes: Any) -> Resolved:
    return resolve(user, Records(user.records_dir), replace(Request(stage, args, overrides=sets), **changes))


def issues(found: Resolved) -> list[tuple[str, str]]:
    return [(issue.severity, issue.code) for issue in found.issues]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("quantize+exprot", "did you mean 'export'"),
        ("quantize+", "unknown stage ''"),
        ("script+export", "script runs alone"),
        ("quantize+quantize", "quantize stands twice"),
        ("export+generate+export", "export stands twice"),
        ("mmlu+mmlu", "mmlu stands twice"),
    ],
)
def test_what_makes_no_run(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        stages.find(name)


def test_each_stage_has_its_words_its_input_and_its_output(lab: User) -> None:
    found = resolved(lab, THREE, LLAMA, "fp8", "One", "Two", "--osl", "9")
    assert issues(found) == [("info", "export-idle")]
    quantize, export, generate = composition.parts(found.spec, found.values)
    assert [part.spec.args[1:] for part in (quantize, export, generate)] == [
        ("fp8", "--osl", "9"), ("--osl", "9"), ("One", "Two", "--osl", "9"),
    ]  # fmt: skip
    assert quantize.target == export.source == generate.source == f"{WORK}/{LLAMA}_quant"
    assert (export.target, generate.target) == (f"{WORK}/{LLAMA}_export", f"{WORK}/{LLAMA}_generate")
    # a checkpoint that nobody asked for may be left out, so it is not promised, nor named in the job
    assert found.spec.outputs == ("EXPORT_DIR", "GENERATE_OUT") and "MLM_MODEL_SAVE" not in found.values
    assert found.spec.args == (LLAMA, "fp8", "One", "Two", "--osl", "9")


def test_the_checkpoint_that_was_asked_for_is_promised(lab: User) -> None:
    save = f"{WORK}/q"
    found = resolved(lab, "quantize+export", LLAMA, "fp8", sets=(f"MLM_MODEL_SAVE={save}",))
    assert found.spec.outputs == ("MLM_MODEL_SAVE", "EXPORT_DIR")
    assert [part.source for part in composition.parts(found.spec, found.values)][1] == save


def test_the_last_checkpoint_has_the_name_that_was_given(lab: User) -> None:
    found = resolved(lab, "convert+quantize", LLAMA, "fp8", sets=(f"MLM_MODEL_SAVE={WORK}/q",))
    convert, quantize = composition.parts(found.spec, found.values)
    assert (convert.target, quantize.source, quantize.target) == (f"{WORK}/{LLAMA}_mlm", convert.target, f"{WORK}/q")


def test_a_stage_that_comes_again_has_a_folder_of_its_own(lab: User) -> None:
    found = resolved(lab, "mmlu+quantize+mmlu", LLAMA, "fp8")
    assert [part.target for part in composition.parts(found.spec, found.values)][::2] == [
        f"{WORK}/{LLAMA}_mmlu", f"{WORK}/{LLAMA}_mmlu-2",
    ]  # fmt: skip
    assert found.spec.outputs == ("MMLU_OUT",)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [("quantize+export", ("fp8", "x"), "unexpected argument 'x'"), (THREE, (), "needs a model")],
)
def test_words_that_no_stage_takes(lab: User, name: str, args: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolved(lab, name, *((LLAMA, *args) if args else ()))


def test_the_rules_of_every_stage_are_asked(lab: User) -> None:
    """quantize's rule on experts, export's on TP; what all stages find is said once."""
    found = resolved(lab, "quantize+export", QWEN_MOE, "fp8", sets=("TP=4", "EP=2", "EPP=1"))
    said = issues(found)
    assert {("error", "quantize-experts"), ("warning", "export-tp"), ("warning", "unknown-variable")} <= set(said)
    assert len(said) == len(set(said))
    alone = resolved(lab, "export", QWEN_MOE, sets=("TP=4", "EP=2", "MLM_MODEL_CKPT=/workspace/scratch/c"))
    assert ("error", "quantize-experts") not in issues(alone)


def test_an_export_before_anything_was_made_needs_a_checkpoint(lab: User) -> None:
    assert ("error", "no-input") in issues(resolved(lab, "export+generate", LLAMA))
    assert ("error", "no-input") not in issues(resolved(lab, "quantize+export", LLAMA))


def test_argument_variables_of_any_stage_are_read(lab: User) -> None:
    given = ("MLM_TRAIN_ARGS=--lr 1e-5",)
    assert ("warning", "unread-arguments") not in issues(resolved(lab, "quantize+finetune", LLAMA, sets=given))
    assert issues(resolved(lab, "quantize+export", LLAMA, sets=given)).count(("warning", "unread-arguments")) == 1


def test_the_plan_shows_the_largest_stage(lab: User, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan.make(resolved(lab, THREE, LLAMA, "fp8"))
    every = [plan.make(resolved(lab, name, LLAMA)) for name in ("quantize", "generate")]
    most = max(stage.total for one in every if one.facts for stage in one.facts.memory)
    assert made.facts and max(stage.total for stage in made.facts.memory) == pytest.approx(most)
    screen._show(made)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"quantize the Hugging Face Hub -> {WORK}/{LLAMA}_quant" in shown
    assert f"{WORK}/{LLAMA}_quant -> {WORK}/{LLAMA}_export" in shown
    assert [part["stage"] for part in plan.data(made)["stages"]] == THREE.split("+")  # type: ignore[attr-defined]


def test_suggestions_suit_every_stage(lab: User) -> None:
    """Quantizing experts takes TP or EP alone, generating both; a layout for both is one for the first."""
    made = plan.make(resolved(lab, "generate+quantize", QWEN_MOE, sets=("QFORMAT=fp8",)), with_suggestions=True)
    assert made.suggestions and not any(one.layout.tp > 1 and one.layout.ep > 1 for one in made.suggestions)
    alone = plan.make(resolved(lab, "generate", QWEN_MOE), with_suggestions=True)
    assert alone.suggestions and any(one.layout.tp > 1 and one.layout.ep > 1 for one in alone.suggestions)


def test_names_of_the_job_its_run_and_its_log(lab: User) -> None:
    found = resolved(lab, THREE, LLAMA, "fp8")
    prepared = submit.prepare(found, Records(lab.records_dir))
    record = prepared.record
    assert record.job_name == f"{THREE}-{LLAMA.rpartition('/')[2]}" and record.stage == THREE
    assert "-quantize_export_generate-" in record.run_id and "+" not in record.run_dir
    command = prepared.bundle.files["env/command.sh"].decode()
    assert f"__mlm_command=(-m mlmsub.runtime {THREE} {LLAMA} fp8)" in command
    assert script.log_name(found.spec, record.stamp).startswith("logs/")
    assert record.outputs == {
        "EXPORT_DIR": f"{WORK}/{LLAMA}_export", "GENERATE_OUT": f"{WORK}/{LLAMA}_generate",
    }  # fmt: skip


def test_completion_goes_on_after_a_plus() -> None:
    assert completion.stages("quantize+ex") == ["quantize+export", "quantize+extract"]
    assert "script" in completion.stages("") and "quantize+script" not in completion.stages("quantize+")
