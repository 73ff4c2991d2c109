"""The job script's text. What it does is in tests/contract/test_job_script.py."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from specs import QUANTIZE, RUN, STAMP, run_spec, script_spec
from test_quoting import sbatch_words

import mlmsub
from mlmsub.app import resources
from mlmsub.core import script
from mlmsub.core.spec import RunSpec

GOLDEN = Path(__file__).parent / "golden"
TEMPLATE = resources.for_bundle()["slurm/job.sbatch.j2"].decode()


def rendered(spec: RunSpec) -> str:
    return script.render(TEMPLATE, spec, RUN, STAMP)


def sbatch_options(spec: RunSpec) -> list[str]:
    lines = [line for line in rendered(spec).splitlines() if line.startswith("#SBATCH")]
    words = [sbatch_words(line.removeprefix("#SBATCH")) for line in lines]
    assert all(len(line) == 1 for line in words), "one option on each line"
    return [line[0] for line in words]


def srun_words(spec: RunSpec) -> list[str]:
    text = rendered(spec).replace("\\\n", " ")
    return shlex.split(text[text.index("\nsrun ") : text.index("</dev/null &\n")])


def test_the_whole_script() -> None:
    """To accept a change of the template: write `rendered(QUANTIZE)` to the file, and read the difference."""
    golden = (GOLDEN / "job.sbatch").read_text()
    assert rendered(QUANTIZE) == golden.replace("{version}", mlmsub.__version__)


def test_every_sbatch_line_holds_one_option() -> None:
    assert sbatch_options(QUANTIZE) == [
        "--job-name=quantize-Llama-3.1-8B-Instruct", "--account=proj", "--partition=batch", "--time=04:00:00",
        "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--exclusive", "--mem=0", "--overcommit",
        f"--chdir={RUN.dir}", f"--output={RUN.dir}/logs/%x_%j_{STAMP}.log", "--open-mode=append", "--no-requeue",
        "--comment=a b",
    ]  # fmt: skip


def test_the_directives_come_before_the_first_command() -> None:
    lines = rendered(QUANTIZE).splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[:last])
    assert lines[0] == "#!/bin/bash"


def test_srun_starts_the_entrypoint_in_the_container() -> None:
    assert srun_words(QUANTIZE) == [
        "srun", "-l", "--mpi=pmix", "--kill-on-bad-exit=1", "--wait=0", "--distribution=block",
        "--container-image=/lustre/images/modelopt.sqsh",
        f"--container-mounts=/lustre/me:/workspace/scratch,{RUN.dir}:/mlmsub/run",
        "--container-workdir=/mlmsub/run", "--no-container-mount-home", "bash", "/mlmsub/run/entrypoint.sh",
    ]  # fmt: skip


def test_without_an_image_srun_gets_no_container_option() -> None:
    words = srun_words(run_spec(image="", mounts=()))
    assert not [word for word in words if "container" in word]
    assert words[-2:] == ["bash", f"{RUN.dir}/entrypoint.sh"]


def test_words_with_blanks_stay_whole() -> None:
    spec = script_spec(
        mounts=("/a b:/workspace/scratch",), srun_args=("--export=ALL,X=a b",), sbatch_args=("--comment=#1 'x'",)
    )
    assert "--container-mounts=/a b:/workspace/scratch," + f"{RUN.dir}:/mlmsub/run" in srun_words(spec)
    assert "--export=ALL,X=a b" in srun_words(spec)
    assert sbatch_options(spec)[-1] == "--comment=#1 'x'"


def test_no_value_of_the_user_is_in_the_script() -> None:
    text = rendered(run_spec(overrides={"A": "needle1"}, profile_env={"B": "needle2"}, defaults={"C": "needle3"}))
    assert "needle" not in text


def test_the_prelude_stands_before_all_that_needs_slurm() -> None:
    text = rendered(run_spec(prelude="module load slurm\nexport A=1\n"))
    prelude = text.index("module load slurm\nexport A=1\n")
    assert text.rindex("#SBATCH") < prelude < text.index("scontrol show hostnames") < text.index("\nsrun ")


def test_only_a_native_stage_must_leave_its_output() -> None:
    assert "done.json" in rendered(QUANTIZE)
    assert "done.json" not in rendered(script_spec())


def test_the_log_is_named_after_job_and_submission() -> None:
    assert script.log_name(QUANTIZE, STAMP) == "logs/%x_%j_20261130-120000.log"
    assert script.log_name(QUANTIZE, STAMP, "7", "n") == "logs/n_7_20261130-120000.log"


# --- options that mlmsub decides -------------------------------------------------------


@pytest.mark.parametrize("name", script.MANAGED)
def test_a_managed_option_is_seen_in_its_long_forms(name: str) -> None:
    assert script.managed_option(f"--{name}") == name
    assert script.managed_option(f"--{name}=x") == name


@pytest.mark.parametrize(("letter", "name"), script.SHORT.items())
def test_a_managed_option_is_seen_in_its_short_forms(letter: str, name: str) -> None:
    assert name in script.MANAGED
    for argument in (f"-{letter}", f"-{letter}x", f"-{letter} x"):
        assert script.managed_option(argument) == name


@pytest.mark.parametrize("argument", ["--part=x", "--nodel=n1", "--job-n=x", "--depend=singleton", "--container-im=x"])
def test_a_managed_option_is_seen_in_its_abbreviations(argument: str) -> None:
    assert script.managed_option(argument)


@pytest.mark.parametrize("argument", ["--job=x", "--arr=0-3", "--dep=singleton", "--ch=/x", "--out=x", "--err=x"])
def test_a_managed_option_is_seen_in_short_abbreviations(argument: str) -> None:
    assert script.managed_option(argument)


@pytest.mark.parametrize("argument", ["-HN4", "-vJname", "-Qpbatch"])
def test_a_managed_option_is_seen_behind_other_short_flags(argument: str) -> None:
    assert script.managed_option(argument)


@pytest.mark.parametrize(
    "argument", ["--comment=partition", "--begin=now+1hour", "--licenses=x", "--nice", "-H", "-v",
                 "--mail-type=END", "--exclude-not-an-option", "--deadline=x", "--wait-all-nodes=1", "-L x"],
)  # fmt: skip
def test_other_options_are_the_users(argument: str) -> None:
    assert script.managed_option(argument) == ""
