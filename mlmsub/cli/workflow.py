"""The verbs on workflows."""

from __future__ import annotations

from typing import Annotated

import typer

from mlmsub.cli import completion
from mlmsub.cli.connect import Trust
from mlmsub.cli.options import AcceptNew, Json, NoPrompt

app = typer.Typer(help="Runs that depend on each other, and sweeps, as one file.", no_args_is_help=True)

File = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="A .yaml file, or a workflow that comes with mlmsub.", autocompletion=completion.workflows
    ),
]
Name = Annotated[
    str,
    typer.Argument(metavar="FILE", help="The file, or the workflow's name.", autocompletion=completion.submitted),
]
Profile = Annotated[
    str, typer.Option(help="The cluster; default: the file's `profile`.", autocompletion=completion.profiles)
]
Var = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Set a value of the file's `vars`.")]


@app.command(epilog="Example: mlmsub workflow plan format_sweep --var model=meta-llama/Llama-3.1-8B-Instruct")
def plan(file: File, profile: Profile = "", var: Var = None, json_: Json = False) -> None:
    """Check all steps and draw what waits for what. Sends nothing; exits 3 on errors."""
    from mlmsub.cli import workflow_verbs as verbs

    verbs.plan(file, profile, var or [], as_json=json_)


@app.command()
def submit(
    file: File,
    profile: Profile = "",
    var: Var = None,
    new: Annotated[bool, typer.Option("--new", help="All steps anew, though they were submitted.")] = False,
    no_prompt: NoPrompt = False,
    accept_new: AcceptNew = False,
    json_: Json = False,
) -> None:
    """Submit all steps, over one connection and in one go; what was submitted already is left as it is."""
    from mlmsub.cli import workflow_verbs as verbs

    verbs.submit(file, profile, var or [], Trust(no_prompt, accept_new), new=new, as_json=json_)


@app.command()
def resume(
    file: File,
    profile: Profile = "",
    var: Var = None,
    no_prompt: NoPrompt = False,
    accept_new: AcceptNew = False,
    json_: Json = False,
) -> None:
    """Submit what is missing, has failed or has other inputs, and what depends on that."""
    from mlmsub.cli import workflow_verbs as verbs

    verbs.resume(file, profile, var or [], Trust(no_prompt, accept_new), as_json=json_)


@app.command()
def status(
    name: Name,
    watch: Annotated[bool, typer.Option("--watch", help="Until all have ended; exit 6 if a step failed.")] = False,
    no_prompt: NoPrompt = False,
    accept_new: AcceptNew = False,
    json_: Json = False,
) -> None:
    """Show every step: state, nodes, time, restarts, and where the time went."""
    from mlmsub.cli import workflow_verbs as verbs

    verbs.status(name, Trust(no_prompt, accept_new), watch=watch, as_json=json_)


@app.command()
def cancel(name: Name, no_prompt: NoPrompt = False, accept_new: AcceptNew = False) -> None:
    """Cancel all steps that have not ended, the last first."""
    from mlmsub.cli import workflow_verbs as verbs

    verbs.cancel(name, Trust(no_prompt, accept_new))


@app.command()
def report(
    name: Name,
    no_prompt: NoPrompt = False,
    accept_new: AcceptNew = False,
    json_: Json = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
) -> None:
    """Compare the cells of a sweep: size of the export, perplexity, MMLU, time."""
    from mlmsub.cli import workflow_verbs as verbs

    verbs.report(name, Trust(no_prompt, accept_new), as_json=json_, as_csv=csv)
