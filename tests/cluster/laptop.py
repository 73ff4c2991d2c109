"""mlmsub on a machine that can only SSH to the login node, and the login node's sshd that tells what it was asked."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command import Mlmsub
from lab import PATH

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract" / "transport"))

from sshd_lab import Sshd

SLURM_COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "srun", "sinfo")


@dataclass(frozen=True)
class Traffic:
    """What an sshd saw: logins that succeeded, and commands that were started."""

    logins: int
    execs: int


class LoginNode(Sshd):
    """An sshd of the login node, which counts."""

    def traffic(self) -> Traffic:
        log = self.log.read_text(errors="replace")
        return Traffic(len(re.findall(r"^Accepted \S+ for ", log, re.M)), log.count("\nStarting session: command"))

    @contextmanager
    def counted(self) -> Iterator[list[Traffic]]:
        """Collects what happens within."""
        before, seen = self.traffic(), []
        yield seen
        after = self.traffic()
        seen.append(Traffic(after.logins - before.logins, after.execs - before.execs))

    def cut(self) -> None:
        """End the connections that are open; new ones are welcome."""
        assert self.process is not None
        shown = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        )
        for pid in map(int, shown.stdout.split()):
            os.kill(pid, 9)


def without_slurm(folder: Path) -> str:
    """A PATH with every program but Slurm's."""
    if not folder.exists():
        folder.mkdir(parents=True)
        for program in Path("/usr/bin").iterdir():
            if program.name not in SLURM_COMMANDS:
                (folder / program.name).symlink_to(program)
    return str(folder)


@dataclass
class Laptop(Mlmsub):
    """mlmsub with a home of its own on this side; `there` is the user's folder on the cluster."""

    there: Path = field(default_factory=Path)
    server: Sshd = field(default=None)  # type: ignore[assignment]
    key: Path | None = None
    login: str = "labuser"
    user: str = "root"

    @property
    def scratch(self) -> Path:
        return self.there / "scratch"

    @property
    def sandbox(self) -> Path:
        return self.there / "sandbox"

    @property
    def ssh_config(self) -> Path:
        return self.home / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.home / "known_hosts"

    def setup(self) -> Laptop:
        for folder in (self.scratch, self.sandbox, self.home / "config/mlmsub/profiles"):
            folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["chown", "-R", f"{self.login}:", str(self.there)], check=True)
        self.known_hosts.write_text(self.server.known_hosts_line())
        self.configure()
        self.profile()
        return self

    def configure(self, *more: str) -> None:
        """Write the ssh configuration; `more` lines come first, and so win."""
        lines = [*more, f"HostName {self.server.address}", f"Port {self.server.port}", f"User {self.login}",
                 f"UserKnownHostsFile {self.known_hosts}", "GlobalKnownHostsFile none", "ControlPath none",
                 f"IdentityFile {self.key or 'none'}", "IdentitiesOnly yes", "IdentityAgent none"]  # fmt: skip
        self.ssh_config.write_text("\n  ".join(["Host cluster", *lines]) + "\n")

    def profile(self, name: str = "lab", **keys: Any) -> None:
        far = {"host": "cluster", "transport": "paramiko", "ssh_config": str(self.ssh_config), "gpus_per_node": 1}
        super().profile(name, **(far | keys))

    def environment(self) -> dict[str, str]:
        """No way to the cluster but SSH."""
        return {
            "HOME": str(self.home), "SLURM_CONF": "/nowhere", "PATH": PATH, "LANG": "C.UTF-8", "TERM": "xterm",
            "XDG_CONFIG_HOME": str(self.home / "config"), "XDG_STATE_HOME": str(self.home / "state"),
        }  # fmt: skip

    def run(self, *args: str | Path, check: bool = True, env: dict[str, str] | None = None, timeout: float = 120):
        return super().run(*args, check=check, env=self.environment() | (env or {}), timeout=timeout)

    def start(self, *args: str) -> subprocess.Popen[str]:
        """The command in the background, its output in a pipe."""
        return subprocess.Popen(
            [str(self.command), *args], env=self.environment(), cwd=self.home, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def records(self) -> list[Path]:
        return sorted((self.home / "state/mlmsub/runs").glob("*.json"))


@dataclass
class Screen:
    """What a terminal session showed, and how it ended."""

    exit_code: int
    text: str

    def count(self, part: str) -> int:
        return self.text.count(part)


def at_terminal(
    argv: Sequence[str | Path], env: Mapping[str, str], answers: Sequence[tuple[str, str]] = (), timeout: float = 60
) -> Screen:
    """Run a command on a terminal of its own, answering each question once it is shown, in this order."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(str(argv[0]), [str(word) for word in argv], dict(env))
    shown, answered, left = b"", 0, list(answers)
    end = time.monotonic() + timeout
    while True:
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise TimeoutError(f"{argv} has not ended; it showed:\n{shown.decode(errors='replace')}")
        try:
            data = os.read(terminal, 4096)
        except OSError:  # how Linux tells the end of a terminal
            data = b""
        if not data:
            break
        shown += data
        if left and left[0][0].encode() in shown[answered:]:
            answered = len(shown)
            os.write(terminal, left.pop(0)[1].encode() + b"\r")
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return Screen(os.waitstatus_to_exitcode(status), shown.decode(errors="replace"))
