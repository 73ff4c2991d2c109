"""RunSpec: one submission, frozen and complete. Everything that follows is a function of it.

`run.yaml` in the run directory is this class written down, and `mlmsub submit --from run.yaml` reads it back.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field, fields
from typing import Literal

from mlmsub.core import paths, stages
from mlmsub.core.errors import UsageError
from mlmsub.core.strict import build

ON_CLUSTER = "cluster:"


@dataclass(frozen=True)
class EnvSetup:
    """The env-setup file, and the files beside it that it sources: name -> content. The first is the setup itself."""

    path: str = ""
    files: dict[str, str] = field(default_factory=dict)

    @property
    def on_cluster(self) -> str:
        """The path of a setup that lies on the cluster (`cluster:/path`) and is copied there; "" for a shipped one."""
        return self.path.removeprefix(ON_CLUSTER) if self.path.startswith(ON_CLUSTER) else ""

    def contents(self) -> dict[str, bytes]:
        return {name: to_bytes(text) for name, text in self.files.items()}


@dataclass(frozen=True)
class Parent:
    """A run that this one waits for, and how it must have ended, in Slurm's words."""

    run_id: str
    run_dir: str
    condition: Literal["afterok", "afterany", "afternotok"] = "afterok"


@dataclass(frozen=True)
class RunSpec:
    """What to run, where, and with which values; `origins` says where each one came from."""

    stage: str
    args: tuple[str, ...]
    model: str
    job_name: str

    # the job
    scheduler: Literal["slurm", "local"]
    nodes: int
    gpus_per_node: int
    tasks_per_node: int
    launcher: Literal["python", "torchrun"]
    launch_script: str
    sbatch: dict[str, str]  # managed options in order: name -> value, "" for a bare flag
    sbatch_args: tuple[str, ...]
    srun: dict[str, str]
    srun_args: tuple[str, ...]
    prelude: str

    # the container
    image: str
    mounts: tuple[str, ...]
    workdir: str

    # the values
    setup: EnvSetup
    overrides: dict[str, str]
    profile_env: dict[str, str]
    defaults: dict[str, str]
    conf_name: str  # model.yaml, model.sh or ""
    conf: str
    outputs: tuple[str, ...] = ()  # variables whose paths the stage promises to fill
    install: str = ""
    runs_root: str = ""
    slurm_bin: str = ""
    pass_env: tuple[str, ...] = ()
    secret_names: tuple[str, ...] = ()
    parents: tuple[Parent, ...] = ()
    chain: int = 0  # jobs that follow the first one, each for when the one before was cut off
    script_signal: str = ""  # what the ranks of a script get before the time limit, such as TERM
    max_restarts: int = 20
    max_total_time: int = 0  # seconds of all attempts together; 0 = no bound
    allow: tuple[str, ...] = ()  # codes of errors that the user overrides
    origins: dict[str, str] = field(default_factory=dict)

    @property
    def native(self) -> bool:
        """Whether mlmsub.runtime does the work, not the user's own command."""
        return self.stage != stages.SCRIPT

    @property
    def ntasks(self) -> int:
        return self.nodes * self.tasks_per_node

    @property
    def parent_lines(self) -> str:
        """A line `CONDITION RUN_DIRECTORY` for each parent, as the scripts on the cluster read them."""
        return "".join(f"{parent.condition} {parent.run_dir}\n" for parent in self.parents)

    @property
    def script_file(self) -> str:
        """The user's script on the cluster, if it is one of the sandbox; else ""."""
        sandbox = next((m.split(":")[0] for m in self.mounts if m.split(":")[1] == paths.SANDBOX), self.workdir)
        relative = not self.native and self.args[0].endswith(".sh") and not self.args[0].startswith("/")
        return f"{sandbox}/{self.args[0]}" if relative else ""

    def run_dir_inside(self, run: paths.RunPaths) -> str:
        """The run directory as the job's processes see it: mounted in a container, else itself."""
        return paths.RUN if self.image else run.dir

    def to_data(self) -> dict[str, object]:
        """Plain strings, lists and mappings, for YAML; `from_data` reads them back."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_data(cls, data: object, where: str) -> RunSpec:
        try:
            return build(cls, _revived(data), where)
        except binascii.Error as error:
            raise UsageError(f"{where}: not base64: {error}") from None


def to_text(content: bytes) -> str:
    """Any bytes as a string, as Python does for file names: what is not UTF-8 becomes lone surrogates."""
    return content.decode(errors="surrogateescape")


def to_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


_BASE64 = "base64:"  # marks a string that YAML cannot hold


def _plain(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (EnvSetup, Parent)):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    text = str(value)
    if text.startswith(_BASE64) or any("\ud800" <= c <= "\udfff" for c in text):
        return _BASE64 + base64.b64encode(to_bytes(text)).decode()
    return text


def _revived(data: object) -> object:
    if isinstance(data, list):
        return [_revived(item) for item in data]
    if isinstance(data, dict):
        return {_revived(key): _revived(item) for key, item in data.items()}
    if isinstance(data, str) and data.startswith(_BASE64):
        return to_text(base64.b64decode(data.removeprefix(_BASE64)))
    return data
