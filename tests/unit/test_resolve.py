"""argv + profile + environment + env setup -> RunSpec: which value wins, and what the checks say of it."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_transport import Call, FakeTransport

from mlmsub.app import submit
from mlmsub.app.config import User
from mlmsub.app.records import Record, Records
from mlmsub.app.resolve import Resolved, resolve
from mlmsub.app.sources import Request
from mlmsub.core.errors import ChecksFailed, MlmsubError, UsageError
from mlmsub.core.issues import Issue
from mlmsub.core.spec import Parent
from mlmsub.transport.base import Result
from mlmsub.transport.errors import ConnectionLost

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUANTIZE = Request("quantize", (SMOL, "FP8_DEFAULT_CFG"))
SCRIPT = Request("script", ("eagle3.sh", "org/m"))

WriteProfile = Callable[[str, str], Path]


@pytest.fixture
def lab(user: User, write_profile: WriteProfile) -> User:
    """A user with one Slurm profile."""
    write_profile("lab", "account: proj\npartition: batch\nimage: /images/m.sqsh\n")
    return user


def resolved(
    user: User, request: Request = QUANTIZE, environ: dict[str, str] | None = None, **changes: Any
) -> Resolved:
    caller = replace(user, environ={**user.environ, **(environ or {})})
    return resolve(caller, Records(user.records_dir), replace(request, **changes))


def setup(user: User, text: str) -> dict[str, str]:
    """Write an env setup; the field of a Request that names it."""
    (user.cwd / "env.sh").write_text(text)
    return {"env_setup": "env.sh"}


def codes(result: Resolved, severity: str = "") -> list[str]:
    return [issue.code for issue in result.issues if severity in ("", issue.severity)]


# --- the job ---------------------------------------------------------------------------------


def test_a_whole_job(lab: User) -> None:
    spec = resolved(lab, nodes="2").spec
    assert spec.sbatch == {
        "job-name": "quantize-SmolLM2-135M-Instruct", "account": "proj", "partition": "batch", "time": "04:00:00",
        "nodes": "2", "ntasks-per-node": "8", "gpus-per-node": "8", "exclusive": "", "mem": "0", "overcommit": "",
        "requeue": "",
    }  # fmt: skip
    assert spec.srun == {"mpi": "pmix", "kill-on-bad-exit": "1", "wait": "0", "distribution": "block"}
    assert (spec.image, spec.mounts, spec.workdir) == (
        "/images/m.sqsh",
        ("/lustre/me:/workspace/scratch",),
        "/mlmsub/run",
    )
    assert spec.runs_root == "/lustre/me/.mlmsub/runs"
    assert spec.ntasks == 16


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("gpus_per_node: 4", {"gpus-per-node": "4", "ntasks-per-node": "4"}),
        ("gpus_per_node: 4\ngpu_request: gres\ngpu_type: gb200", {"gres": "gpu:gb200:4", "ntasks-per-node": "4"}),
        ("gpu_type: h100", {"gpus-per-node": "h100:8"}),
        ("mem: 500G\ncpus_per_task: 12", {"mem": "512000M", "cpus-per-task": "12"}),
        ("cluster: big\nqos: high\nreservation: r\nconstraint: a&b\nsegment: '2'\nnodelist: n[1-2]\nexclude: n3",
         {"clusters": "big", "qos": "high", "reservation": "r", "constraint": "a&b", "segment": "2",
          "nodelist": "n[1-2]", "exclude": "n3"}),
    ],
)  # fmt: skip
def test_the_profile_shapes_the_job(
    user: User, write_profile: WriteProfile, profile: str, expected: dict[str, str]
) -> None:
    write_profile("lab", f"image: /i.sqsh\n{profile}\n")
    sbatch = resolved(user).spec.sbatch
    assert expected.items() <= sbatch.items()


def test_what_a_profile_turns_off_is_not_asked_for(user: User, write_profile: WriteProfile) -> None:
    write_profile("lab", "image: /i.sqsh\ngpu_request: none\nexclusive: no\novercommit: no\nmpi: ''\n")
    spec = resolved(user).spec
    assert not {"gpus-per-node", "gres", "exclusive", "overcommit"} & set(spec.sbatch)
    assert "mpi" not in spec.srun


def test_cpus_per_task_are_repeated_for_srun(user: User, write_profile: WriteProfile) -> None:
    write_profile("lab", "image: /i.sqsh\ncpus_per_task: 12\n")
    assert resolved(user).spec.srun["cpus-per-task"] == "12"


@pytest.mark.parametrize(
    ("environ", "changes", "value", "origin"),
    [
        ({}, {}, "batch", "profile lab"),
        ({"SBATCH_PARTITION": "env"}, {}, "env", "environment (SBATCH_PARTITION)"),
        ({"SBATCH_PARTITION": "env"}, {"partition": "flag"}, "flag", "--partition"),
    ],
)
def test_flag_then_environment_then_profile(
    lab: User, environ: dict[str, str], changes: dict[str, str], value: str, origin: str
) -> None:
    spec = resolved(lab, environ=environ, **changes).spec
    assert (spec.sbatch["partition"], spec.origins["partition"]) == (value, origin)


def test_a_parent_hands_on_its_output(lab: User) -> None:
    saved = parent(lab, job_id="41")
    spec = resolved(lab, after=(saved.run_id,)).spec
    assert spec.parents == (Parent(saved.run_id, saved.run_dir, "afterok"),)
    assert spec.defaults["MLM_MODEL_CKPT"] == "/workspace/scratch/out"


def parent(user: User, **changes: str) -> Record:
    record = Record(
        run_id="20261130-100000-quantize-abcdef", profile="lab", scheduler=changes.pop("scheduler", "slurm"),
        host="", transport="auto", ssh_config="",
        runs_root="/r", run_dir="/r/202611/p", stage="quantize", model="m", job_name="j", nodes=1,
        stamp="20261130-100000", content_hash="h", outputs={"MLM_MODEL_SAVE": "/workspace/scratch/out"}, **changes,
    )  # fmt: skip
    Records(user.records_dir).save(record)
    return record


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"job_id": ""}, "was not finished"), ({"job_id": "1", "scheduler": "local"}, "another cluster")],
)
def test_a_parent_that_cannot_be_waited_for(lab: User, changes: dict[str, str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        resolved(lab, after=(parent(lab, **changes).run_id,))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"nodes": "0"}, "--nodes"),
        ({"nodes": "two"}, "--nodes"),
        ({"time": "soon"}, r"time \(--time\): 'soon' is not a time limit"),
        ({"account": "a\nb"}, "--account"),
        ({"sbatch_args": ("comment",)}, "write one option"),
        ({"sbatch_args": ("--partition=x",)}, "--partition is decided elsewhere"),
        ({"sbatch_args": ("--comment=a\nb",)}, "control characters"),
        ({"overrides": ("TP",)}, "write NAME=VALUE"),
        ({"overrides": ("A-B=1",)}, "write NAME=VALUE"),
        ({"overrides": ("MLMSUB_RUN_DIR=/x",)}, "not yours to set"),
        ({"overrides": ("SLURM_PROCID=0",)}, "not yours to set"),
        ({"after": ("nothing",)}, "there is no run 'nothing'"),
        ({"env_setup": "none.sh"}, "does not exist"),
        ({"env_setup": "."}, "is a folder"),
        ({"profile": "lib"}, "did you mean 'lab'"),
        ({"stage": "quantise"}, "did you mean 'quantize'"),
    ],
)
def test_what_cannot_be_understood(lab: User, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        resolved(lab, **changes)


# --- the reference's variables -----------------------------------------------------------------


def test_user_fsw_is_required(lab: User) -> None:
    with pytest.raises(UsageError, match="USER_FSW is not set") as raised:
        resolved(lab, environ={"USER_FSW": ""})
    assert "export USER_FSW" in raised.value.fix


@pytest.mark.parametrize(("path", "complaint"), [("fsw", "absolute"), ("/a:b", "Pyxis"), ("/a,b", "Pyxis")])
def test_a_user_fsw_that_cannot_be_used(lab: User, path: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        resolved(lab, environ={"USER_FSW": path})


def test_the_references_default_image_is_told(user: User, write_profile: WriteProfile) -> None:
    write_profile("lab", "")
    result = resolved(user)
    assert result.spec.image == "nvidia-modelopt-megatron:latest"
    assert "image-default" in codes(result, "warning")
    assert resolved(user, environ={"CONTAINER_IMAGE": "nvcr.io/a/b:c"}).spec.image == "nvcr.io#a/b:c"


def test_a_script_runs_in_the_sandbox(lab: User) -> None:
    spec = resolved(lab, SCRIPT, environ={"SANDBOX_DIR": "/home/me/sandbox"}).spec
    assert spec.mounts == ("/home/me/sandbox:/workspace/nmm-sandbox", "/lustre/me:/workspace/scratch")
    assert spec.workdir == "/workspace/nmm-sandbox"


def test_the_sandbox_is_the_working_directory_unless_said(lab: User) -> None:
    result = resolved(lab, SCRIPT)
    assert result.spec.mounts[0] == f"{lab.cwd}:/workspace/nmm-sandbox"
    assert "sandbox-default" in codes(result)


def test_a_native_stage_needs_no_sandbox(lab: User) -> None:
    assert resolved(lab, environ={"SANDBOX_DIR": "/none"}).spec.mounts == ("/lustre/me:/workspace/scratch",)


def test_the_env_setup_of_the_environment_is_read(lab: User) -> None:
    setup(lab, "TP=8\n")
    result = resolved(lab, environ={"SANDBOX_ENV_SETUP": "env.sh"})
    assert result.values["TP"] == "8"
    assert result.spec.origins["SANDBOX_ENV_SETUP"] == "environment (SANDBOX_ENV_SETUP)"


def test_the_references_template_in_the_working_directory_is_taken(lab: User) -> None:
    (lab.cwd / "env_setup_template.sh").write_text("TP=2\n")
    result = resolved(lab)
    assert result.values["TP"] == "2"
    assert "env-setup-default" in codes(result)


def test_an_env_setup_of_the_catalogue_is_found_from_anywhere(lab: User) -> None:
    assert resolved(lab, SCRIPT, env_setup="conf/moonshotai/kimi_k2_instruct.sh").values["EP"] == "64"


# --- which value wins ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile_env", "text", "overrides", "value"),
    [
        ("", "", (), "1"),  # the stage's default
        ("env: {TP: 2}", "", (), "2"),
        ("env: {TP: 2}", "TP=4\n", (), "4"),
        ("env: {TP: 2}", "TP=4\n", ("TP=8",), "8"),
        ("env: {TP: 2}", "TP=${TP}0\n", (), "20"),
        ("", "TP=\n", (), "1"),  # empty is unset, as in the reference's scripts
    ],
)
def test_precedence(
    user: User, write_profile: WriteProfile, profile_env: str, text: str, overrides: tuple[str, ...], value: str
) -> None:
    write_profile("lab", f"image: /i.sqsh\n{profile_env}\n")
    assert resolved(user, overrides=overrides, **setup(user, text)).values["TP"] == value


def test_an_override_holds_any_value(lab: User) -> None:
    assert resolved(lab, overrides=("A=b=c\n'd'", "B=")).spec.overrides == {"A": "b=c\n'd'", "B": ""}


@pytest.mark.parametrize(
    ("text", "launcher", "tasks"),
    [("", "python", 8), ("LAUNCH_SCRIPT=torchrun\n", "torchrun", 1),
     ("LAUNCH_SCRIPT='/opt/bin/torchrun -v'\n", "torchrun", 1),
     ("LAUNCH_SCRIPT=/opt/bin/python3\n", "python", 8)],
)  # fmt: skip
def test_the_launcher_decides_the_number_of_tasks(lab: User, text: str, launcher: str, tasks: int) -> None:
    spec = resolved(lab, **setup(lab, text)).spec
    assert (spec.launcher, spec.tasks_per_node) == (launcher, tasks)


def test_a_torchrun_by_its_module_is_one_too(lab: User) -> None:
    spec = resolved(lab, **setup(lab, "LAUNCH_SCRIPT='python -m torch.distributed.run'\n")).spec
    assert spec.tasks_per_node == 1


def test_hf_model_ckpt_of_the_environment_is_passed_on(lab: User) -> None:
    assert resolved(lab, environ={"HF_MODEL_CKPT": "/h"}).values["HF_MODEL_CKPT"] == "/h"
    both = resolved(lab, environ={"HF_MODEL_CKPT": "/h"}, **setup(lab, "HF_MODEL_CKPT=/mine\n"))
    assert both.values["HF_MODEL_CKPT"] == "/mine"


def test_secrets_are_found_wherever_they_are(lab: User) -> None:
    assert resolved(lab, environ={"HF_TOKEN": "hf_environment"}).secrets == {"HF_TOKEN": "hf_environment"}
    result = resolved(lab, environ={"HF_TOKEN": "hf_environment"}, **setup(lab, "HF_TOKEN=hf_mine\n"))
    assert result.secrets == {"HF_TOKEN": "hf_mine"}


@pytest.mark.parametrize(
    ("profile", "changes"),
    [
        ("", {"args": ("run.sh", "--token=hf_environment")}),
        ("", {"sbatch_args": ("--comment=hf_environment",)}),
        ("prelude: export T=hf_environment", {}),
        ("srun_args: ['--export=ALL,T=hf_environment']", {}),
    ],
)
def test_a_secret_where_anybody_could_read_it_is_refused(
    user: User, write_profile: WriteProfile, profile: str, changes: dict[str, Any]
) -> None:
    write_profile("lab", f"image: /i.sqsh\n{profile}\n")
    with pytest.raises(UsageError, match="holds a secret"):
        resolved(user, SCRIPT, environ={"HF_TOKEN": "hf_environment"}, **changes)


# --- checks -----------------------------------------------------------------------------------------


def issue(result: Resolved, code: str) -> Issue:
    return next(found for found in result.issues if found.code == code)


def test_a_run_without_faults_has_no_issue(lab: User) -> None:
    assert codes(resolved(lab)) == []


def test_a_stage_that_is_not_built_yet_names_the_other_way(lab: User) -> None:
    found = issue(resolved(lab, stage="train", args=(SMOL,)), "stage-not-native")
    assert (found.severity, "mlmsub submit script" in found.fix) == ("error", True)


def test_export_needs_a_checkpoint(lab: User) -> None:
    assert "no-input" in codes(resolved(lab, stage="export", args=(SMOL,)), "error")
    given = resolved(lab, stage="export", args=(SMOL,), overrides=("MLM_MODEL_CKPT=/workspace/scratch/c",))
    assert codes(given, "error") == []


def test_an_output_in_the_container_is_refused(lab: User) -> None:
    found = issue(resolved(lab, overrides=("MLM_MODEL_SAVE=/tmp/x",)), "output-not-mounted")
    assert (found.severity, found.field) == ("error", "MLM_MODEL_SAVE")
    assert "/workspace/scratch" in found.fix


def test_a_folder_whose_name_only_begins_alike_is_not_mounted(lab: User) -> None:
    assert "output-not-mounted" in codes(resolved(lab, overrides=("MLM_MODEL_SAVE=/workspace/scratch2/x",)))


def test_a_read_only_mount_takes_no_output(user: User, write_profile: WriteProfile) -> None:
    write_profile("lab", "image: /i.sqsh\nmounts: ['/data:/data:ro', '/rw:/rw']\n")
    assert "output-not-mounted" in codes(resolved(user, overrides=("MLM_MODEL_SAVE=/data/x",)))
    assert "output-not-mounted" not in codes(resolved(user, overrides=("MLM_MODEL_SAVE=/rw/x",)))


def test_an_input_is_not_overwritten(lab: User) -> None:
    same = ("MLM_MODEL_CKPT=/workspace/scratch/a/", "EXPORT_DIR=/workspace/scratch/a")
    assert "in-place" in codes(resolved(lab, stage="export", args=(SMOL,), overrides=same), "error")


def test_unsure_values_only_warn(lab: User) -> None:
    result = resolved(lab, **setup(lab, "N=$(nvidia-smi -L)\nMLM_MODEL_SAVE=/tmp/x\n"))
    assert codes(result, "error") == []
    assert {"env-setup-unsure", "output-not-mounted"} <= set(codes(result, "warning"))
    assert "nvidia-smi" in issue(result, "env-setup-unsure").message


def test_who_a_rank_is_is_not_the_users_to_say(lab: User) -> None:
    result = resolved(lab, overrides=("MASTER_PORT=1",), **setup(lab, "RANK=0\n"))
    assert [found.field for found in result.issues if found.code == "identity"] == ["RANK", "MASTER_PORT"]


def test_what_arguments_sh_sets_again_is_told(lab: User) -> None:
    text = "export NCCL_IB_SL=5\n"
    assert "overruled" in codes(resolved(lab, SCRIPT, **setup(lab, text)), "warning")
    assert "overruled" not in codes(resolved(lab, **setup(lab, text)))


@pytest.mark.parametrize(
    ("image", "nodes", "told"), [("nvcr.io/a/b:c", "2", True), ("nvcr.io/a/b:c", "1", False), ("/a.sqsh", "2", False)]
)
def test_an_image_that_every_node_imports(
    user: User, write_profile: WriteProfile, image: str, nodes: str, told: bool
) -> None:
    write_profile("lab", f"image: {image}\n")
    assert ("image-per-node" in codes(resolved(user, nodes=nodes), "warning")) is told


@pytest.mark.parametrize("root", ["/a%j", "/a,b", "/a:b"])
def test_a_place_for_runs_that_slurm_cannot_express(user: User, write_profile: WriteProfile, root: str) -> None:
    write_profile("lab", f"image: /i.sqsh\nruns_root: '{root}'\n")
    assert "path-characters" in codes(resolved(user), "error")


def test_this_machine_is_one_node(user: User) -> None:
    assert "local-nodes" in codes(resolved(user, profile="local", nodes="2"), "error")
    assert codes(resolved(user, profile="local")) == []


# --- submit: what is kept of a submission ------------------------------------------------------------


def answering(stdout: bytes) -> FakeTransport:
    return FakeTransport(lambda call: Result(0, stdout, b""))


@pytest.fixture
def records(user: User) -> Records:
    return Records(user.records_dir)


def test_a_submission_is_one_exec_with_the_bundle(lab: User, records: Records) -> None:
    fake = answering(b"job 12\n")
    prepared = submit.prepare(resolved(lab), records)
    record, existed = submit.send(prepared, records, lambda: fake)
    assert (record.job_id, existed) == ("12", False)
    assert [gzip.decompress(call.stdin) for call in fake.calls] == [prepared.bundle.tar()]
    assert records.all() == [record]


def test_a_record_says_where_the_outputs_are_on_the_cluster(lab: User, records: Records) -> None:
    record = submit.prepare(resolved(lab, overrides=("MLM_MODEL_SAVE=/workspace/scratch/a",)), records).record
    assert record.outputs == {"MLM_MODEL_SAVE": "/workspace/scratch/a"}
    assert record.outputs_at == {"MLM_MODEL_SAVE": "/lustre/me/a"}


def test_an_error_of_the_checks_ends_the_submission(lab: User) -> None:
    with pytest.raises(ChecksFailed, match="1 error; nothing was submitted"):
        submit.checked(resolved(lab, stage="export", args=(SMOL,)))
    submit.checked(resolved(lab, nodes="2"))


def test_the_record_is_there_before_anything_is_sent(lab: User, records: Records) -> None:
    def answer(call: Call) -> Result:
        assert [record.job_id for record in records.all()] == [""]
        return Result(0, b"job 12\n", b"")

    submit.send(submit.prepare(resolved(lab), records), records, lambda: FakeTransport(answer))


@pytest.mark.parametrize(
    ("stdout", "kept"),
    [
        (b"", True),  # lost on the way: the job may exist
        (b"code 1\nrefused sbatch\nstderr sbatch: error: Socket timed out on send/recv operation\n", True),
        (b"code 1\nrefused sbatch\nstderr sbatch: error: Something new\n", False),
        (b"code 1\nrefused sbatch\nstderr sbatch: error: invalid partition specified: x\n", False),
        (b"refused no-space\nat /r\n", False),
    ],
)
def test_a_refused_submission_is_kept_only_when_a_job_may_exist(
    lab: User, records: Records, stdout: bytes, kept: bool
) -> None:
    with pytest.raises(MlmsubError):
        submit.send(submit.prepare(resolved(lab), records), records, lambda: answering(stdout))
    assert bool(records.all()) is kept


def test_the_same_command_takes_an_unfinished_submission_up_again(lab: User, records: Records) -> None:
    def lost(call: Call) -> Result:
        raise ConnectionLost("gone", where="fake", fix="again")

    first = submit.prepare(resolved(lab), records)
    with pytest.raises(ConnectionLost):
        submit.send(first, records, lambda: FakeTransport(lost))
    again = submit.prepare(resolved(lab), records)
    assert again.record.run_id == first.record.run_id
    assert again.bundle.tar() == first.bundle.tar()
    assert submit.prepare(resolved(lab), records, new=True).record.run_id != first.record.run_id
    assert submit.prepare(resolved(lab, nodes="2"), records).record.run_id != first.record.run_id
    record, existed = submit.send(again, records, lambda: answering(b"existing 12\n"))
    assert (record.job_id, existed) == ("12", True)
    assert submit.prepare(resolved(lab), records).record.run_id != first.record.run_id


# --- the model and its conf --------------------------------------------------------------------

QWEN = "Qwen/Qwen3-0.6B"


def test_a_conf_of_its_own_name_with_another_model_in_it_is_refused(lab: User, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlmsub.app import models

    copied = models.find(QWEN, lab.cwd)
    monkeypatch.setattr(models, "_shipped", lambda name: copied)
    (issue,) = [issue for issue in resolved(lab).issues if issue.code == "conf-model"]
    assert issue.severity == "error"
    assert SMOL in issue.message and QWEN in issue.message
    assert issue.fix.startswith(f"write model: {SMOL}")


@pytest.mark.parametrize(
    ("file", "warned"), [("Qwen3-8B.yaml", True), ("mine.yaml", False), ("Qwen3-0.6B.yaml", False)]
)
def test_a_conf_by_its_path_is_compared_by_the_sizes_in_its_name(lab: User, file: str, warned: bool) -> None:
    from mlmsub.app import models

    (lab.cwd / file).write_text(models.find(QWEN, lab.cwd).text)
    found = [issue for issue in resolved(lab, args=(f"./{file}", "fp8")).issues if issue.code == "conf-model"]
    assert [issue.severity for issue in found] == ["warning"] * warned
    assert all("8b against 0.6b" in issue.message for issue in found)


def test_an_alias_is_the_models_name(lab: User) -> None:
    from mlmsub.app import models

    named = next((found.conf for found in models.catalogue() if found.conf and found.conf.aliases), None)
    assert named
    assert "conf-model" not in codes(resolved(lab, args=(named.aliases[0].upper(), "fp8")))
