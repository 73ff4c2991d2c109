"""A token reaches the job, and nothing that anybody else can read, however the run ends."""

from __future__ import annotations

import hashlib
import json
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex

import pytest
from laptop import Laptop

# the way that each takes; the values are each test's own
WAYS = {
    "HF_TOKEN": "environment",
    "WANDB_API_KEY": "setup",
    "NGC_API_KEY": "set",
    "HUGGING_FACE_HUB_TOKEN": "profile",
    "SITE_PASSWORD": "named",
}
TOKENS: dict[str, str] = {}
SCRIPT = """
for name in {names}; do
    echo "$name $(printf %s "${{!name}}" | md5sum | cut -c 1-8)"
done
{rest}
"""


WAIT = "until [ -e /workspace/scratch/go ]; do sleep 0.1; done"


@pytest.fixture(autouse=True)
def tokens() -> None:
    TOKENS.update({name: f"{way}_{token_hex(8)}" for name, way in WAYS.items()})


@pytest.fixture
def run(laptop: Laptop) -> Callable[..., dict[str, str]]:
    """Submit a run that has every token, which ends as `rest` says."""

    def submit(rest: str, *options: str) -> dict[str, str]:
        (laptop.home / "setup.sh").write_text(f"export WANDB_API_KEY={TOKENS['WANDB_API_KEY']}\n")
        laptop.profile(
            env={"HUGGING_FACE_HUB_TOKEN": TOKENS["HUGGING_FACE_HUB_TOKEN"]}, secrets=["SITE_PASSWORD"], mounts=[]
        )
        laptop.script("work.sh", SCRIPT.format(names=" ".join(TOKENS), rest=rest))
        command = ("submit", "script", *options, "--env-setup", "setup.sh", "--set")
        command += (f"NGC_API_KEY={TOKENS['NGC_API_KEY']}", "--job-name", "quiet")
        env = {name: TOKENS[name] for name in ("HF_TOKEN", "SITE_PASSWORD")}
        shown = laptop.run(*command, "--dry-run", "--", "work.sh", env=env).stdout
        shown += laptop.run(*command, "--dry-run", "--json", "--", "work.sh", env=env).stdout
        assert "HF_TOKEN" in shown and not found_in(shown)
        done = laptop.run(*command, "--json", "--", "work.sh", env=env)
        assert not found_in(done.stdout + done.stderr)
        return json.loads(done.stdout)

    return submit


def found_in(text: str) -> list[str]:
    return [name for name, token in TOKENS.items() if token in text]


def leaks(laptop: Laptop, run: dict[str, str]) -> dict[str, str]:
    """Where a token can be read, besides the secret files themselves; empty if all is well."""
    found = {}
    lab = laptop.lab
    own = Path(run["run_dir"]) / "secrets"
    # job scripts, logs, run directories, slurmctld's state, the nodes' spool, the accounting database, daemons' logs
    words = "\n".join(TOKENS.values())
    places = [str(lab.directory / name) for name in ("shared", "state", "spool", "mysql", "log", "local", "scratch")]
    places.append(str(laptop.home / "state"))
    listed = subprocess.run(["grep", "-rlaF", "-f", "-", *places], input=words, capture_output=True, text=True)
    for file in listed.stdout.splitlines():
        if not Path(file).is_relative_to(own):
            found[file] = "file"
    commands = {
        "scontrol": ["scontrol", "show", "job", "-dd", run["job_id"]],
        "batch script": ["scontrol", "write", "batch_script", run["job_id"], "-"],
        "accounted environment": ["sacct", "-j", run["job_id"], "--env-vars"],
        "accounted script": ["sacct", "-j", run["job_id"], "--batch-script"],
        "processes": ["ps", "-ef", "-ww"],
        "what others see": ["sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'"],
    }
    for name, argv in commands.items():
        other = ["setpriv", "--reuid=nobody", "--clear-groups"] if name == "what others see" else []
        text = lab.run([*other, *argv], check=False).stdout
        if names := found_in(text):
            found[name] = ", ".join(names)
        assert text or "script" in name or "accounted" in name, f"{name}: nothing was looked at"
    for verb in (("status",), ("show",), ("list", "--profile", "lab"), ("logs", "--raw")):
        if names := found_in(laptop.run(*verb).stdout):
            found[" ".join(verb)] = ", ".join(names)
    return found


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in sorted(folder.glob("*"))}


def test_the_search_finds_a_token(laptop: Laptop, run: Callable[..., dict[str, str]]) -> None:
    """Else an empty answer would mean nothing: the run itself gives a token away, in two ways."""
    made = run('echo "$HF_TOKEN"; scontrol update 2>/dev/null; exec -a "$SITE_PASSWORD" sleep 4')
    until(lambda: "HF_TOKEN" in laptop.log(made))
    seen = leaks(laptop, made)
    assert any(file.startswith(made["run_dir"] + "/logs") for file in seen)
    assert {"processes", "what others see"} & set(seen) and "logs --raw" in seen
    laptop.run("cancel", made["run_id"])


@pytest.mark.parametrize(
    ("rest", "state"), [(WAIT, "COMPLETED"), (f"{WAIT}; exit 3", "FAILED")], ids=["success", "failure"]
)
def test_a_run_that_ends_by_itself(laptop: Laptop, run: Callable[..., dict[str, str]], rest: str, state: str) -> None:
    made = run(rest)
    secrets = Path(made["run_dir"]) / "secrets"
    assert stat.S_IMODE(secrets.stat().st_mode) == stat.S_IMODE(secrets.parent.stat().st_mode) == 0o700
    assert set(modes(secrets).values()) == {0o600} and set(modes(secrets)) == {"env.sh", "overrides.sh", "setup.sh"}
    assert "secrets" not in (secrets.parent / "manifest.sha256").read_text()
    until(lambda: "SITE_PASSWORD" in laptop.log(made))
    assert leaks(laptop, made) == {}, "while it runs"
    refused = laptop.lab.run(["scontrol", "requeue", made["job_id"]], check=False)
    assert refused.returncode != 0, "a requeue would find a run without its secrets"
    (laptop.scratch / "go").touch()
    assert laptop.lab.wait(made["job_id"]).state == state
    for name, token in TOKENS.items():
        assert f"{name} {md5(token)}" in laptop.log(made), "each token reached the job"
    assert not secrets.exists()
    assert leaks(laptop, made) == {}


@pytest.mark.parametrize("when", ["pending", "running"])
def test_a_run_that_is_cancelled(laptop: Laptop, run: Callable[..., dict[str, str]], when: str) -> None:
    made = run("sleep 300", *(["--sbatch-arg=--hold"] if when == "pending" else []))
    if when == "running":
        until(lambda: "SITE_PASSWORD" in laptop.log(made))
    assert leaks(laptop, made) == {}
    laptop.run("cancel", made["run_id"])
    assert not (Path(made["run_dir"]) / "secrets").exists()
    assert laptop.lab.wait(made["job_id"]).state == "CANCELLED"
    assert leaks(laptop, made) == {}


@pytest.mark.parametrize("verb", [("status",), ("list",)], ids=["status", "list"])
def test_a_run_that_slurm_ended_is_swept(
    laptop: Laptop, run: Callable[..., dict[str, str]], verb: tuple[str, ...]
) -> None:
    made = run("sleep 300", "--sbatch-arg=--hold")
    laptop.lab.run(["scancel", made["job_id"]])
    laptop.lab.wait(made["job_id"])
    assert (Path(made["run_dir"]) / "secrets").exists()
    laptop.run(*verb)
    assert not (Path(made["run_dir"]) / "secrets").exists()


def md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()[:8]


def until(condition: Callable[[], bool], timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.3)
