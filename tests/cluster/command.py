"""The `mlmsub` command as the lab's ordinary user has it: a wheel, installed under Debian's own Python."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import CACHE, Lab

REPOSITORY = Path(__file__).parents[2]


def installed() -> Path:
    """The command, in a virtual environment that everyone can read; made anew when pyproject.toml changes.

    The package itself is built and installed each time, so that what the wheel lacks is missed here.
    """
    digest = hashlib.sha256((REPOSITORY / "pyproject.toml").read_bytes()).hexdigest()[:12]
    venv = CACHE / f"command-{digest}"
    pip = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not (venv / "done").exists():
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run(["/usr/bin/python3", "-m", "venv", str(venv)], check=True)
        subprocess.run([*pip, "hatchling", "editables", str(REPOSITORY)], check=True)
        (venv / "done").touch()
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--force-reinstall", str(REPOSITORY)], check=True)
    return venv / "bin/mlmsub"


@dataclass
class Mlmsub:
    """One user of mlmsub: a home of its own for profiles and records, and a scratch on the shared file system."""

    lab: Lab
    command: Path
    home: Path
    user: str = "labuser"

    @property
    def scratch(self) -> Path:
        return self.home / "scratch"

    @property
    def sandbox(self) -> Path:
        return self.home / "sandbox"

    def setup(self) -> Mlmsub:
        for folder in (self.scratch, self.sandbox, self.home / "config/mlmsub/profiles"):
            folder.mkdir(parents=True)
        subprocess.run(["chown", "-R", f"{self.user}:", str(self.home)], check=True)
        return self

    def profile(self, name: str = "lab", **keys: Any) -> None:
        """Write a profile; the image is the squashfs file unless the test says otherwise."""
        data = {"image": str(self.lab.sqsh), "scratch": str(self.scratch), "sandbox": str(self.sandbox),
                "launch_script": "python3", "time": "10", "mem": "1G", "exclusive": False} | keys  # fmt: skip
        path = self.home / "config/mlmsub/profiles" / f"{name}.yaml"
        path.write_text(json.dumps(data))  # JSON is YAML
        path.chmod(0o644)

    def script(self, name: str, text: str) -> None:
        """A script in the sandbox."""
        path = self.sandbox / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *args: str | Path, check: bool = True, env: dict[str, str] | None = None, timeout: float = 120):
        own = {"XDG_CONFIG_HOME": str(self.home / "config"), "XDG_STATE_HOME": str(self.home / "state")}
        argv = [str(self.command), *map(str, args)]
        return self.lab.run(argv, self.user, cwd=self.home, env=own | (env or {}), check=check, timeout=timeout)

    def submit(self, *args: str | Path, **how: Any) -> dict[str, Any]:
        """Submit, and return what --json says. `--` and what follows it come last."""
        words = list(map(str, args))
        at = words.index("--") if "--" in words else len(words)
        return json.loads(self.run("submit", *words[:at], "--json", *words[at:], **how).stdout)

    def status(self, run: str) -> dict[str, Any]:
        return json.loads(self.run("status", run, "--json").stdout)[0]["status"]

    def log(self, run: dict[str, Any]) -> str:
        return self.run("logs", "--raw", run["run_id"]).stdout
