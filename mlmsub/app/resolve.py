"""argv + profile + env setup + model conf -> RunSpec, complete, every value with its origin. Sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mlmsub.app import container, envfile, joboptions, models, resources
from mlmsub.app.config import NamedProfile, User, load_profile, read_yaml
from mlmsub.app.records import Record, Records
from mlmsub.app.sources import Request, Sources
from mlmsub.core import checks, composition, confcheck, paths, stages
from mlmsub.core.bundle import REDACTED, secret_texts
from mlmsub.core.envsetup import Reading
from mlmsub.core.errors import UsageError
from mlmsub.core.issues import Issue, warning
from mlmsub.core.quoting import is_name
from mlmsub.core.spec import ON_CLUSTER, EnvSetup, Parent, RunSpec

_NOT_TO_SET = dict.fromkeys(("UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS"), "bash does not let it be set")
_NOT_TO_SET["SANDBOX_ENV_SETUP"] = "use --env-setup"
ReadSetup = Callable[..., envfile.ReadSetup]  # envfile.read, which takes most of the time
DEFAULT_SETUP = "env_setup_template.sh"  # the reference's, in the working directory


@dataclass(frozen=True)
class Resolved:
    """The spec, what the checks found, and what must not be written into the spec: secret values."""

    spec: RunSpec
    profile: NamedProfile
    issues: tuple[Issue, ...]
    values: dict[str, str]  # variables as the job will see them, as far as known
    secrets: dict[str, str]
    reading: Reading


@dataclass(frozen=True)
class _Values:
    """The user's variables, by layer; later layers win."""

    profile_env: dict[str, str]
    setup: envfile.ReadSetup
    overrides: dict[str, str]

    @property
    def said(self) -> dict[str, str]:
        reading = self.setup.reading
        read = {name: reading.text(name) for name in (*reading.values, *reading.arrays)}
        return {**self.profile_env, **read, **self.overrides}


def resolve(user: User, records: Records, request: Request) -> Resolved:
    """Raises UsageError for what cannot be understood; what cannot work comes back as issues."""
    sources = Sources(user, _profile(user, request), request)
    return resolve_from(sources, records, _parents(records, sources))


def resolve_from(
    sources: Sources, records: Records, parents: Sequence[Record], read_setup: ReadSetup = envfile.read
) -> Resolved:
    """The same from sources, with the runs to wait for; these need not be submitted yet."""
    user, request, profile = sources.user, sources.request, sources.profile
    stage = stages.find(request.stage)
    conf, args, model = _conf(sources, stage)
    scratch = container.scratch(sources)
    image = container.image(sources)
    layers = _values(sources, read_setup)
    launch_script, launcher = _launch_script(sources, layers)
    defaults = _defaults(stage, model, layers.said, paths.SCRATCH if image else scratch, parents)
    defaults["LAUNCH_SCRIPT"] = launch_script
    values = {**defaults, **{name: value for name, value in layers.said.items() if value}}
    place = container.place(sources, image, scratch, values, script=stage.name == stages.SCRIPT)

    nodes = joboptions.nodes(sources)
    tasks_per_node = 1 if launcher == "torchrun" else profile.gpus_per_node
    job_name = joboptions.job_name(sources, stage.name, args, model)
    spec = RunSpec(
        stage=stage.name,
        args=args,
        model=model,
        job_name=job_name,
        scheduler=profile.scheduler,
        nodes=nodes,
        gpus_per_node=profile.gpus_per_node,
        tasks_per_node=tasks_per_node,
        launcher=launcher,
        launch_script=launch_script,
        sbatch=joboptions.sbatch(sources, job_name=job_name, nodes=nodes, tasks_per_node=tasks_per_node),
        sbatch_args=joboptions.sbatch_args(sources),
        srun=joboptions.srun(sources),
        srun_args=profile.srun_args,
        prelude=profile.prelude,
        image=place.image,
        mounts=place.mounts,
        workdir=place.workdir,
        setup=layers.setup.setup,
        overrides=layers.overrides,
        profile_env=layers.profile_env,
        defaults=defaults,
        conf_name=conf.file_name if conf else "",
        conf=conf.text if conf else "",
        outputs=composition.outputs(stage.name, layers.said),
        install=request.install,
        runs_root=container.runs_root(sources),
        slurm_bin=profile.slurm_bin,
        pass_env=profile.pass_env,
        secret_names=profile.secret_names,
        parents=tuple(Parent(parent.run_id, parent.run_dir) for parent in parents),
        **joboptions.bounds(sources),
        allow=request.allow,
        origins=sources.origins,
    )
    secrets = {name: value for name in profile.secret_names if (value := values.get(name) or user.get(name))}
    earlier = _earlier(records, values, sources.named)
    return _checked(spec, sources.named, layers, values, secrets, sources.issues, earlier)


def _conf(sources: Sources, stage: stages.Stage) -> tuple[models.Found | None, tuple[str, ...], str]:
    """(conf, arguments for the job, model), with what the name that was given says otherwise than the conf."""
    words = sources.request.args
    conf, args, model = models.conf_of(stage, words, sources.user.cwd)
    if conf and conf.conf and stage.name != stages.SCRIPT:
        sources.issues += confcheck.of_name(words[0], conf.conf, is_file=models.is_file(words[0]))
    return conf, args, model


def reload(user: User, path: Path, profile: str) -> Resolved:
    """The submission that a run.yaml describes. Its secrets are not in it: they are taken from the environment."""
    where = str(user.cwd / path)
    spec = RunSpec.from_data(read_yaml(user.cwd / path), where)
    if any(REDACTED in text for text in spec.setup.files.values()):
        raise UsageError(f"{where}: its env setup held a secret, which is not written down", fix="submit it anew")
    layers = _Values(spec.profile_env, envfile.reread(spec.setup, spec.profile_env), spec.overrides)
    values = {**spec.defaults, **{name: value for name, value in layers.said.items() if value}}
    secrets = {name: value for name in spec.secret_names if (value := user.get(name))}
    return _checked(spec, load_profile(user, profile), layers, values, secrets, [])


def public_values(resolved: Resolved) -> list[tuple[str, str, str]]:
    """(variable, value, where it comes from) as the job gets them, without what is secret by name or by content."""
    spec, secrets = resolved.spec, resolved.secrets
    reading = resolved.reading
    read = {name: reading.text(name) for name in (*reading.values, *reading.arrays)}
    layers = ((spec.overrides, "--set"), (read, "env setup"), (spec.profile_env, "profile"))

    def origin(name: str) -> str:
        if name not in resolved.values:
            return "environment, secret"
        value, found = next(((layer[name], where) for layer, where in layers if name in layer), ("", ""))
        found = found if value else "default"
        return found if found in ("--set", "env setup") else spec.origins.get(name, found)

    def shown(name: str, value: str) -> str:
        return REDACTED if name in secrets or any(text in value for text in secrets.values() if text) else value

    values = {**dict.fromkeys(secrets, ""), **resolved.values}
    return sorted((name, shown(name, value), origin(name)) for name, value in values.items())


def _checked(
    spec: RunSpec,
    named: NamedProfile,
    layers: _Values,
    values: dict[str, str],
    secrets: dict[str, str],
    found: list[Issue],
    earlier: Mapping[str, str] | None = None,
) -> Resolved:
    _no_secrets(spec, secrets)
    reading = layers.setup.reading
    issues = (*found, *checks.run(spec, reading, values, named.profile, earlier))
    return Resolved(spec, named, issues, values, secrets, reading)


def _earlier(records: Records, values: Mapping[str, str], named: NamedProfile) -> dict[str, str]:
    """The layout of the training run whose checkpoint is loaded, or is there already where this run saves."""
    for name in ("MLM_MODEL_CKPT", "MLM_MODEL_SAVE"):
        record = records.writer_of(values[name], named.name) if values.get(name) else None
        if record and stages.trains(record.stage):
            return record.layout
    return {}


def _no_secrets(spec: RunSpec, secrets: Mapping[str, str]) -> None:
    """A secret in a command or an option would be readable in the job script and in Slurm's own tools."""
    texts = secret_texts(secrets)
    for field in ("args", "prelude", "sbatch_args", "srun_args", "mounts", "job_name", "install", "defaults"):
        if any(text in str(getattr(spec, field)) for text in texts):
            raise UsageError(f"{field} holds a secret's value, and is readable", fix="read the variable in the job")


def _profile(user: User, request: Request) -> NamedProfile:
    named = load_profile(user, request.profile)
    if not request.gpu:
        return named
    return replace(named, profile=replace(named.profile, gpu_type=request.gpu, gpu_memory=0))


def _parents(records: Records, sources: Sources) -> list[Record]:
    found = [records.find(word) for word in sources.request.after]
    for parent in found:
        if not parent.job_id:
            raise UsageError(f"the submission of {parent.run_id} was not finished", fix="repeat its command first")
        if parent.scheduler != sources.profile.scheduler or parent.host != sources.profile.host:
            raise UsageError(f"{parent.run_id} runs on another cluster (profile {parent.profile})")
    return found


def _values(sources: Sources, read_setup: ReadSetup) -> _Values:
    profile_env = dict(sources.profile.env)
    checkpoint, origin = sources.from_environment("HF_MODEL_CKPT")
    if checkpoint and "HF_MODEL_CKPT" not in profile_env:  # the one value that the reference's --export passes
        profile_env["HF_MODEL_CKPT"] = checkpoint
        sources.origins["HF_MODEL_CKPT"] = origin
    secrets = {name: value for name in sources.profile.secret_names if (value := sources.user.get(name))}
    setup = _setup(sources, {**profile_env, **secrets}, read_setup)
    return _Values(profile_env, setup, _overrides(sources.request.overrides))


def _setup(sources: Sources, given: dict[str, str], read_setup: ReadSetup) -> envfile.ReadSetup:
    text = sources.pick(
        "SANDBOX_ENV_SETUP",
        (sources.request.env_setup, "--env-setup"),
        sources.from_profile("env_setup"),
        sources.from_environment("SANDBOX_ENV_SETUP"),
    )
    cwd = sources.user.cwd
    if text.startswith(ON_CLUSTER):
        if not text.removeprefix(ON_CLUSTER).startswith("/"):
            raise UsageError(f"--env-setup {text}: the path on the cluster must be absolute")
        return envfile.ReadSetup(EnvSetup(text), Reading(missing=("it lies on the cluster",), complete=True))
    if text:
        path = cwd / text
        if not path.exists() and (resources.root() / text).is_file():
            path = resources.root() / text  # one of those that come with mlmsub, wherever it is installed
    else:
        path = cwd / DEFAULT_SETUP
        if not path.is_file():
            return envfile.ReadSetup(EnvSetup(), Reading(complete=True))
        sources.origins["SANDBOX_ENV_SETUP"] = "default"
        sources.issues.append(warning("env-setup-default", "SANDBOX_ENV_SETUP", f"not set; using ./{DEFAULT_SETUP}"))
    return read_setup(path, given, static=sources.request.static)


def _overrides(texts: Iterable[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not is_name(name):
            raise UsageError(f"--set {text!r}: write NAME=VALUE; a name has letters, digits and _")
        if name.startswith(("MLMSUB_", "SLURM_")):
            raise UsageError(f"--set {name}: names that start with MLMSUB_ or SLURM_ are not yours to set")
        if name in _NOT_TO_SET:
            raise UsageError(f"--set {name}: {_NOT_TO_SET[name]}")
        found[name] = value
    return found


def _launch_script(sources: Sources, layers: _Values) -> tuple[str, Literal["python", "torchrun"]]:
    text = sources.pick(
        "LAUNCH_SCRIPT",
        (layers.overrides.get("LAUNCH_SCRIPT", ""), "--set"),
        (layers.setup.reading.text("LAUNCH_SCRIPT"), "env setup"),
        (layers.profile_env.get("LAUNCH_SCRIPT", ""), f"profile {sources.named.name}"),
        sources.from_profile("launch_script"),
        sources.from_environment("LAUNCH_SCRIPT"),
        ("python", "default"),
    )
    words = text.split() or [""]
    many = words[0].rpartition("/")[2].startswith("torchrun") or "torch.distributed.run" in words
    return text, "torchrun" if many else "python"


def _defaults(
    stage: stages.Stage, model: str, said: dict[str, str], scratch: str, parents: Sequence[Record]
) -> dict[str, str]:
    """What the job sets where nothing else did; `scratch` is USER_FSW as the job sees it."""
    found = {"HF_HOME": f"{scratch}/.cache/huggingface"}
    if stage.name == stages.SCRIPT:
        return found
    work = said.get("MLM_WORK_DIR") or f"{scratch}/megatron_workspace"
    found |= {"MLM_WORK_DIR": work, "TP": "1", "PP": "1", "EP": "1", "CP": "1"}
    for parent in parents:
        if "MLM_MODEL_SAVE" in parent.outputs:
            found["MLM_MODEL_CKPT"] = parent.outputs["MLM_MODEL_SAVE"]
    made = {part.writes: part for part in stages.parts(stage.name)}
    for variable in composition.outputs(stage.name, said):
        found[variable] = f"{work}/{model}{made[variable].suffix}"
    return found
