"""Builders for tests: a complete RunSpec with the few fields that a test is about, and real text for it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from mlmsub.app.records import Record
from mlmsub.core.paths import RunPaths
from mlmsub.core.spec import EnvSetup, RunSpec

RUN_ID = "20261130-120000-quantize-0a1b2c"
STAMP = "20261130-120000"
RUN = RunPaths("/lustre/me/.mlmsub/runs", RUN_ID)

# what a shell variable can hold: any text without NUL; bytes that are not UTF-8 arrive as lone surrogates
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
BYTES_AS_TEXT = st.binary().map(lambda b: b.replace(b"\0", b"").decode(errors="surrogateescape"))
NAMES = st.from_regex(r"X_[A-Za-z0-9_]{0,8}", fullmatch=True)

QUANTIZE = RunSpec(
    stage="quantize",
    args=("meta-llama/Llama-3.1-8B-Instruct", "FP8_DEFAULT_CFG"),
    model="meta-llama/Llama-3.1-8B-Instruct",
    job_name="quantize-Llama-3.1-8B-Instruct",
    scheduler="slurm",
    nodes=2,
    gpus_per_node=8,
    tasks_per_node=8,
    launcher="python",
    launch_script="python",
    sbatch={
        "job-name": "quantize-Llama-3.1-8B-Instruct",
        "account": "proj",
        "partition": "batch",
        "time": "04:00:00",
        "nodes": "2",
        "ntasks-per-node": "8",
        "gpus-per-node": "8",
        "exclusive": "",
        "mem": "0",
        "overcommit": "",
    },
    sbatch_args=("--comment=a b",),
    srun={"mpi": "pmix", "kill-on-bad-exit": "1", "wait": "0", "distribution": "block"},
    srun_args=(),
    prelude="",
    image="/lustre/images/modelopt.sqsh",
    mounts=("/lustre/me:/workspace/scratch",),
    workdir="/mlmsub/run",
    setup=EnvSetup("/home/me/setup.sh", {"setup.sh": "TP=8\n"}),
    overrides={},
    profile_env={},
    defaults={"TP": "1", "LAUNCH_SCRIPT": "python"},
    conf_name="model.yaml",
    conf="model: x\n",
    outputs=("MLM_MODEL_SAVE",),
    runs_root="/lustre/me/.mlmsub/runs",
    secret_names=("HF_TOKEN", "WANDB_API_KEY"),
)
RESOURCES = {
    "container/entrypoint.sh": b"#!/bin/bash\n",
    "slurm/job.sbatch.j2": b"#!/bin/bash\n# {{ run_id }}\n{{ prelude }}\n",
    "slurm/attempts.sh": b"#!/bin/bash\n",
    "slurm/local/start.sh": b"#!/bin/bash\n",
    "mlmsub/runtime/__main__.py": b"pass\n",
}


def run_spec(**changes: Any) -> RunSpec:
    """QUANTIZE, with these fields changed."""
    return replace(QUANTIZE, **changes)


def script_spec(*command: str, **changes: Any) -> RunSpec:
    """A run of the user's own command."""
    own: dict[str, Any] = {"conf_name": "", "conf": "", "outputs": (), "workdir": "/workspace/nmm-sandbox"}
    return run_spec(stage="script", args=command or ("eagle3.sh", "x/y"), **(own | changes))


def bash(program: str, *, env: dict[str, str] | None = None) -> bytes:
    """Standard output of a bash program that must succeed."""
    return subprocess.run(
        ["/bin/bash", "-c", program.encode(errors="surrogateescape")],
        env={"PATH": "/usr/bin:/bin"} | (env or {}),
        check=True,
        capture_output=True,
        timeout=20,
    ).stdout


def record(run_id: str = RUN_ID, **changes: str) -> Record:
    """What the client keeps of a submitted run."""
    values = {
        "profile": "lab", "scheduler": "slurm", "host": "", "transport": "auto", "ssh_config": "",
        "runs_root": "/r", "run_dir": f"/r/{run_id}",
        "stage": "quantize", "model": "m", "job_name": "j", "stamp": "20261130-120000", "content_hash": "h",
        "job_id": "1",
    }  # fmt: skip
    return Record(run_id=run_id, nodes=1, outputs={"MLM_MODEL_SAVE": "/s"}, **(values | changes))
