"""The emblem case: Kimi-K2-Instruct EAGLE3 on 8 nodes of 8 GPUs, and its export on 2 nodes.

A stand-in for Megatron-LM's eagle3.sh writes down, on each of the 64 ranks, what it sees after it has sourced its
arguments.sh; what the reference's README and sbatch.sh promise must then hold on every rank.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import Mlmsub

SANDBOX = Path(__file__).parent / "sandbox"
KIMI = "conf/moonshotai/kimi_k2_instruct.sh"
MODEL = "moonshotai/Kimi-K2-Instruct"


@pytest.fixture
def kimi(mlm: Mlmsub) -> Mlmsub:
    shutil.copytree(SANDBOX, mlm.sandbox, dirs_exist_ok=True)
    return mlm


def seen_by_ranks(mlm: Mlmsub, count: int) -> list[dict]:
    return [json.loads((mlm.scratch / f"rank-{rank}.json").read_text()) for rank in range(count)]


def emblem(mlm: Mlmsub, *options: str, command: tuple[str, ...]) -> list[dict]:
    """Submit the emblem case and return what the 64 ranks saw."""
    run = mlm.submit("script", "--profile", "lab", "--nodes", "8", "--env-setup", KIMI, *options, "--", *command)
    end = mlm.lab.wait(run["job_id"])
    assert end.state == "COMPLETED", mlm.log(run)
    return seen_by_ranks(mlm, 64)


@pytest.mark.parametrize("command", [("eagle3.sh", MODEL), (f"eagle3.sh {MODEL}",)], ids=["words", "one-quoted-word"])
def test_all_64_ranks_see_what_the_reference_promises(kimi: Mlmsub, command: tuple[str, ...]) -> None:
    ranks = emblem(kimi, command=command)
    addresses = {seen["env"]["MASTER_ADDR"] for seen in ranks}
    ports = {seen["env"]["MASTER_PORT"] for seen in ranks}
    assert addresses == {"node1"} and len(ports) == 1
    for rank, seen in enumerate(ranks):
        env = seen["env"]
        assert seen["argv"] == [MODEL]
        assert seen["cwd"] == "/workspace/nmm-sandbox"
        # from the env setup, after arguments.sh sourced it again
        assert env["HF_MODEL_CKPT"] == "/workspace/scratch/moonshotai/Kimi-K2-Instruct"
        assert (env["TP"], env["ETP"], env["EP"], env["PP"]) == ("8", "1", "64", "1")
        # who a rank is: none of it depends on a hook of the site
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == (str(rank), "64", str(rank % 8))
        assert env["SLURMD_NODENAME"] == f"node{rank // 8 + 1}"
        # what the reference's arguments.sh exports, and what its model conf says
        assert env["NCCL_IB_SL"] == "1" and env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert "[0]*1+[1]*60" in env["MODEL_ARGS"]
        assert env["LAUNCH_SCRIPT"] == "python3"
        # the reference's two mounts, and nothing of the submitting shell
        assert seen["mounts"]["/workspace/nmm-sandbox"]["source"].endswith(str(kimi.sandbox))
        assert seen["mounts"]["/workspace/scratch"]["source"].endswith(str(kimi.scratch))
        assert "XDG_STATE_HOME" not in env


def test_a_variable_on_the_command_line_wins_on_every_rank(kimi: Mlmsub) -> None:
    """The reference cannot do this under Slurm; its arguments.sh would source TP=8 over it again."""
    awkward = """it's "a,b" $HOME `id` {"k": [1, 2]}\nsecond line"""
    ranks = emblem(kimi, "--set", "TP=4", "--set", f"EXTRA={awkward}", command=("eagle3.sh", MODEL))
    assert {seen["env"]["TP"] for seen in ranks} == {"4"}
    assert {seen["env"]["ETP"] for seen in ranks} == {"1"}
    assert {seen["env"]["EXTRA"] for seen in ranks} == {awkward}


@pytest.mark.parametrize(
    ("stage", "setup", "nodes", "said"),
    [
        ("eagle3", KIMI, 8, {"TP": "8", "ETP": "1", "EP": "64"}),
        ("export", "conf/moonshotai/kimi_k2_instruct_export.sh", 2, {"PP": "16"}),
    ],
)
def test_the_native_stages_render_for_real_hardware(
    mlm: Mlmsub, stage: str, setup: str, nodes: int, said: dict[str, str]
) -> None:
    mlm.profile(
        "h100", image="/images/nemo.sqsh", scratch="/lustre/me", sandbox="/lustre/me/Megatron-LM", account="team",
        partition="batch", gpu_type="h100", mem="0", exclusive=True, time="04:00:00",
    )  # fmt: skip
    shown = json.loads(
        mlm.run("submit", stage, MODEL, "--profile", "h100", "--nodes", nodes, "--env-setup", setup, "--dry-run",
                "--json").stdout
    )  # fmt: skip
    script = shown["files"]["job.sbatch"].splitlines()
    for line in (f"--nodes={nodes}", "--ntasks-per-node=8", "--gpus-per-node=h100:8", "--exclusive", "--mem=0",
                 "--overcommit", "--account=team", "--partition=batch", "--time=04:00:00"):  # fmt: skip
        assert f"#SBATCH {line}" in script
    assert f"__mlm_command=(-m mlmsub.runtime {stage} {MODEL})" in shown["files"]["env/command.sh"]
    assert shown["values"] | said == shown["values"]
    assert "num-layers: 61" in shown["files"]["conf/model.yaml"]
    assert shown["files"]["env/setup.sh"]
    assert [issue["code"] for issue in shown["issues"] if issue["severity"] == "error"] == []
    assert not mlm.run("list").stdout.startswith("run ")
