"""submit.sh: one job or none, and nothing half-made, whatever sbatch and the file system do."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from remote import SHELLS, Cluster
from specs import RESOURCES, run_spec

from mlmsub.core import bundle, paths

RUN_ID = "20261130-120000-quantize-0a1b2c"
SECRET = "hf_verysecret"


@pytest.fixture(params=SHELLS)
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Cluster:
    return Cluster(tmp_path, request.param)


def tar(run: paths.RunPaths) -> bytes:
    return bundle.build(run_spec(), run, "20261130-120000", RESOURCES, {"HF_TOKEN": SECRET}).tar()


class Submission:
    """What came of one run of submit.sh."""

    def __init__(self, cluster: Cluster, *, root: Path | None = None, stdin: bytes | None = None,
                 env: dict[str, str] | None = None, umask: int = 0o027, **parameters: str) -> None:  # fmt: skip
        run = paths.RunPaths(str(root or cluster.scratch / "runs"), RUN_ID)
        self.dir = Path(run.dir)
        given = {
            "run_dir": run.dir, "scheduler": "slurm", "slurm_bin": "", "clusters": "", "pass_env": "", "image": "",
            "sources": "", "script": "", "cluster_setup": "", "ntasks": "2", "job_name": "j",
            "stamp": "20261130-120000", "parents": "",
        }  # fmt: skip
        done = cluster.run("submit", tar(run) if stdin is None else stdin, env, umask, **(given | parameters))
        assert done.returncode == 0, done.stderr
        lines = done.stdout.decode().splitlines()
        self.answer = {key: value for key, _, value in (line.partition(" ") for line in reversed(lines))}
        self.stderr = [line.removeprefix("stderr ") for line in lines if line.startswith("stderr ")]

    def nothing_is_left(self) -> bool:
        """No run directory, no part of one, no list of what is missing."""
        month = self.dir.parent
        return not month.exists() or list(month.iterdir()) == []


def test_a_job_is_made(cluster: Cluster) -> None:
    cluster.program("sbatch", f'pwd >"{cluster.folder}/cwd"; printf "%s\\n" "$@" >"{cluster.folder}/argv"; echo 123')
    made = Submission(cluster)
    assert made.answer == {"job": "123"}
    assert (made.dir / "state/submitted").read_text() == "123\n"
    assert (cluster.folder / "cwd").read_text().strip() == str(made.dir)
    assert (cluster.folder / "argv").read_text().split() == ["--parsable", "job.sbatch"]
    assert (made.dir / "logs").is_dir(), "else sbatch's job has no log, and fails without a word"
    assert sorted(path.name for path in made.dir.parent.iterdir()) == [RUN_ID]


def test_the_run_directory_is_the_users_alone(cluster: Cluster) -> None:
    made = Submission(cluster, umask=0o000)
    assert stat.S_IMODE(made.dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((made.dir / "secrets/env.sh").stat().st_mode) == 0o600
    assert stat.S_IMODE((made.dir / "entrypoint.sh").stat().st_mode) & 0o700 == 0o700


@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077])
def test_the_job_inherits_the_users_umask(cluster: Cluster, umask: int) -> None:
    cluster.program("sbatch", f'umask >"{cluster.folder}/umask"; echo 1')
    Submission(cluster, umask=umask)
    assert int((cluster.folder / "umask").read_text(), 8) == umask


@pytest.mark.parametrize(
    ("printed", "job"),
    [
        ("echo 123", "123"),
        ("echo '123;cluster'", "123"),
        ("echo Welcome to cluster 7!; echo; echo '123;cl'", "123"),
        ("echo 2026; echo 123", "123"),
        ("echo 123; echo 'sbatch: a word after it' >&2", "123"),
    ],
)
def test_the_job_id_is_found_among_chatter(cluster: Cluster, printed: str, job: str) -> None:
    cluster.program("sbatch", printed)
    assert Submission(cluster).answer == {"job": job}


# --- the environment of sbatch ---------------------------------------------------------------


def sbatch_environment(cluster: Cluster, env: dict[str, str], **parameters: str) -> dict[str, str]:
    cluster.program("sbatch", f'env -0 >"{cluster.folder}/env"; echo 1')
    Submission(cluster, env=env, **parameters)
    pairs = (pair.partition("=") for pair in (cluster.folder / "env").read_text().split("\0")[:-1])
    return {name: value for name, _, value in pairs if name not in ("_", "PWD", "SHLVL", "OLDPWD")}


def test_sbatch_sees_only_what_it_needs(cluster: Cluster) -> None:
    allowed = {
        "LOGNAME": "me",
        "SHELL": "/bin/tcsh",
        "LANG": "C.UTF-8",
        "SLURM_CONF": "/a b/slurm.conf",
        "SLURM_CLUSTERS": "c",
    }
    kept = sbatch_environment(
        cluster,
        allowed | {"HF_TOKEN": "secret", "SBATCH_PARTITION": "x", "SLURM_JOB_ID": "1", "SLURM_CPU_BIND": "none",
                   "LD_LIBRARY_PATH": "/x", "PYTHONPATH": "/x", "CONDA_PREFIX": "/x", "name": "x", "MINE": "x"},
    )  # fmt: skip
    assert kept == allowed | {"PATH": f"{cluster.bin}:/usr/bin:/bin", "HOME": str(cluster.home), "USER": "me"}


def test_the_profile_names_what_else_passes(cluster: Cluster) -> None:
    value = 'it\'s "a" $HOME `id`\nand more'
    kept = sbatch_environment(cluster, {"MINE": value, "EMPTY": ""}, pass_env="MINE EMPTY UNSET")
    assert (kept["MINE"], kept["EMPTY"]) == (value, "")
    assert "UNSET" not in kept


# --- refused: nothing is left ---------------------------------------------------------------------


def test_what_sbatch_refuses_leaves_nothing(cluster: Cluster) -> None:
    cluster.program("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; echo two >&2; exit 1")
    made = Submission(cluster)
    assert (made.answer["refused"], made.answer["code"]) == ("sbatch", "1")
    assert made.stderr == ["sbatch: error: invalid partition specified: x", "two"]
    assert made.nothing_is_left()


def test_a_job_of_which_slurm_keeps_a_record_though_it_refused_it_is_none(cluster: Cluster) -> None:
    cluster.program("sbatch", f'pwd >"{cluster.folder}/cwd"; echo "sbatch: error: Invalid account" >&2; exit 1')
    cluster.program("squeue", f'echo "9|FAILED|$(cat {cluster.folder}/cwd)"')
    made = Submission(cluster)
    assert made.answer["refused"] == "sbatch"
    assert made.nothing_is_left()


def test_an_image_that_is_not_there(cluster: Cluster) -> None:
    made = Submission(cluster, image="/none/of this.sqsh")
    assert (made.answer["refused"], made.answer["at"]) == ("no-image", "/none/of this.sqsh")
    assert made.nothing_is_left()


def test_an_image_that_is_there(cluster: Cluster) -> None:
    (cluster.scratch / "an image.sqsh").touch()
    assert Submission(cluster, image=f"{cluster.scratch}/an image.sqsh").answer == {"job": "123"}


def test_a_mount_source_that_is_not_there(cluster: Cluster) -> None:
    made = Submission(cluster, sources=f"{cluster.scratch}\n/none/a b\n/none/c\n")
    assert (made.answer["refused"], made.answer["at"]) == ("no-mount-source", "/none/a b")
    assert made.nothing_is_left()


def test_mount_sources_that_are_there(cluster: Cluster) -> None:
    (cluster.scratch / "a b").mkdir()
    assert Submission(cluster, sources=f"{cluster.scratch}/a b\n{cluster.scratch}\n").answer == {"job": "123"}


def test_a_place_that_cannot_be_written(cluster: Cluster) -> None:
    (cluster.scratch / "file").touch()
    made = Submission(cluster, root=cluster.scratch / "file" / "runs")
    assert (made.answer["refused"], made.answer["at"]) == ("not-writable", f"{cluster.scratch}/file/runs")


@pytest.mark.parametrize("broken", ["cut", "empty", "noise", "changed"])
def test_a_bundle_that_did_not_arrive_whole(cluster: Cluster, broken: str) -> None:
    whole = tar(paths.RunPaths(str(cluster.scratch / "runs"), RUN_ID))
    stdin = {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "noise": b"not a tar at all" * 100,
        "changed": whole.replace(b"model: x\n", b"model: y\n", 1),
    }[broken]
    cluster.program("sbatch", f"touch {cluster.folder}/called; echo 1")
    made = Submission(cluster, stdin=stdin)
    assert made.answer["refused"] == "not-unpacked"
    assert made.nothing_is_left()
    assert not (cluster.folder / "called").exists()


@pytest.mark.parametrize(
    ("option", "line", "word"),
    [("-k", "x 1 1 100 1% /", "no-space"), ("-i", "x 1 1 10 1% /", "no-inodes")],
)
def test_a_full_file_system(cluster: Cluster, option: str, line: str, word: str) -> None:
    cluster.program(
        "df", f'echo head; if [[ $* == *{option}* ]]; then echo "{line}"; else echo "x 1 1 99999999 1% /"; fi'
    )
    made = Submission(cluster)
    assert made.answer["refused"] == word
    assert made.nothing_is_left()


@pytest.mark.parametrize("inodes", ["-", "0", ""])
def test_a_file_system_that_counts_no_inodes(cluster: Cluster, inodes: str) -> None:
    cluster.program(
        "df", f'echo head; if [[ $* == *-i* ]]; then echo "x 0 0 {inodes} - /"; else echo "x 1 1 99999999 1% /"; fi'
    )
    assert Submission(cluster).answer == {"job": "123"}


def test_a_login_node_without_sbatch(cluster: Cluster) -> None:
    cluster.without("sbatch")
    made = Submission(cluster)
    assert made.answer["refused"] == "no-sbatch"
    assert made.nothing_is_left()


def test_the_profile_says_where_sbatch_is(cluster: Cluster) -> None:
    cluster.without("sbatch")
    elsewhere = cluster.folder / "opt slurm"
    elsewhere.mkdir()
    (elsewhere / "sbatch").write_text("#!/bin/sh\necho 77\n")
    (elsewhere / "sbatch").chmod(0o755)
    assert Submission(cluster, slurm_bin=str(elsewhere)).answer == {"job": "77"}


def test_a_script_that_is_not_there(cluster: Cluster) -> None:
    made = Submission(cluster, script="/none/run it.sh")
    assert (made.answer["refused"], made.answer["at"]) == ("no-script", "/none/run it.sh")
    assert made.nothing_is_left()


def test_an_env_setup_that_lies_on_the_cluster_is_copied(cluster: Cluster) -> None:
    (cluster.home / "my env.sh").write_text("TP=8\n")
    made = Submission(cluster, cluster_setup=f"{cluster.home}/my env.sh")
    assert (made.dir / "env/setup.sh").read_text() == "TP=8\n"


def test_an_env_setup_that_is_not_on_the_cluster(cluster: Cluster) -> None:
    made = Submission(cluster, cluster_setup="/none/env.sh")
    assert (made.answer["refused"], made.answer["at"]) == ("no-setup", "/none/env.sh")
    assert made.nothing_is_left()


@pytest.mark.parametrize(("end", "refused"), [("7 1 0", True), ("never 1 0", True), ("0 1 0", False), (None, False)])
def test_a_parent_that_has_failed_already(cluster: Cluster, end: str | None, refused: bool) -> None:
    parent = cluster.scratch / "a parent"
    (parent / "state").mkdir(parents=True)
    if end:
        (parent / "state/end").write_text(f"{end}\n")
    made = Submission(cluster, parents=f"{parent}\n")
    if refused:
        assert (made.answer["refused"], made.answer["at"]) == ("parent-failed", "a parent")
        assert made.nothing_is_left()
    else:
        assert made.answer == {"job": "123"}


# --- never twice -------------------------------------------------------------------------------------

TIMED_OUT = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"


def test_a_time_out_after_which_the_job_exists(cluster: Cluster) -> None:
    cluster.program("sbatch", f'pwd >"{cluster.folder}/cwd"; {TIMED_OUT}')
    cluster.program(
        "squeue",
        f'echo "8|RUNNING|/elsewhere"; [ ! -f {cluster.folder}/cwd ] || echo "9|PENDING|$(cat {cluster.folder}/cwd)"',
    )
    made = Submission(cluster)
    assert made.answer == {"existing": "9"}
    assert (made.dir / "state/submitted").read_text() == "9\n"


def test_a_time_out_after_which_no_job_is_seen_keeps_the_run_for_a_late_one(cluster: Cluster) -> None:
    cluster.program("sbatch", TIMED_OUT)
    made = Submission(cluster)
    assert made.answer["refused"] == "sbatch"
    assert (made.dir / "job.sbatch").exists(), "a job that arrives late needs it"
    assert not (made.dir / "state/submitted").exists()
    cluster.program("sbatch", "echo 10")
    assert Submission(cluster).answer == {"job": "10"}


def test_a_run_that_was_submitted_is_not_submitted_again(cluster: Cluster) -> None:
    Submission(cluster)
    cluster.program("sbatch", f"touch {cluster.folder}/called; echo 124")
    again = Submission(cluster, stdin=b"")
    assert again.answer == {"existing": "123"}
    assert not (cluster.folder / "called").exists()


def test_a_run_that_slurm_knows_by_its_directory_is_not_submitted_again(cluster: Cluster) -> None:
    made = Submission(cluster)
    (made.dir / "state/submitted").unlink()
    cluster.program("squeue", f'echo "5|RUNNING|/x"; echo "123|RUNNING|{made.dir}"')
    assert Submission(cluster).answer == {"existing": "123"}


def test_an_answer_that_holds_no_id_leaves_the_run_to_the_job(cluster: Cluster) -> None:
    cluster.program("sbatch", f'pwd >"{cluster.folder}/cwd"; echo "Submitted!"')
    cluster.program("squeue", f'[ ! -f {cluster.folder}/cwd ] || echo "9|PENDING|$(cat {cluster.folder}/cwd)"')
    made = Submission(cluster)
    assert (made.dir / "job.sbatch").exists()
    assert made.answer == {"existing": "9"}


# --- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a b", "it's", 'q"q', "$HOME", "`id`", "ä", "back\\slash", "*"])
def test_paths_with_any_character(cluster: Cluster, name: str) -> None:
    cluster.program("sbatch", f'pwd >"{cluster.folder}/cwd"; echo 123')
    made = Submission(cluster, root=cluster.scratch / name / "runs")
    assert made.answer == {"job": "123"}
    assert (cluster.folder / "cwd").read_text() == f"{made.dir}\n"


def test_the_cluster_of_several_is_asked_for(cluster: Cluster) -> None:
    cluster.program("squeue", f'echo "$@" >>{cluster.folder}/asked')
    cluster.program("sbatch", TIMED_OUT)
    Submission(cluster, clusters="big")
    assert (cluster.folder / "asked").read_text().startswith("-M big ")
