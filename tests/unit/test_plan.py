"""`mlmsub plan`, and the rules in `submit`: what is shown, what is refused, what is allowed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from modelfacts import KIMI, LLAMA, QWEN_MOE

from mlmsub.app import plan, submit
from mlmsub.app.config import User
from mlmsub.app.records import Records
from mlmsub.app.resolve import Resolved, public_values, resolve
from mlmsub.app.sources import Request
from mlmsub.cli import plan as screen
from mlmsub.core.errors import ChecksFailed
from mlmsub.core.spec import RunSpec

WriteProfile = Callable[[str, str], Path]
NUMBERS = ("hidden-dropout", "num-layers", "seq-length", "mtp-num-layers", "moe-layer-freq", "vocab-size")
EAGLE3 = "conf/moonshotai/kimi_k2_instruct.sh"
EXPORT = "conf/moonshotai/kimi_k2_instruct_export.sh"


@pytest.fixture
def lab(user: User, write_profile: WriteProfile) -> User:
    write_profile("lab", "account: proj\npartition: batch\nimage: /images/m.sqsh\ngpu_type: h100\n")
    return user


def resolved(user: User, stage: str, *args: str, sets: tuple[str, ...] = (), **changes: Any) -> Resolved:
    return resolve(user, Records(user.records_dir), replace(Request(stage, args, overrides=sets), **changes))


def codes(found: Resolved, severity: str) -> list[str]:
    return [issue.code for issue in found.issues if issue.severity == severity]


def setup(user: User, text: str) -> str:
    (user.cwd / "env.sh").write_text(text)
    return "env.sh"


# --- submit refuses -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "args", "sets", "code"),
    [
        ("quantize", (KIMI,), ("EP=60",), "experts"),
        ("quantize", (KIMI,), ("ETP=2", "EP=24"), "expert-world-size"),
        ("prune", (KIMI,), (), "stage-unsupported"),
        ("prune", (LLAMA,), ("TP=2",), "prune-tp"),
        ("quantize", (LLAMA, "auto"), ("PP=2", "MLM_EXTRA_ARGS=--auto-quantize-bits 4.8"), "auto-quantize"),
        ("quantize", (LLAMA,), ("TP=eight",), "layout-value"),
    ],
)
def test_submit_refuses_what_cannot_work(
    lab: User, stage: str, args: tuple[str, ...], sets: tuple[str, ...], code: str
) -> None:
    found = resolved(lab, stage, *args, sets=sets, nodes="4")
    assert code in codes(found, "error")
    with pytest.raises(ChecksFailed):
        submit.checked(found)


def test_allow_makes_it_a_warning_and_is_recorded(lab: User) -> None:
    same = "/workspace/scratch/c"
    sets = (f"MLM_MODEL_CKPT={same}", f"MLM_MODEL_SAVE={same}")
    assert "in-place" in codes(resolved(lab, "quantize", LLAMA, sets=sets), "error")
    found = resolved(lab, "quantize", LLAMA, sets=sets, allow=("in-place",))
    assert ("in-place" in codes(found, "warning"), codes(found, "error")) == (True, [])
    data = found.spec.to_data()
    assert data["allow"] == ["in-place"]
    assert RunSpec.from_data(data, "run.yaml").allow == ("in-place",)


def test_export_takes_tp_1_and_says_so(lab: User) -> None:
    found = resolved(lab, "export", LLAMA, sets=("TP=8", "MLM_MODEL_CKPT=/workspace/scratch/c"))
    assert ("export-tp" in codes(found, "warning"), codes(found, "error")) == (True, [])
    assert plan.data(plan.make(found))["groups"] == dict.fromkeys(("TP", "CP", "PP", "ETP", "EP"), 1) | {
        "DP": 8,
        "EDP": 8,
    }


def test_allow_of_what_is_not_there_is_said(lab: User) -> None:
    found = resolved(lab, "quantize", LLAMA, allow=("expert",))
    said = [issue for issue in found.issues if issue.code == "allow-unused"]
    assert "did you mean 'experts'?" in said[0].message


def test_allow_does_not_allow_other_errors(lab: User) -> None:
    found = resolved(lab, "quantize", KIMI, sets=("EP=60", "PP=8"), nodes="4", allow=("experts",))
    assert {"layers", "expert-world-size"} <= set(codes(found, "error"))


def test_unsure_values_warn(lab: User) -> None:
    found = resolved(lab, "quantize", KIMI, nodes="4", env_setup=setup(lab, "EP=60\nmodule load cuda\n"))
    assert "experts" in codes(found, "warning")
    assert codes(found, "error") == []


def test_a_script_is_warned_by_the_name_of_its_example(lab: User) -> None:
    found = resolved(lab, "script", "export.sh", LLAMA, sets=("TP=8",))
    assert "export-tp" in codes(found, "warning")
    assert codes(resolved(lab, "script", "my_own.sh", LLAMA, sets=("TP=3",)), "error") == []


def test_an_array_of_arguments_is_read_by_its_elements(lab: User) -> None:
    text = "PP=16\nMLM_MODEL_CKPT=/workspace/scratch/c\nMLM_EXTRA_ARGS=(--decoder-first-pipeline-num-layers 3\n"
    found = resolved(
        lab, "export", KIMI, nodes="2", env_setup=setup(lab, text + "--decoder-last-pipeline-num-layers 2)\n")
    )
    assert codes(found, "error") == []


def test_a_shell_conf_is_read_and_warned_about(lab: User) -> None:
    (lab.cwd / "m.sh").write_text(
        'MODEL_ARGS=" --num-layers 30 --hidden-size 64 --num-attention-heads 4 "\nTOKENIZER_MODEL=x/m\n'
    )
    found = resolved(lab, "quantize", "m.sh", sets=("PP=4",))
    assert "layers" in codes(found, "warning")


# --- the plan -------------------------------------------------------------------------------


def made(user: User, *args: str, suggest: bool = False, **changes: Any) -> plan.Plan:
    return plan.make(resolved(user, *args, **changes), with_suggestions=suggest, free_nodes="nodes" not in changes)


def test_the_plan_as_data(lab: User) -> None:
    data = plan.data(made(lab, "eagle3", KIMI, nodes="8", env_setup=EAGLE3))
    assert data["world"] == 64
    assert data["groups"] == {"TP": 8, "CP": 1, "DP": 8, "PP": 1, "ETP": 1, "EP": 64, "EDP": 1}
    assert data["values"]["TP"] == {"value": "8", "origin": "env setup"}  # type: ignore[index]
    assert data["values"]["PP"]["origin"] == "default"  # type: ignore[index]
    assert data["mounts"] == ["/lustre/me:/workspace/scratch"]
    assert json.loads(json.dumps(data)) == data


def test_pipeline_stages_with_the_same_load_stand_together(lab: User) -> None:
    found = made(lab, "export", KIMI, nodes="2", env_setup=EXPORT)
    assert found.facts
    assert [(one.first, one.last, one.layers) for one in plan.stretches(found.facts)] == [
        (0, 0, (0, 2)), (1, 14, (3, 58)), (15, 15, (59, 60)),
    ]  # fmt: skip


def test_the_screen(lab: User, capsys: pytest.CaptureFixture[str]) -> None:
    screen._show(made(lab, "quantize", KIMI, nodes="4", sets=("EP=60", "PP=8")))
    text = capsys.readouterr().out
    for words in (
        "1.03 T parameters, 32.9 B active; 1 dense, 60 MoE layers", "4 nodes x 8 h100 profile lab",
        "/lustre/me -> /workspace/scratch", "TP 1 x CP 1 x DP 4 x PP 8", "fix: EP may be 1, 2, 3", "3 errors",
        "own Python code is run (trust_remote_code: model conf)",
    ):  # fmt: skip
        assert words in " ".join(text.split())
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= screen.WIDTH


def test_the_screen_of_a_plan_that_fits(lab: User, capsys: pytest.CaptureFixture[str]) -> None:
    screen._show(made(lab, "quantize", QWEN_MOE, sets=("EP=8",)))
    text = capsys.readouterr().out
    assert "ETP 1 x EP 8 x EDP 1 x PP 1   16 of 128 a rank" in text
    assert "memory of one GPU, estimated, GiB of 80" in text
    assert max(map(len, text.splitlines())) <= screen.WIDTH


def test_the_screen_of_suggestions(lab: User, capsys: pytest.CaptureFixture[str]) -> None:
    screen._show(made(lab, "export", KIMI, nodes="2", suggest=True))
    text = capsys.readouterr().out
    assert "layouts on 2 nodes x 8 GPUs, best first" in text
    assert "1  PP=16" in text and "3+14x4+2" in text
    screen._show(made(lab, "quantize", KIMI, nodes="1", suggest=True))
    assert "no layout: none satisfies the rules" in capsys.readouterr().out


def test_a_secret_is_not_shown(lab: User, capsys: pytest.CaptureFixture[str]) -> None:
    found = made(lab, "quantize", LLAMA, env_setup=setup(lab, "HF_TOKEN=hf_abc\nX=a-hf_abc-b\n"))
    screen._show(found)
    assert "hf_abc" not in capsys.readouterr().out + json.dumps(plan.data(found))


@pytest.mark.parametrize(("sets", "code"), [((), 0), (("EP=3",), 3)])
def test_the_exit_code(tmp_path: Path, sets: tuple[str, ...], code: int) -> None:
    profile = tmp_path / "p.yaml"
    profile.write_text("image: /i.sqsh\nscratch: /lustre/me\n")
    options = [word for text in sets for word in ("--set", text)]
    command = [sys.executable, "-m", "mlmsub.cli.main", "plan", "quantize", LLAMA, "--profile", str(profile), "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert json.loads(done.stdout)["stage"] == "quantize"


@pytest.mark.parametrize(
    ("sets", "code"),
    [
        ("--num-layers 0", "argument-value"),
        ("--num-layers 99999999999999999999", "argument-value"),
        ("--num-attention-heads 0", "argument-value"),
        ("--mamba-head-dim 0", "argument-value"),
        ("--decoder-first-pipeline-num-layers abc", "argument-value"),
        ("--mtp-num-layers x", "argument-value"),
        ("--qk-pos-emb-head-dim x", "argument-value"),
        ("--seq-length ²", "argument-value"),
        ("--seed -1", "argument-value"),
        ("--lr nan", "argument-value"),
        ("--train-samples", "argument-value"),
    ],
)
def test_numbers_that_are_none_are_named(lab: User, sets: str, code: str) -> None:
    found = resolved(lab, "quantize", LLAMA, sets=(f"MLM_EXTRA_ARGS={sets}",))
    assert code in codes(found, "error")
    plan.data(plan.make(found))


def test_layers_that_cannot_be_told_are_no_silence(lab: User) -> None:
    """The list is one layer short of Kimi's 61, and EP=60 does not divide its experts."""
    sets = ("EP=60", "MLM_EXTRA_ARGS=--moe-layer-freq [0]*3+[1]*57")
    assert "argument-value" in codes(resolved(lab, "quantize", KIMI, sets=sets), "error")


@pytest.mark.parametrize("stage", ["convert", "quantize", "eagle3", "finetune", "prune", "generate", "mmlu", "extract"])
def test_what_cannot_be_imported_can_be_loaded(lab: User, stage: str) -> None:
    """Four query groups do not divide over TP=8 when ModelOpt imports them."""
    sets = ("TP=8", "ETP=1", "TARGET_NUM_LAYERS=24")
    loaded = (*sets, "MLM_MODEL_CKPT=/workspace/scratch/x")
    assert "query-groups" in codes(resolved(lab, stage, "Qwen/Qwen3-30B-A3B", sets=sets), "error")
    assert "query-groups" not in codes(resolved(lab, stage, "Qwen/Qwen3-30B-A3B", sets=loaded), "error")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(NUMBERS), st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=5))
def test_no_value_of_an_argument_breaks_the_checks(lab: User, name: str, text: str) -> None:
    assume(not text.startswith("-"))
    sets = ("CP=2", f"MLM_EXTRA_ARGS=--{name} {text}")
    found = resolved(lab, "quantize", LLAMA, sets=sets)
    plan.data(plan.make(found))


def test_where_each_value_comes_from(lab: User) -> None:
    """Also where it is what the stage would have taken anyway."""
    (lab.cwd / "env_setup_template.sh").write_text("TP=1\nPP=\n")
    found = resolved(lab, "quantize", LLAMA, sets=("EP=1",))
    origins = {name: origin for name, _, origin in public_values(found)}
    assert (origins["TP"], origins["PP"], origins["EP"], origins["CP"]) == ("env setup", "default", "--set", "default")


def test_an_argument_that_megatron_does_not_have_is_warned_of(lab: User) -> None:
    found = resolved(lab, "quantize", LLAMA, sets=("MLM_EXTRA_ARGS=--sequnce-parallel --calib-size 8",))
    said = [issue.message for issue in found.issues if issue.code == "unknown-argument"]
    assert said == ["Megatron-Core 0.19 has no such argument; did you mean 'sequence-parallel'?"]


def test_an_example_script_is_checked_by_the_catalogues_conf(lab: User) -> None:
    """The emblem's export: 61 layers need the uneven split."""

    def ends(more: str) -> list[str]:
        sets = ("PP=16", f"MLM_EXTRA_ARGS={more}")
        return codes(resolved(lab, "script", "export.sh", KIMI, nodes="2", sets=sets), "error")

    assert "layers" in " ".join(ends(""))
    assert ends("--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2") == []


def test_training_whose_state_does_not_fit_is_refused(lab: User) -> None:
    found = resolved(
        lab, "finetune", "Qwen/Qwen3-235B-A22B", nodes="8", sets=("EP=64", "MLM_MODEL_CKPT=/workspace/scratch/c")
    )
    assert "weights-memory" in codes(found, "error")


def test_suggestions_keep_the_stages_own_rules_and_the_partition(lab: User) -> None:
    auto = plan.make(
        resolved(lab, "quantize", LLAMA, "auto", sets=("MLM_EXTRA_ARGS=--auto-quantize-bits 4.8",)),
        with_suggestions=True,
    )
    assert auto.suggestions and {one.layout.pp for one in auto.suggestions} == {1}
    impossible = plan.make(resolved(lab, "prune", KIMI), with_suggestions=True, free_nodes=True)
    assert impossible.suggestions == () and impossible.failed


@pytest.mark.parametrize("size", ["999999999", "9" * 23])
def test_a_group_beyond_all_clusters_is_refused_at_once(lab: User, size: str) -> None:
    found = resolved(lab, "quantize", LLAMA, sets=(f"PP={size}",))
    assert "layout-value" in codes(found, "error")


@pytest.mark.parametrize("name", ["TPP", "TTP", "EPP", "HF_MODEL_CHECKPOINT"])
def test_a_name_that_is_nearly_one_that_is_read_is_warned_of(lab: User, name: str) -> None:
    assert "unknown-variable" in codes(resolved(lab, "quantize", LLAMA, sets=(f"{name}=2",)), "warning")


def test_another_gpu_can_be_planned_for(lab: User) -> None:
    sizes = {
        gpu: plan.data(plan.make(resolved(lab, "quantize", LLAMA, gpu=gpu)))["gpu"]["gib"] for gpu in ("h100", "h200")
    }
    assert sizes == {"h100": 79.6, "h200": 140.3}


def test_training_does_not_go_on_with_another_layout(lab: User) -> None:
    ckpt = "/workspace/scratch/c"

    def after(**layout: str) -> list[str]:
        records = Records(lab.records_dir)
        before = resolved(lab, "finetune", LLAMA, sets=(f"MLM_MODEL_CKPT={ckpt}-0", f"MLM_MODEL_SAVE={ckpt}", "TP=2",
                                                      *layout.pop("more", ())))  # fmt: skip
        records.submitted(submit.prepare(before, records).record, "1")
        sets = tuple(f"{name}={value}" for name, value in layout.items())
        found = resolved(
            lab, "finetune", LLAMA, sets=(f"MLM_MODEL_CKPT={ckpt}", "MLM_MODEL_SAVE=/workspace/scratch/d", *sets)
        )
        return codes(found, "error")

    assert "resume-other-layout" in after(TP="4")
    assert "resume-other-layout" not in after(TP="2")
    assert "resume-other-layout" not in after(TP="4", more=("MLM_TRAIN_ARGS=--dist-ckpt-optim-fully-reshardable",))
