"""The checks of a resolved run: a list of issues, each with a stable code. Layout rules are in core.layout."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache

from mlmsub.core import architecture, composition, confcheck, megatron_arguments, modelconf, paths, rules, stages
from mlmsub.core.envsetup import Reading
from mlmsub.core.facts import Facts, gather
from mlmsub.core.issues import Issue, error, info, warning
from mlmsub.core.profile import Profile
from mlmsub.core.spec import RunSpec
from mlmsub.core.strict import build, nearest
from mlmsub.core.values import TimeLimit

# exported again by the reference's arguments.sh after it sourced the env setup
OVERRULED_BY_ARGUMENTS_SH = (
    "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "NCCL_IB_SL", "NCCL_IB_TIMEOUT", "CUDA_DEVICE_MAX_CONNECTIONS",
)  # fmt: skip
IDENTITY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def run(
    spec: RunSpec,
    reading: Reading,
    values: Mapping[str, str],
    profile: Profile,
    earlier: Mapping[str, str] | None = None,
) -> Iterator[Issue]:
    """All issues of a run.

    `values` are the variables as the job will see them, `earlier` the layout (`saved_layout`) of the training run
    whose checkpoint this one goes on from.
    """
    found = (*_all(spec, reading, values, profile), *_resumed(spec, values, earlier or {}))
    yield from _allowed(spec, found)


def facts(spec: RunSpec, reading: Reading, values: Mapping[str, str], profile: Profile) -> list[Facts]:
    """What the rules look at, for each stage. Raises ValueError naming the variable of the layout that is no number."""
    conf, parts = model_conf(spec), composition.parts(spec, values)
    names = tuple(part.stage.name for part in parts) if len(parts) > 1 else ()
    return [replace(gather(part.spec, conf, reading, part.values, profile), run=names) for part in parts]


def model_conf(spec: RunSpec) -> modelconf.ModelConf | None:
    """The model conf that the run ships; None for a `.sh` that says nothing readable, and for `script`."""
    if spec.conf_name.endswith(".sh"):
        return modelconf.read_shell(spec.conf, spec.model)
    return _parsed_conf(spec.conf, spec.conf_name) if spec.conf else None


@cache
def _parsed_conf(text: str, name: str) -> modelconf.ModelConf:
    import yaml

    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    return build(modelconf.ModelConf, yaml.load(text, Loader=loader), name)


def _all(spec: RunSpec, reading: Reading, values: Mapping[str, str], profile: Profile) -> Iterator[Issue]:
    parts = composition.parts(spec, values)
    yield from _each([(part.stage.name, list(_stage(part.spec))) for part in parts])
    yield from _launch_script(spec)
    yield from _place(spec)
    yield from _env_setup(spec, reading)
    yield from _local(spec, values)
    yield from _partition(spec, profile)
    yield from _stop_before(spec)
    if spec.native:
        yield from _each([(part.stage.name, list(_paths(part.spec, reading, part.values))) for part in parts])
    try:
        known = facts(spec, reading, values, profile)
    except ValueError as problem:
        severity = warning if reading.unsure else error
        yield severity("layout-value", str(problem).partition(" ")[0], str(problem).partition(" ")[2])
        return
    yield from _conf(spec, known[0])
    yield from _each([(one.stage, list(_arguments(one))) for one in known])
    # a script of the user's own may do otherwise than one of this name, a shell conf otherwise than it reads
    unsure = reading.unsure or spec.conf_name.endswith(".sh") or not (spec.native or spec.conf)
    yield from _each([(one.stage, list(rules.check(one, unsure=unsure))) for one in known])


def _each(found: list[tuple[str, list[Issue]]]) -> Iterator[Issue]:
    """The issues of each stage: what all of them have once, what only some have with the stage's name."""
    for index, (stage, issues) in enumerate(found):
        for issue in issues:
            if any(issue in others for _, others in found[:index]):
                continue
            everywhere = all(issue in others for _, others in found) or stage in issue.message
            yield issue if everywhere else replace(issue, message=f"{stage}: {issue.message}")


def _conf(spec: RunSpec, known: Facts) -> Iterator[Issue]:
    """What `conf check` would refuse; a shell conf may do more than can be read of it."""
    if known.conf is None and spec.conf_name:
        yield warning("conf-unread", spec.conf_name, "it sets no MODEL_ARGS that can be read without running it")
    elif known.conf is not None and spec.native:
        readable = not spec.conf_name.endswith(".sh")
        found = confcheck.run(known.conf)
        yield from (issue for issue in found if issue.severity == "error" and readable)


def _arguments(known: Facts) -> Iterator[Issue]:
    """Megatron's arguments: numbers that are none, and names that it does not have."""
    for name, text in architecture.odd_numbers(known.args):
        yield error("argument-value", f"--{name}", f"{text!r} is not a whole number from 1 on", "mend MLM_EXTRA_ARGS")
    for name, text, wanted in megatron_arguments.odd_values(known.user_args):
        yield error("argument-value", f"--{name}", f"{text!r} is no {wanted}", f"correct --{name}, or leave it out")
    if known.arch is None and known.conf and architecture.read(known.conf.megatron_args):
        message = "with these arguments the model's layers cannot be told, so nothing of it can be checked"
        yield error("argument-value", "MLM_EXTRA_ARGS", message, "mend what it says of layers and sizes")
    names = megatron_arguments.NAMES | megatron_arguments.EXAMPLES | megatron_arguments.OWN
    for name in known.user_args:
        if name not in names:
            yield warning(
                "unknown-argument", f"--{name}", f"Megatron-Core 0.19 has no such argument{nearest(name, names)}",
                "the job will end when it reads it; mend MLM_EXTRA_ARGS",
            )  # fmt: skip


def saved_layout(values: Mapping[str, str]) -> dict[str, str]:
    """What decides who can load the optimizer's state of a training run: its layout, and the form it is saved in."""
    found = {name: values.get(name) or "1" for name in ("TP", "PP", "EP")} | {"ETP": values.get("ETP", "")}
    full = any("--dist-ckpt-optim-fully-reshardable" in text for text in values.values())
    return found | {"optimizer": "fully_reshardable" if full else "dp_reshardable"}


def _resumed(spec: RunSpec, values: Mapping[str, str], earlier: Mapping[str, str]) -> Iterator[Issue]:
    """A training run goes on from what an earlier run saved: with another layout only where that can be resharded."""
    if not stages.trains(spec.stage) or earlier.get("optimizer") != "dp_reshardable":
        return
    now = saved_layout(values)
    other = [name for name in ("TP", "PP", "EP", "ETP") if now[name] != earlier.get(name, now[name])]
    if other:
        was, is_now = (", ".join(f"{name}={said.get(name)}" for name in other) for said in (earlier, now))
        yield error(
            "resume-other-layout", other[0],
            f"the checkpoint was saved with {was}, and the state of its optimizer cannot be resharded to {is_now}",
            "keep the layout; --dist-ckpt-optim-fully-reshardable in the earlier run would have allowed another",
        )  # fmt: skip


def _allowed(spec: RunSpec, found: Iterable[Issue]) -> Iterator[Issue]:
    """Errors that the user allows become warnings; the spec records which."""
    unused = dict.fromkeys(spec.allow)
    for issue in found:
        if issue.severity == "error" and issue.code in spec.allow:
            unused.pop(issue.code, None)
            issue = replace(issue, severity="warning", message=f"{issue.message} (allowed)", fix="")
        yield issue
    for code in unused:
        near = "" if code in rules.CODES else nearest(code, rules.CODES)
        yield info("allow-unused", "--allow", f"there is no error {code!r} here{near}")


def _stage(spec: RunSpec) -> Iterator[Issue]:
    if spec.native and not stages.STAGES[spec.stage].native:
        yield error(
            "stage-not-native", "stage",
            f"{spec.stage} can be rendered, but mlmsub's runtime does not do it yet",
            f"run Megatron-LM's example: mlmsub submit script ... -- {spec.stage}.sh {spec.model}",
        )  # fmt: skip
    if spec.scheduler == "local" and spec.nodes > 1:
        yield error("local-nodes", "nodes", f"this machine is one node, not {spec.nodes}", "leave out --nodes")


def _launch_script(spec: RunSpec) -> Iterator[Issue]:
    program = (spec.launch_script.split() or [""])[0].rpartition("/")[2]
    if not program.startswith(("python", "torchrun")):
        yield warning(
            "launch-script", "LAUNCH_SCRIPT", f"{program!r} is taken for a python: one task per GPU",
            "use python or torchrun, with a path if need be",
        )  # fmt: skip


def _place(spec: RunSpec) -> Iterator[Issue]:
    if any(c in spec.runs_root for c in "%,:\n"):
        yield error(
                "path-characters", "runs_root",
                f"{spec.runs_root!r} holds % , : or a newline, which #SBATCH lines or Pyxis mounts cannot express",
                "choose another path",
            )  # fmt: skip
    if spec.nodes > 1 and spec.image and not spec.image.startswith("/"):
        yield warning(
            "image-per-node", "CONTAINER_IMAGE",
            f"each of {spec.nodes} nodes will import {spec.image} for itself",
            "import it once: enroot import -o FILE.sqsh docker://...",
        )  # fmt: skip


def _partition(spec: RunSpec, profile: Profile) -> Iterator[Issue]:
    """The limits that `doctor` found hold for the profile's own partition."""
    if spec.sbatch.get("partition", "") != profile.partition:
        return
    if profile.max_time and TimeLimit.parse(spec.sbatch["time"]).seconds > TimeLimit.parse(profile.max_time).seconds:
        yield error(
            "time-limit", "time", f"{spec.sbatch['time']} is above the partition's limit of {profile.max_time}",
            "set a shorter --time, or another --partition",
        )  # fmt: skip
    if profile.max_nodes and spec.nodes > profile.max_nodes:
        yield error(
            "node-limit", "nodes", f"the partition has {profile.max_nodes} nodes, not {spec.nodes}",
            "set --nodes, or another --partition",
        )  # fmt: skip


def _stop_before(spec: RunSpec) -> Iterator[Issue]:
    """Slurm's signal is up to a minute early or late, and a save takes its time."""
    before, limit = spec.sbatch.get("signal", "").rpartition("@")[2], TimeLimit.parse(spec.sbatch["time"]).seconds
    if before and not 120 <= int(before) < limit:
        yield error(
            "stop-before", "--stop-before",
            f"{before} s must be at least 120, and less than the time limit of {limit} s",
            "set --stop-before, or a longer --time",
        )  # fmt: skip


def _local(spec: RunSpec, values: Mapping[str, str]) -> Iterator[Issue]:
    for name, value in values.items() if spec.scheduler == "local" else ():
        if any(inside in value for inside in (paths.SCRATCH, paths.SANDBOX)):
            yield warning(
                "container-path", name, f"{value!r}: under the profile local there is no container, and no such path",
                "give this machine's path",
            )  # fmt: skip


def _env_setup(spec: RunSpec, reading: Reading) -> Iterator[Issue]:
    if reading.unsure:
        yield warning(
            "env-setup-unsure", "SANDBOX_ENV_SETUP",
            f"the values of {spec.setup.path} are not sure before the job, since some of it is not here: "
            f"{', '.join(reading.missing[:3])}",
        )  # fmt: skip
    assigned = {*reading.values, *reading.arrays, *spec.overrides}
    for name in IDENTITY:
        if name in assigned:
            yield warning("identity", name, "mlmsub sets it in the job, from Slurm's variables", "leave it out")
    if not spec.native:
        for name in OVERRULED_BY_ARGUMENTS_SH:
            if name in assigned:
                yield warning(
                    "overruled", name, "Megatron-LM's conf/arguments.sh sets it again, so this value has no effect",
                    "edit arguments.sh in the sandbox",
                )  # fmt: skip


def _paths(spec: RunSpec, reading: Reading, values: Mapping[str, str]) -> Iterator[Issue]:
    """Outputs must outlive the container; the input must be there and must not be the output."""
    severity = warning if reading.unsure else error
    stage = stages.STAGES[spec.stage]
    if stage.reads == "MLM_MODEL_CKPT" and not values.get("MLM_MODEL_CKPT"):
        yield severity(
            "no-input", "MLM_MODEL_CKPT", f"{spec.stage} needs a Megatron checkpoint to start from",
            "set MLM_MODEL_CKPT in the env setup or by --set, or give --after RUN",
        )  # fmt: skip
    targets = [text.split(":")[1] for text in spec.mounts if not text.endswith(":ro")]
    output = values.get(stage.writes, "")
    if spec.image and output and not any(f"{output}/".startswith(f"{t.rstrip('/')}/") for t in (*targets, paths.RUN)):
        yield severity(
            "output-not-mounted", stage.writes, f"{output} lies in the container and is gone when the job ends",
            f"choose a path below one of: {', '.join(targets)}",
        )  # fmt: skip
    if output and posixpath.normpath(output) == posixpath.normpath(values.get("MLM_MODEL_CKPT") or "."):
        yield severity(
            "in-place", stage.writes, f"{output} is the input too, and would be overwritten", "choose another"
        )
