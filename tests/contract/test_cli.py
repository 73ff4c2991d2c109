"""The command itself, end to end, under the profile `local`: the same bundle and entrypoint, as real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"


class Mlmsub:
    """The command of a user with a home, a scratch and a working directory of their own."""

    def __init__(self, folder: Path, scratch: str = "scratch") -> None:
        self.folder, self.cwd, self.scratch = folder, folder / "work", folder / scratch
        self.config, self.state = folder / "config", folder / "state"
        for path in (self.cwd, self.scratch, self.config / "mlmsub/profiles"):
            path.mkdir(parents=True)
        self.env = {
            "PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT), "USER_FSW": str(self.scratch),
            "XDG_CONFIG_HOME": str(self.config), "XDG_STATE_HOME": str(self.state), "MLMSUB_PROFILE": "local",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip

    def __call__(self, *argv: str, env: dict[str, str] | None = None, **how: Any) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "mlmsub.cli.main", *argv], cwd=how.pop("cwd", self.cwd), env=self.env | (env or {}),
            capture_output=True, text=True, timeout=60, **how,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def ok(self, *argv: str, **how: Any) -> str:
        done = self(*argv, **how)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *argv: str, **how: Any) -> dict[str, Any]:
        """Submit a script; what `--json` says of it."""
        return json.loads(self.ok("submit", "script", "--json", *argv, **how))

    def script(self, name: str, text: str) -> str:
        (self.cwd / name).write_text(text)
        return name

    def state_of(self, run: str) -> dict[str, Any]:
        return json.loads(self.ok("status", run, "--json"))[0]["status"]

    def ended(self, run: str) -> dict[str, Any]:
        """Wait for a run's end; its state."""
        for _ in range(600):
            state = self.state_of(run)
            if state["state"] not in ("running", "pending", "unknown"):
                return state
            time.sleep(0.1)
        raise AssertionError(f"{run} does not end: {state}")

    def runs(self) -> list[Path]:
        return sorted((self.scratch / ".mlmsub/runs").glob("*/*"))

    def profile(self, name: str, text: str) -> None:
        (self.config / f"mlmsub/profiles/{name}.yaml").write_text(text)


@pytest.fixture
def mlmsub(tmp_path: Path) -> Mlmsub:
    return Mlmsub(tmp_path)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it does not happen")


# --- a run ------------------------------------------------------------------------------------


def test_watching_a_run_that_succeeds(mlmsub: Mlmsub) -> None:
    mlmsub.script("go.sh", 'echo "TP is $TP, rank $RANK of $WORLD_SIZE"\n')
    out = mlmsub.ok("submit", "script", "--watch", "--set", "TP=4", "--", "go.sh", "org/model")
    run_id = out.split()[0]
    assert "TP is 4, rank 0 of 1" in out
    assert "exit code 0" in out
    assert mlmsub.state_of(run_id)["state"] == "succeeded"
    assert [path.name for path in mlmsub.runs()] == [run_id]


def test_watching_a_run_that_fails(mlmsub: Mlmsub) -> None:
    mlmsub.script("fail.sh", "exit 7\n")
    done = mlmsub("submit", "script", "--watch", "--", "fail.sh")
    assert done.returncode == 6
    assert "failed with exit code 7" in done.stderr
    assert "mlmsub status" in done.stderr
    state = mlmsub.state_of("last")
    assert (state["state"], state["exit_code"]) == ("failed", 7)


def test_values_take_the_whole_way(mlmsub: Mlmsub) -> None:
    value = 'it\'s "a" $HOME `id`,\nnew\tline ü %j'
    mlmsub.script("env.sh", "A='x y'\nexport LIST=(a b)\n")
    mlmsub.script("go.sh", 'printf "%s|" "$A" "$B" >out; printf "%s|" "$@" >>out\n')
    run = mlmsub.submit("--env-setup", "env.sh", "--set", f"B={value}", "--", "go.sh", "it's a", "word $X")
    mlmsub.ended(run["run_id"])
    assert (mlmsub.cwd / "out").read_text() == f"x y|{value}|it's a|word $X|"


def test_a_run_of_several_ranks(mlmsub: Mlmsub) -> None:
    mlmsub.profile("two", "scheduler: local\ngpu_request: none\ngpus_per_node: 2\n")
    mlmsub.script("go.sh", 'echo hello from all; echo "I am $RANK"\n')
    run = mlmsub.submit("--profile", "two", "--", "go.sh")["run_id"]
    assert mlmsub.ended(run)["state"] == "succeeded"
    assert "hello from all" in mlmsub.ok("logs", run)
    assert mlmsub.ok("logs", run, "--rank", "1") == "hello from all\nI am 1\n"
    raw = mlmsub.ok("logs", run, "--raw")
    assert sorted(line for line in raw.splitlines() if "I am" in line) == ["0: I am 0", "1: I am 1"]


def test_a_rank_that_fails_ends_the_others(mlmsub: Mlmsub) -> None:
    mlmsub.profile("two", "scheduler: local\ngpu_request: none\ngpus_per_node: 2\n")
    mlmsub.script("go.sh", "[[ $RANK == 1 ]] && exit 7\nsleep 60; touch survived\n")
    run = mlmsub.submit("--profile", "two", "--", "go.sh")["run_id"]
    assert mlmsub.ended(run)["exit_code"] == 7
    assert processes_of(mlmsub) == []


def test_following_a_log_ends_with_the_run(mlmsub: Mlmsub) -> None:
    mlmsub.script("go.sh", "for i in 1 2 3; do echo step $i; sleep 0.3; done\n")
    run = mlmsub.submit("--", "go.sh")["run_id"]
    assert [f"0: step {i}" in mlmsub.ok("logs", "-f", run) for i in (1, 2, 3)] == [True] * 3


# --- dependencies ------------------------------------------------------------------------------


def test_a_run_waits_for_another(mlmsub: Mlmsub) -> None:
    mlmsub.script("first.sh", "until [ -e go ]; do sleep 0.1; done; echo first >>order\n")
    mlmsub.script("second.sh", "echo second >>order\n")
    first = mlmsub.submit("--", "first.sh")["run_id"]
    second = mlmsub.submit("--after", first, "--", "second.sh")["run_id"]
    (mlmsub.cwd / "go").touch()
    assert mlmsub.ended(second)["state"] == "succeeded"
    assert (mlmsub.cwd / "order").read_text() == "first\nsecond\n"


def test_a_run_does_not_start_after_a_failure(mlmsub: Mlmsub) -> None:
    mlmsub.script("first.sh", "until [ -e go ]; do sleep 0.1; done; exit 7\n")
    mlmsub.script("second.sh", "touch started\n")
    first = mlmsub.submit("--", "first.sh")["run_id"]
    second = mlmsub.submit("--after", first, "--", "second.sh")["run_id"]
    (mlmsub.cwd / "go").touch()
    state = mlmsub.ended(second)
    assert (state["state"], state["reason"]) == ("cancelled", "not started: a run it waits for ended otherwise")
    assert not (mlmsub.cwd / "started").exists()


def test_runs_may_lie_below_a_folder_with_blanks(tmp_path: Path) -> None:
    mlmsub = Mlmsub(tmp_path, scratch="my scratch")
    mlmsub.script("go.sh", "true\n")
    first = mlmsub.submit("--", "go.sh")["run_id"]
    second = mlmsub.submit("--after", first, "--", "go.sh")["run_id"]
    assert mlmsub.ended(second)["state"] == "succeeded"


# --- cancel ----------------------------------------------------------------------------------------


def processes_of(mlmsub: Mlmsub) -> list[str]:
    """The command lines of living processes that work below the user's folder."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if str((path / "cwd").readlink()).startswith(str(mlmsub.folder)):
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return [line for line in found if line]


def test_cancelling_ends_everything(mlmsub: Mlmsub) -> None:
    mlmsub.script("go.sh", "touch started; sleep 60 & sleep 61; touch survived\n")
    run = mlmsub.submit("--", "go.sh", env={"HF_TOKEN": "hf_verysecret"})
    until((mlmsub.cwd / "started").exists)
    assert (Path(run["run_dir"]) / "secrets").exists()
    assert mlmsub.state_of(run["run_id"])["state"] == "running"
    assert "cancelled" in mlmsub.ok("cancel", run["run_id"])
    assert mlmsub.ended(run["run_id"])["state"] == "cancelled"
    until(lambda: processes_of(mlmsub) == [])
    assert not (Path(run["run_dir"]) / "secrets").exists()


def test_cancelling_ends_what_does_not_want_to(mlmsub: Mlmsub) -> None:
    mlmsub.script("go.sh", "trap '' TERM; touch started; for i in {1..80}; do sleep 0.1; done\n")
    run = mlmsub.submit("--", "go.sh")
    until((mlmsub.cwd / "started").exists)
    mlmsub.ok("cancel", run["run_id"])
    for _ in range(40):
        if not processes_of(mlmsub):
            return
        time.sleep(0.1)
    raise AssertionError(processes_of(mlmsub))


# --- list, status --------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first(mlmsub: Mlmsub) -> None:
    assert "no runs yet" in mlmsub.ok("list")
    assert json.loads(mlmsub.ok("list", "--json")) == []
    mlmsub.script("go.sh", "true\n")
    ids = [mlmsub.submit("--", "go.sh")["run_id"] for _ in range(2)]
    for run in ids:
        mlmsub.ended(run)
    listed = json.loads(mlmsub.ok("list", "--json"))
    assert [entry["run_id"] for entry in listed] == ids[::-1]
    assert {entry["status"]["state"] for entry in listed} == {"succeeded"}
    assert json.loads(mlmsub.ok("list", "-n", "1", "--json"))[0]["run_id"] == ids[1]
    mlmsub.profile("other", f"scheduler: local\nruns_root: {mlmsub.folder}/elsewhere\n")
    assert json.loads(mlmsub.ok("list", "--profile", "other", "--json")) == []
    assert ids[0] in mlmsub.ok("status", ids[0])


def test_the_same_command_twice_makes_two_runs(mlmsub: Mlmsub) -> None:
    mlmsub.script("go.sh", "true\n")
    first, second = (mlmsub.submit("--", "go.sh") for _ in range(2))
    assert first["run_id"] != second["run_id"]
    assert not second["existed"]


def test_profiles_are_listed_and_shown(mlmsub: Mlmsub) -> None:
    mlmsub.profile("lab", "account: proj\nenv: {TP: 2}\n")
    assert [entry["name"] for entry in json.loads(mlmsub.ok("profile", "list", "--json"))] == ["lab", "local"]
    assert "account: proj" in mlmsub.ok("profile", "show", "lab")
    assert json.loads(mlmsub.ok("profile", "show", "lab", "--json"))["env"] == {"TP": "2"}


# --- dry run, --from ---------------------------------------------------------------------------------------


def tree(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize("json_", [(), ("--json",)])
def test_a_dry_run_shows_everything_and_leaves_nothing(mlmsub: Mlmsub, json_: tuple[str, ...]) -> None:
    mlmsub.script("env.sh", "TP=2\nHF_TOKEN=hf_verysecret\n")
    before = tree(mlmsub.folder)
    out = mlmsub.ok(
        "submit", "quantize", SMOL, "FP8_DEFAULT_CFG", "--dry-run", "--env-setup", "env.sh", "--set", "PP=3", *json_,
        env={"WANDB_API_KEY": "wandb_verysecret"},
    )  # fmt: skip
    assert tree(mlmsub.folder) == before
    for text in ("quantize-SmolLM2-135M-Instruct", "TP=2", "PP=3", "mlmsub.runtime quantize", "#SBATCH --nodes=1"):
        assert text in out
    assert "verysecret" not in out


def test_a_dry_run_of_the_emblem_case(mlmsub: Mlmsub) -> None:
    mlmsub.profile("lab", "image: /images/m.sqsh\n")
    out = json.loads(mlmsub.ok(
        "submit", "script", "--profile", "lab", "--nodes", "8", "--env-setup", "conf/moonshotai/kimi_k2_instruct.sh",
        "--set", "TP=4", "--dry-run", "--json", "--", "eagle3.sh", "moonshotai/Kimi-K2-Instruct",
    ))  # fmt: skip
    assert (out["values"]["TP"], out["values"]["EP"]) == ("4", "64")
    assert "#SBATCH --nodes=8\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in out["files"]["job.sbatch"]
    one_word = json.loads(
        mlmsub.ok(
            "submit", "script", "--profile", "lab", "--dry-run", "--json", "eagle3.sh moonshotai/Kimi-K2-Instruct"
        )
    )
    assert one_word["files"]["env/command.sh"] == out["files"]["env/command.sh"]


def test_a_run_yaml_is_an_input(mlmsub: Mlmsub) -> None:
    mlmsub.script("env.sh", "A='x y'\n")
    mlmsub.script("go.sh", 'echo "$A|$B" >>out\n')
    first = mlmsub.submit("--env-setup", "env.sh", "--set", "B=1", "--", "go.sh")
    mlmsub.ended(first["run_id"])
    (mlmsub.cwd / "env.sh").unlink()
    again = json.loads(mlmsub.ok("submit", "--from", f"{first['run_dir']}/run.yaml", "--json"))
    assert again["run_id"] != first["run_id"]
    mlmsub.ended(again["run_id"])
    assert (mlmsub.cwd / "out").read_text() == "x y|1\n" * 2


def test_a_run_yaml_keeps_the_values_of_its_env_setup(mlmsub: Mlmsub) -> None:
    mlmsub.script("env.sh", f"MLM_MODEL_CKPT={mlmsub.scratch}/in\nEXPORT_DIR={mlmsub.scratch}/out\n")
    shown = json.loads(mlmsub.ok("submit", "export", SMOL, "--env-setup", "env.sh", "--dry-run", "--json"))
    (mlmsub.cwd / "run.yaml").write_text(shown["files"]["run.yaml"])
    again = json.loads(mlmsub.ok("submit", "--from", "run.yaml", "--dry-run", "--json"))
    assert again["values"]["EXPORT_DIR"] == f"{mlmsub.scratch}/out"
    assert again["content_hash"] == shown["content_hash"]
    assert not [issue for issue in again["issues"] if issue["severity"] == "error"]


# --- secrets --------------------------------------------------------------------------------------------------


def test_a_secret_reaches_the_job_and_nothing_else(mlmsub: Mlmsub) -> None:
    mlmsub.script("go.sh", 'echo "the job has ${HF_TOKEN//[aeiou]/.}"\n')
    out = mlmsub("submit", "script", "--watch", "--", "go.sh", env={"HF_TOKEN": "hf_verysecret"})
    assert "the job has hf_v.rys.cr.t" in out.stdout
    assert "verysecret" not in out.stdout + out.stderr
    holding = [path for path in mlmsub.folder.rglob("*") if path.is_file() and b"verysecret" in path.read_bytes()]
    assert holding == []


# --- bad input -------------------------------------------------------------------------------------------------

USAGE, CHECKS = 2, 3


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        pytest.param(["submit"], USAGE, "which stage?", id="no-stage"),
        pytest.param(["submit", "quantise", SMOL], USAGE, "did you mean 'quantize'", id="unknown-stage"),
        pytest.param(["submit", "quantize"], USAGE, "needs a model", id="no-model"),
        pytest.param(["submit", "quantize", "HuggingFaceTB/SmolLM2-135M"],
                     USAGE, f"did you mean '{SMOL}'", id="unknown-model"),
        pytest.param(["submit", "quantize", SMOL, "A", "B"], USAGE, "unexpected argument 'B'", id="one-too-many"),
        pytest.param(["submit", "script"], USAGE, "needs a command", id="no-command"),
        pytest.param(["submit", "script", "--profile", "locl", "--", "x"],
                     USAGE, "did you mean 'local'", id="unknown-profile"),
        pytest.param(["submit", "script", "--env-setup", "none.sh", "--", "x"],
                     USAGE, "none.sh does not exist", id="no-setup"),
        pytest.param(["submit", "script", "--env-setup", "exit.sh", "--", "x"], USAGE, "line 2", id="setup-exits"),
        pytest.param(["submit", "script", "--env-setup", "syntax.sh", "--", "x"],
                     USAGE, "line 3: syntax error", id="setup-syntax"),
        pytest.param(["submit", "script", "--env-setup", "crlf.sh", "--", "x"],
                     USAGE, "DOS line ends", id="setup-crlf"),
        pytest.param(["submit", "script", "--set", "TP", "--", "x"], USAGE, "write NAME=VALUE", id="set"),
        pytest.param(["submit", "script", "--nodes", "x", "--", "x"], USAGE, "--nodes must be a number", id="nodes"),
        pytest.param(["submit", "script", "--nodes", "2", "--", "x"],
                     CHECKS, "this machine is one node", id="local-nodes"),
        pytest.param(["submit", "script", "--time", "soon", "--", "x"], USAGE, "not a time limit", id="time"),
        pytest.param(["submit", "script", "--after", "x", "--", "x"], USAGE, "there is no run 'x'", id="after"),
        pytest.param(["submit", "script", "--sbatch-arg=--array=1-3", "--", "x"],
                     USAGE, "--array is decided", id="sbatch-arg"),
        pytest.param(["submit", "export", SMOL], CHECKS, "MLM_MODEL_CKPT", id="no-input"),
        pytest.param(["submit", "train", SMOL, "--set", "MLM_MODEL_CKPT=/a"],
                     CHECKS, "mlmsub submit script", id="not-native"),
        pytest.param(["submit", "script", "--profile", "key", "--", "x"],
                     USAGE, "did you mean 'partition'", id="unknown-key"),
        pytest.param(["submit", "script", "--profile", "mount", "--", "x"], USAGE, "comma", id="bad-mount"),
        pytest.param(["submit", "script", "--profile", "yaml", "--", "x"],
                     USAGE, "yaml.yaml:1: not YAML", id="not-yaml"),
        pytest.param(["submit", "script", "--profile", "nul", "--", "x"], USAGE, "NUL", id="nul-in-yaml"),
        pytest.param(["submit", "--from", "none.yaml"], USAGE, "none.yaml", id="from-nothing"),
        pytest.param(["submit", "--from", "bad.yaml"], USAGE, "bad.yaml", id="from-something"),
        pytest.param(["submit", "--from", "."], USAGE, "cannot read", id="from-folder"),
        pytest.param(["submit", "script", "--from", "bad.yaml"], USAGE, "--from takes", id="from-and-stage"),
        pytest.param(["submit", "--from", "bad.yaml", "--nodes", "2"], USAGE, "--from takes", id="from-and-nodes"),
        pytest.param(["status", "x"], USAGE, "there is no run 'x'", id="status"),
        pytest.param(["logs", "x"], USAGE, "there is no run 'x'", id="logs"),
        pytest.param(["logs", "--raw", "--rank", "1"], USAGE, "--raw", id="raw-and-rank"),
        pytest.param(["cancel", "x"], USAGE, "there is no run 'x'", id="cancel"),
        pytest.param(["profile", "show", "x"], USAGE, "there is no profile 'x'", id="profile-show"),
        pytest.param(["nonsense"], USAGE, "nonsense", id="no-verb"),
        pytest.param(["submit", "--nonsense"], USAGE, "nonsense", id="no-option"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_and_no_run(mlmsub: Mlmsub, argv: list[str], code: int, message: str) -> None:
    mlmsub.script("exit.sh", "TP=1\nexit 1\n")
    mlmsub.script("syntax.sh", "if true; then\nTP=1\n")
    (mlmsub.cwd / "crlf.sh").write_bytes(b"TP=1\r\n")
    (mlmsub.cwd / "bad.yaml").write_text("stage: quantize\nargs: base64:!\n")
    mlmsub.profile("key", "partion: x\n")
    mlmsub.profile("mount", "mounts: ['/a:/b,/c:/d']\n")
    mlmsub.profile("yaml", "a: b: c\n")
    mlmsub.profile("nul", 'scheduler: local\nenv: {A: "x\\0y"}\n')
    done = mlmsub(*argv)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) <= (2 if code == CHECKS else 1), "one message; a failed check also says that nothing was sent"
    assert done.stdout == ""
    assert mlmsub.runs() == []
    assert not list(mlmsub.state.rglob("*.json"))


def test_user_fsw_is_required(mlmsub: Mlmsub) -> None:
    done = mlmsub("submit", "script", "--", "x", env={"USER_FSW": ""})
    assert (done.returncode, "USER_FSW is not set" in done.stderr) == (USAGE, True)


def test_an_endless_env_setup(mlmsub: Mlmsub) -> None:
    mlmsub.script("loop.sh", "while :; do :; done\n")
    done = mlmsub("submit", "script", "--env-setup", "loop.sh", "--", "x")
    assert (done.returncode, "did not end within" in done.stderr) == (USAGE, True)
    assert mlmsub.runs() == []


def test_output_of_an_env_setup_is_no_error(mlmsub: Mlmsub) -> None:
    mlmsub.script("env.sh", "echo hello; echo '{' ; A=1\n")
    mlmsub.script("go.sh", "true\n")
    assert mlmsub.submit("--env-setup", "env.sh", "--", "go.sh")["job_id"]


def test_a_scratch_that_cannot_be_written(mlmsub: Mlmsub) -> None:
    (mlmsub.folder / "file").touch()
    done = mlmsub("submit", "script", "--", "x", env={"USER_FSW": f"{mlmsub.folder}/file"})
    assert done.returncode == CHECKS
    assert "cannot write runs to" in done.stderr
    assert "USER_FSW" in done.stderr
    assert not list(mlmsub.state.rglob("*.json"))


def test_a_working_directory_that_is_gone(mlmsub: Mlmsub) -> None:
    program = f"mkdir gone; cd gone; rmdir ../gone; exec {sys.executable} -m mlmsub.cli.main list"
    done = subprocess.run(
        ["/bin/bash", "-c", program], cwd=mlmsub.cwd, env=mlmsub.env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == USAGE
    assert "working directory is gone" in done.stderr


def test_a_reader_that_goes_away_is_no_error(mlmsub: Mlmsub) -> None:
    mlmsub.script("go.sh", "seq 1 200000\n")
    run = mlmsub.submit("--", "go.sh")["run_id"]
    mlmsub.ended(run)
    done = subprocess.run(
        ["/bin/bash", "-c", f"{sys.executable} -m mlmsub.cli.main logs {run} | head -n 1"],
        cwd=mlmsub.cwd, env=mlmsub.env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_a_value_that_is_not_utf8_takes_the_whole_way(mlmsub: Mlmsub) -> None:
    mlmsub.script("go.sh", 'printf %s "$X" >out\n')
    argv = [sys.executable, "-m", "mlmsub.cli.main", "submit", "script", "--json", "--set", b"X=a\xff", "--", "go.sh"]
    done = subprocess.run(argv, cwd=mlmsub.cwd, env=mlmsub.env, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    mlmsub.ended(json.loads(done.stdout)["run_id"])
    assert (mlmsub.cwd / "out").read_bytes() == b"a\xff"


def test_help_names_the_verbs(mlmsub: Mlmsub) -> None:
    out = mlmsub.ok("--help", env={"COLUMNS": "100"})
    for verb in ("submit", "status", "logs", "cancel", "list", "profile"):
        assert verb in out
    assert mlmsub("--version").stdout.startswith("mlmsub ")


def test_records_are_the_users_alone(mlmsub: Mlmsub) -> None:
    mlmsub.script("go.sh", "true\n")
    mlmsub.submit("--", "go.sh")
    assert (mlmsub.state / "mlmsub/runs").stat().st_mode & 0o777 == 0o700
