"""Workflows on a real Slurm: the emblem case, a real model, failures, a broken connection, resume."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Mlmsub
from lab import Lab
from laptop import Laptop, LoginNode
from test_remote_once import first_sbatch
from until import until

sys.path.insert(0, str(Path(__file__).parents[1] / "stages"))

# Stands in for python: notes what each rank was started with, and that the stage is done.
STAGE = """#!/bin/bash
printf '%s ' "$3" "$4" "$WORLD_SIZE" "$PP" "$EP" "$MLM_MODEL_CKPT" >"/workspace/scratch/$3-$RANK"
[ "$RANK" != 0 ] || echo '{}' >"$MLMSUB_RUN_DIR/state/$MLMSUB_RESTART/done.json"
"""
WORK = "echo once >>/workspace/scratch/$SLURM_JOB_NAME; exit ${CODE:-0}\n"


def workflow(mlm: Mlmsub, steps: dict[str, Any], **keys: Any) -> None:
    (mlm.home / "w.yaml").write_text(yaml.safe_dump({"steps": steps, **keys}, sort_keys=False))


def step(*needs: str, script: str = "work.sh", **keys: Any) -> dict[str, Any]:
    return {"stage": "script", "args": [script], "needs": list(needs), **keys}


def states(mlm: Mlmsub, name: str = "w") -> dict[str, str]:
    told = json.loads(mlm.run("workflow", "status", name, "--json").stdout)
    return {step: data["status"]["state"] for step, data in told["steps"].items()}


def ended(mlm: Mlmsub, name: str = "w", timeout: float = 120) -> dict[str, str]:
    """The states of all steps, when all have one that lasts."""
    until(lambda: not {"pending", "running", "requeued", "unknown"} & set(states(mlm, name).values()), timeout)
    return states(mlm, name)


def test_the_emblem_from_convert_to_export_in_one_command(mlm: Mlmsub) -> None:
    (mlm.scratch / "bin").mkdir()
    (mlm.scratch / "bin/python").write_text(STAGE)
    (mlm.scratch / "bin/python").chmod(0o755)
    mlm.profile(launch_script="/workspace/scratch/bin/python")
    mlm.run("workflow", "submit", "kimi_k2_eagle3")
    assert ended(mlm, "kimi_k2_eagle3") == dict.fromkeys(("convert", "eagle3", "export"), "succeeded")
    work, model = "/workspace/scratch/megatron_workspace/moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2-Instruct"
    for rank in range(64):
        assert (mlm.scratch / f"eagle3-{rank}").read_text().split() == ["eagle3", model, "64", "1", "64", f"{work}_mlm"]
    exported = [path.read_text().split() for path in mlm.scratch.glob("export-*")]
    assert len(exported) == 16
    assert all(words[2:4] == ["16", "16"] and words[-1] == f"{work}-Eagle3" for words in exported)
    shown = mlm.run("workflow", "status", "kimi_k2_eagle3").stdout.splitlines()
    assert [line.split()[:3] for line in shown[2:5]] == [
        ["convert", "succeeded", "8"], ["└─", "eagle3", "succeeded"], ["└─", "export", "succeeded"],
    ]  # fmt: skip
    assert shown[5].startswith("3 succeeded; ")


def test_a_failed_step_cancels_what_depends_on_it_and_resume_mends_it(mlm: Mlmsub) -> None:
    mlm.profile(gpus_per_node=1)
    mlm.script("work.sh", WORK)
    workflow(mlm, {
        "before": step(), "a": step("before", set={"CODE": "${vars.code}"}), "b": step("a"), "c": step("b"),
        "clean": step("afterany:a"), "mend": step("afternotok:a"),
    }, vars={"code": "7"})  # fmt: skip
    mlm.run("workflow", "submit", "w.yaml")
    assert ended(mlm) == {
        "before": "succeeded", "a": "failed", "b": "cancelled", "c": "cancelled", "clean": "succeeded",
        "mend": "succeeded",
    }  # fmt: skip
    watched = mlm.run("workflow", "status", "w", "--watch", check=False)
    assert watched.returncode == 6
    b, c = (next(line for line in watched.stdout.splitlines() if f"─ {name} " in line) for name in "bc")
    assert "cancelled" in b and "a failed" in b and "cancelled" in c and "b cancelled" in c
    told = json.loads(mlm.run("workflow", "resume", "w.yaml", "--var", "code=0", "--json").stdout)["steps"]
    assert {name: data["why"] for name, data in told.items() if data["submitted"]} == {
        "a": "its inputs changed", "b": "a runs again", "c": "b runs again", "clean": "a runs again",
        "mend": "a runs again",
    }  # fmt: skip
    assert ended(mlm) == {
        "before": "succeeded", "a": "succeeded", "b": "succeeded", "c": "succeeded", "clean": "succeeded",
        "mend": "cancelled",
    }  # fmt: skip
    done = {path.name: path.read_text().split() for path in mlm.scratch.glob("w-*")}
    assert {name: len(lines) for name, lines in done.items()} == {
        "w-before": 1, "w-a": 2, "w-b": 1, "w-c": 1, "w-clean": 2, "w-mend": 1,
    }  # fmt: skip
    told = json.loads(mlm.run("workflow", "resume", "w.yaml", "--json").stdout)["steps"]
    assert not any(data["submitted"] for data in told.values()), "the variables of before hold on"
    assert told["mend"]["why"] == "not needed: a succeeded"


def test_cancel_ends_all_steps(mlm: Mlmsub) -> None:
    mlm.profile(gpus_per_node=1)
    mlm.script("sleep.sh", "sleep 300\n")
    mlm.script("work.sh", WORK)
    workflow(mlm, {"a": step(script="sleep.sh"), "b": step("a", script="sleep.sh"), "c": step("afterany:b")})
    mlm.run("workflow", "submit", "w.yaml")
    until(lambda: states(mlm)["a"] == "running")
    assert mlm.run("workflow", "cancel", "w").stdout.splitlines() == ["a: cancelled", "b: cancelled", "c: cancelled"]
    assert set(ended(mlm).values()) == {"cancelled"}
    assert not (mlm.scratch / "w-c").exists()


def test_cut_off_in_the_middle_then_the_same_command(laptop: Laptop, login_node: LoginNode) -> None:
    """The second sbatch has made its job, and nobody hears of it."""
    laptop.script("work.sh", WORK)
    first_sbatch(laptop, '/usr/bin/sbatch "$@" >/dev/null; cut; sleep 1; kill -9 $PPID', number=2)
    sweep = {"matrix": {"x": ["one", "two"]}}
    workflow(laptop, {"a": step(), "b": step("a") | sweep, "c": step("b") | sweep, "d": step("c")})
    first = laptop.run("workflow", "submit", "w.yaml", "--no-prompt", check=False)
    assert first.returncode == 4, first.stderr
    with login_node.counted() as seen:
        laptop.run("workflow", "submit", "w.yaml", "--no-prompt")
    assert (seen[0].logins, seen[0].execs) == (1, 1)
    assert set(ended(laptop).values()) == {"succeeded"}
    names = ["w-a", "w-b-one", "w-b-two", "w-c-one", "w-c-two", "w-d"]
    assert {path.name: path.read_text() for path in laptop.scratch.glob("w-*")} == dict.fromkeys(names, "once\n")
    assert list(laptop.scratch.glob(".mlmsub/runs/.workflow.*")) == [], "an archive of secrets"


def test_a_real_model_is_quantized_exported_and_scored(lab: Lab, installed_command: Path, scratch: Path) -> None:
    """SmolLM2 on the CPU. As root, who alone may read this test's own Python."""
    pytest.importorskip("torch")
    from smollm2 import checkpoint
    from test_mmlu import write_csv

    mlm = Mlmsub(lab, installed_command, scratch / "home", user="root").setup()
    write_csv(mlm.scratch / "mmlu")
    prefixes = sorted({str(Path(sys.prefix)), str(Path(sys.base_prefix))})
    mlm.profile(
        gpus_per_node=1, launch_script=f"{sys.prefix}/bin/python", mem="6G",
        mounts=[*(f"{prefix}:{prefix}:ro" for prefix in prefixes), f"{checkpoint()}:/models/smollm2:ro"],
        env={"HF_MODEL_CKPT": "/models/smollm2", "MMLU_DATA": "/workspace/scratch/mmlu", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    model = "model=HuggingFaceTB/SmolLM2-135M-Instruct"
    variables = ("--var", model, "--var", "mmlu=--few-shots 1", "--var", "time=20")
    mlm.run("workflow", "submit", "quantize_export_mmlu", *variables)
    assert set(ended(mlm, "quantize_export_mmlu", 400).values()) == {"succeeded"}
    made = mlm.scratch / "megatron_workspace/quantize_export_mmlu"
    assert "FP8" in (made / "export/hf_quant_config.json").read_text()
    rows = {
        row["name"]: row for row in json.loads(mlm.run("workflow", "report", "quantize_export_mmlu", "--json").stdout)
    }
    for name, folder in (("mmlu", "mmlu"), ("mmlu-before", "mmlu-before")):
        score = json.loads((made / folder / "mmlu.json").read_text())
        assert rows[name]["mmlu"] == score["accuracy"] and rows[name]["questions"] == "12 of 12"
    assert 1 < rows["quantize"]["perplexity"] < 100
    files = sum(path.stat().st_size for path in (made / "export").rglob("*") if path.is_file())
    assert files <= rows["export"]["bytes"] < 1.1 * files
    table = list(csv.DictReader(io.StringIO(mlm.run("workflow", "report", "quantize_export_mmlu", "--csv").stdout)))
    assert {row["name"] for row in table} == set(rows)
    told = json.loads(mlm.run("workflow", "status", "quantize_export_mmlu", "--json").stdout)["steps"]
    assert all(data["seconds"] for data in told.values())
