"""Every path of a run, from the cluster's side and from inside the container. No path is spelt elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass

# where the reference's sbatch.sh mounts its two directories, and where the run directory goes
SANDBOX = "/workspace/nmm-sandbox"
SCRATCH = "/workspace/scratch"
RUN = "/mlmsub/run"

# inside a run directory
JOB_SCRIPT = "job.sbatch"
ENTRYPOINT = "entrypoint.sh"
ATTEMPTS = "attempts.sh"
MANIFEST = "manifest.sha256"
SPEC = "run.yaml"
RECORD = "record.json"
SETUP = "env/setup.sh"
OVERRIDES = "env/overrides.sh"
DEFAULTS = "env/defaults.sh"
PROFILE_ENV = "env/profile.sh"
MERGED = "env/merged.sh"
ORDER = "env/order"
COMMAND = "env/command.sh"
RUNTIME = "runtime"
SECRETS = "secrets"
# names in env/ that an env setup's own siblings cannot have
RESERVED = tuple(
    path.removeprefix("env/") for path in (SETUP, OVERRIDES, DEFAULTS, PROFILE_ENV, MERGED, ORDER, COMMAND)
)

_RUN_ID = re.compile(r"\d{8}-\d{6}-[A-Za-z0-9_.]+-[0-9a-f]{6}")


@dataclass(frozen=True)
class RunPaths:
    """The run directory of one run, as the cluster's nodes see it: `<runs_root>/<yyyymm>/<run id>`."""

    runs_root: str
    run_id: str

    def __post_init__(self) -> None:
        if not _RUN_ID.fullmatch(self.run_id):
            raise ValueError(f"{self.run_id!r} is not a run id")

    @property
    def dir(self) -> str:
        return f"{self.runs_root.rstrip('/')}/{self.run_id[:6]}/{self.run_id}"

    @property
    def logs(self) -> str:
        return f"{self.dir}/logs"

    @property
    def state(self) -> str:
        return f"{self.dir}/state"


def run_id(stamp: str, stage: str, token: str) -> str:
    """`<yyyymmdd-hhmmss>-<stage>-<six hex digits>`: sorts by time, says what it is, and is unique.

    The names of several stages have `_` between them.
    """
    return f"{stamp}-{stage.replace('+', '_')}-{token}"


def job_name(*parts: str) -> str:
    """A job name that can stand in a file name: `%x` with a `/` or of 256 bytes leaves a job without log.

    At most 64 bytes, of the characters that no shell and no file system minds.
    """
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", "-".join(filter(None, parts))).strip("-.")
    return name[:64].rstrip("-.") or "mlmsub"
