"""The user's side: environment, configuration folder, profiles. The only module that looks at `os.environ`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlmsub.core import profile as profiles
from mlmsub.core.errors import UsageError
from mlmsub.core.profile import Profile
from mlmsub.core.strict import build, nearest


@dataclass(frozen=True)
class User:
    """Who calls, from where: environment variables and the folders that follow from them."""

    environ: Mapping[str, str]
    cwd: Path

    @classmethod
    def current(cls) -> User:
        try:
            return cls(dict(os.environ), Path.cwd())
        except FileNotFoundError:
            raise UsageError("the working directory is gone", fix="cd to one that exists") from None

    def get(self, name: str) -> str:
        return self.environ.get(name, "")

    @property
    def profiles_dir(self) -> Path:
        return self._xdg("XDG_CONFIG_HOME", ".config") / "profiles"

    @property
    def records_dir(self) -> Path:
        return self._xdg("XDG_STATE_HOME", ".local/state") / "runs"

    def _xdg(self, variable: str, default: str) -> Path:
        base = self.get(variable)
        if not base.startswith("/"):  # the XDG specification: a relative path is to be ignored
            base = f"{self.get('HOME') or Path.home()}/{default}"
        return Path(base) / "mlmsub"


@dataclass(frozen=True)
class Place:
    """A login node: this machine, or a host behind SSH."""

    host: str = ""
    transport: Literal["auto", "paramiko", "openssh"] = "auto"
    ssh_config: str = ""


@dataclass(frozen=True)
class NamedProfile:
    name: str
    profile: Profile
    source: str

    @property
    def place(self) -> Place:
        return Place(self.profile.host, self.profile.transport, self.profile.ssh_config)


_BUILT_IN = {"local": profiles.LOCAL, "default": Profile()}


def profile_names(user: User) -> list[str]:
    found = [path.stem for path in user.profiles_dir.glob("*.yaml")] if user.profiles_dir.is_dir() else []
    return sorted({*found, "local"})


def load_profile(user: User, name: str) -> NamedProfile:
    """The profile of this name, or in this file; without a name MLMSUB_PROFILE's, else `default`, else the only one."""
    name = name or user.get("MLMSUB_PROFILE") or _only(user)
    path = user.cwd / name if name.endswith((".yaml", ".yml")) else user.profiles_dir / f"{name}.yaml"
    if path.is_file():
        data = read_yaml(path)
        return NamedProfile(path.stem, build(Profile, data or {}, str(path)), str(path))
    if name in _BUILT_IN:
        return NamedProfile(name, _BUILT_IN[name], "built in")
    if path.parent == user.profiles_dir:
        known = profile_names(user)
        raise UsageError(
            f"there is no profile {name!r}{nearest(name, known)}",
            fix=f"the profiles are: {', '.join(known)}; they lie in {user.profiles_dir} (see docs/profiles.md)",
        )
    raise UsageError(f"there is no profile file {path}")


def _only(user: User) -> str:
    own = [name for name in profile_names(user) if name != "local"]
    if "default" in own:
        return "default"
    if len(own) == 1:
        return own[0]
    if not own:  # as with the reference: this machine's Slurm, and USER_FSW and its like say the rest
        return "default"
    raise UsageError(f"which profile? there are {', '.join(own)}", fix="give --profile, or set MLMSUB_PROFILE")


def read_yaml(path: Path) -> object:
    """The file with every scalar as a string (see core.strict); UsageError names line and problem."""
    import yaml

    class Loader(getattr(yaml, "CBaseLoader", yaml.BaseLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            seen = [key.value for key, _ in node.value]
            if twice := next((key for key in seen if seen.count(key) > 1), None):
                raise UsageError(f"{path}:{node.start_mark.line + 1}: the key {twice!r} stands there twice")
            return super().construct_mapping(node, deep=deep)  # type: ignore[no-any-return]

    try:
        return yaml.load(path.read_bytes(), Loader=Loader)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UsageError(f"{at}: not YAML: {getattr(error, 'problem', error)}") from None
