"""A profile: one cluster, as data. `docs/profiles.md` explains each key to the user."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from mlmsub.core.quoting import is_name
from mlmsub.core.values import MemorySize, Mount, TimeLimit

# Names whose values are secret wherever they come from; a profile may add its own.
SECRET_NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "NGC_API_KEY")


@dataclass(frozen=True)
class Profile:
    """How to reach a cluster and what its jobs look like. Empty means: not said here.

    Raises ValueError for a value that cannot be meant; the loader adds the file and the key.
    """

    # the place
    scheduler: Literal["slurm", "local"] = "slurm"
    host: str = ""
    transport: Literal["auto", "paramiko", "openssh"] = "auto"
    ssh_config: str = ""
    slurm_bin: str = ""
    prelude: str = ""
    cluster: str = ""
    pass_env: tuple[str, ...] = ()
    runs_root: str = ""

    # the shape of a node
    gpus_per_node: int = 8
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    gpu_type: str = ""
    gpu_memory: int = 0  # GB of one GPU; 0 = as its gpu_type has
    cpus_per_task: int = 0
    mem: str = "0"
    exclusive: bool = True
    overcommit: bool = True
    mpi: str = "pmix"
    arch: Literal["x86_64", "aarch64"] = "x86_64"

    # the job
    account: str = ""
    partition: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""
    segment: str = ""
    nodelist: str = ""
    exclude: str = ""
    time: str = "04:00:00"
    max_time: str = ""
    max_nodes: int = 0
    requeue: Literal["", "true", "false"] = ""  # empty: as suits the stage
    stop_before: int = 0  # seconds; 0 = as suits the stage
    script_signal: Literal["", "TERM", "INT", "USR1", "USR2"] = ""
    max_restarts: int = 20
    max_total_time: str = ""
    sbatch_args: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()

    # the container, and what is in it
    image: str = ""
    scratch: str = ""
    sandbox: str = ""
    mounts: tuple[str, ...] = ()
    launch_script: str = ""
    env_setup: str = ""
    env: dict[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ValueError("gpus_per_node must be at least 1 (on a cluster without GPUs: tasks per node)")
        TimeLimit.parse(self.time)
        for limit in filter(None, (self.max_time, self.max_total_time)):
            TimeLimit.parse(limit)
        MemorySize.parse(self.mem)
        for text in self.mounts:
            Mount.parse(text)
        for key, names in (("env", tuple(self.env)), ("secrets", self.secrets), ("pass_env", self.pass_env)):
            for name in names:
                if not is_name(name):
                    raise ValueError(f"{key}: {name!r} is not a variable's name")
        if any("\0" in value for value in self.env.values()):
            raise ValueError("env: a variable cannot hold NUL")
        for key in ("scratch", "runs_root", "slurm_bin"):
            path = getattr(self, key)
            if path and not path.startswith("/"):
                raise ValueError(f"{key} must be an absolute path, not {path!r}")

    @property
    def secret_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*SECRET_NAMES, *self.secrets)))

    def said(self) -> dict[str, object]:
        """The keys that differ from the default, in the order of the class."""
        default = Profile()
        return {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)
        }


# Runs the same bundle and entrypoint as processes of this machine: no Slurm, no container.
LOCAL = Profile(scheduler="local", gpus_per_node=1, gpu_request="none")
