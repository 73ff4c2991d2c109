"""container/entrypoint.sh, run as processes: which value wins, who a rank is, what is started, which code remains."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from rundir import PROBE, RunDir, setup
from specs import BYTES_AS_TEXT, NAMES, TEXT

from mlmsub.core.quoting import assignment

Make = Callable[..., RunDir]


@pytest.fixture
def probed(run_dir: Make) -> Callable[..., RunDir]:
    """A run directory whose command keeps its environment; one rank has run."""

    def make(env: dict[str, str] | None = None, **changes: Any) -> RunDir:
        made = run_dir("bash", "-c", PROBE, **changes)
        code, said = made.rank(env=env)
        assert code == 0, said
        return made

    return make


# --- values ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(6))
def test_later_layers_win(probed: Callable[..., RunDir], count: int) -> None:
    """Image < stage default < profile env < env setup < --set; here each layer up to `count` says TP."""
    made = probed(
        env={"TP": "image"},
        defaults={"LAUNCH_SCRIPT": "python"} | ({"TP": "default"} if count >= 1 else {}),
        profile_env={"TP": "profile"} if count >= 2 else {},
        setup=setup("TP=setup\n" if count >= 3 else ""),
        overrides={"TP": "override"} if count >= 4 else {},
    )
    expected = [None, "default", "profile", "setup", "override", "override"][count]
    assert made.env().get("TP") == expected


@pytest.mark.parametrize("name", ["HF_HOME", "MLM_WORK_DIR", "EXPORT_DIR"])
def test_an_image_does_not_overrule_a_default(probed: Callable[..., RunDir], name: str) -> None:
    made = probed(env={name: "/image"}, defaults={"LAUNCH_SCRIPT": "python", name: "/default"})
    assert made.env()[name] == "/default"


def test_an_empty_value_of_the_user_takes_the_default(probed: Callable[..., RunDir]) -> None:
    """As in Megatron-LM's scripts, where empty is unset."""
    made = probed(defaults={"LAUNCH_SCRIPT": "python", "PP": "1"}, setup=setup("PP=\n"))
    assert made.env()["PP"] == "1"


@pytest.mark.parametrize("name", ["PYTHONNOUSERSITE", "HF_MODULES_CACHE", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"])
def test_the_users_own_cache_folders_win(probed: Callable[..., RunDir], name: str) -> None:
    assert probed(setup=setup(f"{name}=/mine\n")).env()[name] == "/mine"


def test_caches_are_local_to_the_node_and_the_job(probed: Callable[..., RunDir]) -> None:
    made = probed()
    for name in ("HF_MODULES_CACHE", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        assert made.env()[name].startswith(f"/tmp/mlmsub-{made.job_id}-cache/")
    assert made.env()["PYTHONNOUSERSITE"] == "1"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8, deadline=None, database=None)
@given(value=TEXT | BYTES_AS_TEXT, override=TEXT, name=NAMES)
def test_values_arrive_byte_for_byte(probed: Callable[..., RunDir], value: str, override: str, name: str) -> None:
    text = f"{assignment(name, value)}\nOTHER={'x'}\n".encode(errors="surrogateescape")
    made = probed(setup=setup(text), overrides={"OVER": override}, profile_env={"PROFILE": override})
    env = made.env()
    assert (env[name], env["OVER"], env["PROFILE"]) == (value, override, override)
    subprocess.run(["rm", "-r", f"{made.folder}/probe.arrays.0"], check=True)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ('export FOO="a,b c"', "FOO", "a,b c"),
        ("TOK=\"it's \\$HOME \\`id\\`\"", "TOK", "it's $HOME `id`"),
        ("export http_proxy=http://p:1", "http_proxy", "http://p:1"),
        ("NCCL_SOCKET_IFNAME=^vlan,lo", "NCCL_SOCKET_IFNAME", "^vlan,lo"),
        ("export MLM_EXTRA_ARGS='--override {\"num_layers\": 24, \"s\": \"x y\"}'", "MLM_EXTRA_ARGS",
         '--override {"num_layers": 24, "s": "x y"}'),
        ("A='two\nlines'", "A", "two\nlines"),
        ("declare D=1", "D", "1"),
        ("declare -i N=3+4", "N", "7"),
        ("X=1; unset X; Y=[0]*3+[1]*58", "Y", "[0]*3+[1]*58"),
        ("Z=$(cat <<EOF\nhere 'doc'\nEOF\n)", "Z", "here 'doc'"),
    ],
)  # fmt: skip
def test_values_of_the_reports(probed: Callable[..., RunDir], text: str, name: str, value: str) -> None:
    assert probed(setup=setup(f"{text}\n")).env()[name] == value


def test_arrays_arrive_exactly(probed: Callable[..., RunDir]) -> None:
    made = probed(setup=setup("ARGS=(--a 'b c' \"x\ny\" '' \"it's\" [0]*3)\nEMPTY=()\nMORE=(1)\nMORE+=('2 3')\n"))
    assert made.arrays()["ARGS"] == ["--a", "b c", "x\ny", "", "it's", "[0]*3"]
    assert made.arrays()["EMPTY"] == []
    assert made.arrays()["MORE"] == ["1", "2 3"]


def test_an_override_replaces_a_whole_array(probed: Callable[..., RunDir]) -> None:
    made = probed(setup=setup("ARGS=(a b)\n"), overrides={"ARGS": "c d"})
    assert made.env()["ARGS"] == "c d"
    assert "ARGS" not in made.arrays()


def test_the_files_of_the_arrays_are_removed(probed: Callable[..., RunDir]) -> None:
    assert not Path(probed(setup=setup("A=(1)\n")).env()["MLMSUB_ARRAYS"]).exists()


def test_a_sibling_is_sourced_from_the_setups_own_folder(probed: Callable[..., RunDir]) -> None:
    text = 'source ./x.sh\nsource "$(dirname "${BASH_SOURCE[0]}")/lib/y.sh"\n'
    made = probed(setup=setup(text, x__sh="X=1\n", lib_S_y__sh="Y=2\n"))
    assert (made.env()["X"], made.env()["Y"]) == ("1", "2")


@pytest.mark.parametrize(
    "text",
    ["set -e", "set -eu", "set -u", "set -f", "set -x", "set -o pipefail", "shopt -s nullglob", "shopt -s extglob",
     "IFS=,", "cd /", "trap 'echo trapped' EXIT", "set -o posix", "set -C"],
)  # fmt: skip
def test_what_a_setup_does_to_its_shell_ends_with_it(run_dir: Make, text: str) -> None:
    """Options, the working directory and IFS are the entrypoint's own again, and the arrays still arrive."""
    made = run_dir("bash", "-c", PROBE, setup=setup(f"{text}\nAFTER=1\nA=('x y' z)\n"))
    code, said = made.rank()
    assert (code, "trapped" in said) == (0, False), said
    assert made.env()["AFTER"] == "1"
    assert made.arrays()["A"] == ["x y", "z"]
    assert (made.folder / "probe.pwd").read_text().strip() == made.spec.workdir
    assert made.state("rank-0") == "0"


FUNCTIONS = (
    "cd",
    "srun",
    "printf",
    "echo",
    "unset",
    "set",
    "rm",
    "declare",
    "mkdir",
    "export",
    "trap",
    "source",
    "read",
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_a_setup_do_not_disturb(run_dir: Make, name: str) -> None:
    made = run_dir("bash", "-c", PROBE, setup=setup(f"{name}() {{ :; }}\nX=1\nA=(1 2)\n"), overrides={"Y": "2"})
    code, said = made.rank()
    assert code == 0, said
    env = made.env()
    assert (env["X"], env["Y"], made.arrays()["A"]) == ("1", "2", ["1", "2"])
    assert not [variable for variable in env if variable.startswith("BASH_FUNC_")]


def test_no_variable_of_ours_is_left_but_mlmsubs(probed: Callable[..., RunDir]) -> None:
    assert not [name for name in probed(setup=setup("set -a\n")).env() if name.startswith("__mlm")]


@pytest.mark.parametrize(
    ("text", "line"),
    [("X=1\n\nexit 0\n", "line 3"), ("exit 1\n", "line 1"), ("set -e\nX=1\nfalse\nY=1\n", "line 3"),
     ("set -u\nX=$NOPE\n", "line 2"), ("f() {\n  exit 5\n}\nf\n", "line 2")],
)  # fmt: skip
def test_a_setup_that_ends_the_shell_is_named_by_line(run_dir: Make, text: str, line: str) -> None:
    made = run_dir("true", setup=setup(text))
    code, said = made.rank()
    assert code == 78
    assert f"setup.sh {line}" in said
    assert made.state("first_failure").startswith("78 by rank 0 on node1")


def test_output_of_a_setup_goes_to_the_log(run_dir: Make) -> None:
    code, said = run_dir("echo", "the command", setup=setup("echo hello\n")).rank()
    assert (code, said.split("\n")[:2]) == (0, ["hello", "the command"])


# --- secrets ---------------------------------------------------------------------------------


def test_secrets_reach_the_command(tmp_path: Path, run_dir: Make) -> None:
    spec = run_dir(
        "bash", "-c", PROBE, setup=setup("HF_TOKEN=hf_in_setup\nX=1\n"), overrides={"WANDB_API_KEY": "w" * 9}
    ).spec
    made = RunDir(spec, tmp_path, HF_TOKEN="hf_in_setup", WANDB_API_KEY="w" * 9)
    assert made.rank()[0] == 0
    env = made.env()
    assert (env["HF_TOKEN"], env["WANDB_API_KEY"], env["X"]) == ("hf_in_setup", "w" * 9, "1")


# --- who this rank is ----------------------------------------------------------------------------


def test_ranks_come_from_slurm(run_dir: Make) -> None:
    made = run_dir("bash", "-c", PROBE)
    assert [code for code, _ in made.ranks(4, nodes=2)] == [0] * 4
    identity = [
        tuple(made.env(rank)[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
        for rank in range(4)
    ]
    assert identity == [(str(r), "4", str(r % 2), "node1", "11111") for r in range(4)]


def test_neither_image_nor_setup_says_who_a_rank_is(run_dir: Make) -> None:
    made = run_dir("bash", "-c", PROBE, setup=setup("RANK=7\nMASTER_ADDR=elsewhere\n"))
    results = made.ranks(2, env={"RANK": "9", "WORLD_SIZE": "99", "MASTER_PORT": "1"})
    assert [made.env(rank)["RANK"] for rank in range(2)] == ["0", "1"]
    assert made.env(1)["MASTER_ADDR"] == "node1"
    assert "sets RANK=7" in results[0][1]
    assert "sets MASTER_ADDR=elsewhere" in results[0][1]
    assert results[1][1] == "", "one rank tells it for all"
    assert "WORLD_SIZE" not in results[0][1], "an image's own value is nobody's mistake"


# --- what is started --------------------------------------------------------------------------------

SHOW = 'printf "%s\\n" "${0##*/}" "$@"; echo "PYTHONPATH=${PYTHONPATH%%:*} RANK=${RANK-unset}"'


def native(run_dir: Make, launch_script: str, **changes: Any) -> RunDir:
    """A quantize run whose python and torchrun print what they got."""
    launcher = "torchrun" if "torchrun" in launch_script else "python"
    defaults = {"LAUNCH_SCRIPT": launch_script}
    made = run_dir(stage="quantize", launcher=launcher, defaults=defaults, **changes)
    for name in ("python", "python3", "torchrun"):
        made.program(name, SHOW)
    return made


STAGE = ["-m", "mlmsub.runtime", "quantize", "meta-llama/Llama-3.1-8B-Instruct", "FP8_DEFAULT_CFG"]


def test_python_runs_the_stage_with_the_bundles_runtime(run_dir: Make) -> None:
    made = native(run_dir, "python")
    code, said = made.rank()
    assert code == 0
    assert said.splitlines() == ["python", *STAGE, f"PYTHONPATH={made.dir}/runtime RANK=0"]


def test_words_of_launch_script_are_kept(run_dir: Make) -> None:
    assert native(run_dir, "python3 -u -X faulthandler").rank()[1].splitlines()[:5] == [
        "python3", "-u", "-X", "faulthandler", "-m",
    ]  # fmt: skip


@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_starts_the_ranks_of_its_node(run_dir: Make, nodes: int) -> None:
    made = native(run_dir, "torchrun", gpus_per_node=4)
    for rank in range(nodes):
        code, said = made.rank(rank, ntasks=nodes, nodes=nodes)
        assert code == 0
        assert said.splitlines() == [
            "torchrun", f"--nnodes={nodes}", "--nproc-per-node=4", f"--node-rank={rank}", "--master-addr=node1",
            "--master-port=11111", *STAGE, f"PYTHONPATH={made.dir}/runtime RANK=unset",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "gone"),
    [("--nproc-per-node=2", "--nproc-per-node=4"), ("--nproc_per_node 2", "--nproc-per-node=4"),
     ("--master_port=5", "--master-port=11111"), ("--nnodes=1 --max-restarts=1", "")],
)  # fmt: skip
def test_torchruns_options_of_the_user_win(run_dir: Make, words: str, gone: str) -> None:
    code, said = native(run_dir, f"torchrun {words}", gpus_per_node=4).rank()
    lines = said.splitlines()
    assert code == 0
    assert lines[1 : 1 + len(words.split())] == words.split()
    assert gone not in lines
    assert len([line for line in lines if line.replace("_", "-").startswith("--nproc-per-node")]) == 1


def test_torchrun_and_a_task_for_each_gpu_do_not_mix(run_dir: Make) -> None:
    made = native(run_dir, "torchrun")
    results = made.ranks(2, nodes=1)
    assert [code for code, _ in results] == [78, 78]
    assert "one task per node" in results[0][1]


def test_another_launcher_than_the_job_was_laid_out_for_is_refused(run_dir: Make) -> None:
    made = native(run_dir, "python", setup=setup("LAUNCH_SCRIPT=torchrun\n"))
    code, said = made.rank()
    assert code == 78
    assert "laid out for python" in said


def test_a_launch_script_of_the_image_counts_for_nothing(run_dir: Make) -> None:
    assert native(run_dir, "python").rank(env={"LAUNCH_SCRIPT": "torchrun"})[0] == 0


def test_launch_script_reaches_a_script_as_it_is_meant(run_dir: Make) -> None:
    made = run_dir("bash", "-c", PROBE, launcher="torchrun", gpus_per_node=4, defaults={"LAUNCH_SCRIPT": "torchrun"})
    assert made.rank(1, ntasks=2, nodes=2)[0] == 0
    assert made.env(1)["LAUNCH_SCRIPT"] == (
        "torchrun --nnodes=2 --nproc-per-node=4 --node-rank=1 --master-addr=node1 --master-port=11111"
    )


def test_a_script_runs_in_its_working_directory(probed: Callable[..., RunDir]) -> None:
    made = probed()
    assert (made.folder / "probe.pwd").read_text().strip() == made.spec.workdir


def test_a_working_directory_that_is_not_there(run_dir: Make) -> None:
    code, said = run_dir("true").rank(env={"MLMSUB_WORKDIR": "/none"})
    assert code == 73
    assert "working directory /none" in said


# --- exit codes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, 7, 137, 200])
def test_the_first_rank_to_fail_names_the_code(run_dir: Make, code: int) -> None:
    made = run_dir("bash", "-c", f"[[ $RANK == 1 ]] || {{ sleep 0.6; exit 9; }}; exit {code}")
    assert [result for result, _ in made.ranks(2)] == [9, code]
    assert made.state("first_failure") == f"{code} by rank 1 on node1"
    assert (made.state("rank-0"), made.state("rank-1")) == ("9", str(code))


def test_a_rank_that_is_killed_has_its_signals_code(run_dir: Make) -> None:
    made = run_dir("bash", "-c", "kill -9 $$")
    assert made.rank()[0] == 137
    assert made.state("first_failure").startswith("137 ")


@pytest.mark.parametrize("code", [0, 143])
def test_success_and_being_ended_are_no_failure(run_dir: Make, code: int) -> None:
    made = run_dir("bash", "-c", f"exit {code}")
    assert made.rank()[0] == code
    assert made.state("first_failure") == ""
    assert made.state("rank-0") == str(code)


def test_a_rank_that_srun_ends_does_not_become_the_first_failure(run_dir: Make) -> None:
    made = run_dir("sleep", "30")
    process = made.start()
    while (
        not (made.dir / "state/0").exists()
        or not subprocess.run(["pgrep", "-P", str(process.pid), "sleep"], capture_output=True, timeout=10).stdout
    ):
        pass
    child = subprocess.run(
        ["pgrep", "-P", str(process.pid), "sleep"], capture_output=True, text=True, timeout=10
    ).stdout
    process.terminate()
    subprocess.run(["kill", child.strip()], check=True)
    process.communicate(timeout=20)
    assert process.returncode in (143, -15)
    assert made.state("first_failure") == ""


# --- --install --------------------------------------------------------------------------------------------

PIP = """\
[[ $* == "-m pip install"* ]] || {{ echo "ran with ${{PYTHONPATH}}"; exit 0; }}
echo "$SLURMD_NODENAME" >>{calls}
{body}
"""
INSTALL = 'while [[ $1 != --target ]]; do shift; done; sleep 0.3; mkdir -p "$2"; touch "$2/done"'


def installing(run_dir: Make, body: str = INSTALL) -> RunDir:
    made = run_dir(stage="quantize", install="/reqs.txt")
    made.program("python", PIP.format(calls=made.folder / "calls", body=body))
    return made


def test_pip_runs_once_on_each_node(run_dir: Make) -> None:
    made = installing(run_dir)
    results = made.ranks(4, nodes=2)
    assert [code for code, _ in results] == [0] * 4, results
    assert sorted((made.folder / "calls").read_text().split()) == ["node1", "node2"]
    for rank, (_, said) in enumerate(results):
        assert f"ran with {made.dir}/runtime:{made.dir}/state/0/site-node{rank // 2 + 1}" in said


def test_pip_runs_again_after_a_restart(run_dir: Make) -> None:
    made = installing(run_dir)
    made.ranks(2, nodes=1)
    made.ranks(2, nodes=1, restart=1)
    assert (made.folder / "calls").read_text().split() == ["node1", "node1"]


def test_a_pip_that_fails_ends_all_ranks_of_its_node(run_dir: Make) -> None:
    made = installing(run_dir, "sleep 0.3; exit 1")
    assert [code for code, _ in made.ranks(3)] == [69, 143, 143]
    assert made.state("first_failure").startswith("69 by rank 0")


def test_without_install_pip_never_runs(run_dir: Make) -> None:
    made = run_dir(stage="quantize")
    made.program("python", PIP.format(calls=made.folder / "calls", body=INSTALL))
    assert made.rank()[0] == 0
    assert not (made.folder / "calls").exists()


# --- the reference's scripts, which source the env setup again ------------------------------------------------

ARGUMENTS = """\
unset ETP
if [ -z ${SANDBOX_ENV_SETUP} ]; then exit 1; else source ${SANDBOX_ENV_SETUP}; fi
export NCCL_IB_SL=1
env -0 >"$PROBE_OUT.$SLURM_PROCID"; pwd >"$PROBE_OUT.pwd"
"""


def test_sourcing_the_setup_again_keeps_the_overrides(run_dir: Make) -> None:
    made = run_dir("arguments.sh", setup=setup("TP=8\nETP=1\nsource ./x.sh\n", x__sh="X=1\n"), overrides={"TP": "4"},
                   profile_env={"FROM": "profile"})  # fmt: skip
    (Path(made.spec.workdir) / "arguments.sh").write_text(ARGUMENTS)
    code, said = made.rank()
    assert code == 0, said
    env = made.env()
    assert (env["TP"], env["X"], env["FROM"]) == ("4", "1", "profile")
    assert env["SANDBOX_ENV_SETUP"] == f"{made.dir}/env/merged.sh"
    assert (made.folder / "probe.pwd").read_text().strip() == made.spec.workdir


def test_the_references_pip_install_is_off_unless_the_user_says_so(probed: Callable[..., RunDir]) -> None:
    assert probed().env()["MLM_SKIP_INSTALL"] == "1"


@pytest.mark.parametrize("value", ["0", ""])
def test_the_users_own_mlm_skip_install_wins(probed: Callable[..., RunDir], value: str) -> None:
    assert probed(overrides={"MLM_SKIP_INSTALL": value}).env()["MLM_SKIP_INSTALL"] == value


# --- Megatron-LM style model confs ----------------------------------------------------------------------------


def shell_conf(run_dir: Make, conf: str, **changes: Any) -> dict[str, str]:
    made = run_dir(stage="quantize", conf_name="model.sh", conf=conf, **changes)
    made.program("python", PROBE)
    code, said = made.rank()
    assert code == 0, said
    return made.env()


def test_a_shell_conf_is_sourced(run_dir: Make) -> None:
    assert shell_conf(run_dir, 'MODEL_ARGS=" \\\n  --num-layers 2 \\\n"\nTOKENIZER_MODEL=x\n')["TOKENIZER_MODEL"] == "x"


def test_the_users_value_wins_over_a_shell_conf(run_dir: Make) -> None:
    assert shell_conf(run_dir, "TP=2\nMODEL_ARGS=x\n", setup=setup("TP=8\n"))["TP"] == "8"


def test_a_shell_conf_wins_over_the_stages_default(run_dir: Make) -> None:
    defaults = {"LAUNCH_SCRIPT": "python", "TP": "1"}
    assert shell_conf(run_dir, "TP=${TP:-4}\n", defaults=defaults, setup=setup("X=1\n"))["TP"] == "4"
