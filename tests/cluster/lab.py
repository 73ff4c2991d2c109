"""A real Slurm cluster on this machine, as Python sees it: start and stop, run commands, wait for jobs.

The shell scripts next to this file do the work; see slurm-cluster.sh for what the cluster is.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("MLMSUB_TEST_CACHE", "/var/tmp/mlmsub-tests"))
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
POLL_S = 0.2
UNAVAILABLE = 77
"""The shell scripts' exit code when this machine cannot have what they need (automake's convention)."""
FINAL_STATES = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
    | {"TIMEOUT"}
)


class Unavailable(Exception):
    """This machine cannot run the cluster; the text says why."""


@dataclass(frozen=True)
class JobEnd:
    """How a job ended: Slurm's state name and its exit code as ``code:signal``, both as sacct shows them."""

    state: str
    exit_code: str


@dataclass
class Lab:
    """One cluster with accounting, an ordinary user and the Pyxis stand-in.

    Two labs can run side by side if `directory` and `port` differ (by 200 or more).

    Attributes:
        directory: everything of the cluster; `directory / "log"` has the daemons' logs.
        port: slurmctld's; the next are slurmdbd's and sshd's, and from +101 on the nodes'.
        nodes: how many; their names are node1, node2, ...
        gpus: pretended GPUs per node.
        image: the container image as a directory.
        sqsh: the same image as a squashfs file, as enroot writes it.
    """

    directory: Path
    port: int = 27817
    nodes: int = 8
    gpus: int = 8
    user: str = "labuser"
    ssh_host: str = "127.0.0.1"
    image: Path = field(init=False)
    sqsh: Path = field(init=False)

    @property
    def ssh_port(self) -> int:
        return self.port + 2

    @property
    def ssh_key(self) -> Path:
        """The private key of `user`, readable by root alone."""
        return self.directory / "ssh" / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.directory / "ssh" / "known_hosts"

    @property
    def shared(self) -> Path:
        """A folder that all nodes see and everyone may write to, as a cluster's scratch."""
        return self.directory / "shared"

    @property
    def slurm_conf(self) -> Path:
        return self.directory / "etc" / "slurm.conf"

    def start(self) -> None:
        """Start the cluster and build the image; quick where both are there.

        Raises:
            Unavailable: not root, no user namespaces, or packages cannot be installed.
        """
        require_privileges()
        started_with = self.directory / "nodes"
        if started_with.exists() and started_with.read_text().strip() != str(self.nodes):
            self.stop()
        self._script("slurm-cluster.sh", "start", str(self.nodes))
        folder = Path(self._script("image.sh").strip())
        self.image, self.sqsh = folder / "rootfs", folder / "image.sqsh"
        self.shared.mkdir(exist_ok=True)
        self.shared.chmod(0o1777)

    def stop(self) -> None:
        """End all jobs and daemons; the files stay."""
        self._script("slurm-cluster.sh", "stop")

    def end(self, daemon: str, sent: signal.Signals = signal.SIGTERM) -> None:
        """End slurmctld, or the slurmd of a node by the node's name, and wait until it is gone."""
        pid = int((self.directory / f"run/{daemon}.pid").read_text())
        os.kill(pid, sent)
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{daemon} (pid {pid}) does not end")
            time.sleep(POLL_S)

    def run(
        self,
        command: str | Sequence[str],
        user: str = "root",
        *,
        check: bool = True,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program, or a line of bash, on the login node.

        Args:
            command: arguments, or a string for bash.
            user: "root" or the lab's ordinary user.
            cwd: where; by default the shared folder.
            env: variables on top of a login's few; nothing else of this process enters.
            timeout: seconds.

        Raises:
            AssertionError: `check` is set and the command failed; with its output.
            subprocess.TimeoutExpired: it took longer than `timeout`.
        """
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        entry = pwd.getpwnam(user)
        login = {"HOME": entry.pw_dir, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", "LANG": "C.UTF-8"}
        done = subprocess.run(
            argv,
            cwd=cwd or self.shared,
            env={**login, "PATH": PATH, "SLURM_CONF": str(self.slurm_conf), **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            user=entry.pw_uid,
            group=entry.pw_gid,
            extra_groups=[],
        )
        if check:
            assert done.returncode == 0, f"{argv} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def wait(self, job: str | int, timeout: float = 120) -> JobEnd:
        """Wait until a job has ended for good; one that is requeued has not.

        Raises:
            TimeoutError: it has not ended in `timeout` seconds; with squeue's view of it.
        """
        end = time.monotonic() + timeout
        queued = ["squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T %r"]
        ended = ["sacct", "-n", "-X", "-P", "-j", str(job), "-o", "State,ExitCode"]
        seen = ""
        while time.monotonic() < end:
            seen = self.run(queued, check=False).stdout.strip()
            # squeue forgets a job after some minutes, and sacct learns of its end a moment later
            if not seen or seen.split()[0] in FINAL_STATES:
                state, _, code = self.run(ended).stdout.strip().partition("|")
                if state and state.split()[0] in FINAL_STATES:
                    return JobEnd(state.split()[0], code)
            time.sleep(POLL_S)
        raise TimeoutError(f"job {job} has not ended after {timeout} s: {seen or 'not in the queue'}")

    def log(self, job: str | int) -> str:
        """What a job has written so far to its output file; empty if there is none."""
        shown = self.run(["scontrol", "show", "job", str(job)]).stdout
        match = re.search(r"^ *StdOut=(.*)$", shown, re.MULTILINE)
        path = Path(match[1]) if match else None
        return path.read_text(errors="replace") if path and path.exists() else ""

    def image_with(self, **variables: str) -> Path:
        """A copy of the directory image whose own environment has these variables too."""
        name = "image-" + re.sub(r"\W+", "_", "-".join(f"{k}={v}" for k, v in sorted(variables.items())))
        copy = self.directory / name
        shutil.rmtree(copy, ignore_errors=True)
        subprocess.run(["cp", "-a", str(self.image), str(copy)], check=True)
        with (copy / "etc" / "environment").open("a") as file:
            file.writelines(f"{key}={value}\n" for key, value in variables.items())
        return copy

    def _script(self, name: str, *args: str) -> str:
        ours = {
            "SLURM_LAB_DIR": str(self.directory),
            "SLURM_LAB_CTLD_PORT": str(self.port),
            "SLURM_LAB_SSH_PORT": str(self.ssh_port),
            "SLURM_LAB_SSH_ADDR": self.ssh_host,
            "SLURM_LAB_USER": self.user,
            "SLURM_LAB_GPUS": str(self.gpus),
        }
        others = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        # the daemons that it starts keep stdout and stderr open, so these are files and not pipes
        output, errors = self.directory / "script.out", self.directory / "script.err"
        self.directory.mkdir(parents=True, exist_ok=True)
        with output.open("w") as out, errors.open("w") as err:
            rc = subprocess.call(
                [HERE / name, *args], env=others | ours, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        if rc == UNAVAILABLE:
            raise Unavailable(errors.read_text().strip())
        if rc != 0:
            raise RuntimeError(f"{name} {' '.join(args)} exited {rc}: {errors.read_text().strip()}")
        return output.read_text()


def require_privileges() -> None:
    """Raise Unavailable unless this process may start a cluster with containers."""
    if os.geteuid() != 0:
        raise Unavailable("the cluster tests need root")
    if subprocess.run(["unshare", "--user", "--mount", "true"], capture_output=True).returncode != 0:
        raise Unavailable("the cluster tests need user namespaces")


def default_lab() -> Lab:
    """The tests' own cluster, apart from the one that slurm-cluster.sh starts by default.

    MLMSUB_CLUSTER_DIR and MLMSUB_CLUSTER_PORT put it elsewhere.
    """
    directory = Path(os.environ.get("MLMSUB_CLUSTER_DIR", CACHE / "cluster"))
    return Lab(directory, port=int(os.environ.get("MLMSUB_CLUSTER_PORT", "27817")))


@contextmanager
def running(lab: Lab) -> Iterator[Lab]:
    """The lab, started, and stopped at the end unless MLMSUB_KEEP_CLUSTER=1; one user of it at a time."""
    require_privileges()
    lab.directory.mkdir(parents=True, exist_ok=True)
    with (lab.directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            lab.start()
            yield lab
        finally:
            if os.environ.get("MLMSUB_KEEP_CLUSTER") != "1" and lab.slurm_conf.exists():
                lab.stop()
