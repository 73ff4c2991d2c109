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
            "stamp": "20261130-120000", "chain": "0", "parents": "", "twins": "",
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


# --- the runs that it waits for ------------------------------------------------------------------


def parent(cluster: Cluster, name: str, jobs: str = "7", end: str = "", claimed_by: str = "") -> Path:
    state = cluster.scratch / name / "state"
    state.mkdir(parents=True)
    if jobs:
        (state / "submitted").write_text(f"{jobs}\n")
    if end:
        (state / "end").write_text(f"{end} 7 0\n")
    if claimed_by:
        (state / "job").symlink_to(claimed_by)
    return state.parent


@pytest.mark.parametrize(
    ("condition", "end", "refused"),
    [
        ("afterok", "7", "parent-failed"), ("afterok", "never", "parent-failed"), ("afterok", "0", ""),
        ("afternotok", "0", "parent-succeeded"), ("afternotok", "7", ""), ("afternotok", "never", ""),
        ("afterany", "7", ""), ("afterany", "0", ""),
    ],
)  # fmt: skip
def test_a_parent_that_is_over(cluster: Cluster, condition: str, end: str, refused: str) -> None:
    cluster.program("sbatch", f'echo "$@" >"{cluster.folder}/argv"; echo 123')
    made = Submission(cluster, parents=f"{condition} {parent(cluster, 'a parent', end=end)}\n")
    if refused:
        assert (made.answer["refused"], made.answer["at"]) == (refused, "a parent")
        assert made.nothing_is_left()
    else:
        assert made.answer == {"job": "123"}
        assert "--dependency" not in (cluster.folder / "argv").read_text(), "Slurm may have forgotten its job"


@pytest.mark.parametrize(
    ("jobs", "claimed_by", "condition", "expected"),
    [
        ("7", "", "afterok", "afterok:7"), ("7", "9", "afterok", "afterok:9"), ("7", "", "afterany", "afterany:7"),
        ("7", "", "afternotok", "afternotok:7"), ("7 8 9", "7", "afterok", "afterany:7:8:9"),
        ("7 8", "", "afternotok", "afterany:7:8"),
    ],
)  # fmt: skip
def test_parents_become_a_dependency(
    cluster: Cluster, jobs: str, claimed_by: str, condition: str, expected: str
) -> None:
    """A chain is waited for as a whole; its job script then asks how it ended."""
    cluster.program("sbatch", f'echo "$@" >"{cluster.folder}/argv"; echo 123')
    first, second = parent(cluster, "one it's $x", jobs, claimed_by=claimed_by), parent(cluster, "two", "5")
    Submission(cluster, parents=f"{condition} {first}\nafterok {second}\n")
    dependency, kill = (cluster.folder / "argv").read_text().split()[1:3]
    assert (dependency, kill) == (f"--dependency={expected},afterok:5", "--kill-on-invalid-dep=yes")


def test_a_parent_of_which_nothing_is_known(cluster: Cluster) -> None:
    made = Submission(cluster, parents=f"afterok {parent(cluster, 'p', jobs='')}\n")
    assert (made.answer["refused"], made.answer["at"]) == ("parent-unknown", "p")
    assert made.nothing_is_left()


# --- chains --------------------------------------------------------------------------------------

# Numbers jobs from 101 on and keeps their arguments; squeue knows what was made.
COUNTS = """\
n=$((101 + $(cat {0}/made 2>/dev/null | wc -l)))
words="$*"
echo "$n|PENDING|$PWD|$PWD/job.sbatch${{words##*job.sbatch}}" >>{0}/made
echo "$*" >>{0}/argv
"""
FORGET = "sed -i '$d' {0}/made {0}/argv; "
ASKED = '[[ "$*" != *"-t all"* ]] || cat {0}/made 2>/dev/null'


def counting(cluster: Cluster, answer: str = "") -> None:
    cluster.program("sbatch", COUNTS.format(cluster.folder) + (answer or "echo $n"))
    cluster.program("squeue", ASKED.format(cluster.folder))


def links_made(cluster: Cluster) -> list[str]:
    """What each link was given: the links before it."""
    return [line.partition("job.sbatch")[2].strip() for line in (cluster.folder / "argv").read_text().splitlines()]


def test_each_link_waits_for_all_before_it(cluster: Cluster) -> None:
    """Were a queued one cancelled, the next would else start beside the one at work."""
    counting(cluster)
    made = Submission(cluster, chain="2", parents=f"afterok {parent(cluster, 'p', '5')}\n")
    assert made.answer == {"job": "101 102 103"}
    assert (made.dir / "state/submitted").read_text() == "101 102 103\n"
    log, kill = f"--output={made.dir}/logs/j_101_20261130-120000.log", "--kill-on-invalid-dep=yes"
    assert (cluster.folder / "argv").read_text().splitlines() == [
        f"--parsable --dependency=afterok:5 {kill} job.sbatch",
        f"--parsable --dependency=afterok:5,afterany:101 {kill} {log} job.sbatch 101",
        f"--parsable --dependency=afterok:5,afterany:101:102 {kill} {log} job.sbatch 101 102",
    ]


@pytest.mark.parametrize("refused_at", [101, 102, 103])
def test_a_link_that_is_refused_takes_back_the_others(cluster: Cluster, refused_at: int) -> None:
    counting(
        cluster,
        f'((n < {refused_at})) || {{ echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }}; echo $n',
    )
    made = Submission(cluster, chain="2")
    assert made.answer["refused"] == "sbatch" and "QOSMax" in made.stderr[0]
    assert made.nothing_is_left()
    cancelled = cluster.folder / "cancelled"
    ids = cancelled.read_text().split() if cancelled.exists() else []
    assert ids == [str(n) for n in range(refused_at - 1, 100, -1)], "the last one first"


@pytest.mark.parametrize("killed_at", [101, 102, 103])
@pytest.mark.parametrize("made", [True, False], ids=["made", "not-made"])
def test_a_submission_that_is_cut_between_links_is_completed(cluster: Cluster, killed_at: int, made: bool) -> None:
    """Whether or not the sbatch that was cut off made its job."""
    forget = "" if made else FORGET.format(cluster.folder)
    counting(
        cluster,
        f"if ((n == {killed_at})) && mkdir {cluster.folder}/once 2>/dev/null; then\n"
        f"{forget}kill -9 $(sed s/.*-// state/attempt)\nfi\necho $n",
    )
    with pytest.raises(AssertionError):
        Submission(cluster, chain="2")
    again = Submission(cluster, chain="2")
    assert set(again.answer) == {"existing" if made or killed_at > 101 else "job"}
    assert again.answer.popitem()[1] == "101 102 103"
    assert links_made(cluster) == ["", "101", "101 102"]
    assert Submission(cluster, chain="2").answer == {"existing": "101 102 103"}


@pytest.mark.parametrize("begun", [True, False])
def test_links_that_may_be_at_work_stay_where_slurm_refuses_another(cluster: Cluster, begun: bool) -> None:
    counting(cluster, "((n != 102)) || kill -9 $(sed s/.*-// state/attempt); echo $n")
    with pytest.raises(AssertionError):
        Submission(cluster, chain="3")
    run = cluster.scratch / "runs/202611" / RUN_ID
    if begun:
        (run / "state/0").mkdir()
    counting(cluster, f"{FORGET.format(cluster.folder)}echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1")
    again = Submission(cluster, chain="3")
    assert again.answer == {"existing": "101 102"} and not (cluster.folder / "cancelled").exists()
    assert "Slurm refused job 3 of the chain: sbatch: error: QOSMax" in (run / "state/advice").read_text()


def test_a_link_waits_for_a_second_job_of_an_sbatch_that_was_late(cluster: Cluster) -> None:
    counting(cluster, "((n != 101)) || kill -9 $(sed s/.*-// state/attempt); echo $n")
    with pytest.raises(AssertionError):
        Submission(cluster, chain="2")
    run = cluster.scratch / "runs/202611" / RUN_ID
    late = f"99|PENDING|{run}|{run}/job.sbatch 101"
    cluster.program("squeue", f"{ASKED.format(cluster.folder)}; [[ $* == *'-t all'* ]] || echo '{late}'")
    counted = COUNTS.format(cluster.folder)
    cluster.program("sbatch", f"{counted}echo $n")
    assert Submission(cluster, chain="2").answer == {"existing": "101 102 103"}
    assert "--dependency=afterany:99:101:102 " in (cluster.folder / "argv").read_text()


def test_a_run_that_is_over_gets_no_further_link(cluster: Cluster) -> None:
    counting(cluster, "((n != 102)) || kill -9 $(sed s/.*-// state/attempt); echo $n")
    with pytest.raises(AssertionError):
        Submission(cluster, chain="3")
    (cluster.scratch / "runs/202611" / RUN_ID / "state/end").write_text("0 101 0\n")
    counting(cluster)
    assert Submission(cluster, chain="3").answer == {"existing": "101"}
    assert links_made(cluster) == ["", "101"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_link_that_is_refused_when_nobody_listens_any_more(cluster: Cluster, when: str) -> None:
    """The same command again comes before that, and goes on; or after, and begins anew."""
    again = f"echo elsewhere-1 >{cluster.scratch}/runs/202611/{RUN_ID}/state/attempt; " if when == "before" else ""
    counting(cluster, f"((n != 102)) || {{ {again}{FORGET.format(cluster.folder)}exit 1; }}; echo $n")
    first = Submission(cluster, chain="1")
    assert first.answer["refused"] == "sbatch"
    assert (cluster.folder / "cancelled").exists() == (when == "after")
    assert first.dir.exists() == (when == "before")
    counting(cluster)
    (cluster.folder / "argv").unlink()
    answer = Submission(cluster, chain="1").answer
    assert answer == ({"existing": "101 102"} if when == "before" else {"job": "102 103"})


def test_a_run_that_is_being_withdrawn_is_waited_for(cluster: Cluster) -> None:
    counting(cluster, "((n != 102)) || kill -9 $(sed s/.*-// state/attempt); echo $n")
    with pytest.raises(AssertionError):
        Submission(cluster, chain="1")
    state = cluster.scratch / "runs/202611" / RUN_ID / "state"
    for mark in ("withdrawn", "cancelled"):
        (state / mark).touch()
    cluster.program("sleep", f"rm -rf {state.parent}")
    counting(cluster)
    assert Submission(cluster, chain="1").answer == {"job": "103 104"}
    assert not (state / "cancelled").exists()


def test_a_time_out_in_the_middle_of_a_chain(cluster: Cluster) -> None:
    timed_out = "if ((n == 102)); then echo 'sbatch: error: Socket timed out' >&2; exit 1; fi; echo $n"
    counting(cluster, timed_out)
    assert Submission(cluster, chain="2").answer == {"existing": "101 102 103"}
    assert links_made(cluster) == ["", "101", "101 102"]


def test_a_time_out_whose_link_is_not_seen_keeps_the_rest(cluster: Cluster) -> None:
    counting(
        cluster,
        f"if ((n == 102)); then {FORGET.format(cluster.folder)}echo 'Socket timed out' >&2; exit 1; fi; echo $n",
    )
    first = Submission(cluster, chain="1")
    assert first.answer["refused"] == "sbatch" and not (cluster.folder / "cancelled").exists()
    counting(cluster)
    assert Submission(cluster, chain="1").answer == {"existing": "101 102"}


# --- never twice -------------------------------------------------------------------------------------

IN_QUEUE = '[ ! -f {0}/cwd ] || echo "9|PENDING|$(cat {0}/cwd)|$(cat {0}/cwd)/job.sbatch"'
TIMED_OUT = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"


def test_a_time_out_after_which_the_job_exists(cluster: Cluster) -> None:
    cluster.program("sbatch", f'pwd >"{cluster.folder}/cwd"; {TIMED_OUT}')
    cluster.program(
        "squeue",
        f'echo "8|RUNNING|/elsewhere|/elsewhere/job.sbatch"; {IN_QUEUE.format(cluster.folder)}',
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
    cluster.queue(
        ("5", "RUNNING", "/x", "/x/job.sbatch"),
        ("6", "RUNNING", str(made.dir), f"{made.dir}/mine.sh"),
        ("123", "RUNNING", str(made.dir), f"{made.dir}/job.sbatch"),
    )
    assert Submission(cluster).answer == {"existing": "123"}


def test_an_answer_that_holds_no_id_leaves_the_run_to_the_job(cluster: Cluster) -> None:
    cluster.program("sbatch", f'pwd >"{cluster.folder}/cwd"; echo "Submitted!"')
    cluster.program("squeue", IN_QUEUE.format(cluster.folder))
    made = Submission(cluster)
    assert (made.dir / "job.sbatch").exists()
    assert made.answer == {"existing": "9"}


def test_a_job_is_found_below_a_linked_path(cluster: Cluster) -> None:
    """Slurm keeps the resolved path, of which a profile seldom knows."""
    (cluster.scratch / "disk7").mkdir()
    (cluster.scratch / "linked").symlink_to("disk7")
    made = Submission(cluster, root=cluster.scratch / "linked/runs")
    (made.dir / "state/submitted").unlink()
    where = str(made.dir.resolve())
    cluster.queue(("123", "RUNNING", where, f"{where}/job.sbatch"))
    assert Submission(cluster, root=cluster.scratch / "linked/runs").answer == {"existing": "123"}


# --- runs of the same content --------------------------------------------------------------------------


def twin(cluster: Cluster, name: str, state: str, *marks: str, job: str = "7") -> str:
    """Another run, whose job is in this state."""
    folder = parent(cluster, name, job)
    for mark in marks:
        (folder / "state" / mark).write_text("143 7 0\n")
    queue = cluster.folder / "queue"
    with queue.open("a") as lines:
        lines.write(f"{job}|{state}|{folder}|{folder}/job.sbatch\n")
    cluster.program("squeue", f"cat {queue}")
    return f"{folder}\n"


@pytest.mark.parametrize(
    "state",
    ["PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"],
)
def test_a_run_at_work_is_the_answer(cluster: Cluster, state: str) -> None:
    made = Submission(cluster, twins=twin(cluster, "t", state))
    assert made.answer == {"twin": "7"} and made.nothing_is_left()


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"])
def test_a_run_that_is_over_is_none(cluster: Cluster, state: str) -> None:
    assert Submission(cluster, twins=twin(cluster, "t", state)).answer == {"job": "123"}


@pytest.mark.parametrize(("state", "answer"), [("PENDING", "twin"), ("REQUEUE_HOLD", "twin"), ("COMPLETING", "job")])
def test_a_run_that_was_over_and_is_requeued_is_the_answer(cluster: Cluster, state: str, answer: str) -> None:
    assert set(Submission(cluster, twins=twin(cluster, "t", state, "end")).answer) == {answer}


def test_a_run_at_work_before_one_that_was_cancelled(cluster: Cluster) -> None:
    twins = twin(cluster, "newer", "CANCELLED", "cancelled", "end") + twin(cluster, "older", "RUNNING", job="6")
    assert Submission(cluster, twins=twins).answer == {"twin": "6"}


def test_a_cancelled_run_that_is_not_quite_gone_is_waited_for(cluster: Cluster) -> None:
    cluster.program("sbatch", f'echo "$@" >{cluster.folder}/argv; echo 123')
    made = Submission(cluster, twins=twin(cluster, "t", "COMPLETING", "cancelled"))
    assert made.answer == {"job": "123"}
    assert "--dependency=afterany:7 " in (cluster.folder / "argv").read_text()


def test_without_the_queue_it_is_not_known_whether_there_is_one(cluster: Cluster) -> None:
    twins = twin(cluster, "t", "RUNNING")
    cluster.program("squeue", "echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1")
    made = Submission(cluster, twins=twins)
    assert (
        made.answer["refused"] == "twin-unknown" and "Socket timed out" in made.answer["at"] and made.nothing_is_left()
    )


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
