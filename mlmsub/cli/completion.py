"""What the shell offers while one types. Looks at files of this machine only; never connects."""

from __future__ import annotations


def stages(incomplete: str) -> list[str]:
    from mlmsub.core.stages import AND, SCRIPT, STAGES

    before, joined, last = incomplete.rpartition(AND)
    names = [name for name in STAGES if not joined or name != SCRIPT]
    return [f"{before}{joined}{name}" for name in names if name.startswith(last)]


def models(incomplete: str) -> list[str]:
    from mlmsub.app import resources

    return [name for name in resources.conf_names() if name.startswith(incomplete)]


def profiles(incomplete: str) -> list[str]:
    from mlmsub.app import config

    return [name for name in config.profile_names(config.User.current()) if name.startswith(incomplete)]


def workflows(incomplete: str) -> list[str]:
    from mlmsub.app import workflow

    return [name for name in workflow.names() if name.startswith(incomplete)]


def submitted(incomplete: str) -> list[str]:
    from mlmsub.app import config, workflow_runs
    from mlmsub.app.records import Records

    names = workflow_runs.known(Records(config.User.current().records_dir))
    return [name for name in names if name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    from mlmsub.app import config
    from mlmsub.app.records import Records

    ids = [record.run_id for record in Records(config.User.current().records_dir).all()]
    return [run_id for run_id in [*ids, "last"] if run_id.startswith(incomplete)]
