"""The options of sbatch and srun, from flags, SBATCH_* variables and the profile."""

from __future__ import annotations

from pathlib import PurePath

from mlmsub.app.sources import Sources
from mlmsub.core import paths, script, stages
from mlmsub.core.errors import UsageError
from mlmsub.core.quoting import sbatch_value
from mlmsub.core.spec import Parent
from mlmsub.core.values import MemorySize, TimeLimit

# option -> (the variable by which sbatch would let the environment override a script's line, the profile's key)
_PLACEMENT = {
    "account": ("SBATCH_ACCOUNT", "account"),
    "partition": ("SBATCH_PARTITION", "partition"),
    "qos": ("SBATCH_QOS", "qos"),
    "reservation": ("SBATCH_RESERVATION", "reservation"),
    "constraint": ("SBATCH_CONSTRAINT", "constraint"),
    "segment": ("", "segment"),
    "nodelist": ("", "nodelist"),
    "exclude": ("", "exclude"),
    "clusters": ("SBATCH_CLUSTERS", "cluster"),
    "time": ("SBATCH_TIMELIMIT", "time"),
}


def nodes(sources: Sources) -> int:
    text = sources.pick("nodes", (sources.request.nodes, "--nodes"), ("1", "default"))
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"--nodes must be a number from 1 on, not {text!r}")
    return int(text)


def job_name(sources: Sources, stage: str, args: tuple[str, ...], model: str) -> str:
    """`<stage>-<model basename>`; for a script its own name stands for the stage."""
    first = PurePath(args[0]).name.removesuffix(".sh") if stage == stages.SCRIPT else stage
    name = sources.pick(
        "job-name",
        (sources.request.job_name, "--job-name"),
        sources.from_environment("SBATCH_JOB_NAME"),
        (paths.job_name(first, PurePath(model).name), "default"),
    )
    return paths.job_name(name)


def sbatch(
    sources: Sources, *, job_name: str, nodes: int, tasks_per_node: int, parents: tuple[Parent, ...]
) -> dict[str, str]:
    """The managed options in the order of the script's lines; "" makes a bare flag."""
    profile, request = sources.profile, sources.request
    options = {"job-name": job_name}
    said = {"account": request.account, "partition": request.partition, "time": request.time}
    for option, (variable, key) in _PLACEMENT.items():
        value = sources.pick(
            option,
            (said.get(option, ""), f"--{option}"),
            *([sources.from_environment(variable)] if variable else []),
            sources.from_profile(key),
        )
        if value:
            options[option] = value
    try:
        options["time"] = TimeLimit.parse(options["time"]).render()
    except ValueError as error:
        raise UsageError(f"time ({sources.origins['time']}): {error}") from None
    options |= {"nodes": str(nodes), "ntasks-per-node": str(tasks_per_node)}
    gpus = ":".join(filter(None, (profile.gpu_type, str(profile.gpus_per_node))))
    if profile.gpu_request != "none":
        options |= {"gpus-per-node": gpus} if profile.gpu_request == "gpus-per-node" else {"gres": f"gpu:{gpus}"}
    if profile.cpus_per_task:
        options["cpus-per-task"] = str(profile.cpus_per_task)
    options |= {"exclusive": ""} if profile.exclusive else {}
    options["mem"] = MemorySize.parse(profile.mem).render()
    options |= {"overcommit": ""} if profile.overcommit else {}
    if parents:
        options["dependency"] = "afterok:" + ":".join(parent.job_id for parent in parents)
        options["kill-on-invalid-dep"] = "yes"
    for option, value in options.items():
        _expressible(f"--{option}", value)
    return options


def sbatch_args(sources: Sources) -> tuple[str, ...]:
    """The user's own sbatch options; they may not touch a managed one."""
    arguments = (*sources.profile.sbatch_args, *sources.request.sbatch_args)
    for argument in arguments:
        if not argument.startswith("-"):
            raise UsageError(f"--sbatch-arg {argument!r}: write one option with its value, such as --comment=x")
        if managed := script.managed_option(argument):
            raise UsageError(
                f"--sbatch-arg {argument!r}: --{managed} is decided elsewhere",
                fix=f"it is decided by {script.MANAGED[managed]}",
            )
        _expressible("--sbatch-arg", argument)
    return arguments


def srun(sources: Sources) -> dict[str, str]:
    profile = sources.profile
    options = {"mpi": profile.mpi, "kill-on-bad-exit": "1", "wait": "0", "distribution": "block"}
    if profile.cpus_per_task:
        options["cpus-per-task"] = str(profile.cpus_per_task)  # Slurm from 22.05 on does not take it over from sbatch
    return {name: value for name, value in options.items() if value}


def _expressible(name: str, value: str) -> None:
    try:
        sbatch_value(value)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
