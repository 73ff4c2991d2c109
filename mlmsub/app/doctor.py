"""Ask a cluster once what it is like, and write what is certain into the profile."""

from __future__ import annotations

from pathlib import Path

from mlmsub.app import container
from mlmsub.app.config import NamedProfile, User
from mlmsub.app.sources import Request, Sources
from mlmsub.core import doctor
from mlmsub.core.doctor import Finding
from mlmsub.core.errors import UsageError
from mlmsub.slurm import jobs
from mlmsub.transport import Transport


def examine(user: User, named: NamedProfile, transport: Transport) -> list[Finding]:
    """One exec. Raises UsageError where the profile does not say enough to ask."""
    profile = named.profile
    if profile.scheduler == "local":
        raise UsageError("the profile local has no cluster", fix="name another one by --profile")
    sources = Sources(user, named, Request())
    script = jobs.script(
        "doctor",
        slurm_bin=profile.slurm_bin,
        prelude=profile.prelude,
        runs_root=container.runs_root(sources),
        scratch=container.scratch(sources),
        image=profile.image if profile.image.startswith("/") else "",
    )
    return doctor.judge(doctor.parse(transport.run(script).stdout.decode(errors="replace")), profile)


def write(named: NamedProfile, findings: list[Finding]) -> dict[str, str]:
    """Add to the profile's file what it leaves open and the cluster settles; what it says already is left alone.

    Lines are appended, so comments stay. Returns what was added.
    """
    path = Path(named.source)
    if not path.is_file():
        raise UsageError(f"{named.source}: there is no file to write to", fix="mlmsub profile init")
    said = named.profile.said()
    settled = {key: value for finding in findings for key, value in finding.settles.items()}
    default, text = type(named.profile)(), _text(path)
    open_keys = {key for key in settled if key not in said and f"\n{key}:" not in text}
    new = {key: value for key, value in settled.items() if key in open_keys and str(getattr(default, key)) != value}
    if new:
        lines = "".join(f"{key}: {value}\n" for key, value in new.items())
        path.write_text(text.lstrip("\n") + "# found by mlmsub doctor\n" + lines)
    return new


def _text(path: Path) -> str:
    text = path.read_text()
    return "\n" + text + ("" if text.endswith("\n") or not text else "\n")
