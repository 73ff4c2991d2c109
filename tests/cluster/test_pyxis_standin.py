"""The Pyxis stand-in behaves as Pyxis 0.24 on enroot 4.1.2 was measured to behave."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from lab import Lab

USERS = ("root", "labuser")
TWO_NODES = ("-N2", "-w", "node[1-2]")
TAIL = [
    "error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1",
    "error: Failed to invoke spank plugin stack",
]


PMIX_CLIENT = """
import ctypes
lib, me, zero = ctypes.CDLL("libpmix.so.2"), ctypes.create_string_buffer(512), ctypes.c_size_t(0)
print(lib.PMIx_Init(me, None, zero), lib.PMIx_Fence(None, zero, None, zero), lib.PMIx_Finalize(None, zero))
"""


def srun(lab: Lab, *options: str | Path, run: str, user: str = "labuser", image: Path | str | None = None, **how):
    """One srun with a container; `run` is a line of bash in each task."""
    argv = ["srun", f"--container-image={image or lab.image}", *map(str, options), "bash", "-c", run]
    return lab.run(argv, user, **how)


def refused(lab: Lab, *options: str | Path, image: Path | str | None = None, **how) -> tuple[int, list[str]]:
    """The exit code of an srun that must fail, and its messages without node names and process ids."""
    done = srun(lab, *options, run="true", image=image, check=False, **how)
    assert done.returncode != 0
    lines = [re.sub(r"^slurmstepd-node\d+: |^srun: ", "", line) for line in done.stderr.splitlines()]
    # whether srun has to wait for a node that still cleans up is no matter here
    lines = [re.sub(r"child \d+ failed", "child N failed", x) for x in lines if not x.startswith("job ")]
    # srun's own line and those that it passes on come in any order
    lines.sort(key=lambda line: line.startswith("error: node"))
    return done.returncode, [re.sub(r"error: node\d+: task", "error: nodeN: task", line) for line in lines]


def own_file(path: Path, text: str, mode: int = 0o644) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture(params=["image", "sqsh"])
def image(lab: Lab, request: pytest.FixtureRequest) -> Path:
    return getattr(lab, request.param)


@pytest.fixture
def data(scratch: Path) -> Path:
    """A folder to mount: root's files, one secret, and a place where everyone may write."""
    folder = scratch / "da ta"
    (folder / "open").mkdir(parents=True)
    (folder / "open").chmod(0o1777)
    own_file(folder / "public", "public\n")
    own_file(folder / "secret", "secret\n", 0o600)
    return folder


# --- the container


@pytest.mark.parametrize("user", USERS)
def test_runs_in_the_image_as_the_job_user(lab: Lab, image: Path, user: str) -> None:
    run = 'echo "$(id -un) $(hostname) $IMAGE_SAYS $(python3 -V)"'
    done = srun(lab, *TWO_NODES, run=run, image=image, user=user)
    assert sorted(done.stdout.splitlines()) == [f"{user} node{i} image Python 3.11.2" for i in (1, 2)]


@pytest.mark.parametrize("user", USERS)
def test_root_is_read_only_and_tmp_and_run_are_fresh(lab: Lab, image: Path, user: str) -> None:
    run = "touch /x; touch $HOME/x; touch /tmp/x /run/x && ls /tmp /run"
    done = srun(lab, run=run, image=image, user=user)
    home = "/root" if user == "root" else f"/home/{user}"
    assert done.stderr.splitlines() == [
        f"touch: cannot touch '{path}': Read-only file system" for path in ("/x", f"{home}/x")
    ]
    assert done.stdout.split() == ["/run:", "x", "/tmp:", "x"]
    assert not Path("/tmp/x").exists()


def test_home_is_not_mounted_but_is_where_tasks_start(lab: Lab) -> None:
    marker = Path(f"~{lab.user}").expanduser() / "on-the-host"
    marker.touch()
    try:
        for option in ([], ["--no-container-mount-home"]):
            done = srun(lab, *option, run="pwd; echo $HOME; ls -A $HOME", cwd=Path("/"))
            assert done.stdout.split() == [f"/home/{lab.user}"] * 2
    finally:
        marker.unlink()


def test_workdir(lab: Lab, data: Path) -> None:
    done = srun(lab, f"--container-mounts={data}:/a b", "--container-workdir=/a b", run="pwd; ls")
    assert done.stdout.splitlines() == ["/a b", "open", "public", "secret"]


def test_image_is_left_as_it_was(lab: Lab, data: Path) -> None:
    srun(lab, f"--container-mounts={data}:/new/place", run="ls /new/place", user="root")
    assert not (lab.image / "new").exists()


def test_tasks_of_one_node_and_step_share_tmp(lab: Lab) -> None:
    meet = "touch /tmp/$SLURM_PROCID; until [ $(ls /tmp | wc -l) = 3 ]; do sleep 0.05; done"
    run = f"{meet}; echo $(hostname) $(ls /tmp)"
    done = srun(lab, *TWO_NODES, "--ntasks-per-node=3", "-t1", run=run)
    assert sorted(done.stdout.splitlines()) == ["node1 0 1 2"] * 3 + ["node2 3 4 5"] * 3
    assert srun(lab, run="ls /tmp").stdout == ""


def test_host_devices_processes_and_names_are_visible(lab: Lab) -> None:
    done = srun(lab, "-w", "node2", run="getent hosts node1; ls -d /dev/null /dev/shm /proc/1 /sys/class")
    assert done.stdout.split() == ["127.0.10.1", "node1", "/dev/null", "/dev/shm", "/proc/1", "/sys/class"]


def test_nothing_is_left_on_the_nodes(lab: Lab) -> None:
    def left() -> set[Path]:
        return {path for i in (1, 2) for path in (lab.directory / f"scratch/node{i}").glob("pyxis_*")}

    before = left()
    srun(lab, *TWO_NODES, run="true", image=lab.sqsh)
    lab.run('until [ -z "$(squeue -h)" ]; do sleep 0.1; done')
    assert left() - before == set()


def test_exit_code_is_the_task_own(lab: Lab) -> None:
    assert srun(lab, run="exit 7", check=False).returncode == 7


# --- permissions


def test_permissions_are_those_of_the_user(lab: Lab, image: Path, data: Path) -> None:
    run = "cat public; cat secret; touch denied; touch open/mine; id -u"
    options = (f"--container-mounts={data}", f"--container-workdir={data}")
    done = srun(lab, *options, run=run, image=image)
    assert done.stdout.split() == ["public", str((data / "open/mine").stat().st_uid)]
    assert done.stderr.splitlines() == [
        "cat: secret: Permission denied",
        "touch: cannot touch 'denied': Permission denied",
    ]
    assert (data / "open/mine").owner() == lab.user
    done = srun(lab, *options, run="cat secret; touch open/roots", image=image, user="root")
    assert done.stdout == "secret\n"
    assert (data / "open/roots").owner() == "root"


def test_an_image_that_the_user_cannot_read(lab: Lab, scratch: Path) -> None:
    closed = own_file(scratch / "closed.sqsh", "", 0o600)
    assert f"error: pyxis:     [ERROR] Permission denied: {closed}" in refused(lab, image=closed)[1]


# --- mounts


def test_read_only_mount(lab: Lab, data: Path) -> None:
    run = "touch /ro/open/x; touch /rw/open/y; touch /bogus/open/z"
    mounts = f"{data}:/ro:ro,{data}:/rw:rw,{data}:/bogus:bogus"
    done = srun(lab, f"--container-mounts={mounts}", run=run)
    assert done.stderr.splitlines() == ["touch: cannot touch '/ro/open/x': Read-only file system"]
    assert sorted(p.name for p in (data / "open").iterdir()) == ["y", "z"]


def test_the_later_mount_on_a_target_wins(lab: Lab, data: Path, scratch: Path) -> None:
    own_file(scratch / "late", "")
    done = srun(lab, f"--container-mounts={data}:/m,{scratch}:/m", run="ls /m")
    assert "late" in done.stdout.split()


def test_a_lone_path_mounts_to_itself(lab: Lab, data: Path) -> None:
    assert srun(lab, f"--container-mounts={data}", run=f"cat '{data}/public'").stdout == "public\n"


def test_a_file_and_a_mount_within_a_mount(lab: Lab, data: Path) -> None:
    mounts = f"{data}/public:/usr/share/one/file,{data}/open:/tmp/deep,{data}:/tmp/deep/er"
    run = "cat /usr/share/one/file /tmp/deep/er/public; ls -d /usr/share/python3"
    done = srun(lab, f"--container-mounts={mounts}", run=run)
    assert done.stdout.split() == ["public", "public", "/usr/share/python3"]


def test_mount_target_behind_a_link_of_the_image(lab: Lab, data: Path) -> None:
    # /bin is a link to usr/bin in the image; both must still be there
    run = "cat /usr/bin/new/place/public; readlink /bin"
    done = srun(lab, f"--container-mounts={data}:/bin/new/place", run=run)
    assert done.stdout.split() == ["public", "usr/bin"]


def test_relative_mount_source_is_relative_to_the_cwd(lab: Lab, data: Path) -> None:
    done = srun(lab, "--container-mounts=./da ta:/rel", run="cat /rel/public", cwd=data.parent)
    assert done.stdout == "public\n"


def test_tmpfs_mount(lab: Lab) -> None:
    assert srun(lab, "--container-mounts=tmpfs:/fast", run="touch /fast/x; ls /fast").stdout == "x\n"


# --- environment


@pytest.mark.parametrize("user", USERS)
def test_host_variables_enter_and_the_image_wins(lab: Lab, image: Path, user: str) -> None:
    host = {"FOO": "from-host", "BAR": 'a,b c\nd"q', "PATH": "/usr/bin:/bin"}
    run = 'printf "%s|" "$FOO" "$BAR" "$IMAGE_SAYS" "$PATH" "$SLURM_PROCID"'
    done = srun(lab, run=run, image=image, user=user, env=host)
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert done.stdout.split("|") == ["from-image", host["BAR"], "image", path, "0", ""]


def test_the_image_wins_over_export(lab: Lab) -> None:
    done = srun(lab, "--export=ALL,FOO=exported,BAR=exported", run='echo "$FOO $BAR"')
    assert done.stdout == "from-image exported\n"


def test_container_env_makes_the_host_win(lab: Lab) -> None:
    host = {"FOO": "from-host", "IMAGE_SAYS": "from-host", "BAR": "bar"}
    run = 'echo "$FOO $IMAGE_SAYS $BAR"'
    assert srun(lab, "--container-env=NOTSET,FOO", run=run, env=host).stdout == "from-host image bar\n"
    done = srun(lab, "--container-env=IMAGE_SAYS,FO", run=run, env=host)
    assert done.stdout == "from-image from-host bar\n"
    assert srun(lab, "--container-env=FOO", run=run).stdout == "from-image image \n"


def test_without_a_host_path_the_program_is_found_by_the_image(lab: Lab) -> None:
    assert srun(lab, "--export=A=1", run="echo $A $HOSTNAME_").stdout == "1\n"


def test_an_image_of_pytorch_sets_ranks(lab: Lab) -> None:
    run = 'echo "$SLURM_PROCID: $RANK $LOCAL_RANK ${WORLD_SIZE-none} ${MASTER_ADDR-none}"'
    options = (
        *TWO_NODES,
        "--ntasks-per-node=2",
        "--container-env=RANK,LOCAL_RANK",
        "--export=ALL,RANK=9",
    )
    host = {"RANK": "5", "LOCAL_RANK": "5"}
    done = srun(lab, *options, run=run, image=lab.image_with(PYTORCH_VERSION="2.11"), env=host)
    assert sorted(done.stdout.splitlines()) == [f"{i}: {i} {i % 2} none none" for i in range(4)]
    assert srun(lab, run=run, env=host).stdout == "0: 5 5 none none\n"


# --- errors


def test_no_image_file(lab: Lab) -> None:
    assert refused(lab, image="/images/none.sqsh") == (
        1,
        [
            "error: pyxis: child N failed with error code: 1",
            "error: pyxis: failed to create container filesystem for image: /images/none.sqsh",
            "error: pyxis: printing enroot log file:",
            "error: pyxis:     [ERROR] No such file or directory: /images/none.sqsh",
            *TAIL,
            "error: nodeN: task 0: Exited with exit code 1",
        ],
    )


def test_image_relative_to_the_cwd(lab: Lab, scratch: Path) -> None:
    (scratch / "here.sqsh").symlink_to(lab.sqsh)
    assert srun(lab, image="./here.sqsh", run="echo $IMAGE_SAYS", cwd=scratch).stdout == "image\n"
    _, lines = refused(lab, image="./none.sqsh", cwd=scratch)
    assert "error: pyxis:     [ERROR] No such file or directory: ./none.sqsh" in lines


def test_not_a_squashfs(lab: Lab, scratch: Path) -> None:
    bad = own_file(scratch / "bad.sqsh", "no image")
    rc, lines = refused(lab, image=bad)
    assert rc == 1
    assert lines[1:4] == [
        f"error: pyxis: failed to create container filesystem for image: {bad}",
        "error: pyxis: printing enroot log file:",
        f"error: pyxis:     [ERROR] Invalid image format: {bad}",
    ]


def test_a_squashfs_that_is_cut_short(lab: Lab, scratch: Path) -> None:
    cut = scratch / "cut.sqsh"
    cut.write_bytes(lab.sqsh.read_bytes()[:100_000])
    rc, lines = refused(lab, image=cut)
    assert rc == 1
    assert lines[1] == f"error: pyxis: failed to create container filesystem for image: {cut}"
    assert lines[-3:-1] == TAIL


@pytest.mark.parametrize(
    ("image", "name", "host"),
    [
        ("nvcr.io#nvidia/pytorch:25.06-py3", "nvcr.io#nvidia/pytorch:25.06-py3", "nvcr.io"),
        ("nvcr.io/nvidia/pytorch:25.06-py3", "nvcr.io/nvidia/pytorch:25.06-py3", "nvcr.io"),
        ("docker://nvcr.io#nvidia/pytorch", "nvcr.io#nvidia/pytorch", "nvcr.io"),
        ("relative/none.sqsh", "relative/none.sqsh", "registry-1.docker.io"),
        ("ubuntu:24.04", "ubuntu:24.04", "registry-1.docker.io"),
    ],
)
def test_registry_without_a_network(lab: Lab, image: str, name: str, host: str) -> None:
    assert refused(lab, image=image) == (
        1,
        [
            f"pyxis: importing docker image: {name}",
            "error: pyxis: child N failed with error code: 6",
            f"error: pyxis: failed to import docker image: {name}",
            "error: pyxis: printing enroot log file:",
            "error: pyxis:     [INFO] Querying registry for permission grant",
            f"error: pyxis:     curl: (6) Could not resolve host: {host}",
            *TAIL,
            "error: nodeN: task 0: Exited with exit code 1",
        ],
    )


def test_docker_daemon(lab: Lab) -> None:
    text = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
    assert any(text in line for line in refused(lab, image="dockerd://ubuntu")[1])


def test_missing_mount_source(lab: Lab, image: Path) -> None:
    rc, lines = refused(lab, "-n2", "--container-mounts=/nope:/x", image=image)
    assert rc == 1
    assert "error: pyxis: --container-mounts: source path does not exist: /nope" in lines
    assert "error: pyxis: couldn't create enroot start configuration script" in lines
    assert "error: pyxis: container was not started successfully by another task" in lines
    assert all(lines.count(line) == 2 for line in TAIL)


def test_missing_relative_mount_source(lab: Lab) -> None:
    rc, lines = refused(lab, "--container-mounts=./rel:/rel")
    assert rc == 1
    assert lines[0] == "error: pyxis: container start failed with error code: 1"
    mount = "error: pyxis:     enroot-mount: failed to mount"
    assert re.fullmatch(rf"{mount}: \./rel at /.*/rel: No such file or directory", lines[2])


def test_mount_source_that_the_user_cannot_reach(lab: Lab, scratch: Path) -> None:
    closed = scratch / "closed"
    (closed / "in").mkdir(parents=True)
    closed.chmod(0o700)
    rc, lines = refused(lab, f"--container-mounts={closed}/in:/x")
    assert rc == 1
    assert lines[2].endswith("/x: Permission denied")


@pytest.mark.parametrize(
    ("mounts", "causes"),
    [
        (
            "rel:/rel",
            [
                'pyxis: mount source must be a relative path, an absolute path, "tmpfs" or "umount"',
                "pyxis: could not add mount entry: rel:/rel",
            ],
        ),
        (
            "/etc:rel",
            [
                "pyxis: mount target must be a relative path or an absolute path",
                "pyxis: could not add mount entry: /etc:rel",
            ],
        ),
        ("/etc:/x,", ["pyxis: --container-mounts: invalid format: "]),
        ("", ["pyxis: --container-mounts: argument required"]),
    ],
)
def test_bad_mounts_are_found_by_srun_and_sbatch(lab: Lab, mounts: str, causes: list[str]) -> None:
    expected = [*causes, f"Invalid --container-mounts argument: {mounts}"]
    image, option = f"--container-image={lab.image}", f"--container-mounts={mounts}"
    for command in (["srun", image, option, "true"], ["sbatch", image, option, "--wrap", "true"]):
        done = lab.run(command, lab.user, check=False)
        assert done.returncode == 255
        assert done.stderr.splitlines() == [f"{command[0]}: error: {line}" for line in expected]


@pytest.mark.parametrize("workdir", ["/nonexistent", "relative"])
def test_missing_workdir(lab: Lab, workdir: str) -> None:
    rc, lines = refused(lab, f"--container-workdir={workdir}")
    assert rc == 1
    assert lines[0] == f"error: pyxis: couldn't chdir to {workdir}: No such file or directory"
    assert lines[1:3] == TAIL


def test_no_such_command(lab: Lab) -> None:
    done = lab.run(["srun", f"--container-image={lab.image}", "nosuchcmd"], lab.user, check=False)
    assert done.returncode == 2
    assert "error: execve(): nosuchcmd: No such file or directory" in done.stderr


@pytest.mark.parametrize("option", ["--container-foo", "--container-writable", "--container-name=x"])
def test_any_other_option_is_unknown(lab: Lab, option: str) -> None:
    done = lab.run(["srun", f"--container-image={lab.image}", option, "true"], lab.user, check=False)
    assert done.returncode == 255
    assert done.stderr.startswith(f"srun: unrecognized option '{option}'")


def test_without_the_plugin_srun_knows_no_container(lab: Lab, scratch: Path) -> None:
    (scratch / "plugstack.conf").touch()
    conf = lab.slurm_conf.read_text() + f"PlugStackConfig={scratch}/plugstack.conf\n"
    bare = own_file(scratch / "slurm.conf", conf)
    argv = ["srun", f"--container-image={lab.image}", "true"]
    done = lab.run(argv, check=False, env={"SLURM_CONF": str(bare)})
    assert done.returncode == 255
    assert done.stderr.startswith("srun: unrecognized option '--container-image")


def test_a_cancel_while_the_container_starts(lab: Lab, scratch: Path) -> None:
    os.mkfifo(scratch / "never-ready.sqsh")
    (scratch / "never-ready.sqsh").chmod(0o666)
    run = f"echo started; srun --container-image={scratch}/never-ready.sqsh true"
    submit = ["sbatch", "--parsable", "-n2", "-w", "node1", f"--output={scratch}/log", "--wrap", run]
    job = lab.run(submit, lab.user).stdout.strip()
    lab.run(f"until grep -q started {scratch}/log && scontrol show step {job}.0; do sleep 0.1; done")
    lab.run(["scancel", job])
    assert lab.wait(job, timeout=45).state == "CANCELLED"
    assert lab.run(["sinfo", "-h", "-n", "node1", "-p", "batch", "-o", "%t"]).stdout.strip() == "idle"


# --- many tasks


@pytest.mark.parametrize("user", USERS)
def test_64_tasks_on_8_nodes_with_pmix(lab: Lab, image: Path, user: str) -> None:
    """Each rank sees the PMIx directory of its node and step in its container."""
    run = "ls $PMIX_SERVER_TMPDIR/pmix_dstor* >/dev/null && echo $SLURM_PROCID $(hostname) $PMIX_RANK"
    done = srun(lab, "-N8", "--ntasks-per-node=8", "--mpi=pmix", run=run, image=image, user=user)
    seen = sorted((line.split() for line in done.stdout.splitlines()), key=lambda words: int(words[0]))
    assert seen == [[str(i), f"node{i // 8 + 1}", str(i)] for i in range(64)]


def test_pmix_init_and_fence_work_inside(lab: Lab, scratch: Path) -> None:
    """A PMIx client, with the host's library mounted, meets the other ranks."""
    folder = next(Path("/usr/lib").glob("*-linux-gnu/libpmix.so.2")).parent
    own_file(scratch / "client.py", PMIX_CLIENT)
    options = (*TWO_NODES, "-n4", "--mpi=pmix", f"--container-mounts={folder}:/host:ro,{scratch}:/w")
    done = srun(lab, *options, run="LD_LIBRARY_PATH=/host python3 /w/client.py")
    assert done.stdout.splitlines() == ["0 0 0"] * 4
