"""The verbs on model confs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mlmsub.cli.options import Json

app = typer.Typer(help="Model confs: which models are known, and how to add one.", no_args_is_help=True)


@app.command(name="list")
def list_(json_: Json = False) -> None:
    """List the models of the catalogue."""
    from mlmsub.app import confs
    from mlmsub.cli import output

    entries = confs.entries()
    if json_:
        output.print_json([asdict(entry) for entry in entries])
        return
    rows = [
        (e.name, e.family, str(e.layers), str(e.experts or ""), _billions(e.parameters), e.source_format,
         "yes" if e.verified else "unverified")
        for e in entries
    ]  # fmt: skip
    output.print_table(("model", "family", "layers", "experts", "parameters", "source", "verified"), rows)


@app.command()
def show(
    model: Annotated[str, typer.Argument(help="A model of the catalogue, an alias, or a conf's file.")],
    json_: Json = False,
) -> None:
    """Show everything that a conf says."""
    from mlmsub.app import config, confs, models
    from mlmsub.cli import output

    found = models.find(model, config.User.current().cwd)
    entry = confs.entry(found)
    if json_:
        said = asdict(found.conf) if found.conf else {}
        output.print_json({"file": str(found.path), **said, **asdict(entry)})
        return
    print(f"{output.styled(entry.name, 'bold')}  {found.path}")
    if entry.layers:
        verified = "verified" if entry.verified else "unverified"
        print(f"{entry.layers} layers, {_billions(entry.parameters)} parameters, {verified}")
    print(found.text.rstrip())


@app.command()
def check(files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Confs' files, or models.")]) -> None:
    """Check confs: keys, argument names, plausibility. Exits with 3 on an error."""
    from mlmsub.app import config, confs
    from mlmsub.cli import output

    cwd = config.User.current().cwd
    failed = False
    for name in files:
        issues = confs.check(name, cwd)
        errors = sum(issue.severity == "error" for issue in issues)
        failed = failed or errors > 0
        print(f"{name}: {f'{errors} errors' if errors else 'ok'}", flush=True)
        output.print_issues(issues)
    if failed:
        sys.exit(3)


@app.command(name="from-hf")
def from_hf(
    path: Annotated[str, typer.Argument(metavar="PATH", help="config.json, or the folder that holds it.")],
    out: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Write the conf there.")] = "",
    name: Annotated[str, typer.Option(help="The model's name; default: what config.json or the folder says.")] = "",
) -> None:
    """Make a conf from a Hugging Face config.json; nothing is downloaded."""
    from mlmsub.app import config, confs

    cwd: Path = config.User.current().cwd
    text = confs.from_hf(cwd / path, name)
    if not out:
        print(text, end="")
        return
    confs.write(cwd / out, text)
    print(f"wrote {out}; look at its notes, then: mlmsub conf check {out}")


def _billions(parameters: int) -> str:
    billions = parameters / 1e9
    return f"{billions:,.{0 if billions >= 100 else 2}f} B" if parameters else ""
