"""Typed values with `parse` and `render`: what a user may write, and the one form that Slurm and Pyxis get."""

from __future__ import annotations

import re
from dataclasses import dataclass

_REGISTRY_HOST = re.compile(r"(?:[A-Za-z0-9-]+\.)+[A-Za-z0-9-]+(?::\d+)?|localhost(?::\d+)?|[A-Za-z0-9-]+:\d+")


def number(text: str) -> int | None:
    """The whole number from 0 on that this is, of at most 12 digits; else None."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None


@dataclass(frozen=True)
class Mount:
    """A bind mount, `SRC:DST[:FLAGS]`, as Pyxis reads it.

    Pyxis splits at `,` and `:` and has no escape, so a path with one of them cannot be mounted.
    """

    source: str
    target: str
    flags: str = ""

    @classmethod
    def parse(cls, text: str) -> Mount:
        if "," in text:
            raise ValueError("a mount cannot hold a comma; give several mounts as several entries")
        if re.search(r"\s/", text):
            raise ValueError(f"{text!r}: give several mounts as several entries, not separated by blanks")
        source, _, rest = text.partition(":")
        target, _, flags = rest.partition(":")
        if flags not in ("", "ro", "rw"):
            raise ValueError(f"mount flags are ro or rw, not {flags!r}")
        return cls(source, target or source, flags).checked()

    def checked(self) -> Mount:
        for name, path in (("source", self.source), ("target", self.target)):
            if not path.startswith("/"):
                raise ValueError(f"the mount's {name} must be an absolute path, not {path!r}")
            bad = sorted(set(path) & set(",:\n\0"))
            if bad:
                raise ValueError(f"the mount's {name} {path!r} holds {bad[0]!r}, which Pyxis cannot express")
        return self

    def render(self) -> str:
        return ":".join(filter(None, (self.source, self.target, self.flags)))


def image(text: str, *, base: str) -> str:
    """A container image as Pyxis takes it: a squashfs file or root directory on the cluster, or a registry reference.

    Enroot takes everything before `#` as the registry. `nvcr.io/nvidia/x:1` without one is looked for at the
    default registry, so a first part that looks like a host becomes `nvcr.io#nvidia/x:1`.

    Args:
        text: what the user wrote, `docker://` in front or not. ValueError where it can be no image.
        base: the directory, on the cluster, that a relative file name starts from; "" if there is none.
    """
    if not text or re.search(r"[\s\0,]", text):
        raise ValueError(f"{text!r} is not an image: it is empty, or holds blanks or a comma")
    if text.startswith(("/", "./", "../")) or text.endswith((".sqsh", ".squashfs")):
        if not text.startswith("/") and not base:
            raise ValueError(f"{text!r} must be an absolute path on the cluster")
        return text if text.startswith("/") else f"{base.rstrip('/')}/{text.removeprefix('./')}"
    text = text.removeprefix("docker://")
    host, slash, rest = text.partition("/")
    if "#" not in text and slash and _REGISTRY_HOST.fullmatch(host):
        return f"{host}#{rest}"
    return text


@dataclass(frozen=True)
class TimeLimit:
    """A job's time limit in seconds, in every form of sbatch's `--time`."""

    seconds: int

    @classmethod
    def parse(cls, text: str) -> TimeLimit:
        """`M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S` (sbatch(1))."""
        match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
        if not match:
            raise ValueError(f"{text!r} is not a time limit: write H:MM:SS, minutes, or D-HH:MM:SS")
        days, *fields = match.groups()
        numbers = [int(field) for field in fields if field is not None]
        if days is not None:
            hours, minutes, seconds = (*numbers, 0, 0)[:3]
        elif len(numbers) == 3:
            hours, minutes, seconds = numbers
        else:
            hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
        total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
        if total == 0:
            raise ValueError("a time limit of 0 means none to Slurm; give one")
        return cls(total)

    def render(self) -> str:
        minutes, seconds = divmod(self.seconds, 60)
        hours, minutes = divmod(minutes, 60)
        days, hours = divmod(hours, 24)
        return (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{seconds:02}"


@dataclass(frozen=True)
class MemorySize:
    """Memory per node in MiB; 0 is all of the node's memory (sbatch's `--mem`)."""

    mib: int

    @classmethod
    def parse(cls, text: str) -> MemorySize:
        match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip(), re.IGNORECASE)
        if not match:
            raise ValueError(f"{text!r} is not a memory size: write a number with K, M, G or T, or 0 for all")
        number, unit = int(match[1]), match[2].upper() or "M"
        return cls(-(-number // 1024) if unit == "K" else number * 1024 ** "MGT".index(unit))

    def render(self) -> str:
        return f"{self.mib}M" if self.mib else "0"
