"""The lab is a cluster: accounting, GPUs, logins, and a plain answer to how a job ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import JobEnd, Lab


def submit(lab: Lab, scratch: Path, script: str, *options: str) -> str:
    argv = ["sbatch", "--parsable", f"--output={scratch}/log", *options]
    return lab.run(argv, lab.user, stdin=f"#!/bin/bash\n{script}\n").stdout.strip()


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("echo fine", JobEnd("COMPLETED", "0:0")),
        ("exit 7", JobEnd("FAILED", "7:0")),
        ("scancel $SLURM_JOB_ID; sleep 60", JobEnd("CANCELLED", "0:0")),
    ],
)
def test_wait_tells_how_a_job_ended(lab: Lab, scratch: Path, script: str, end: JobEnd) -> None:
    assert lab.wait(submit(lab, scratch, script)) == end


def test_wait_outlasts_a_requeue_and_the_log_has_both_runs(lab: Lab, scratch: Path) -> None:
    script = 'echo run ${SLURM_RESTART_COUNT-0}; [ "$SLURM_RESTART_COUNT" ] || scontrol requeue $SLURM_JOB_ID; sleep 1'
    job = submit(lab, scratch, script, "--open-mode=append")
    assert lab.wait(job) == JobEnd("COMPLETED", "0:0")
    assert [line for line in lab.log(job).splitlines() if line.startswith("run")] == ["run 0", "run 1"]


def test_wait_gives_up(lab: Lab, scratch: Path) -> None:
    job = submit(lab, scratch, "sleep 60")
    with pytest.raises(TimeoutError, match=job):
        lab.wait(job, timeout=1)
    lab.run(["scancel", job])


def test_every_node_has_gpus(lab: Lab) -> None:
    run = "echo $(hostname) $CUDA_VISIBLE_DEVICES"
    argv = ["srun", "-N", str(lab.nodes), f"--gpus-per-node={lab.gpus}", "bash", "-c", run]
    gpus = ",".join(map(str, range(lab.gpus)))
    seen = lab.run(argv, lab.user).stdout.splitlines()
    assert sorted(seen) == [f"node{i} {gpus}" for i in range(1, lab.nodes + 1)]


def test_the_user_can_log_in_and_reach_slurm(lab: Lab) -> None:
    ssh = ["ssh", "-F", "none", "-p", str(lab.ssh_port), "-i", str(lab.ssh_key), "-o", "BatchMode=yes"]
    options = ["-o", f"UserKnownHostsFile={lab.known_hosts}", f"{lab.user}@{lab.ssh_host}"]
    assert lab.run([*ssh, *options, "id -un; sinfo -h -o %D"]).stdout.split() == [lab.user, str(lab.nodes)]


def test_run_is_a_fresh_login(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAK", "yes")
    done = lab.run('echo "$HOME ${LEAK-clean} $A"; pwd; cat', lab.user, env={"A": "a"}, stdin="in")
    assert done.stdout.split() == [f"/home/{lab.user}", "clean", "a", str(lab.shared), "in"]
    with pytest.raises(AssertionError, match="exited 3"):
        lab.run("exit 3")
