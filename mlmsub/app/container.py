"""What a job's container is made of: image, mounts, working directory."""

from __future__ import annotations

from dataclasses import dataclass

from mlmsub.app.sources import Sources
from mlmsub.core import paths
from mlmsub.core.errors import UsageError
from mlmsub.core.issues import warning
from mlmsub.core.values import Mount
from mlmsub.core.values import image as parsed_image

DEFAULT_IMAGE = "nvidia-modelopt-megatron:latest"  # the reference's


@dataclass(frozen=True)
class Place:
    """Where the job's processes run. Without an image (profile `local`) that is this machine."""

    image: str
    mounts: tuple[str, ...]
    workdir: str


def scratch(sources: Sources) -> str:
    """USER_FSW, on the cluster; required, as in the reference."""
    path = sources.pick("USER_FSW", sources.from_profile("scratch"), sources.from_environment("USER_FSW"))
    if not path:
        raise UsageError(
            "USER_FSW is not set: the scratch space on the cluster, readable and writable from all nodes",
            fix="export USER_FSW=/path, or set the profile's `scratch`",
        )
    if not path.startswith("/"):
        raise UsageError(f"USER_FSW must be an absolute path, not {path!r}")
    return path


def runs_root(sources: Sources) -> str:
    """Where run directories go."""
    return sources.profile.runs_root or f"{scratch(sources).rstrip('/')}/.mlmsub/runs"


def image(sources: Sources) -> str:
    """CONTAINER_IMAGE in the one form that Pyxis gets; empty under the profile `local`."""
    if sources.profile.scheduler == "local":
        return ""
    text = sources.pick(
        "CONTAINER_IMAGE",
        sources.from_profile("image"),
        sources.from_environment("CONTAINER_IMAGE"),
        (DEFAULT_IMAGE, "default"),
    )
    if sources.origins["CONTAINER_IMAGE"] == "default":
        sources.issues.append(
            warning("image-default", "CONTAINER_IMAGE", f"not set; using {text}", "set the profile's `image`")
        )
    try:
        return parsed_image(text, base="" if sources.profile.host else str(sources.user.cwd))
    except ValueError as error:
        raise UsageError(f"CONTAINER_IMAGE: {error}") from None


def place(sources: Sources, image: str, scratch: str, values: dict[str, str], *, script: bool) -> Place:
    """Mounts in the order of mounting: the reference's two, then the profile's, which so may lie within.

    The sandbox, a Megatron-LM checkout, is what `script` runs in. A native stage gets it only where one of its
    values points into it, so a sandbox that is not there cannot hurt it.
    """
    sandbox = _sandbox(sources) if script or any(paths.SANDBOX in value for value in values.values()) else ""
    if not image:
        return Place("", (), sandbox)
    try:
        own = [Mount(sandbox, paths.SANDBOX).checked()] if sandbox else []
        own.append(Mount(scratch, paths.SCRATCH).checked())
        others = [Mount.parse(text) for text in sources.profile.mounts]
        for mount in others:
            if f"{mount.target.rstrip('/')}/" in (
                "/",
                "/workspace/",
                f"{paths.SCRATCH}/",
                f"{paths.SANDBOX}/",
                f"{paths.RUN}/",
            ):
                raise ValueError(f"{mount.render()!r} would hide what mlmsub mounts at {mount.target}")
        mounts = tuple(mount.render() for mount in (*own, *others))
    except ValueError as error:
        raise UsageError(f"{error}", fix="change USER_FSW, SANDBOX_DIR or the profile's `mounts`") from None
    return Place(image, mounts, paths.SANDBOX if script else paths.RUN)


def _sandbox(sources: Sources) -> str:
    here = "" if sources.profile.host else str(sources.user.cwd)  # from afar there is no meaningful default
    path = sources.pick(
        "SANDBOX_DIR",
        sources.from_profile("sandbox"),
        sources.from_environment("SANDBOX_DIR"),
        (here, "default"),
    )
    if not path or (sources.profile.host and not path.startswith("/")):
        raise UsageError(
            f"SANDBOX_DIR must be an absolute path on {sources.profile.host}, not {path!r}",
            fix="export SANDBOX_DIR=/path, or set the profile's `sandbox`",
        )
    if sources.origins["SANDBOX_DIR"] == "default":
        sources.issues.append(warning("sandbox-default", "SANDBOX_DIR", f"not set; using the working directory {path}"))
    return str((sources.user.cwd / path).absolute())
