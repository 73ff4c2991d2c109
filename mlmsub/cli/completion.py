"""What the shell offers while one types. Looks at files of this machine only; never connects."""

from __future__ import annotations


def stages(incomplete: str) -> list[str]:
    from mlmsub.core.stages import STAGES

    return [name for name in STAGES if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    from mlmsub.app import resources

    return [name for name in resources.conf_names() if name.startswith(incomplete)]


def profiles(incomplete: str) -> list[str]:
    from mlmsub.app import config

    return [name for name in config.profile_names(config.User.current()) if name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    from mlmsub.app import config
    from mlmsub.app.records import Records

    ids = [record.run_id for record in Records(config.User.current().records_dir).all()]
    return [run_id for run_id in [*ids, "last"] if run_id.startswith(incomplete)]
