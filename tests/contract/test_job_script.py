"""job.sbatch, run under bash with stand-ins for srun and scontrol: exit codes, the claim, restarts, the port."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rundir import PROBE, RunDir, setup

from mlmsub.core import paths

Make = Callable[..., RunDir]

# srun as it is with --kill-on-bad-exit: two ranks; when one fails the others are ended, and srun itself says 143
SRUN = """\
while [[ $1 == -* ]]; do shift; done
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 SLURM_NTASKS=2 SLURM_NNODES=1 SLURMD_NODENAME=node1 "$@" &
done
code=0
for _ in 0 1; do wait -n || code=143; done
exit $code
"""

# A file of assignments uses none of them; `$` and quotes within quotes are meant; what is sourced is not known.
NO_FAULT = "SC2034,SC2016,SC1090,SC2089,SC2090"

SPECS: dict[str, dict[str, Any]] = {
    "python": {"stage": "quantize"},
    "torchrun": {"stage": "quantize", "launcher": "torchrun", "launch_script": "torchrun"},
    "export": {"stage": "export", "outputs": ("EXPORT_DIR",)},
    "script": {},
    "prelude": {"prelude": "module() { :; }\nmodule load slurm\n"},
    "container": {"image": "nvcr.io#nvidia/pytorch:25.06-py3", "mounts": ("/a b:/c d:ro", "/it's:/x")},
    "srun-arguments": {"srun_args": ("--export=ALL,X=$HOME", "--label")},
    "weird-workdir": {"workdir": "/a b/it's $HOME"},
}


@pytest.mark.parametrize("name", SPECS)
def test_shellcheck_has_nothing_to_say(run_dir: Make, name: str) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck here")
    made = run_dir(**SPECS[name])
    for path in ("job.sbatch", "entrypoint.sh", "env/command.sh", "env/merged.sh"):
        subprocess.run(
            ["shellcheck", "-s", "bash", "-e", NO_FAULT, str(made.dir / path)],
            check=True, timeout=60,
        )  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_srun_gets_its_words_whole(run_dir: Make, name: str) -> None:
    made = run_dir(**SPECS[name])
    made.job()
    argv = made.srun_argv
    assert argv[:5] == ["-l", "--mpi=pmix", "--kill-on-bad-exit=1", "--wait=0", "--distribution=block"]
    assert argv[-2:] == ["bash", f"{made.spec.run_dir_inside(made.paths)}/entrypoint.sh"]
    if made.spec.image:
        assert f"--container-image={made.spec.image}" in argv
        mounts = ",".join((*made.spec.mounts, f"{made.dir}:{paths.RUN}"))
        assert f"--container-mounts={mounts}" in argv
    assert argv[-2 - len(made.spec.srun_args) : -2] == list(made.spec.srun_args)


def test_only_mlmsubs_names_are_exported(run_dir: Make) -> None:
    made = run_dir(setup=setup("TP=8\n"), overrides={"A": "needle"})
    given = {"PATH", "HOME", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"}
    made.job(env={"SLURM_EXPORT_ENV": "NONE"})
    added = set(made.srun_env) - given - {"_", "PWD", "SHLVL", "OLDPWD"}
    assert added == {
        "MLMSUB_MASTER_ADDR", "MLMSUB_MASTER_PORT", "MLMSUB_RUN_DIR", "MLMSUB_RESTART", "MLMSUB_LAUNCHER",
        "MLMSUB_GPUS_PER_NODE", "MLMSUB_WORKDIR",
    }  # fmt: skip
    assert made.srun_env["MLMSUB_MASTER_ADDR"] == "node1"
    assert made.srun_env["MLMSUB_WORKDIR"] == made.spec.workdir


def test_srun_reads_nothing_of_the_scripts_input(run_dir: Make) -> None:
    made = run_dir()
    made.srun("[[ -z $(cat) ]]")
    assert made.job().returncode == 0


# --- exit codes ------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, 7, 137, 200])
def test_the_code_of_the_first_rank_that_failed_is_the_jobs(run_dir: Make, code: int) -> None:
    made = run_dir("bash", "-c", f"[[ $RANK == 1 ]] || exit 0; exit {code}")
    made.srun(SRUN)
    done = made.job()
    assert done.returncode == code
    assert f"{code} by rank 1 on node1" in done.stderr
    assert (made.dir / "state/end").read_text() == f"{code} {made.job_id} 0\n"


def test_a_killed_rank_is_137(run_dir: Make) -> None:
    made = run_dir("bash", "-c", "[[ $RANK == 1 ]] || exit 0; kill -9 $$")
    made.srun(SRUN)
    assert made.job().returncode == 137


@pytest.mark.parametrize("code", [1, 255])
def test_sruns_own_code_counts_when_no_rank_left_one(run_dir: Make, code: int) -> None:
    made = run_dir()
    made.srun(f"exit {code}")
    assert made.job().returncode == code


def test_ranks_that_were_all_ended_leave_143(run_dir: Make) -> None:
    made = run_dir("bash", "-c", "exit 143", nodes=1, tasks_per_node=2)
    made.srun(SRUN)
    assert made.job().returncode == 143


def test_a_rank_that_could_leave_no_code_was_killed(run_dir: Make) -> None:
    """Out of memory, the entrypoint itself is killed; srun then says 143 for all."""
    made = run_dir("bash", "-c", "[[ $RANK == 1 ]] && kill -9 $PPID; exit 143", nodes=1, tasks_per_node=2)
    made.srun(SRUN)
    done = made.job()
    assert done.returncode == 137
    assert "killed before it could leave its exit code" in done.stderr


def test_success(run_dir: Make) -> None:
    made = run_dir("bash", "-c", PROBE)
    made.srun(SRUN)
    done = made.job(env={"PROBE_OUT": f"{made.folder}/probe"})
    assert done.returncode == 0, done.stderr
    assert [made.env(rank)["RANK"] for rank in range(2)] == ["0", "1"]
    assert (made.dir / "state/end").read_text() == f"0 {made.job_id} 0\n"


def test_a_native_stage_without_its_output_has_failed(run_dir: Make) -> None:
    made = run_dir(stage="quantize")
    done = made.job()
    assert done.returncode == 70
    assert "without its output (MLM_MODEL_SAVE)" in done.stderr


@pytest.mark.parametrize(("content", "code"), [("{}", 0), ("", 70)])
def test_a_native_stage_with_its_output_has_not(run_dir: Make, content: str, code: int) -> None:
    made = run_dir(stage="quantize")
    made.srun(f"printf '%s' '{content}' >{made.dir}/state/0/done.json")
    assert made.job().returncode == code


def test_the_output_of_an_earlier_restart_does_not_count(run_dir: Make) -> None:
    made = run_dir(stage="quantize")
    (made.dir / "state/0").mkdir()
    (made.dir / "state/0/done.json").write_text("{}")
    assert made.job(restart=1).returncode == 70


def test_a_failure_of_an_earlier_restart_does_not_count(run_dir: Make) -> None:
    made = run_dir()
    made.srun("exit 0")
    (made.dir / "state/0").mkdir()
    (made.dir / "state/0/first_failure").symlink_to("7 by rank 0 on node1")
    assert made.job(restart=1).returncode == 0


# --- the claim, restarts, secrets ----------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, str]:
    return {str(p): str(p.readlink()) if p.is_symlink() else p.read_text() for p in folder.rglob("*") if not p.is_dir()}


def test_a_second_job_of_the_same_run_does_nothing(run_dir: Make) -> None:
    made = run_dir()
    assert made.job().returncode == 0
    before = snapshot(made.dir)
    second = made.job(job_id="999")
    assert second.returncode == 3
    assert "job 999 does nothing" in second.stderr
    assert snapshot(made.dir) == before


def test_a_requeued_job_goes_on_under_its_own_claim(run_dir: Make) -> None:
    made = run_dir()
    made.srun("exit 7")
    assert made.job().returncode == 7
    made.srun("exit 0")
    again = made.job(restart=1)
    assert again.returncode == 0
    assert "restart 1" in again.stdout
    assert made.srun_env["MLMSUB_RESTART"] == "1"
    assert (made.dir / "state/1").is_dir()
    assert (made.dir / "state/end").read_text() == f"0 {made.job_id} 1\n"


@pytest.mark.parametrize("code", [0, 7])
def test_secrets_are_gone_when_the_job_has_ended(tmp_path: Path, run_dir: Make, code: int) -> None:
    made = RunDir(run_dir().spec, tmp_path, HF_TOKEN="hf_verysecret")
    made.srun(f"[[ -e {made.dir}/secrets/env.sh ]] || exit 99; exit {code}")
    assert made.job().returncode == code
    assert not (made.dir / "secrets").exists()


def test_the_banner_names_run_job_restart_and_nodes(run_dir: Make) -> None:
    made = run_dir()
    out = made.job().stdout
    assert f"run {made.paths.run_id}  job {made.job_id}  restart 0 ===" in out
    assert "2 nodes: node[1-2]" in out
    assert re.search(r"=== \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  exit code 0 ===", out)


def test_a_prelude_may_use_what_is_not_set(run_dir: Make) -> None:
    assert run_dir(prelude='if [ -n "$LMOD_CMD" ]; then echo; fi').job().returncode == 0


@pytest.mark.parametrize("how", ["set -e", "set -Cf -o pipefail", "shopt -s failglob nullglob"])
def test_what_a_prelude_sets_does_not_hold_for_the_job(run_dir: Make, how: str) -> None:
    """Its second start, above all, finds much that is there already."""
    made = run_dir(prelude=how)
    shown = "JobState=RUNNING Restarts=1 PreemptTime=None"
    made.program("scontrol", f'[[ $2 == hostnames ]] && echo node1 || echo "{shown}"')
    made.srun("exit 143")
    assert made.job().returncode == 143 and not (made.dir / "state/end").exists()
    made.srun()
    assert made.job(restart=1).returncode == 0
    assert (made.dir / "state/end").read_text() == f"0 {made.job_id} 1\n"


@pytest.mark.parametrize(("code", "told"), [(0, 1), (3, 3)])
def test_a_prelude_that_ends_the_job_is_no_success(run_dir: Make, code: int, told: int) -> None:
    done = run_dir(prelude=f"exit {code}").job()
    assert done.returncode == told and f"the prelude of the profile has ended the job ({code})" in done.stderr


def test_a_prelude_may_use_any_name(run_dir: Make) -> None:
    made = run_dir(prelude="run=1 state=2 restart=3 code=4 link=5; set -- a b")
    assert made.job().returncode == 0
    assert (made.dir / "state/end").read_text() == f"0 {made.job_id} 0\n"


# --- the port -----------------------------------------------------------------------------------------

RANGE = "/proc/sys/net/ipv4/ip_local_port_range"


def port(made: RunDir, kernel: Path, job_id: int, restart: int = 0) -> int:
    """The port that the script chooses where the kernel's range is what the file says."""
    text = (made.dir / "job.sbatch").read_text()
    assert RANGE in text
    begin, end = text.index("MLMSUB_MASTER_ADDR=$("), text.index("MLMSUB_RUN_DIR=")
    text = f"set -eu; restart={restart}\n{text[begin:end].replace(RANGE, str(kernel))}\necho $MLMSUB_MASTER_PORT"
    done = made.job(script=text, job_id=str(job_id))
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("kernel", ["32768\t60999", "49152 65535", "15000 61000", "9000 40000"])
def test_the_port_lies_outside_the_kernels_own(run_dir: Make, tmp_path: Path, kernel: str) -> None:
    made, file = run_dir(), tmp_path / "range"
    file.write_text(f"{kernel}\n")
    low, high = map(int, kernel.split())
    ports = [port(made, file, job_id) for job_id in (1, 2, 3, 4711, 99_999, 4_294_967_295)]
    assert all(1024 <= p <= 65535 and not low <= p <= high for p in ports), ports
    assert len(set(ports)) > 4
    assert port(made, file, 1, restart=1) != ports[0]


@pytest.mark.parametrize("kernel", ["1024 65535", "1024 65000", "10000 65535", "2000 64999", ""])
def test_there_is_a_port_whatever_the_kernel_says(run_dir: Make, tmp_path: Path, kernel: str) -> None:
    made, file = run_dir(), tmp_path / "range"
    file.write_text(f"{kernel}\n" if kernel else "")
    assert all(1024 <= port(made, file, job_id) <= 65535 for job_id in (1, 4711, 99_999))
