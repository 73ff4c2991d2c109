"""The job script: `slurm/job.sbatch.j2` and the sbatch and srun options that go into it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from mlmsub import __version__
from mlmsub.core import paths, stages
from mlmsub.core.quoting import quote, sbatch_value
from mlmsub.core.spec import RunSpec

if TYPE_CHECKING:
    import jinja2

# sbatch options that mlmsub decides, each with the flag or profile key that sets it. `--sbatch-arg` may not touch them.
MANAGED = {
    "job-name": "--job-name",
    "account": "--account or the profile's `account`",
    "partition": "--partition or the profile's `partition`",
    "nodes": "--nodes",
    "ntasks": "--nodes and the profile's `gpus_per_node`",
    "ntasks-per-node": "the profile's `gpus_per_node` and LAUNCH_SCRIPT",
    "gpus-per-node": "the profile's `gpus_per_node`",
    "gpus": "the profile's `gpus_per_node`",
    "gres": "the profile's `gpu_request` and `gpu_type`",
    "cpus-per-task": "the profile's `cpus_per_task`",
    "time": "--time or the profile's `time`",
    "mem": "the profile's `mem`",
    "mem-per-cpu": "the profile's `mem`",
    "mem-per-gpu": "the profile's `mem`",
    "exclusive": "the profile's `exclusive`",
    "oversubscribe": "the profile's `exclusive`",
    "overcommit": "the profile's `overcommit`",
    "qos": "the profile's `qos`",
    "reservation": "the profile's `reservation`",
    "constraint": "the profile's `constraint`",
    "segment": "the profile's `segment`",
    "nodelist": "the profile's `nodelist`",
    "exclude": "the profile's `exclude`",
    "clusters": "the profile's `cluster`",
    "dependency": "--after and --chain",
    "kill-on-invalid-dep": "--after",
    "output": "mlmsub: `mlmsub logs` finds it",
    "error": "mlmsub: it goes to the log",
    "open-mode": "mlmsub",
    "chdir": "mlmsub: the run directory is the run's key",
    "requeue": "--requeue, or the profile's `requeue`",
    "no-requeue": "--no-requeue, or the profile's `requeue`",
    "signal": "--stop-before, or the profile's `stop_before`",
    "export": "mlmsub: values travel in the env setup",
    "export-file": "mlmsub: values travel in the env setup",
    "array": "mlmsub: one run is one job",
    "wrap": "mlmsub",
    "parsable": "mlmsub",
    "wait": "--watch",
    "test-only": "--dry-run",
    "container-image": "CONTAINER_IMAGE or the profile's `image`",
    "container-mounts": "the profile's `mounts`",
}
SHORT = {
    "J": "job-name", "A": "account", "p": "partition", "N": "nodes", "n": "ntasks", "t": "time", "c": "cpus-per-task",
    "q": "qos", "C": "constraint", "w": "nodelist", "x": "exclude", "M": "clusters", "d": "dependency", "o": "output",
    "e": "error", "D": "chdir", "G": "gpus", "O": "overcommit", "a": "array", "W": "wait", "s": "oversubscribe",
}  # fmt: skip
# Stages that save and end when they are asked to, and how many seconds before the time limit they are asked.
STOPS = (*stages.TRAINING, "extract")
STOP_BEFORE = 300
_FLAGS = "HIkQvhVu"  # short options of sbatch that take no value


def managed_option(argument: str) -> str:
    """The managed option that an sbatch argument would set, or ""."""
    if argument.startswith("--"):
        name = argument[2:].partition("=")[0]
        # sbatch takes beginnings too: --part=x is --partition=x
        return name if name in MANAGED else next((known for known in MANAGED if name and known.startswith(name)), "")
    for letter in argument[1:]:  # bundled: -HN4 is -H -N 4
        if letter in SHORT:
            return SHORT[letter]
        if letter not in _FLAGS:
            return ""  # takes the rest as its value
    return ""


def log_name(spec: RunSpec, stamp: str, job_id: str = "%j", job_name: str = "%x") -> str:
    """`logs/%x_%j_<UTC stamp>.log`, or the file's name once the job id is known."""
    return f"logs/{job_name}_{job_id}_{stamp}.log"


def directives(spec: RunSpec, run: paths.RunPaths, stamp: str) -> list[str]:
    """The `#SBATCH` lines without their beginning, one option each."""
    own = {
        "chdir": run.dir,
        "output": f"{run.dir}/{log_name(spec, stamp)}",
        "open-mode": "append",
    }
    if "requeue" not in spec.sbatch:
        own["no-requeue"] = ""  # always explicit: a cluster's JobRequeue says one or the other
    options = {**spec.sbatch, **own}
    lines = [f"--{name}" + (f"={sbatch_value(value)}" if value else "") for name, value in options.items()]
    return lines + [sbatch_value(argument) for argument in spec.sbatch_args]


def srun_options(spec: RunSpec, run: paths.RunPaths) -> list[str]:
    """srun's options, quoted for the shell."""
    options = dict(spec.srun)
    if spec.image:
        mounts = ",".join((*spec.mounts, f"{run.dir}:{paths.RUN}"))
        options |= {
            "container-image": spec.image,
            "container-mounts": mounts,
            "container-workdir": spec.workdir,
        }
        options["no-container-mount-home"] = ""
    return [f"--{name}" + (f"={quote(value)}" if value else "") for name, value in options.items()] + [
        quote(argument) for argument in spec.srun_args
    ]


def render(template: str, spec: RunSpec, run: paths.RunPaths, stamp: str) -> str:
    """The job script's text. `template` is slurm/job.sbatch.j2, `stamp` the UTC time of submission."""
    inside = spec.run_dir_inside(run)
    return _compiled(template).render(
        version=__version__,
        directives=directives(spec, run, stamp),
        run_id=run.run_id,
        run_dir=run.dir,
        run_dir_inside=inside,
        prelude=spec.prelude.rstrip(),
        ntasks=spec.ntasks,
        launcher=spec.launcher,
        gpus_per_node=spec.gpus_per_node,
        workdir=inside if spec.native else spec.workdir,
        what=spec.job_name,
        srun=srun_options(spec, run),
        native=spec.native,
        max_restarts=spec.max_restarts,
        max_total_time=spec.max_total_time,
        trains="1" if stages.trains(spec.stage) else "",
        script_signal=spec.script_signal,
        stop_before=spec.sbatch.get("signal", "").rpartition("@")[2] or 0,
        chain=spec.chain,
        parents=spec.parent_lines,
        stage=spec.stage,
        outputs=" ".join(spec.outputs),
    )


@cache
def _compiled(template: str) -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    environment.filters["q"] = quote
    return environment.from_string(template)
