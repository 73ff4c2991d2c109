"""Source an env-setup file here, to know its values before the job does (see core.envsetup)."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mlmsub.core import envsetup, paths
from mlmsub.core.errors import UsageError
from mlmsub.core.spec import EnvSetup, to_text

_BASH = "/bin/bash"
TIME_LIMIT = 10.0  # seconds


@dataclass(frozen=True)
class ReadSetup:
    """The files to ship, and what they set."""

    setup: EnvSetup
    reading: envsetup.Reading


def read(path: Path, given: Mapping[str, str], *, static: bool = False, time_limit: float = TIME_LIMIT) -> ReadSetup:
    """Read an env setup and the files beside it that it sources.

    `given` are the variables that it may see. Raises UsageError with file and line for a file that does not parse,
    ends the shell, does not end in time, or sources a file that cannot be shipped.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100  # without `..`, but with its links
    try:
        content = path.read_bytes()
    except IsADirectoryError:
        raise UsageError(f"the env setup {path} is a folder") from None
    except FileNotFoundError:
        raise UsageError(
            f"the env setup {path} does not exist",
            fix="give --env-setup or SANDBOX_ENV_SETUP the path of a file",
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read the env setup {path}: {error.strerror}") from None
    if doubt := envsetup.doubts(content):
        raise UsageError(f"{path}: {doubt}", fix=f"sed -i -e '1s/^\\xef\\xbb\\xbf//' -e 's/\\r$//' {path}")
    line = content.strip()
    if b"\n" not in line and b"=" not in line and line and (path.parent / to_text(line)).is_file():
        raise UsageError(
            f"{path} holds nothing but the path {to_text(line)}: it was a symbolic link, and became a text file",
            fix=f"give {path.parent / to_text(line)} instead, or check the files out again with links",
        )
    files = {path.name: content}
    reading = None if static else _source(path, given, time_limit)
    if reading is None:
        return ReadSetup(_setup(path, files), envsetup.read_static(content.decode(errors="replace")))
    return ReadSetup(_setup(path, files | _siblings(path, reading)), reading)


def reread(setup: EnvSetup, given: Mapping[str, str]) -> ReadSetup:
    """Read a setup again from what was shipped of it."""
    if not setup.files:
        return ReadSetup(setup, envsetup.Reading(complete=True))
    with tempfile.TemporaryDirectory(prefix="mlmsub-") as folder:
        for name, content in setup.contents().items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_bytes(content)
        return ReadSetup(setup, read(Path(folder) / next(iter(setup.files)), given).reading)


def _setup(path: Path, files: Mapping[str, bytes]) -> EnvSetup:
    return EnvSetup(str(path), {name: to_text(content) for name, content in files.items()})


def _source(path: Path, given: Mapping[str, str], time_limit: float) -> envsetup.Reading | None:
    """None where there is no bash that can do it."""
    path = path.absolute()
    with tempfile.TemporaryDirectory(prefix="mlmsub-") as empty:
        environ = {**given, "PATH": empty, "__mlm_setup": f"./{path.name}"}
        try:
            if (parsed := subprocess.run([_BASH, "-n", f"./{path.name}"], cwd=path.parent, env={"PATH": empty},
                                         capture_output=True, timeout=time_limit)).returncode:  # fmt: skip
                raise UsageError(f"{path}: {_first_error(parsed.stderr, path.name)}", fix="mend the env setup")
            process = subprocess.Popen(
                [_BASH, "--noprofile", "--norc", "-c", envsetup.READER],
                cwd=path.parent, env=environ, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            return None
        try:
            output, errors = process.communicate(timeout=time_limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise UsageError(
                f"{path} did not end within {time_limit:.0f} s",
                fix="an env setup only sets variables; or read it without running it: --static",
            ) from None
    if process.returncode == envsetup.TOO_OLD:
        return None
    reading = envsetup.parse(output, environ)
    if not reading.complete:
        at = reading.ended_at or str(path.name)
        raise UsageError(
            f"{path}: it ends the shell at {at} (exit code {process.returncode}){_said(errors)}",
            fix="an env setup is sourced: take out `exit`, and mind `set -e`",
        )
    if b"No such file or directory" in errors:  # it may be there in the job
        return replace(reading, missing=(*reading.missing, _said(errors).removeprefix("; it said: ")))
    return reading


def _siblings(path: Path, reading: envsetup.Reading) -> dict[str, bytes]:
    """The files that the setup sourced, by their path relative to its folder."""
    folder = path.absolute().parent
    found: dict[str, bytes] = {}
    for name in reading.files:
        sourced = Path(os.path.normpath(folder / name))
        if sourced == folder / path.name or not sourced.is_file():
            continue
        if not sourced.is_relative_to(folder):
            raise UsageError(
                f"{path} sources {name}, which lies outside its folder and would be missing in the job",
                fix=f"put it into {folder}, or below it",
            )
        relative = str(sourced.relative_to(folder))
        if relative in paths.RESERVED:
            raise UsageError(f"{path} sources {name}, a name that mlmsub uses in the run directory", fix="rename it")
        found[relative] = sourced.read_bytes()
    return found


def _first_error(stderr: bytes, name: str) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines() or ["does not parse"]
    return lines[0].removeprefix(f"./{name}: ")


def _said(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return f"; it said: {lines[-1]}" if lines else ""
