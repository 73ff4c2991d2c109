"""The scripts that mlmsub sends to a cluster, run under /bin/sh with stand-ins for Slurm's commands in PATH."""

from __future__ import annotations

import subprocess
from pathlib import Path

from mlmsub.slurm import jobs

SHELLS = {"dash": ["/bin/dash"], "bash": ["/bin/bash", "--posix"]}


class Cluster:
    """A login node: `bin` is first in PATH, `home` is the user's, `scratch` where runs go."""

    def __init__(self, folder: Path, shell: str) -> None:
        self.folder, self.shell = folder, SHELLS[shell]
        self.bin, self.home, self.scratch = folder / "bin", folder / "home", folder / "scratch"
        for path in (self.bin, self.home, self.scratch):
            path.mkdir()
        self.program("squeue", "exit 0")
        self.program("sacct", "exit 0")
        self.program("scancel", f'echo "$@" >>"{folder}/cancelled"')
        self.program("sbatch", "echo 123")

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def without(self, name: str) -> None:
        """PATH holds no such program: all others of /usr/bin are linked, this one is not."""
        clean = self.folder / "clean"
        clean.mkdir()
        for folder in ("/usr/bin", "/bin"):
            for path in Path(folder).iterdir():
                if path.name != name and not (clean / path.name).exists():
                    (clean / path.name).symlink_to(path)
        (self.bin / name).unlink(missing_ok=True)
        self.path = f"{self.bin}:{clean}"

    path = ""

    def queue(self, *jobs: tuple[str, str, str, str]) -> None:
        """squeue knows these: id, state, working directory and command, the last as in the run's job.sbatch."""
        (self.folder / "queue").write_text("".join(f"{'|'.join(job)}\n" for job in jobs))
        self.program("squeue", f"cat {self.folder}/queue")

    def run(
        self,
        name: str,
        stdin: bytes = b"",
        env: dict[str, str] | None = None,
        umask: int = 0o027,
        timeout: int = 30,
        **parameters: str,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run the script `name` with these parameters, in an environment of the user's session."""
        variables = {"PATH": self.path or f"{self.bin}:/usr/bin:/bin", "HOME": str(self.home), "USER": "me"}
        return subprocess.run(
            [*self.shell, "-c", jobs.script(name, **parameters)], input=stdin, cwd=self.home,
            env=variables | (env or {}), capture_output=True, timeout=timeout, umask=umask,
        )  # fmt: skip
