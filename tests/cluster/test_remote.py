"""From a laptop: every verb over SSH, on a real Slurm, with one login and one exec for each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from laptop import Laptop, LoginNode, Traffic, at_terminal
from sshd_lab import Account

ONE = [Traffic(logins=1, execs=1)]


@pytest.mark.parametrize("kind", ["paramiko", "openssh"])
def test_every_verb_takes_one_login_and_one_exec(laptop: Laptop, login_node: LoginNode, kind: str) -> None:
    laptop.profile(transport=kind)
    laptop.script("hello.sh", "echo hello; echo done >/workspace/scratch/out.json\n")
    laptop.script("sleep.sh", "sleep 300\n")
    with login_node.counted() as submitting:
        first = laptop.submit("script", "--", "hello.sh")
    with login_node.counted() as watching:
        watched = laptop.run("submit", "script", "--watch", "--job-name", "watched", "--", "hello.sh")
    second = laptop.submit("script", "--", "sleep.sh")
    third = laptop.submit("script", "--job-name", "third", "--", "sleep.sh")
    assert laptop.lab.wait(first["job_id"]).state == "COMPLETED"
    ids = [first["run_id"], second["run_id"], third["run_id"]]
    seen = {}
    for verb in (
        ("status", *ids), ("list",), ("list", "--profile", "lab"), ("show", ids[0]), ("logs", ids[0]),
        ("logs", "-f", ids[0]), ("fetch", ids[0]), ("cancel", *ids[1:]),
    ):  # fmt: skip
        with login_node.counted() as seen[verb]:
            done = laptop.run(*verb)
        assert "hello" in done.stdout if verb[0] == "logs" else ids[0] in done.stdout or verb[0] == "cancel"
    assert submitting == ONE, "one connection, one exec"
    assert watching[0].logins == (1 if kind == "paramiko" else 3) and "hello" in watched.stdout
    two = [Traffic(1, 2)] if kind == "paramiko" else [Traffic(2, 2)]
    assert {verb: count for verb, count in seen.items() if count != ONE} == {("list", "--profile", "lab"): two}
    (log,) = (laptop.home / ids[0] / "logs").iterdir()
    assert "hello" in log.read_text()
    for run in (second, third):
        assert laptop.lab.wait(run["job_id"]).state == "CANCELLED"


@pytest.mark.parametrize(
    ("shell", "startup", "keys"),
    [
        ("/usr/bin/tcsh", "echo hello from tcsh\nset noclobber\n", {"slurm_bin": "/usr/bin"}),
        ("/bin/bash", "echo one two; echo three >&2; printf 'mlmsub-'\n", {"prelude": "PATH=$PATH:/usr/bin"}),
        ("/bin/bash", "", {"prelude": 'read -r line; echo "$line"; module() { PATH+=:/usr/bin; }; module load; exit'}),
    ],
    ids=["tcsh-slurm_bin", "noisy-bash-prelude", "prelude-that-reads-prints-and-exits"],
)
def test_login_shells_and_slurm_off_the_path(
    laptop_of: Callable[..., Laptop], account: Callable[[str, str], Account], bare_login_node: LoginNode,
    shell: str, startup: str, keys: dict[str, str],
) -> None:  # fmt: skip
    if not Path(shell).exists():
        pytest.skip(f"no {shell}")
    laptop = laptop_of(bare_login_node, login=account(shell, startup).name)
    laptop.profile(**keys)
    if "exit" in keys.get("prelude", ""):  # good for finding Slurm; a job script would end there
        laptop.script("hold.sh", "true\n")
        run = laptop.submit("script", "--sbatch-arg=--hold", "--", "hold.sh")
        assert laptop.status(run["run_id"])["state"] == "pending"
        laptop.run("cancel", run["run_id"])
        assert laptop.status(run["run_id"])["state"] == "cancelled"
        return
    laptop.script("hello.sh", "echo hello from the job\n")
    done = laptop.run("submit", "script", "--watch", "--", "hello.sh")
    assert "hello from the job" in done.stdout
    assert "succeeded" in laptop.run("status").stdout
    assert "hello from the job" in laptop.run("logs", "-f").stdout


def test_a_cluster_without_sbatch_names_the_keys(laptop_of: Callable[..., Laptop], bare_login_node: LoginNode) -> None:
    laptop = laptop_of(bare_login_node)
    laptop.profile(prelude="module load slurm")
    laptop.script("hello.sh", "echo hello\n")
    done = laptop.run("submit", "script", "--", "hello.sh", check=False)
    assert done.returncode == 5
    assert "sbatch was not found" in done.stderr and "module: command not found" in done.stderr
    assert "`slurm_bin`" in done.stderr and "`prelude`" in done.stderr
    assert not (laptop.scratch / ".mlmsub").exists() and not laptop.records()


@pytest.mark.parametrize("kind", ["paramiko", "openssh"])
def test_following_goes_on_after_the_connection_was_cut(laptop: Laptop, login_node: LoginNode, kind: str) -> None:
    laptop.profile(transport=kind)
    laptop.script("count.sh", "for i in $(seq 20); do echo line $i; sleep 0.3; done\n")
    run = laptop.submit("script", "--", "count.sh")
    following = laptop.start("logs", "-f", "--raw", run["run_id"])
    assert following.stdout
    first = next(line for line in following.stdout if "line 3" in line)
    login_node.cut()
    rest = following.stdout.read()
    assert following.wait(90) == 0
    lines = [line.split()[-1] for line in (first + rest).splitlines() if ": line" in line]
    assert lines == [str(number) for number in range(3, 21)], "each line once, none lost"


def test_another_machine_finds_the_run(laptop: Laptop, laptop_of: Callable[..., Laptop], login_node: LoginNode) -> None:
    laptop.script("sleep.sh", "echo asleep; sleep 300\n")
    run = laptop.submit("script", "--", "sleep.sh")
    other = laptop_of(login_node, home="workstation")
    assert other.run("status", run["run_id"], check=False).returncode == 2
    listed = json.loads(other.run("list", "--profile", "lab", "--json").stdout)
    assert [(r["run_id"], r["job_id"], r["host"]) for r in listed] == [(run["run_id"], run["job_id"], "cluster")]
    until(lambda: "asleep" in other.run("logs", run["run_id"]).stdout)
    assert other.status(run["run_id"])["state"] == "running"
    other.run("fetch", run["run_id"], "--to", "here")
    assert list((other.home / "here/logs").iterdir())
    other.run("cancel", run["run_id"])
    assert laptop.status(run["run_id"])["state"] == "cancelled"


def test_outputs_are_fetched_with_a_bar(laptop: Laptop) -> None:
    laptop.script("make.sh", (
        'mkdir -p "$EXPORT_DIR/deep"; echo "{}" >"$EXPORT_DIR/config.json"; echo "{}" >"$EXPORT_DIR/deep/a b.json"\n'
        'head -c 3000000 /dev/urandom >"$EXPORT_DIR/model.bin"\n'
    ))  # fmt: skip
    run = laptop.submit("script", "--set", "EXPORT_DIR=/workspace/scratch/export", "--", "make.sh")
    assert laptop.lab.wait(run["job_id"]).state == "COMPLETED", laptop.log(run)
    shown = laptop.run("show", run["run_id"]).stdout
    assert all(word in shown for word in (run["run_dir"], "cluster", "succeeded", run["job_id"]))
    argv = [laptop.command, "fetch", run["run_id"], "state/*", "--to", str(laptop.home / "state-files")]
    screen = at_terminal(argv, laptop.environment())
    assert screen.exit_code == 0 and "100 %" in screen.text and "[####" in screen.text
    assert (laptop.home / "state-files/state/end").read_text().startswith("0 ")
    missing = laptop.run("fetch", run["run_id"], "nothing/*", check=False)
    assert missing.returncode == 2 and "nothing/*" in missing.stderr


@pytest.mark.parametrize(
    ("keys", "code", "sentence"),
    [
        ({"sandbox": ""}, 2, "SANDBOX_DIR must be an absolute path on cluster"),
        ({"image": "images/x.sqsh"}, 2, "must be an absolute path on the cluster"),
        ({"image": "/nowhere/x.sqsh"}, 3, "the container image /nowhere/x.sqsh is not there"),
        ({"mounts": ["/nowhere:/data"]}, 3, "/nowhere is to be mounted, but is not there"),
        ({"runs_root": "/proc/runs"}, 3, "cannot write runs to /proc/runs"),
        ({"env_setup": "cluster:/nowhere/setup.sh"}, 3, "the env setup /nowhere/setup.sh is not there on the cluster"),
        ({"partition": "nope"}, 5, "the partition does not exist"),
    ],
)
def test_what_is_missing_is_said_and_leaves_nothing(
    laptop: Laptop, keys: dict[str, object], code: int, sentence: str
) -> None:
    laptop.script("hello.sh", "echo hello\n")
    laptop.profile(**keys)
    done = laptop.run("submit", "script", "--", "hello.sh", check=False)
    assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr
    assert not list(laptop.scratch.rglob("job.sbatch")) and not list(laptop.scratch.rglob("*.part.*"))
    assert not laptop.records()


def test_an_env_setup_on_the_cluster_and_one_that_is_packed(laptop: Laptop) -> None:
    laptop.script("say.sh", 'echo "TP=$TP WHERE=$WHERE"\n')
    (laptop.there / "setup.sh").write_text("TP=2 WHERE=cluster\n")
    (laptop.home / "setup.sh").write_text("TP=4 WHERE=laptop\n")
    there = laptop.submit("script", "--env-setup", f"cluster:{laptop.there}/setup.sh", "--", "say.sh")
    here = laptop.submit("script", "--env-setup", "setup.sh", "--", "say.sh")
    for run, text in ((there, "TP=2 WHERE=cluster"), (here, "TP=4 WHERE=laptop")):
        assert laptop.lab.wait(run["job_id"]).state == "COMPLETED"
        assert text in laptop.log(run)


def test_too_much_to_send_names_the_largest_files(laptop: Laptop, login_node: LoginNode) -> None:
    laptop.script("hello.sh", "echo hello\n")
    sizes = [9, 8, 7, 6, 5, 4]  # and once more in run.yaml
    for size in sizes:
        (laptop.home / f"part{size}.sh").write_bytes(b"A=1\n#" + b"-" * (size * 2**20))
    (laptop.home / "setup.sh").write_text("".join(f"source ./part{size}.sh\n" for size in sizes))
    with login_node.counted() as seen:
        done = laptop.run("submit", "script", "--env-setup", "setup.sh", "--", "hello.sh", check=False)
    assert done.returncode == 2
    assert "more than 64" in done.stderr
    assert [size for size in sizes if f"part{size}.sh" in done.stderr] == sizes[:5]
    assert not laptop.records() and not (laptop.scratch / ".mlmsub").exists()
    assert seen[0].logins <= 1


def test_the_shell_completes_without_connecting(laptop: Laptop, login_node: LoginNode) -> None:
    laptop.script("hold.sh", "true\n")
    run = laptop.submit("script", "--sbatch-arg=--hold", "--", "hold.sh")
    laptop.run("cancel", run["run_id"])
    laptop.profile("elsewhere", host="host.invalid")
    script = f'PATH={laptop.command.parent}:$PATH; eval "$(_MLMSUB_COMPLETE=source_bash mlmsub)"\n'
    script += 'ask() { COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _mlmsub_completion mlmsub "${@: -1}"; '
    script += 'echo "${COMPREPLY[@]}"; COMPREPLY=(); }\n'
    script += "ask mlmsub submit qua; ask mlmsub submit quantize moonshotai/; ask mlmsub submit --profile else\n"
    script += f"ask mlmsub status {run['run_id'][:4]}; ask mlmsub logs la\n"
    with login_node.counted() as seen:
        done = laptop.lab.run(["bash", "-c", script], env=laptop.environment())
    stages, models, profiles, runs, last = done.stdout.splitlines()
    assert (stages, profiles, runs, last) == ("quantize", "elsewhere", run["run_id"], "last")
    assert "moonshotai/Kimi-K2-Instruct" in models.split()
    assert seen == [Traffic(0, 0)]


def until(condition: Callable[[], bool], timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.3)
