"""Where values come from: flag, profile, environment, default. Picks the first that was said, and notes which."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlmsub.app.config import NamedProfile, User
from mlmsub.core.issues import Issue
from mlmsub.core.profile import Profile

Candidate = tuple[str, str]  # value, origin


@dataclass(frozen=True)
class Request:
    """What the command line said; empty means: not said."""

    stage: str = ""
    args: tuple[str, ...] = ()
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
    requeue: str = ""  # true or false
    stop_before: str = ""
    chain: str = ""
    install: str = ""
    static: bool = False
    gpu: str = ""  # a kind of GPU in place of the profile's, to plan for
    allow: tuple[str, ...] = ()


@dataclass
class Sources:
    """One submission's sources, and what was found on the way."""

    user: User
    named: NamedProfile
    request: Request
    origins: dict[str, str] = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)

    @property
    def profile(self) -> Profile:
        return self.named.profile

    def pick(self, name: str, *candidates: Candidate) -> str:
        """The first candidate that is not empty; `name` is what `origins` calls it."""
        for value, origin in candidates:
            if value:
                self.origins[name] = origin
                return value
        return ""

    def from_profile(self, key: str) -> Candidate:
        return getattr(self.profile, key), f"profile {self.named.name}"

    def from_environment(self, variable: str) -> Candidate:
        return self.user.get(variable), f"environment ({variable})"
