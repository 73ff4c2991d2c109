"""The checks of a resolved run: a list of issues, each with a stable code. Layout rules are in core.layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mlmsub.core import paths, stages
from mlmsub.core.envsetup import Reading
from mlmsub.core.issues import Issue, error, warning
from mlmsub.core.spec import RunSpec

# exported again by the reference's arguments.sh after it sourced the env setup
OVERRULED_BY_ARGUMENTS_SH = (
    "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "NCCL_IB_SL", "NCCL_IB_TIMEOUT", "CUDA_DEVICE_MAX_CONNECTIONS",
)  # fmt: skip
IDENTITY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def run(spec: RunSpec, reading: Reading, values: Mapping[str, str]) -> Iterator[Issue]:
    """All issues of a run. `values` are the variables as the job will see them."""
    yield from _stage(spec)
    yield from _place(spec)
    yield from _env_setup(spec, reading)
    if spec.native:
        yield from _paths(spec, reading, values)


def _stage(spec: RunSpec) -> Iterator[Issue]:
    if spec.native and not stages.STAGES[spec.stage].native:
        yield error(
            "stage-not-native", "stage",
            f"{spec.stage} can be rendered, but mlmsub's runtime does not do it yet",
            f"run Megatron-LM's example: mlmsub submit script ... -- {spec.stage}.sh {spec.model}",
        )  # fmt: skip
    if spec.scheduler == "local" and spec.nodes > 1:
        yield error("local-nodes", "nodes", f"this machine is one node, not {spec.nodes}", "leave out --nodes")


def _place(spec: RunSpec) -> Iterator[Issue]:
    if any(c in spec.runs_root for c in "%,:\n"):
        yield error(
                "path-characters", "runs_root",
                f"{spec.runs_root!r} holds % , : or a newline, which #SBATCH lines or Pyxis mounts cannot express",
                "choose another path",
            )  # fmt: skip
    if spec.nodes > 1 and spec.image and not spec.image.endswith((".sqsh", ".squashfs")):
        yield warning(
            "image-per-node", "CONTAINER_IMAGE",
            f"each of {spec.nodes} nodes will import {spec.image} for itself",
            "import it once: enroot import -o FILE.sqsh docker://...",
        )  # fmt: skip


def _env_setup(spec: RunSpec, reading: Reading) -> Iterator[Issue]:
    if reading.unsure:
        yield warning(
            "env-setup-unsure", "SANDBOX_ENV_SETUP",
            f"{spec.setup.path} uses what is not here ({', '.join(reading.missing[:3])}); its values are not sure "
            "before the job",
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
    if output and output.rstrip("/") == values.get("MLM_MODEL_CKPT", "").rstrip("/"):
        yield severity(
            "in-place", stage.writes, f"{output} is the input too, and would be overwritten", "choose another"
        )
