"""A workflow on a login node with stand-ins for Slurm: one exec, every step once, whatever breaks in between."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_transport import Call, FakeTransport
from remote import SHELLS, Cluster

from mlmsub.app import workflow, workflow_report, workflow_runs
from mlmsub.app.config import User
from mlmsub.app.records import Records
from mlmsub.app.workflow_runs import Decision
from mlmsub.core.errors import MlmsubError, SchedulerRefused, UsageError
from mlmsub.slurm.jobs import JobState
from mlmsub.transport.base import Result
from mlmsub.transport.errors import ConnectFailed, ConnectionLost

SECRET = "hf_verysecret"
# counts its calls, keeps how it was called in which run, and runs a line of the test's before it answers
SBATCH = """
echo x >>"{folder}/calls"
number=$(($(wc -l <"{folder}/calls")))
name=$(sed -n 's/^#SBATCH --job-name=//p' job.sbatch)
echo "$number $name $*" >>"{folder}/sbatch"
{line}
echo $((100 + number))
"""
CHAIN = {
    "a": {"stage": "script", "args": ["a.sh"], "set": {"OUT": "/workspace/scratch/a"}},
    "b": {"stage": "script", "args": ["b.sh"], "set": {"IN": "${steps.a.OUT}"}},
    "c": {"stage": "script", "args": ["c.sh"], "needs": ["b", "afterany:a"]},
}


class Site:
    """One user's machine, and the login node that it reaches."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.cwd = folder / "work"
        self.cwd.mkdir()
        sandbox = cluster.scratch / "sandbox"
        sandbox.mkdir()
        for name in "abc":
            (sandbox / f"{name}.sh").write_text("true\n")
        self.user = User(
            {"HOME": str(folder / "client"), "USER_FSW": str(cluster.scratch), "SANDBOX_DIR": str(sandbox),
             "CONTAINER_IMAGE": "reg#image:1", "HF_TOKEN": SECRET}, self.cwd,
        )  # fmt: skip
        self.records = Records(self.user.records_dir)
        self.transport = FakeTransport(self.run)
        self.loses_answer = False
        self.sbatch()

    def sbatch(self, line: str = "") -> None:
        self.cluster.program("sbatch", SBATCH.format(folder=self.cluster.folder, line=line))

    def run(self, call: Call) -> Result:
        env = {"PATH": f"{self.cluster.bin}:/usr/bin:/bin", "HOME": str(self.cluster.home), "USER": "me"}
        done = subprocess.run(
            [*self.cluster.shell, "-c", call.script], input=call.stdin, env=env, capture_output=True, timeout=60
        )
        if self.loses_answer:
            raise ConnectionLost("the connection was lost", where="fake", fix="again")
        return Result(done.returncode, done.stdout, done.stderr)

    def plan(self, steps: Mapping[str, Any] = CHAIN) -> workflow.Plan:
        (self.cwd / "w.yaml").write_text(yaml.safe_dump({"steps": steps}, sort_keys=False))
        return workflow.plan(self.user, self.records, "w.yaml")

    def send(self, plan: workflow.Plan, decisions: list[Decision]) -> dict[str, Decision]:
        done = workflow_runs.send(plan, decisions, self.records, lambda: self.transport, ())
        return {one.name: one for one in done}

    def submit(self, steps: Mapping[str, Any] = CHAIN) -> dict[str, Decision]:
        plan = self.plan(steps)
        submitted = workflow_runs.load(self.records, "w")
        return self.send(plan, workflow_runs.first_time(plan, submitted, self.records))

    def resume(self, steps: Mapping[str, Any] = CHAIN, **states: Any) -> dict[str, Decision]:
        plan = self.plan(steps)
        submitted = workflow_runs.load(self.records, "w")
        assert submitted
        told = {name: JobState(state) for name, state in states.items()}
        return self.send(plan, workflow_runs.again(plan, submitted, told, self.records))

    @property
    def called(self) -> dict[str, str]:
        """job name -> sbatch's arguments; each job was submitted once."""
        path = self.cluster.folder / "sbatch"
        lines = [line.split(" ", 2) for line in path.read_text().splitlines()] if path.exists() else []
        assert len({name for _, name, _ in lines}) == len(lines), lines
        return {name: words for _, name, words in lines}

    def run_dirs(self) -> list[Path]:
        return sorted(self.cluster.scratch.glob(".mlmsub/runs/*/*"))


@pytest.fixture
def shell() -> str:
    """The login node's /bin/sh; tests of the scripts themselves take both."""
    return "dash"


@pytest.fixture
def site(tmp_path: Path, shell: str) -> Site:
    (tmp_path / "cluster").mkdir()
    return Site(Cluster(tmp_path / "cluster", shell), tmp_path)


both_shells = pytest.mark.parametrize("shell", SHELLS)


@both_shells
def test_all_steps_in_one_exec_each_waiting_for_those_before(site: Site) -> None:
    done = site.submit()
    assert len(site.transport.calls) == 1
    assert {name: one.record.job_id for name, one in done.items()} == {"a": "101", "b": "102", "c": "103"}
    assert site.called == {
        "w-a": "--parsable job.sbatch",
        "w-b": "--parsable --dependency=afterok:101 --kill-on-invalid-dep=yes job.sbatch",
        "w-c": "--parsable --dependency=afterok:102,afterany:101 --kill-on-invalid-dep=yes job.sbatch",
    }
    assert [record.job_id for record in site.records.all()[::-1]] == ["101", "102", "103"]
    for one in done.values():
        folder = Path(one.record.run_dir)
        subprocess.run(["sha256sum", "--quiet", "-c", "manifest.sha256"], cwd=folder, check=True)
        assert SECRET in (folder / "secrets/env.sh").read_text()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert "IN=" in (Path(done["b"].record.run_dir) / "env/overrides.sh").read_text()
    left = [path.name for path in (site.cluster.scratch / ".mlmsub/runs").iterdir()]
    assert len(left) == 1, "the month alone: no archive, which holds secrets, is left"


def test_what_the_runs_share_is_sent_once(site: Site) -> None:
    many = {f"s{i}": {"stage": "quantize", "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "args": ["FP8_DEFAULT_CFG"],
                      "set": {"MLM_MODEL_SAVE": f"/workspace/scratch/{i}"}} for i in range(6)}  # fmt: skip
    site.submit({"s0": many["s0"]})
    site.cluster.folder.joinpath("sbatch").unlink()
    workflow_runs.load(site.records, "w")
    site.submit(many)
    one, five = (len(call.stdin) for call in site.transport.calls)
    assert five < 1.5 * one
    assert all((path / "runtime/mlmsub/runtime/__main__.py").is_file() for path in site.run_dirs())


def test_the_same_command_again_submits_nothing(site: Site) -> None:
    first, second = site.submit(), site.submit()
    assert [one.record for one in first.values()] == [one.record for one in second.values()]
    assert not any(one.sends for one in second.values())
    assert len(site.transport.calls) == 1 and len(site.called) == 3


@both_shells
@pytest.mark.parametrize("at", ["before", "b", "after"])
def test_a_broken_connection_then_the_same_command(site: Site, at: str) -> None:
    """Cut before anything arrived, while the second step was at sbatch, and before the answer was read."""
    site.loses_answer = True
    if at == "b":  # the whole remote side is gone in the middle
        site.sbatch('[ "$name" != w-b ] || kill -9 $(ps -o ppid= -p $PPID) $PPID')
    if at == "before":
        site.transport._handler = lambda call: (_ for _ in ()).throw(ConnectionLost("lost", where="fake", fix="again"))
    with pytest.raises(ConnectionLost):
        site.submit()
    ids = {one.run_id for one in site.records.all()}
    assert len(ids) == 3 and not any(one.job_id for one in site.records.all())
    if at == "b":  # what that sbatch made is not known; it never answered
        lines = (site.cluster.folder / "sbatch").read_text().splitlines()
        (site.cluster.folder / "sbatch").write_text("".join(f"{line}\n" for line in lines if " w-b " not in line))
    site.loses_answer = False
    site.sbatch()
    site.transport._handler = site.run
    done = site.submit()
    assert {one.record.run_id for one in done.values()} == ids
    assert set(site.called) == {"w-a", "w-b", "w-c"} and all(one.record.job_id for one in done.values())
    assert len(site.run_dirs()) == 3


def test_a_step_that_is_refused_after_its_submission_was_cut_off(site: Site) -> None:
    """The run that was begun is gone then, and the next time it is another."""
    site.transport._handler = lambda call: (_ for _ in ()).throw(ConnectionLost("lost", where="fake", fix="again"))
    with pytest.raises(ConnectionLost):
        site.submit()
    site.transport._handler = site.run
    site.sbatch('[ "$name" != w-b ] || { echo "sbatch: error: Invalid account" >&2; exit 1; }')
    with pytest.raises(SchedulerRefused):
        site.submit()
    (site.cluster.folder / "sbatch").write_text("")
    site.sbatch()
    assert all(one.record.job_id for one in site.submit().values())


@both_shells
def test_a_refusal_stops_there_and_the_same_command_goes_on(site: Site) -> None:
    site.sbatch('[ "$name" != w-b ] || { echo "sbatch: error: Invalid account" >&2; exit 1; }')
    with pytest.raises(SchedulerRefused) as caught:
        site.submit()
    assert caught.value.message.startswith("b: ") and "1 of 3 steps are submitted" in caught.value.fix
    assert [one.job_id for one in site.records.all()] == ["101"] and len(site.run_dirs()) == 1
    (site.cluster.folder / "sbatch").write_text("")
    site.sbatch()
    mended = CHAIN | {"b": CHAIN["b"] | {"account": "mine"}}
    done = site.submit(mended)
    assert [one.sends for one in done.values()] == [False, True, True]
    assert set(site.called) == {"w-b", "w-c"}
    assert "--dependency=afterok:101 " in site.called["w-b"]


@both_shells
def test_nothing_is_submitted_where_one_step_lacks_something(site: Site) -> None:
    with pytest.raises(MlmsubError) as caught:
        site.submit(CHAIN | {"c": CHAIN["c"] | {"args": ["no.sh"]}})
    assert caught.value.exit_code == 3 and caught.value.message.startswith("c: the script ")
    assert "0 of 3 steps are submitted" in caught.value.fix
    assert site.called == {} and site.records.all() == [] and site.run_dirs() == []


def test_a_place_that_cannot_be_written(site: Site) -> None:
    (site.cluster.scratch / ".mlmsub").write_text("a file")
    with pytest.raises(MlmsubError, match="cannot write runs"):
        site.submit()
    assert site.records.all() == []


def test_a_step_with_other_inputs_is_not_taken_for_the_submitted_one(site: Site) -> None:
    site.submit()
    with pytest.raises(UsageError, match="b is not what was submitted") as caught:
        site.submit(CHAIN | {"b": CHAIN["b"] | {"set": {"IN": "/other"}, "needs": ["a"]}})
    assert "workflow resume" in caught.value.fix
    assert len(site.called) == 3


def test_what_came_to_nothing_leaves_all_as_it_was(site: Site) -> None:
    """After a refusal, or where the host is not reached: the runs that succeeded stay known."""
    site.submit()
    path = site.records.folder.parent / "workflows/w.json"
    before = path.read_text()
    wrong = CHAIN | {"a": CHAIN["a"] | {"args": ["no.sh"]}}
    with pytest.raises(MlmsubError, match=r"no\.sh is not there"):
        site.resume(wrong, a="succeeded", b="succeeded", c="succeeded")
    assert path.read_text() == before

    def unreachable(call: Call) -> Result:
        raise ConnectFailed("refused", where="fake", fix="")

    site.transport = FakeTransport(unreachable)
    plan = site.plan()
    with pytest.raises(ConnectFailed):
        site.send(plan, workflow_runs.first_time(plan, None, site.records))
    assert path.read_text() == before and len(site.records.all()) == 3


def test_a_refusal_in_the_middle_keeps_what_the_others_were(site: Site) -> None:
    first = site.submit()
    site.sbatch('[ "$name" != w-b ] || { echo "sbatch: error: Invalid account" >&2; exit 1; }')
    with pytest.raises(SchedulerRefused):
        again(site, a="failed", b="failed", c="cancelled")
    now = workflow_runs.load(site.records, "w")
    assert now and now.steps["a"].run_id != first["a"].record.run_id
    assert [now.steps[name].run_id for name in "bc"] == [first[name].record.run_id for name in "bc"]


def test_no_run_at_work_is_forgotten(site: Site) -> None:
    """Of a step that the file has no longer, or by `--new`."""
    site.submit()
    submitted = workflow_runs.load(site.records, "w")
    assert submitted
    runs = workflow_runs.find_runs(submitted, site.records)
    renamed = site.plan({"a": CHAIN["a"]})
    assert set(workflow_runs.given_up(renamed, submitted, runs, new=False)) == {"b", "c"}
    assert set(workflow_runs.given_up(renamed, submitted, runs, new=True)) == {"a", "b", "c"}
    for state in (JobState("running"), JobState("pending"), JobState("unknown", age=5)):
        with pytest.raises(UsageError, match=r"b of the workflow w is [a-z]+, and would") as caught:
            workflow_runs.require_ended(submitted, {"a": JobState("failed"), "b": state})
        assert "workflow cancel w" in caught.value.fix
    workflow_runs.require_ended(submitted, {"a": JobState("succeeded"), "b": JobState("unknown", age=9999)})


def test_new_goes_on_with_a_submission_that_was_cut_off(site: Site) -> None:
    site.loses_answer = True
    with pytest.raises(ConnectionLost) as caught:
        site.submit()
    assert caught.value.fix.startswith("give the same command again")
    submitted = workflow_runs.load(site.records, "w")
    assert submitted
    runs = workflow_runs.find_runs(submitted, site.records)
    assert workflow_runs.given_up(site.plan(), submitted, runs, new=True) == {}


def test_a_run_whose_record_is_gone_is_not_made_again_by_submit(site: Site) -> None:
    done = site.submit()
    site.records.forget(done["b"].record)
    with pytest.raises(UsageError, match="the run of b, is gone"):
        site.submit()
    assert len(site.called) == 3


# --- resume --------------------------------------------------------------------------------------


def sent(done: Mapping[str, Decision]) -> dict[str, str]:
    return {name: one.why for name, one in done.items() if one.sends}


def again(site: Site, steps: Mapping[str, Any] = CHAIN, **states: str) -> dict[str, Decision]:
    (site.cluster.folder / "sbatch").unlink()
    return site.resume(steps, **states)


def test_resume_runs_what_failed_and_what_depends_on_it(site: Site) -> None:
    first = site.submit()
    (Path(first["a"].record.run_dir) / "state/end").write_text("0 101 0\n")
    done = again(site, a="succeeded", b="failed", c="cancelled")
    assert sent(done) == {"b": "failed", "c": "b runs again"}
    assert done["a"].record == first["a"].record and done["b"].record.run_id != first["b"].record.run_id
    assert site.called["w-b"] == "--parsable job.sbatch", "its parent has succeeded"
    assert site.called["w-c"].startswith("--parsable --dependency=afterok:104 --kill")


def test_resume_runs_what_has_other_inputs_and_takes_finished_steps_as_they_are(site: Site) -> None:
    first = site.submit()
    for name in "abc":
        (Path(first[name].record.run_dir) / "state/end").write_text("0 1 0\n")
    succeeded = dict.fromkeys("abc", "succeeded")
    changed = CHAIN | {"b": CHAIN["b"] | {"set": {"IN": "${steps.a.OUT}", "MORE": "1"}}}
    assert sent(again(site, changed, **succeeded)) == {"b": "its inputs changed", "c": "b runs again"}
    assert sent(site.resume(changed, **succeeded)) == {}
    queued = changed | {"c": changed["c"] | {"time": "1:00:00"}}
    assert sent(site.resume(queued, **succeeded)) == {}, "how long it may take is no input"
    more = changed | {"d": {"stage": "script", "args": ["a.sh"], "needs": ["c"]}}
    new = site.records.find(site.resume(changed, **succeeded)["c"].record.run_id)
    (Path(new.run_dir) / "state/end").write_text("0 1 0\n")
    assert sent(site.resume(more, **succeeded)) == {"d": "not submitted"}


def test_resume_leaves_a_step_at_work_alone_unless_it_must_run_again(site: Site) -> None:
    site.submit()
    assert sent(site.resume(a="running", b="pending", c="pending")) == {}
    with pytest.raises(UsageError, match="b is pending, and must run again: a runs again") as caught:
        site.resume(a="failed", b="pending", c="pending")
    assert "workflow cancel w" in caught.value.fix


def test_resume_does_not_wait_for_what_cannot_come(site: Site) -> None:
    steps = {"a": CHAIN["a"], "mend": {"stage": "script", "args": ["b.sh"], "needs": ["afternotok:a"]}}
    site.submit(steps)
    done = site.resume(steps, a="succeeded", mend="cancelled")
    assert sent(done) == {} and done["mend"].why == "not needed: a succeeded"


def test_a_lost_run_runs_again_unless_it_gave_a_sign_of_late(site: Site) -> None:
    site.submit()
    plan, submitted = site.plan(), workflow_runs.load(site.records, "w")
    assert submitted
    rest = {"b": JobState("pending"), "c": JobState("pending")}
    lately = {"a": JobState("unknown", age=10), **rest}
    for other in ({}, {"a": CHAIN["a"] | {"args": ["other.sh"]}}):  # its inputs changed
        with pytest.raises(UsageError, match="a may be at work"):
            workflow_runs.again(site.plan(CHAIN | other), submitted, lately, site.records)
    ended = dict.fromkeys("bc", JobState("cancelled"))
    found = workflow_runs.again(plan, submitted, {"a": JobState("unknown", age=9999), **ended}, site.records)
    assert [one.why for one in found] == ["its job is lost", "a runs again", "b, a runs again"]


# --- what they found out -------------------------------------------------------------------------

SWEEP = {
    "q": {"stage": "script", "args": ["a.sh"], "matrix": {"f": ["fp8", "int4"]}, "set": {"OUT": "/x/${matrix.f}"}},
    "after": {"stage": "script", "args": ["b.sh"], "needs": ["q"]},
}


def test_a_sweep_is_compared_by_what_its_runs_wrote(site: Site) -> None:
    done = site.submit(SWEEP)
    events = [
        {"event": "step", "name": "load", "seconds": 2.5}, {"event": "step", "name": "load", "seconds": 1.5},
        {"event": "iteration", "iteration": 1}, {"event": "perplexity", "before": 1, "after": 12.5},
        {"event": "mmlu", "accuracy": 0.25, "questions": 12, "available": 14042},
    ]  # fmt: skip
    record = done["q-fp8"].record
    text = "".join(json.dumps(event) + "\n" for event in events)
    (Path(record.run_dir) / "state/events.jsonl").write_text(text + '{"event": "cut o')
    submitted = workflow_runs.load(site.records, "w")
    assert submitted
    told = workflow_report.results({n: one.record for n, one in done.items()}, lambda _: site.transport, sizes=True)
    assert told["q-fp8"].seconds() == {"load": 4.0}
    states = {"q-fp8": JobState("succeeded", elapsed="1:02:03"), "q-int4": JobState("failed", elapsed="05:00")}
    first, second = workflow_report.compare(submitted, states, told)
    assert (first.name, first.state, first.perplexity, first.mmlu, first.questions, first.seconds) == (
        "fp8", "succeeded", 12.5, 0.25, "12 of 14042", 3723,
    )  # fmt: skip
    assert (second.name, second.state, second.mmlu, second.seconds) == ("int4", "incomplete", None, 300)


@pytest.mark.parametrize("sizes", [True, False])
def test_outputs_are_looked_at_only_where_their_sizes_are_asked_for(site: Site, sizes: bool) -> None:
    """`workflow status --watch` asks each few seconds."""
    made = replace(site.submit(SWEEP)["q-fp8"].record, outputs_at={"EXPORT_DIR": "/x/fp8"})
    workflow_report.results({"q-fp8": made}, lambda _: site.transport, sizes=sizes)
    assert ("/x/fp8" in site.transport.calls[-1].script) == sizes


def test_the_archive_names_no_secret_outside_the_runs_own_files(site: Site) -> None:
    site.submit()
    import gzip

    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(site.transport.calls[0].stdin))) as archive:
        for member in archive.getmembers():
            held = archive.extractfile(member)
            assert held
            assert (SECRET.encode() in held.read()) == (member.name.endswith(".tar") and member.name != "common.tar")
    assert SECRET not in site.transport.calls[0].script
