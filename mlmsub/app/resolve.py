"""argv + profile + env setup + model conf -> RunSpec, complete, every value with its origin. Sends nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from mlmsub.app import envfile, models, resources
from mlmsub.app.config import NamedProfile, User, load_profile, read_yaml
from mlmsub.app.records import Record, Records
from mlmsub.core import checks, paths, script, stages
from mlmsub.core.envsetup import Reading
from mlmsub.core.errors import UsageError
from mlmsub.core.issues import Issue, warning
from mlmsub.core.quoting import is_name, sbatch_value
from mlmsub.core.spec import EnvSetup, Parent, RunSpec
from mlmsub.core.values import Image, MemorySize, Mount, TimeLimit

DEFAULT_IMAGE = "nvidia-modelopt-megatron:latest"  # the reference's
DEFAULT_SETUP = "env_setup_template.sh"  # the reference's, in the working directory

# SBATCH_* variables override a script's own lines, so they are read here instead of left to sbatch.
_SBATCH_VARIABLES = {
    "job-name": "SBATCH_JOB_NAME", "account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION",
    "qos": "SBATCH_QOS", "reservation": "SBATCH_RESERVATION", "constraint": "SBATCH_CONSTRAINT",
    "time": "SBATCH_TIMELIMIT", "clusters": "SBATCH_CLUSTERS",
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What the command line said; empty means: not said."""

    stage: str
    args: tuple[str, ...]
    profile: str = ""
    env_setup: str = ""
    overrides: tuple[str, ...] = ()
    nodes: str = ""
    time: str = ""
    partition: str = ""
    account: str = ""
    job_name: str = ""
    after: tuple[str, ...] = ()
    sbatch_args: tuple[str, ...] = ()
    install: str = ""
    static: bool = False


@dataclass(frozen=True)
class Resolved:
    """The spec, what the checks found, and what must not be written into the spec: secret values."""

    spec: RunSpec
    profile: NamedProfile
    issues: tuple[Issue, ...]
    values: dict[str, str]  # variables as the job will see them, as far as known
    secrets: dict[str, str]


@dataclass
class _Origins:
    """Picks the first value that was said, and notes where it came from."""

    noted: dict[str, str] = field(default_factory=dict)

    def pick(self, name: str, *candidates: tuple[str, str]) -> str:
        for value, origin in candidates:
            if value:
                self.noted[name] = origin
                return value
        return ""


def resolve(user: User, records: Records, request: Request) -> Resolved:
    """Raises UsageError for what cannot be understood; what cannot work comes back as issues."""
    stage = stages.find(request.stage)
    named = load_profile(user, request.profile)
    profile, origins, issues = named.profile, _Origins(), list[Issue]()
    in_profile = f"profile {named.name}"
    conf, args, model = models.conf_of(stage, request.args, user.cwd)
    parents = [records.find(word) for word in request.after]
    _check_parents(parents, named)

    scratch = origins.pick("USER_FSW", (profile.scratch, in_profile), (user.get("USER_FSW"), "environment"))
    if not scratch:
        raise UsageError(
            "USER_FSW is not set: the scratch space on the cluster, readable and writable from all nodes",
            fix="export USER_FSW=/path, or set the profile's `scratch`",
        )
    if not scratch.startswith("/"):
        raise UsageError(f"USER_FSW must be an absolute path, not {scratch!r}")
    image = _image(user, named, origins, issues)
    scratch_inside = paths.SCRATCH if image else scratch

    overrides = _overrides(request.overrides)
    profile_env = dict(profile.env)
    if user.get("HF_MODEL_CKPT") and "HF_MODEL_CKPT" not in profile_env:
        profile_env["HF_MODEL_CKPT"] = user.get("HF_MODEL_CKPT")  # the reference's --export passes it
    setup = _setup(user, named, request, profile_env, origins, issues)
    values = {
        **profile_env,
        **{n: setup.reading.text(n) for n in (*setup.reading.values, *setup.reading.arrays)},
        **overrides,
    }
    launch_script = origins.pick(
        "LAUNCH_SCRIPT", (overrides.get("LAUNCH_SCRIPT", ""), "--set"), (values.get("LAUNCH_SCRIPT", ""), "env setup"),
        (profile.launch_script, in_profile), (user.get("LAUNCH_SCRIPT"), "environment"), ("python", "default"),
    )  # fmt: skip
    defaults = _defaults(stage, model, values, scratch_inside, parents) | {"LAUNCH_SCRIPT": launch_script}
    values = {**defaults, **{name: value for name, value in values.items() if value}}
    launcher: Literal["python", "torchrun"] = (
        "torchrun" if launch_script.split()[0].rpartition("/")[2].startswith("torchrun") else "python"
    )
    nodes = _nodes(origins.pick("nodes", (request.nodes, "--nodes"), ("1", "default")))
    sandbox = _sandbox(user, named, stage, values, origins, issues)
    mounts = _mounts(profile.mounts, scratch, sandbox) if image else ()
    spec = RunSpec(
        stage=stage.name,
        args=args,
        model=model,
        job_name=_job_name(request, user, stage, args, model, origins),
        scheduler=profile.scheduler,
        nodes=nodes,
        gpus_per_node=profile.gpus_per_node,
        tasks_per_node=1 if launcher == "torchrun" else profile.gpus_per_node,
        launcher=launcher,
        launch_script=launch_script,
        sbatch={},
        sbatch_args=_sbatch_args((*profile.sbatch_args, *request.sbatch_args)),
        srun=_srun(named),
        srun_args=profile.srun_args,
        prelude=profile.prelude,
        image=image,
        mounts=mounts,
        workdir=paths.RUN if stage.name != stages.SCRIPT else paths.SANDBOX if image else sandbox,
        setup=setup.setup,
        overrides=overrides,
        profile_env=profile_env,
        defaults=defaults,
        conf_name=conf.file_name if conf else "",
        conf=conf.text if conf else "",
        outputs=(stage.writes,) if stage.native and stage.writes else (),
        install=request.install,
        runs_root=profile.runs_root or f"{scratch.rstrip('/')}/.mlmsub/runs",
        slurm_bin=profile.slurm_bin,
        pass_env=profile.pass_env,
        secret_names=profile.secret_names,
        parents=tuple(Parent(parent.run_id, parent.job_id, parent.run_dir) for parent in parents),
    )
    spec = _with_sbatch(spec, user, named, request, origins)
    secrets = {n: v for n in profile.secret_names if (v := values.get(n) or user.get(n))}
    found = (*issues, *checks.run(spec, setup.reading, values))
    return Resolved(spec, named, found, values, secrets)


def reload(user: User, path: Path, profile: str) -> Resolved:
    """The submission that a run.yaml describes. Its secrets are not in it: they are taken from the environment."""
    where = str(user.cwd / path)
    spec = RunSpec.from_data(read_yaml(user.cwd / path), where)
    if any("***" in text for text in spec.setup.files.values()):
        raise UsageError(
            f"{where}: its env setup held a secret, which is not written down", fix="submit it anew"
        )
    named = load_profile(user, profile)
    values = {**spec.defaults, **spec.profile_env, **spec.overrides}
    secrets = {name: value for name in spec.secret_names if (value := user.get(name))}
    return Resolved(spec, named, tuple(checks.run(spec, Reading(complete=True), values)), values, secrets)


def _check_parents(parents: Iterable[Record], named: NamedProfile) -> None:
    for parent in parents:
        if not parent.job_id:
            raise UsageError(
                f"the submission of {parent.run_id} was not finished", fix="repeat its command first"
            )
        if parent.scheduler != named.profile.scheduler or parent.host != named.profile.host:
            raise UsageError(f"{parent.run_id} runs on another cluster (profile {parent.profile})")


def _image(user: User, named: NamedProfile, origins: _Origins, issues: list[Issue]) -> str:
    if named.profile.scheduler == "local":
        return ""
    text = origins.pick(
        "CONTAINER_IMAGE", (named.profile.image, f"profile {named.name}"), (user.get("CONTAINER_IMAGE"), "environment"),
        (DEFAULT_IMAGE, "default"),
    )  # fmt: skip
    if origins.noted["CONTAINER_IMAGE"] == "default":
        issues.append(
            warning("image-default", "CONTAINER_IMAGE", f"not set; using {text}", "set the profile's `image`")
        )
    try:
        image = Image.parse(text, base=str(user.cwd))
    except ValueError as error:
        raise UsageError(f"CONTAINER_IMAGE: {error}") from None
    if "," in image.ref:
        raise UsageError(f"CONTAINER_IMAGE: {image.ref!r} holds a comma")
    return image.render()


def _overrides(texts: Iterable[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not is_name(name):
            raise UsageError(f"--set {text!r}: write NAME=VALUE")
        if name.startswith(("MLMSUB_", "SLURM_")):
            raise UsageError(f"--set {name}: names that start with MLMSUB_ or SLURM_ are not yours to set")
        if "\0" in value:
            raise UsageError(f"--set {name}: a variable cannot hold NUL")
        found[name] = value
    return found


def _setup(
    user: User,
    named: NamedProfile,
    request: Request,
    given: dict[str, str],
    origins: _Origins,
    issues: list[Issue],
) -> envfile.ReadSetup:
    text = origins.pick(
        "SANDBOX_ENV_SETUP", (request.env_setup, "--env-setup"), (named.profile.env_setup, f"profile {named.name}"),
        (user.get("SANDBOX_ENV_SETUP"), "environment"),
    )  # fmt: skip
    if not text:
        path = user.cwd / DEFAULT_SETUP
        if not path.is_file():
            return envfile.ReadSetup(EnvSetup(), Reading(complete=True))
        origins.noted["SANDBOX_ENV_SETUP"] = "default"
        issues.append(warning("env-setup-default", "SANDBOX_ENV_SETUP", f"not set; using ./{DEFAULT_SETUP}"))
    else:
        path = user.cwd / text
        if not path.exists() and (resources.root() / text).is_file():
            path = resources.root() / text  # one of those that come with mlmsub, wherever it is installed
    return envfile.read(path, given, static=request.static)


def _defaults(
    stage: stages.Stage, model: str, values: dict[str, str], scratch: str, parents: list[Record]
) -> dict[str, str]:
    """What the job sets where nothing else did."""
    if stage.name == stages.SCRIPT:
        return {"HF_HOME": f"{scratch}/.cache/huggingface"}
    work = values.get("MLM_WORK_DIR") or f"{scratch}/megatron_workspace"
    found = {
        "MLM_WORK_DIR": work,
        "HF_HOME": f"{scratch}/.cache/huggingface",
        "TP": "1",
        "PP": "1",
        "EP": "1",
        "CP": "1",
    }
    for parent in parents:
        if "MLM_MODEL_SAVE" in parent.outputs:
            found["MLM_MODEL_CKPT"] = parent.outputs["MLM_MODEL_SAVE"]
    if stage.writes:
        found[stage.writes] = f"{work}/{model}{stage.suffix}"
    return found


def _nodes(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"--nodes must be a number from 1 on, not {text!r}")
    return int(text)


def _sandbox(
    user: User,
    named: NamedProfile,
    stage: stages.Stage,
    values: dict[str, str],
    origins: _Origins,
    issues: list[Issue],
) -> str:
    """The Megatron-LM checkout: what `script` runs in. A native stage gets it where a value points into it."""
    script_stage = stage.name == stages.SCRIPT
    if not script_stage and not any(paths.SANDBOX in value for value in values.values()):
        return ""
    sandbox = origins.pick(
        "SANDBOX_DIR", (named.profile.sandbox, f"profile {named.name}"), (user.get("SANDBOX_DIR"), "environment"),
        (str(user.cwd), "default"),
    )  # fmt: skip
    if origins.noted["SANDBOX_DIR"] == "default":
        issues.append(
            warning("sandbox-default", "SANDBOX_DIR", f"not set; using the working directory {sandbox}")
        )
    return str((user.cwd / sandbox).absolute())


def _mounts(profile_mounts: tuple[str, ...], scratch: str, sandbox: str) -> tuple[str, ...]:
    """In the order of mounting: the reference's two, then the profile's, which so may lie within."""
    try:
        own = [Mount(sandbox, paths.SANDBOX).checked()] if sandbox else []
        own.append(Mount(scratch, paths.SCRATCH).checked())
        return tuple(mount.render() for mount in (*own, *map(Mount.parse, profile_mounts)))
    except ValueError as error:
        raise UsageError(f"{error}", fix="change USER_FSW, SANDBOX_DIR or the profile's `mounts`") from None


def _job_name(
    request: Request, user: User, stage: stages.Stage, args: tuple[str, ...], model: str, origins: _Origins
) -> str:
    first, last = stage.name, model.rpartition("/")[2]
    if stage.name == stages.SCRIPT:
        first = Path(args[0]).name.removesuffix(".sh")
    return paths.job_name(
        origins.pick(
            "job-name", (request.job_name, "--job-name"), (user.get("SBATCH_JOB_NAME"), "environment"),
            (paths.job_name(first, last), "default"),
        )
    )  # fmt: skip


def _sbatch_args(arguments: tuple[str, ...]) -> tuple[str, ...]:
    for argument in arguments:
        if not argument.startswith("-"):
            raise UsageError(
                f"--sbatch-arg {argument!r}: write one option with its value, such as --comment=x"
            )
        if managed := script.managed_option(argument):
            raise UsageError(
                f"--sbatch-arg {argument!r}: --{managed} is decided elsewhere",
                fix=f"use {script.MANAGED[managed]}",
            )
        try:
            sbatch_value(argument)
        except ValueError as error:
            raise UsageError(f"--sbatch-arg: {error}") from None
    return arguments


def _srun(named: NamedProfile) -> dict[str, str]:
    profile = named.profile
    options = {"mpi": profile.mpi, "kill-on-bad-exit": "1", "wait": "0", "distribution": "block"}
    if profile.cpus_per_task:
        options["cpus-per-task"] = str(
            profile.cpus_per_task
        )  # Slurm from 22.05 on does not take it over from sbatch
    return {name: value for name, value in options.items() if value}


def _with_sbatch(
    spec: RunSpec, user: User, named: NamedProfile, request: Request, origins: _Origins
) -> RunSpec:
    profile = named.profile
    options = {"job-name": spec.job_name}
    said = {"account": request.account, "partition": request.partition, "time": request.time}
    for name in (
        "account",
        "partition",
        "qos",
        "reservation",
        "constraint",
        "segment",
        "nodelist",
        "exclude",
        "clusters",
        "time",
    ):
        value = origins.pick(
            name,
            (said.get(name, ""), f"--{name}"),
            (user.get(_SBATCH_VARIABLES.get(name, "")), f"environment ({_SBATCH_VARIABLES.get(name)})"),
            (getattr(profile, "cluster" if name == "clusters" else name), f"profile {named.name}"),
        )
        if value:
            options[name] = value
    try:
        options["time"] = TimeLimit.parse(options["time"]).render()
    except ValueError as error:
        raise UsageError(f"--time: {error}") from None
    options |= {"nodes": str(spec.nodes), "ntasks-per-node": str(spec.tasks_per_node)}
    gpus = ":".join(filter(None, (profile.gpu_type, str(profile.gpus_per_node))))
    if profile.gpu_request != "none":
        options |= (
            {"gpus-per-node": gpus} if profile.gpu_request == "gpus-per-node" else {"gres": f"gpu:{gpus}"}
        )
    if profile.cpus_per_task:
        options["cpus-per-task"] = str(profile.cpus_per_task)
    options |= {"exclusive": ""} if profile.exclusive else {}
    options["mem"] = MemorySize.parse(profile.mem).render()
    options |= {"overcommit": ""} if profile.overcommit else {}
    if spec.parents:
        options["dependency"] = "afterok:" + ":".join(parent.job_id for parent in spec.parents)
        options["kill-on-invalid-dep"] = "yes"
    for name, value in options.items():
        try:
            sbatch_value(value)
        except ValueError as error:
            raise UsageError(f"--{name}: {error}") from None
    return replace(spec, sbatch=options, origins=origins.noted)
