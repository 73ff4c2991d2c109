"""The `mlmsub` command. Verbs import what they need when they run: `--help` must not wait for paramiko or jinja2."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from mlmsub import __version__
from mlmsub.cli import completion, confs, output, workflow
from mlmsub.cli.connect import Trust
from mlmsub.cli.options import AcceptNew, Json, NoPrompt
from mlmsub.core.errors import MlmsubError
from mlmsub.transport.errors import TransportError

app = typer.Typer(
    help="Submit containerized Megatron-Core and ModelOpt post-training to Slurm.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
profiles = typer.Typer(help="The clusters that you can submit to.", no_args_is_help=True)
app.add_typer(profiles, name="profile")
app.add_typer(confs.app, name="conf")
app.add_typer(workflow.app, name="workflow")

# what several verbs take
Stage = Annotated[
    str,
    typer.Argument(
        help="convert, quantize, export, ... or script; several in one job: quantize+export.",
        autocompletion=completion.stages,
    ),
]
ProfileName = Annotated[
    str, typer.Option(help="The cluster: a profile's name or file.", autocompletion=completion.profiles)
]
EnvSetup = Annotated[str, typer.Option(metavar="FILE", help="Shell file of variables (SANDBOX_ENV_SETUP).")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set a variable of the job; wins over the env setup."),
]
Nodes = Annotated[str, typer.Option("--nodes", "-N", metavar="N", help="Number of nodes (default: 1).")]
Time = Annotated[str, typer.Option(metavar="H:MM:SS", help="Time limit.")]
Partition = Annotated[str, typer.Option(help="Slurm partition.")]
Account = Annotated[str, typer.Option(help="Slurm account.")]
Static = Annotated[bool, typer.Option("--static", help="Read the env setup without running it.")]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="CODE", help="Submit in spite of this error (docs/rules.md); may be repeated."),
]
InPlace = Annotated[bool, typer.Option("--in-place", help="Overwrite the input checkpoint: --allow in-place.")]
Requeue = Annotated[
    bool | None,
    typer.Option("--requeue/--no-requeue", help="Whether Slurm may start the job again (default: not for script)."),
]
StopBefore = Annotated[
    str, typer.Option(metavar="SECONDS", help="Save and stop so long before the time limit (default: 300).")
]
Chain = Annotated[
    str, typer.Option(metavar="K", help="Queue K more jobs to go on after a time limit, preemption or a lost node.")
]
From = Annotated[str, typer.Option("--from", metavar="RUN.YAML", help="Submit what another run's run.yaml says.")]
Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...", help="Run ids, their beginnings, job ids, or `last`.", autocompletion=completion.runs
    ),
]
Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Run id, its beginning, job id, or `last`.", autocompletion=completion.runs),
]


def main() -> None:
    """The entry point: every error becomes a message and its exit code; nobody sees a traceback."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except MlmsubError as error:
        output.print_error(error)
        sys.exit(error.exit_code)
    except TransportError as error:
        output.print_error(MlmsubError(str(error), fix=error.fix))
        sys.exit(4)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `mlmsub logs | head`: nothing more can be written, not even at the interpreter's end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        output.print_error(MlmsubError(f"{error.strerror or error}: {error.filename or 'standard output'}"))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mlmsub {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(
    context_settings={"allow_interspersed_args": True},
    epilog="Example: mlmsub submit quantize meta-llama/Llama-3.1-8B-Instruct FP8_DEFAULT_CFG --env-setup setup.sh",
)
def submit(
    stage: Stage = "",
    args: Annotated[
        list[str] | None,
        typer.Argument(
            help="The model and more; for script, your command after `--`.", autocompletion=completion.models
        ),
    ] = None,
    profile: ProfileName = "",
    env_setup: EnvSetup = "",
    set_: Set = None,
    nodes: Nodes = "",
    time: Time = "",
    partition: Partition = "",
    account: Account = "",
    job_name: Annotated[str, typer.Option(help="Job name (default: STAGE-MODEL).")] = "",
    after: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN", help="Start when this run has succeeded; may be repeated.", autocompletion=completion.runs
        ),
    ] = None,
    requeue: Requeue = None,
    chain: Chain = "",
    stop_before: StopBefore = "",
    sbatch_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="ARG", help="One more sbatch option, such as --comment=x; may be repeated."),
    ] = None,
    install: Annotated[
        str,
        typer.Option(metavar="FILE", help="pip install this requirements file of the container, once per node."),
    ] = "",
    static: Static = False,
    allow: Allow = None,
    in_place: InPlace = False,
    from_: From = "",
    new: Annotated[bool, typer.Option("--new", help="Another run, though one of the same is under way.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show everything; send nothing.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the log; exit 6 if the job fails.")] = False,
    no_prompt: NoPrompt = False,
    accept_new: AcceptNew = False,
    json_: Json = False,
) -> None:
    """Submit a stage, or several with + between, as one Slurm job."""
    from mlmsub.cli import submit as verb

    verb.run(
        verb.Options(
            stage=stage, args=tuple(args or ()), profile=profile, env_setup=env_setup, overrides=tuple(set_ or ()),
            nodes=nodes, time=time, partition=partition, account=account, job_name=job_name, after=tuple(after or ()),
            requeue="" if requeue is None else str(requeue).lower(), chain=chain, stop_before=stop_before,
            sbatch_args=tuple(sbatch_arg or ()), install=install, static=static,
            allow=(*(allow or ()), *(("in-place",) if in_place else ())),
        ),
        Trust(no_prompt, accept_new), from_file=from_, new=new, dry_run=dry_run, watch=watch, as_json=json_,
    )  # fmt: skip


@app.command(epilog="Example: mlmsub plan eagle3 moonshotai/Kimi-K2-Instruct --nodes 8 --env-setup setup.sh")
def plan(
    stage: Stage = "",
    args: Annotated[
        list[str] | None, typer.Argument(help="The model and more.", autocompletion=completion.models)
    ] = None,
    profile: ProfileName = "",
    env_setup: EnvSetup = "",
    set_: Set = None,
    nodes: Nodes = "",
    time: Time = "",
    partition: Partition = "",
    account: Account = "",
    after: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="The run that this one continues.", autocompletion=completion.runs),
    ] = None,
    static: Static = False,
    allow: Allow = None,
    gpu: Annotated[str, typer.Option(metavar="KIND", help="Plan for this GPU, such as h200.")] = "",
    suggest: Annotated[
        bool, typer.Option("--suggest", help="List layouts that work, best first; without --nodes, on any number.")
    ] = False,
    json_: Json = False,
) -> None:
    """Show what a submission would be: values, layout, memory, issues. Sends nothing; exits 3 on errors."""
    from mlmsub.cli import plan as verb

    verb.run(
        verb.Options(
            stage=stage, args=tuple(args or ()), profile=profile, env_setup=env_setup, overrides=tuple(set_ or ()),
            nodes=nodes, time=time, partition=partition, account=account, after=tuple(after or ()), static=static,
            allow=tuple(allow or ()), gpu=gpu,
        ),
        suggest=suggest, as_json=json_,
    )  # fmt: skip


@app.command()
def status(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Default: `last`.", autocompletion=completion.runs),
    ] = None,
    no_prompt: NoPrompt = False,
    accept_new: AcceptNew = False,
    json_: Json = False,
) -> None:
    """Show what became of runs."""
    from mlmsub.cli import runs as verbs

    verbs.status(runs or ["last"], Trust(no_prompt, accept_new), as_json=json_)


@app.command(name="list")
def list_(
    profile: Annotated[
        str,
        typer.Option(help="This profile's runs, also those of other machines.", autocompletion=completion.profiles),
    ] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many, newest first.")] = 20,
    no_prompt: NoPrompt = False,
    accept_new: AcceptNew = False,
    json_: Json = False,
) -> None:
    """List your runs, newest first."""
    from mlmsub.cli import runs as verbs

    verbs.list_runs(profile, limit, Trust(no_prompt, accept_new), as_json=json_)


@app.command()
def show(run: Run = "last", no_prompt: NoPrompt = False, accept_new: AcceptNew = False, json_: Json = False) -> None:
    """Show all that is known of a run: state, directory, log, outputs."""
    from mlmsub.cli import runs as verbs

    verbs.show(run, Trust(no_prompt, accept_new), as_json=json_)


@app.command()
def logs(
    run: Run = "last",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="The log's bytes as they are.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="One rank's lines only.")] = None,
    no_prompt: NoPrompt = False,
    accept_new: AcceptNew = False,
) -> None:
    """Print a run's log; what several ranks say alike stands once."""
    from mlmsub.cli import runs as verbs

    verbs.logs(run, Trust(no_prompt, accept_new), follow=follow, raw=raw, rank=rank)


@app.command()
def fetch(
    run: Run,
    patterns: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATTERN]...", help="Such as 'logs/*' (default) or 'EXPORT_DIR/*.json'."),
    ] = None,
    to: Annotated[str, typer.Option("--to", "-o", metavar="FOLDER", help="Where to (default: ./RUN).")] = "",
    no_prompt: NoPrompt = False,
    accept_new: AcceptNew = False,
) -> None:
    """Bring logs and small outputs of a run here."""
    from mlmsub.cli import runs as verbs

    verbs.fetch(run, patterns or [], to, Trust(no_prompt, accept_new))


@app.command()
def cancel(runs: Runs, no_prompt: NoPrompt = False, accept_new: AcceptNew = False) -> None:
    """Cancel runs, and remove their secrets from the cluster."""
    from mlmsub.cli import runs as verbs

    verbs.cancel(runs, Trust(no_prompt, accept_new))


@app.command()
def doctor(
    profile: ProfileName = "",
    write: Annotated[bool, typer.Option("--write", help="Add what is certain to the profile's file.")] = False,
    no_prompt: NoPrompt = False,
    accept_new: AcceptNew = False,
    json_: Json = False,
) -> None:
    """Ask a cluster what it has, and say what a profile must say."""
    from mlmsub.cli import doctor as verb

    verb.run(profile, Trust(no_prompt, accept_new), write=write, as_json=json_)


@profiles.command(name="init")
def profile_init(
    name: Annotated[str, typer.Argument(help="How to call it.")] = "default",
    no_prompt: NoPrompt = False,
    accept_new: AcceptNew = False,
) -> None:
    """Ask for a cluster's facts, try the connection, and write a profile."""
    from mlmsub.cli import profiles as verbs

    verbs.init(name, Trust(no_prompt, accept_new))


@profiles.command(name="list")
def profile_list(json_: Json = False) -> None:
    """List the profiles."""
    from mlmsub.cli import profiles as verbs

    verbs.list_profiles(as_json=json_)


@profiles.command(name="show")
def profile_show(
    name: Annotated[str, typer.Argument(help="Default: the one that submit would take.")] = "",
    json_: Json = False,
) -> None:
    """Show what a profile says."""
    from mlmsub.cli import profiles as verbs

    verbs.show_profile(name, as_json=json_)


if __name__ == "__main__":
    main()
