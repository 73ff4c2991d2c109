"""A run directory as the cluster would have it, and ways to run what is in it without Slurm."""

from __future__ import annotations

import secrets
import subprocess
from contextlib import nullcontext
from pathlib import Path

from mlmsub.app import resources
from mlmsub.core import bundle, paths
from mlmsub.core.spec import EnvSetup, RunSpec, to_text

STAMP = "20261130-120000"
# a command that keeps what it was given
PROBE = (
    'env -0 >"$PROBE_OUT.$SLURM_PROCID"; pwd >"$PROBE_OUT.pwd"; '
    'cp -r "$MLMSUB_ARRAYS" "$PROBE_OUT.arrays.$SLURM_PROCID"'
)


def setup(content: str | bytes, **siblings: str) -> EnvSetup:
    """An env setup; siblings by name, `__` for a dot and `_S_` for a slash."""
    content = content.encode() if isinstance(content, str) else content
    others = {name.replace("_S_", "/").replace("__", "."): text for name, text in siblings.items()}
    return EnvSetup("/home/me/setup.sh", {"setup.sh": to_text(content), **others})


class RunDir:
    """The unpacked bundle of `spec`, below `folder`."""

    def __init__(self, spec: RunSpec, folder: Path, **hidden: str) -> None:
        run_id = paths.run_id(STAMP, spec.stage, secrets.token_hex(3))
        self.spec, self.folder = spec, folder
        self.paths = paths.RunPaths(spec.runs_root, run_id)
        self.dir = Path(self.paths.dir)
        self.job_id = str(secrets.randbelow(10**8) + 10**8)  # entrypoint.sh keeps files in /tmp by job id
        self.bin = folder / "bin"
        self.bin.mkdir(exist_ok=True)
        made = bundle.build(spec, self.paths, STAMP, resources.for_bundle(), hidden)
        for name, content in {**made.files, **made.secrets}.items():
            path = self.dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        (self.dir / "logs").mkdir()
        (self.dir / "state").mkdir()

    def program(self, name: str, text: str) -> Path:
        """A stand-in for a program, first in PATH."""
        path = self.bin / name
        path.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        return path

    # --- the job script -----------------------------------------------------------------

    def job(
        self,
        *links: str,
        restart: int | None = None,
        job_id: str = "",
        env: dict[str, str] | None = None,
        script: str = "",
        log: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run job.sbatch (or `script`, a changed one) as slurmstepd would; srun and scontrol are stand-ins.

        `links` are the jobs of its chain that came before.
        """
        if not (self.bin / "scontrol").exists():
            self.program("scontrol", "echo node1; echo node2; [[ $1-$2 == show-hostnames ]]")
        if not (self.bin / "srun").exists():
            self.srun()
        variables = {
            "PATH": f"{self.bin}:/usr/bin:/bin", "HOME": "/home/me", "SLURM_JOB_ID": job_id or self.job_id,
            "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2",
        } | ({} if restart is None else {"SLURM_RESTART_COUNT": str(restart)}) | (env or {})  # fmt: skip
        argv = ["/bin/bash", "-c", script] if script else ["/bin/bash", str(self.dir / "job.sbatch"), *links]
        with log.open("a") if log else nullcontext(subprocess.PIPE) as out:
            return subprocess.run(argv, cwd=self.dir, env=variables, stdout=out, stderr=out, text=True, timeout=60)

    def srun(self, body: str = "exit 0") -> None:
        """A stand-in that keeps its arguments and environment, then does `body`.

        All ranks have ended well, but for the first two where `body` starts those.
        """
        first = 2 if '"$@"' in body else 0
        codes = f"echo 0 >{self.dir}/state/$MLMSUB_RESTART/rank-$i"
        ended_well = f"for ((i = {first}; i < {self.spec.ntasks}; i++)); do {codes}; done"
        self.program(
            "srun",
            f'printf "%s\\0" "$@" >"{self.folder}/srun.argv"; env -0 >"{self.folder}/srun.env"\n{ended_well}\n{body}',
        )

    @property
    def srun_argv(self) -> list[str]:
        return (self.folder / "srun.argv").read_bytes().decode().split("\0")[:-1]

    @property
    def srun_env(self) -> dict[str, str]:
        return parse_env((self.folder / "srun.env").read_bytes())

    # --- the entrypoint ------------------------------------------------------------------

    def start(
        self, rank: int = 0, *, ntasks: int = 1, nodes: int = 1, restart: int = 0, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the entrypoint as srun would start this rank; `env` is what the image sets."""
        per_node = ntasks // nodes
        (self.dir / f"state/{restart}").mkdir(exist_ok=True)
        variables = {
            "PATH": f"{self.bin}:/usr/bin:/bin", "HOME": "/root", "PROBE_OUT": str(self.folder / "probe"),
            "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(ntasks), "SLURM_LOCALID": str(rank % per_node),
            "SLURM_NODEID": str(rank // per_node), "SLURM_NNODES": str(nodes), "SLURM_JOB_ID": self.job_id,
            "SLURMD_NODENAME": f"node{rank // per_node + 1}", "MLMSUB_RUN_DIR": str(self.dir),
            "MLMSUB_RESTART": str(restart), "MLMSUB_LAUNCHER": self.spec.launcher,
            "MLMSUB_GPUS_PER_NODE": str(self.spec.gpus_per_node), "MLMSUB_MASTER_ADDR": "node1",
            "MLMSUB_MASTER_PORT": "11111", "MLMSUB_WORKDIR": str(self.dir) if self.spec.native else self.spec.workdir,
        } | (env or {})  # fmt: skip
        return subprocess.Popen(
            ["/bin/bash", str(self.dir / "entrypoint.sh")], cwd=self.folder, env=variables,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def rank(self, rank: int = 0, **how: object) -> tuple[int, str]:
        """Run one rank to its end: exit code, and all that it printed."""
        return ended(self.start(rank, **how))  # type: ignore[arg-type]

    def ranks(self, ntasks: int, **how: object) -> list[tuple[int, str]]:
        """Run all ranks at once."""
        started = [self.start(rank, ntasks=ntasks, **how) for rank in range(ntasks)]  # type: ignore[arg-type]
        return [ended(process) for process in started]

    def env(self, rank: int = 0) -> dict[str, str]:
        """The environment that the command of a rank had (its command must be PROBE)."""
        return parse_env((self.folder / f"probe.{rank}").read_bytes())

    def arrays(self, rank: int = 0) -> dict[str, list[str]]:
        folder = self.folder / f"probe.arrays.{rank}"
        return {path.name: to_text(path.read_bytes()).split("\0")[:-1] for path in folder.iterdir()}

    def state(self, name: str, restart: int = 0) -> str:
        """A file or the target of a link in the state folder; "" if it is not there."""
        path = self.dir / f"state/{restart}/{name}"
        if path.is_symlink():
            return str(path.readlink())
        return path.read_text().strip() if path.exists() else ""


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, (out + err).decode(errors="replace")


def parse_env(content: bytes) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in to_text(content).split("\0")[:-1])
    return {name: value for name, _, value in pairs}
