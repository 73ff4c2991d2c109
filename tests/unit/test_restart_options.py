"""When Slurm tells the job of its time limit, and whether it may start the job again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlmsub.app import joboptions
from mlmsub.app.config import NamedProfile, User
from mlmsub.app.records import Records
from mlmsub.app.resolve import resolve
from mlmsub.app.sources import Request, Sources
from mlmsub.core.errors import UsageError
from mlmsub.core.profile import Profile
from mlmsub.core.spec import RunSpec


def options(stage: str, profile: Profile | None = None, **said: str) -> tuple[dict[str, str], list[str]]:
    """The sbatch options, and the codes of issues found on the way."""
    named = NamedProfile("lab", profile or Profile(), "")
    sources = Sources(User({}, Path()), named, Request(stage, (), **said))
    found = joboptions.sbatch(sources, job_name="j", nodes=1, tasks_per_node=1)
    return found, [issue.code for issue in sources.issues]


@pytest.mark.parametrize("stage", ["finetune", "train", "eagle3", "extract"])
def test_stages_that_can_stop_are_told(stage: str) -> None:
    assert options(stage)[0]["signal"] == "B:USR1@300"
    assert options(stage, stop_before="600")[0]["signal"] == "B:USR1@600"
    assert options(stage, Profile(stop_before=200))[0]["signal"] == "B:USR1@200"
    assert options(stage, Profile(stop_before=200), stop_before="600")[0]["signal"] == "B:USR1@600"


@pytest.mark.parametrize("stage", ["quantize", "export", "mmlu", "script"])
def test_others_are_not(stage: str) -> None:
    assert "signal" not in options(stage)[0]


def test_a_script_is_told_if_it_asks_for_it() -> None:
    assert options("script", stop_before="600")[0]["signal"] == "B:USR1@600"
    assert options("script", Profile(script_signal="TERM"))[0]["signal"] == "B:USR1@300"
    assert "signal" not in options("quantize", Profile(script_signal="TERM"))[0]


def test_a_short_limit_leaves_no_time_to_save() -> None:
    found, issues = options("train", time="9:59")
    assert "signal" not in found and issues == ["stop-before"]
    assert options("train", time="10:00") == (options("train", time="10:00")[0], [])
    assert options("train", time="9:59", stop_before="120")[0]["signal"] == "B:USR1@120"


def test_seconds_are_a_number() -> None:
    with pytest.raises(UsageError, match="number of seconds"):
        options("train", stop_before="5m")


@pytest.mark.parametrize(
    ("stage", "profile", "said", "expected"),
    [
        ("quantize", "", "", "requeue"),
        ("script", "", "", "no-requeue"),
        ("script", "true", "", "requeue"),
        ("quantize", "false", "", "no-requeue"),
        ("script", "true", "false", "no-requeue"),
        ("quantize", "false", "true", "requeue"),
    ],
)
def test_requeue_is_always_explicit(stage: str, profile: str, said: str, expected: str) -> None:
    found, _ = options(stage, Profile(requeue=profile), requeue=said)  # type: ignore[arg-type]
    assert {"requeue", "no-requeue"} & set(found) == {expected}


@pytest.mark.parametrize(
    ("chain", "expected"), [("", 0), ("0", 0), ("3", 3), ("-1", "number"), ("two", "number"), ("1.5", "number")]
)
def test_a_chain_is_a_number_of_jobs(
    user: User, write_profile: Callable[[str, str], Path], chain: str, expected: int | str
) -> None:
    write_profile("lab", "image: /i.sqsh\n")
    request = Request("script", ("x.sh",), chain=chain)
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            resolve(user, Records(user.records_dir), request)
    else:
        assert resolve(user, Records(user.records_dir), request).spec.chain == expected


def test_without_slurm_there_is_no_chain(user: User, write_profile: Callable[[str, str], Path]) -> None:
    write_profile("here", "scheduler: local\n")
    with pytest.raises(UsageError, match="needs Slurm"):
        resolve(user, Records(user.records_dir), Request("script", ("true",), profile="here", chain="1"))


@pytest.mark.parametrize(("before", "wrong"), [("119", True), ("120", False), ("3599", False), ("3600", True)])
def test_the_time_before_the_limit_is_checked(
    user: User, write_profile: Callable[[str, str], Path], before: str, wrong: bool
) -> None:
    write_profile("lab", "image: /i.sqsh\nmax_restarts: 3\nmax_total_time: 2-0\n")
    request = Request("script", ("x.sh",), time="1:00:00", stop_before=before)
    result = resolve(user, Records(user.records_dir), request)
    assert [issue.code for issue in result.issues if issue.severity == "error"] == ["stop-before"] * wrong
    assert (result.spec.max_restarts, result.spec.max_total_time) == (3, 2 * 86400)
    assert RunSpec.from_data(result.spec.to_data(), "run.yaml") == result.spec
