"""Jobs on a real Slurm: exit codes, signals, dependencies, launchers, refusals."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command import Mlmsub
from lab import Lab

RANK_1 = '[ "$SLURM_PROCID" = 1 ] || exec sleep 300\n'  # the other ranks sleep on


@pytest.mark.parametrize(
    ("last_act", "code"),
    [("exit 7", 7), ("kill -9 $$", 137), ("exit 200", 200), ("kill -9 $PPID", 137)],
    ids=["exits-7", "is-killed", "exits-200", "its-task-is-killed"],
)
def test_the_job_has_the_exit_code_of_the_rank_that_failed(mlm: Mlmsub, last_act: str, code: int) -> None:
    """srun itself would say 143, and the reference's script 0."""
    mlm.profile(gpus_per_node=2)
    mlm.script("fail.sh", f"{RANK_1}sleep 1\n{last_act}\n")
    run = mlm.submit("script", "--nodes", "2", "--", "fail.sh")
    child = mlm.submit("script", "--after", run["run_id"], "--", "fail.sh")
    assert mlm.lab.wait(run["job_id"]).state == "FAILED"
    # sacct of Slurm 22.05 shows a code from 128 on less 128
    assert f"ExitCode={code}:0" in mlm.lab.run(["scontrol", "show", "job", run["job_id"]]).stdout
    by = "" if "PPID" in last_act else " by rank 1 on node1"  # a killed task has no last word
    assert f"exit code {code}{by}" in mlm.log(run)
    assert mlm.lab.wait(child["job_id"]).state == "CANCELLED"
    states = json.loads(mlm.run("status", run["run_id"], child["run_id"], "--json").stdout)
    assert [s["status"]["state"] for s in states] == ["failed", "cancelled"]
    assert states[0]["status"]["exit_code"] == code
    assert mlm.log(child) == ""


def test_watch_ends_with_6_when_the_job_fails(mlm: Mlmsub) -> None:
    mlm.script("fail.sh", "echo the reason; exit 9\n")
    done = mlm.run("submit", "script", "--watch", "--", "fail.sh", check=False)
    assert done.returncode == 6
    assert "the reason" in done.stdout and "failed with exit code 9" in done.stderr


def test_cancel_ends_the_job_for_good(mlm: Mlmsub) -> None:
    mlm.script("sleep.sh", "echo asleep; sleep 300\n")
    run = mlm.submit("script", "--", "sleep.sh")
    child = mlm.submit("script", "--after", run["run_id"], "--", "sleep.sh")
    until(lambda: "asleep" in mlm.log(run))
    mlm.run("cancel", run["run_id"])
    assert mlm.lab.wait(run["job_id"]).state == "CANCELLED"
    assert mlm.lab.wait(child["job_id"]).state == "CANCELLED"
    assert mlm.status(run["run_id"])["state"] == "cancelled"


def test_logs_follow_until_the_end(mlm: Mlmsub) -> None:
    mlm.script("count.sh", "for i in 1 2 3; do echo line $i; sleep 1; done\n")
    run = mlm.submit("script", "--", "count.sh")
    shown = mlm.run("logs", "-f", run["run_id"]).stdout
    assert [line for line in shown.splitlines() if "line" in line] == [
        "8 ranks: line 1",
        "8 ranks: line 2",
        "8 ranks: line 3",
    ]
    assert shown.rstrip().endswith("exit code 0 ===")
    one = mlm.run("logs", "--rank", "5", run["run_id"]).stdout
    assert one.splitlines() == ["line 1", "line 2", "line 3"]
    assert mlm.run("logs", "--raw", run["run_id"]).stdout.count(" line 2") == 8


def test_log_has_job_name_job_id_and_stamp(mlm: Mlmsub) -> None:
    mlm.script("hello.sh", "echo hello\n")
    run = mlm.submit("script", "--job-name", "a/b c", "--", "hello.sh")
    mlm.lab.wait(run["job_id"])
    (log,) = (Path(run["run_dir"]) / "logs").iterdir()
    assert log.name == f"a-b-c_{run['job_id']}_{run['run_id'][:15]}.log"


def test_four_gpus_a_node(mlm: Mlmsub) -> None:
    """8 is never a constant: GB200 nodes have 4."""
    mlm.profile(gpus_per_node=4)
    mlm.script("who.sh", 'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK on $SLURMD_NODENAME, GPUs $SLURM_GPUS_ON_NODE"\n')
    run = mlm.submit("script", "--nodes", "2", "--", "who.sh")
    assert mlm.lab.wait(run["job_id"]).state == "COMPLETED"
    lines = sorted(line.split(": ", 1)[1] for line in mlm.log(run).splitlines() if " of 8" in line)
    assert lines == [f"{r} of 8, {r % 4} on node{r // 4 + 1}, GPUs 4" for r in range(8)]


@pytest.mark.parametrize("request_as", ["gpus-per-node", "gres", "none"])
def test_every_way_to_ask_for_gpus(mlm: Mlmsub, request_as: str) -> None:
    mlm.profile(gpu_request=request_as, gpu_type="h100", gpus_per_node=2)
    mlm.script("gpus.sh", 'echo "sees ${CUDA_VISIBLE_DEVICES-none}"\n')
    run = mlm.submit("script", "--", "gpus.sh")
    assert mlm.lab.wait(run["job_id"]).state == "COMPLETED"
    assert ("sees none" if request_as == "none" else "sees 0,1") in mlm.log(run)


def test_the_whole_node_as_the_reference_asks_for_it(mlm: Mlmsub) -> None:
    mlm.profile(exclusive=True, mem="0", overcommit=True)
    mlm.script("hello.sh", "echo hello\n")
    run = mlm.submit("script", "--sbatch-arg=--comment=two words", "--", "hello.sh")
    shown = mlm.lab.run(["scontrol", "show", "job", run["job_id"]]).stdout
    assert mlm.lab.wait(run["job_id"]).state == "COMPLETED"
    assert "OverSubscribe=NO" in shown and "Requeue=0" in shown
    assert f"WorkDir={run['run_dir']}" in shown


def test_paths_with_blanks_quotes_and_hashes(mlm: Mlmsub) -> None:
    """They pass through #SBATCH lines, the shell and Pyxis."""
    scratch = mlm.home / 'it\'s a "scratch" #1'
    mlm.lab.run(["mkdir", str(scratch)], mlm.user)
    mlm.profile(scratch=str(scratch), gpus_per_node=1)
    mlm.script("touch.sh", "touch /workspace/scratch/was-here\n")
    run = mlm.submit("script", "--", "touch.sh")
    assert mlm.lab.wait(run["job_id"]).state == "COMPLETED", mlm.log(run)
    assert (scratch / "was-here").exists()
    assert run["run_dir"].startswith(str(scratch))


def test_outputs_have_the_users_umask_and_run_directories_are_private(mlm: Mlmsub) -> None:
    mlm.profile(gpus_per_node=1)
    mlm.script("touch.sh", "touch /workspace/scratch/output\n")
    run = mlm.submit("script", "--", "touch.sh")
    mlm.lab.wait(run["job_id"])
    assert stat.S_IMODE((mlm.scratch / "output").stat().st_mode) == 0o666 & ~current_umask()
    assert stat.S_IMODE(Path(run["run_dir"]).stat().st_mode) == 0o700


def current_umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


@pytest.mark.parametrize("image", ["image", "sqsh"])
def test_the_env_setup_beats_the_image(mlm: Mlmsub, image: str) -> None:
    chosen = mlm.lab.image_with(TP="2", HF_HOME="/image") if image == "image" else mlm.lab.sqsh
    mlm.profile(image=str(chosen), gpus_per_node=1)
    (mlm.home / "setup.sh").write_text("TP=8\nFOO=mine\n")
    mlm.script("say.sh", 'echo "TP=$TP FOO=$FOO IMAGE_SAYS=$IMAGE_SAYS"\n')
    run = mlm.submit("script", "--env-setup", "setup.sh", "--", "say.sh")
    assert mlm.lab.wait(run["job_id"]).state == "COMPLETED"
    assert "TP=8 FOO=mine IMAGE_SAYS=image" in mlm.log(run)


def test_ranks_overrule_what_an_image_or_hook_says(mlm: Mlmsub) -> None:
    mlm.profile(
        image=str(mlm.lab.image_with(PYTORCH_VERSION="2", MASTER_ADDR="elsewhere", WORLD_SIZE="1")), gpus_per_node=2
    )
    mlm.script("who.sh", 'echo "$RANK/$WORLD_SIZE at $MASTER_ADDR"\n')
    run = mlm.submit("script", "--set", "RANK=5", "--nodes", "2", "--", "who.sh")
    assert mlm.lab.wait(run["job_id"]).state == "COMPLETED"
    log = mlm.log(run)
    assert all(f"{rank}: {rank}/4 at node1" in log for rank in range(4))
    assert log.count("the env setup sets RANK=5; mlmsub decides it: 0") == 1


def test_a_second_job_of_the_same_run_does_nothing(mlm: Mlmsub) -> None:
    """An sbatch that times out may still make its job, after another one was made."""
    mlm.profile(gpus_per_node=1)
    mlm.script("count.sh", "echo once >>/workspace/scratch/count\n")
    run = mlm.submit("script", "--", "count.sh")
    late = mlm.lab.run(["sbatch", "--parsable", f"{run['run_dir']}/job.sbatch"], mlm.user).stdout.strip()
    ends = {mlm.lab.wait(run["job_id"]).exit_code, mlm.lab.wait(late).exit_code}
    assert ends == {"0:0", "3:0"}
    assert (mlm.scratch / "count").read_text() == "once\n"


def test_pip_runs_once_a_node_and_only_when_asked(mlm: Mlmsub) -> None:
    """Eight ranks of a node that install at once spoil each other's site-packages."""
    fake = '#!/bin/bash\n[[ $1$2 != -mpip ]] && exec python3 "$@"\n'
    fake += 'while [[ $1 != --target ]]; do shift; done; sleep 1; mkdir -p "$2"; echo "V = 1" >"$2/installed.py"\n'
    fake += "echo $SLURMD_NODENAME >>/workspace/scratch/pip\n"
    mlm.script("python-with-pip", fake)
    mlm.script("use.sh", '${LAUNCH_SCRIPT} -c "import installed; print(installed.V)"\n')
    mlm.profile(launch_script="/workspace/nmm-sandbox/python-with-pip", gpus_per_node=4)
    run = mlm.submit("script", "--nodes", "2", "--install", "/workspace/nmm-sandbox/r.txt", "--", "use.sh")
    assert mlm.lab.wait(run["job_id"]).state == "COMPLETED", mlm.log(run)
    assert sorted((mlm.scratch / "pip").read_text().split()) == ["node1", "node2"]
    without = mlm.submit("script", "--", "use.sh")
    assert mlm.lab.wait(without["job_id"]).state == "FAILED"
    assert len((mlm.scratch / "pip").read_text().split()) == 2


@pytest.mark.parametrize(
    ("options", "sentence", "cure"),
    [
        (("--partition", "nope"), "the partition does not exist", "--partition or the profile's `partition`"),
        (("--sbatch-arg=--licenses=none:1",), "Slurm refused the job", ""),
        (("--nodes", "2", "--sbatch-arg=--tmp=999999999"), "no such nodes in this partition", "--nodes"),
    ],
)
def test_what_slurm_refuses_leaves_nothing(mlm: Mlmsub, options: tuple[str, ...], sentence: str, cure: str) -> None:
    mlm.script("hello.sh", "echo hello\n")
    done = mlm.run("submit", "script", *options, "--", "hello.sh", check=False)
    assert done.returncode == 5
    assert sentence in done.stderr and cure in done.stderr and "Traceback" not in done.stderr
    assert not list((mlm.scratch / ".mlmsub").rglob("job.sbatch*"))
    assert "no runs yet" in mlm.run("list").stdout


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("image", "/nowhere/image.sqsh", "the container image /nowhere/image.sqsh is not there"),
        ("mounts", ["/nowhere:/data"], "/nowhere is to be mounted, but is not there"),
        ("runs_root", "/proc/runs", "cannot write runs to /proc/runs"),
        ("slurm_bin", "", ""),
    ],
)
def test_what_the_cluster_lacks_is_said_before_sbatch(mlm: Mlmsub, key: str, value: object, sentence: str) -> None:
    mlm.script("hello.sh", "echo hello\n")
    mlm.profile(**{key: value})
    elsewhere = mlm.home / "bin"  # all programs but Slurm's
    mlm.lab.run(f"mkdir {elsewhere} && ln -s /usr/bin/* {elsewhere} && rm {elsewhere}/sbatch", mlm.user)
    env = {} if sentence else {"PATH": str(elsewhere)}
    done = mlm.run("submit", "script", "--", "hello.sh", check=False, env=env)
    assert done.returncode == (3 if sentence else 5)
    assert (sentence or "sbatch was not found") in done.stderr
    assert "no runs yet" in mlm.run("list").stdout


def test_slurmctld_down(mlm: Mlmsub) -> None:
    mlm.script("hello.sh", "echo hello\n")
    pid = int((mlm.lab.directory / "run/slurmctld.pid").read_text())
    os.kill(pid, 15)
    try:
        done = mlm.run("submit", "script", "--", "hello.sh", check=False)
    finally:
        mlm.lab.start()
    assert done.returncode == 5
    assert "slurmctld does not answer" in done.stderr
    assert not list((mlm.scratch / ".mlmsub").rglob("job.sbatch*"))


def until(condition, timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.3)


@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_starts_the_ranks(lab: Lab, installed_command: Path, scratch: Path, nodes: int) -> None:
    """The real torchrun, with a rendezvous across nodes. As root, who alone may read this test's own Python."""
    torchrun = pytest.importorskip("torch") and Path(sys.prefix) / "bin/torchrun"
    mlm = Mlmsub(lab, installed_command, scratch / "home", user="root").setup()
    prefixes = {str(Path(sys.prefix)), str(Path(sys.base_prefix))}
    mlm.profile(
        gpus_per_node=2, launch_script=str(torchrun), mounts=[f"{p}:{p}:ro" for p in sorted(prefixes)], mem="4G"
    )
    mlm.script("sum.sh", "${LAUNCH_SCRIPT} sum.py\n")
    mlm.script("sum.py", (
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.tensor([float(dist.get_rank() + 1)])\n"
        "dist.all_reduce(x)\n"
        "sys.stdout.write(f'sum {x.item()} over {dist.get_world_size()}\\n')\n"
        "dist.destroy_process_group()\n"
    ))  # fmt: skip
    run = mlm.submit("script", "--nodes", str(nodes), "--", "sum.sh")
    assert mlm.lab.wait(run["job_id"]).state == "COMPLETED", mlm.log(run)
    ranks = 2 * nodes
    assert mlm.log(run).count(f"sum {ranks * (ranks + 1) / 2} over {ranks}") == ranks


def test_torchrun_under_one_task_per_gpu_is_refused(mlm: Mlmsub) -> None:
    """An env setup that the submit side could not read may say so only in the job."""
    (mlm.home / "setup.sh").write_text('if [ -n "$SLURM_JOB_ID" ]; then LAUNCH_SCRIPT=torchrun; fi\n')
    mlm.script("hello.sh", "echo hello\n")
    run = mlm.submit("script", "--env-setup", "setup.sh", "--", "hello.sh")
    assert mlm.lab.wait(run["job_id"]).exit_code == "78:0"
    assert "the job was laid out for python" in mlm.log(run)


def test_the_same_command_again_is_the_run_that_is_under_way(mlm: Mlmsub) -> None:
    """Whoever did not see the end of a submission repeats it; two jobs would write the same checkpoint."""
    mlm.profile(gpus_per_node=1)
    mlm.script("sleep.sh", "sleep 60\n")
    first = mlm.submit("script", "--", "sleep.sh")
    again = mlm.submit("script", "--", "sleep.sh")
    other = mlm.submit("script", "--new", "--", "sleep.sh")
    assert (again["run_id"], again["job_id"], again["existed"]) == (first["run_id"], first["job_id"], True)
    assert other["job_id"] != first["job_id"] and not other["existed"]
    mlm.run("cancel", first["run_id"], other["run_id"])
    for run in (first, other):
        mlm.lab.wait(run["job_id"])
    assert mlm.submit("script", "--", "sleep.sh")["existed"] is False
    mlm.run("cancel", "last")


def test_a_submission_whose_answer_was_lost_is_found_and_can_be_cancelled(mlm: Mlmsub) -> None:
    mlm.profile(gpus_per_node=1)
    mlm.script("sleep.sh", "sleep 60\n")
    run = mlm.submit("script", "--", "sleep.sh")
    record = mlm.home / f"state/mlmsub/runs/{run['run_id']}.json"

    def forget() -> None:
        record.write_text(json.dumps(json.loads(record.read_text()) | {"job_id": ""}))

    forget()
    assert mlm.status(run["run_id"])["state"] in ("pending", "running")
    assert json.loads(record.read_text())["job_id"] == run["job_id"]
    forget()
    mlm.run("cancel", run["run_id"])
    assert mlm.lab.wait(run["job_id"]).state == "CANCELLED"


def test_cancelling_a_submission_that_made_no_job_removes_its_secrets_and_bars_a_late_one(mlm: Mlmsub) -> None:
    mlm.profile(gpus_per_node=1)
    mlm.script("go.sh", "touch /workspace/scratch/ran\n")
    slow = mlm.home / "bin"
    slow.mkdir()
    (slow / "sbatch").write_text("#!/bin/sh\necho sbatch: error: Socket timed out >&2; exit 1\n")
    (slow / "sbatch").chmod(0o755)
    mlm.profile(gpus_per_node=1, slurm_bin=str(slow))
    lost = mlm.run("submit", "script", "--", "go.sh", check=False, env={"HF_TOKEN": "hf_not_to_be_kept"})
    assert lost.returncode == 5 and "may exist" in lost.stderr
    (job_script,) = (mlm.scratch / ".mlmsub").rglob("job.sbatch")
    assert (job_script.parent / "secrets").is_dir()
    mlm.run("cancel", "last")
    assert not (job_script.parent / "secrets").exists()
    late = mlm.lab.run(["sbatch", "--parsable", str(job_script)], mlm.user).stdout.strip()
    assert mlm.lab.wait(late).exit_code == "3:0"
    assert not (mlm.scratch / "ran").exists()
    assert mlm.status("last")["state"] == "cancelled"


def test_the_same_command_at_the_same_instant_makes_one_job(mlm: Mlmsub) -> None:
    mlm.profile(gpus_per_node=1)
    mlm.script("sleep.sh", "sleep 60\n")
    with ThreadPoolExecutor(3) as shells:
        runs = list(shells.map(lambda _: mlm.submit("script", "--", "sleep.sh"), range(3)))
    assert len({run["job_id"] for run in runs}) == 1
    mlm.run("cancel", runs[0]["run_id"])
