"""The verbs on profiles."""

from __future__ import annotations

import subprocess
from dataclasses import asdict

import typer

from mlmsub.app import config
from mlmsub.cli import connect, output
from mlmsub.core.errors import UsageError
from mlmsub.core.profile import Profile
from mlmsub.core.strict import build
from mlmsub.transport.errors import TransportError


def list_profiles(*, as_json: bool) -> None:
    user = config.User.current()
    rows: list[tuple[str, ...]] = []
    for name in config.profile_names(user):
        try:
            found = config.load_profile(user, name)
            rows.append((name, found.profile.host or "this machine", found.profile.scheduler, found.source))
        except UsageError as error:  # one that is broken does not hide the others
            rows.append((name, "broken", "", error.message))
    header = ("profile", "where", "scheduler", "source")
    if as_json:
        output.print_json([dict(zip(("name", *header[1:]), row, strict=True)) for row in rows])
    else:
        output.print_table(header, rows)


def show_profile(name: str, *, as_json: bool) -> None:
    found = config.load_profile(config.User.current(), name)
    profile = found.profile
    shown_env = {name: output.HIDDEN if name in profile.secret_names else v for name, v in profile.env.items()}
    if as_json:
        output.print_json({"name": found.name, "source": found.source} | asdict(profile) | {"env": shown_env})
        return
    print(f"{output.styled(found.name, 'bold')}  {found.source}")
    for key, value in profile.said().items():
        shown = ", ".join(f"{k}={v}" for k, v in shown_env.items()) if key == "env" else value
        print(f"  {key}: {', '.join(shown) if isinstance(shown, tuple) else shown}")


_QUESTIONS = (
    ("account", "Slurm account (empty: your default)"),
    ("partition", "Slurm partition (empty: the default)"),
    ("gpus_per_node", "GPUs per node"),
    ("scratch", "Scratch on the cluster, readable and writable from all nodes (USER_FSW)"),
    ("sandbox", "Megatron-LM checkout on the cluster (SANDBOX_DIR; empty: none)"),
    ("image", "Container image: a .sqsh file on the cluster, or a registry reference"),
)


def init(name: str, trust: connect.Trust) -> None:
    """Ask, try the connection, write. Refuses to touch a profile that is there."""
    user = config.User.current()
    path = user.profiles_dir / f"{name}.yaml"
    if path.exists():
        raise UsageError(f"{path} is there already", fix="edit it, or choose another name")
    answers = {"host": typer.prompt("Login node, as for ssh (empty: this machine)", default="", show_default=False)}
    if answers["host"]:
        _probe(answers["host"], trust)
    for key, question in _QUESTIONS:
        default = str(getattr(Profile(), key))
        answers[key] = typer.prompt(question, default=default, show_default=bool(default))
    said = {key: value.strip() for key, value in answers.items() if value.strip()}
    build(Profile, said, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    import yaml

    path.write_text(yaml.safe_dump(said, sort_keys=False))
    print(f"wrote {path}; docs/profiles.md lists more keys")


def _probe(host: str, trust: connect.Trust) -> None:
    """Say where ssh would go, and whether sbatch answers there."""
    try:
        shown = subprocess.run(["ssh", "-G", host], capture_output=True, text=True, timeout=10, check=True).stdout
        values = dict(line.split(" ", 1) for line in shown.splitlines() if " " in line)
        print(f"  ssh goes to {values.get('user')}@{values.get('hostname')} port {values.get('port')}")
    except (OSError, subprocess.SubprocessError):
        print("  no ssh program here; its configuration is read without it")
    try:
        with connect.Connections(trust) as connections:
            done = connections.to(config.Place(host)).run("command -v sbatch && sbatch --version", timeout=30)
        said = done.stdout.decode(errors="replace").split()
        print(f"  connected; {' '.join(said[1:]) or 'sbatch is not on PATH there: set slurm_bin or prelude'}")
    except TransportError as error:
        print(f"  could not connect: {error}\n    fix: {error.fix}")
