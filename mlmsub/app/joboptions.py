"""The options of sbatch and srun, from flags, SBATCH_* variables and the profile."""

from __future__ import annotations

from pathlib import PurePath
from typing import TypedDict

from mlmsub.app.sources import Sources
from mlmsub.core import paths, script, stages
from mlmsub.core.errors import UsageError
from mlmsub.core.issues import warning
from mlmsub.core.quoting import sbatch_value
from mlmsub.core.values import MemorySize, TimeLimit, number

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


class Bounds(TypedDict):
    """Fields of RunSpec."""

    script_signal: str
    chain: int
    max_restarts: int
    max_total_time: int


def nodes(sources: Sources) -> int:
    text = sources.pick("nodes", (sources.request.nodes, "--nodes"), ("1", "default"))
    if not (number := _number("--nodes", text, "nodes")):
        raise UsageError("--nodes must be 1 or more")
    return number


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


def sbatch(sources: Sources, *, job_name: str, nodes: int, tasks_per_node: int) -> dict[str, str]:
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
    options |= _restarts(sources, TimeLimit.parse(options["time"]).seconds)
    for option, value in options.items():
        _expressible(f"--{option}", value)
    return options


def _restarts(sources: Sources, limit: int) -> dict[str, str]:
    """Who is told of the time limit, and when; and whether Slurm may start the job again. `limit` is in seconds."""
    profile, stage = sources.profile, sources.request.stage
    before = sources.pick(
        "signal",
        (sources.request.stop_before, "--stop-before"),
        (str(profile.stop_before or ""), f"profile {sources.named.name}"),
    )
    before = before and str(_number("--stop-before", before, "seconds"))
    stops = any(part in script.STOPS for part in stage.split(stages.AND))
    stops = stops or (stage == stages.SCRIPT and bool(before or profile.script_signal))
    if stops and not before and limit < 2 * script.STOP_BEFORE:
        message = f"a time limit of {limit} s leaves no time to save before it; what the last save has not is lost"
        sources.issues.append(warning("stop-before", "time", message, "set a longer --time, or --stop-before SECONDS"))
        stops = False
    requeue = sources.pick(
        "requeue",
        (sources.request.requeue, "--requeue, --no-requeue"),
        sources.from_profile("requeue"),
        ("false" if stage == stages.SCRIPT else "true", "default"),
    )
    signal = {"signal": f"B:USR1@{before or script.STOP_BEFORE}"} if stops else {}
    return signal | {"requeue" if requeue == "true" else "no-requeue": ""}


def _number(flag: str, text: str, unit: str) -> int:
    if (said := number(text)) is None:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise UsageError(f"{flag} must be a number of {unit}, not {shown!r}")
    return said


def _chain(sources: Sources) -> int:
    """How many jobs follow the first one."""
    jobs = _number("--chain", sources.request.chain or "0", "jobs")
    if jobs > (max_restarts := sources.profile.max_restarts):
        raise UsageError(
            f"--chain {jobs}: after {max_restarts} restarts a run is not started again (max_restarts)",
            fix=f"--chain {max_restarts}, or set the profile's `max_restarts`",
        )
    if jobs and sources.profile.scheduler == "local":
        raise UsageError("--chain needs Slurm: a local run has no time limit, and nothing preempts it")
    return jobs


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


def bounds(sources: Sources) -> Bounds:
    """How often, how long and by how many jobs a run may go on, and the signal that a script wants before its limit."""
    profile = sources.profile
    return {
        "script_signal": profile.script_signal if sources.request.stage == stages.SCRIPT else "",
        "chain": _chain(sources),
        "max_restarts": profile.max_restarts,
        "max_total_time": TimeLimit.parse(profile.max_total_time).seconds if profile.max_total_time else 0,
    }


def _expressible(name: str, value: str) -> None:
    try:
        sbatch_value(value)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
