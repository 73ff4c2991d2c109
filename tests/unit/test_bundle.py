"""The bundle: the same input gives the same bytes, and secrets are in no file but the secret ones."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from specs import QUANTIZE, RESOURCES, RUN, RUN_ID, STAMP, run_spec, script_spec

from mlmsub.core import bundle, paths
from mlmsub.core.bundle import Bundle
from mlmsub.core.spec import EnvSetup, RunSpec, to_text

TOKEN = "hf_verysecret123"

AS_IT_IS = {"filter": "tar"} if hasattr(tarfile, "data_filter") else {}  # the Python of Debian 12 has none


def built(spec: RunSpec = QUANTIZE, run: paths.RunPaths = RUN, stamp: str = STAMP, **secrets: str) -> Bundle:
    return bundle.build(spec, run, stamp, RESOURCES, secrets)


def unpacked(made: Bundle, folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(made.tar())) as archive:
        archive.extractall(folder, **AS_IT_IS)
    return folder


def holding(made: Bundle, text: str) -> list[str]:
    """The files outside secrets/ that hold `text`."""
    return [path for path, content in made.files.items() if text.encode() in content]


# --- bytes -----------------------------------------------------------------------------


def test_the_same_input_gives_the_same_bytes() -> None:
    assert built().tar() == built().tar()


def test_the_content_hash_leaves_out_id_and_time() -> None:
    other = built(
        run=paths.RunPaths("/lustre/me/.mlmsub/runs", RUN_ID.replace("0a1b2c", "ffffff")), stamp="20270101-000000"
    )
    assert other.content_hash == built().content_hash
    assert other.tar() != built().tar()


@pytest.mark.parametrize(
    "change",
    [{"nodes": 3}, {"args": ("m", "NVFP4_DEFAULT_CFG")}, {"overrides": {"TP": "4"}}, {"prelude": "module load x"},
     {"setup": EnvSetup("/home/me/setup.sh", {"setup.sh": "TP=4\n"})}, {"conf": "model: y\n"}],
)  # fmt: skip
def test_the_content_hash_tells_runs_apart(change: dict[str, Any]) -> None:
    assert built(run_spec(**change)).content_hash != built().content_hash


def test_the_content_hash_covers_mlmsubs_own_files() -> None:
    newer = RESOURCES | {"container/entrypoint.sh": b"#!/bin/bash\n# newer\n"}
    assert bundle.content_hash(QUANTIZE, newer) != bundle.content_hash(QUANTIZE, RESOURCES)


def test_the_archive_says_nothing_about_who_made_it_and_when() -> None:
    with tarfile.open(fileobj=io.BytesIO(built(HF_TOKEN=TOKEN).tar())) as archive:
        members = archive.getmembers()
    assert [m.name for m in members] == sorted(m.name for m in members)
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, 0, "", "")}
    assert all(not m.name.startswith(("/", "..")) for m in members)


def test_the_manifest_verifies_the_unpacked_files(tmp_path: Path) -> None:
    made = built(HF_TOKEN=TOKEN)
    folder = unpacked(made, tmp_path)
    subprocess.run(["sha256sum", "--quiet", "--strict", "-c", paths.MANIFEST], cwd=folder, check=True, timeout=10)
    (folder / "job.sbatch").write_bytes(b"changed")
    assert subprocess.run(["sha256sum", "--status", "-c", paths.MANIFEST], cwd=folder, timeout=10).returncode == 1


def test_the_manifest_names_every_file_that_is_not_secret() -> None:
    made = built(run_spec(setup=EnvSetup("/h/s.sh", {"s.sh": f"HF_TOKEN={TOKEN}\n"})), HF_TOKEN=TOKEN)
    lines = dict(reversed(line.split("  ")) for line in made.files[paths.MANIFEST].decode().splitlines())
    assert set(lines) == set(made.files) - {paths.MANIFEST}
    assert all(hashlib.sha256(made.files[path]).hexdigest() == digest for path, digest in lines.items())


def test_modes(tmp_path: Path) -> None:
    folder = unpacked(built(run_spec(scheduler="local"), HF_TOKEN=TOKEN), tmp_path)
    modes = {str(p.relative_to(folder)): p.stat().st_mode & 0o777 for p in folder.rglob("*") if p.is_file()}
    assert modes["entrypoint.sh"] == modes["local/start.sh"] == 0o755
    assert modes["run.yaml"] == modes["runtime/mlmsub/runtime/__main__.py"] == 0o644
    assert modes["secrets/env.sh"] == 0o600


# --- what is in it ------------------------------------------------------------------------


def test_a_native_stage_brings_its_runtime_and_its_conf() -> None:
    files = built().files
    assert files["runtime/mlmsub/runtime/__main__.py"] == b"pass\n"
    assert files["conf/model.yaml"] == b"model: x\n"


def test_a_script_brings_neither() -> None:
    assert not [path for path in built(script_spec()).files if path.startswith(("runtime/", "conf/", "local/"))]


@pytest.mark.parametrize(
    ("spec", "command"),
    [
        (QUANTIZE, "(-m mlmsub.runtime quantize meta-llama/Llama-3.1-8B-Instruct FP8_DEFAULT_CFG)"),
        (script_spec("eagle3.sh", "x/y"), "(bash eagle3.sh x/y)"),
        (script_spec("./run it.sh", "a b", "$X"), "(bash './run it.sh' 'a b' '$X')"),
        (script_spec("python", "-c", "print(1)"), "(python -c 'print(1)')"),
    ],
)
def test_the_command(spec: RunSpec, command: str) -> None:
    assert f"__mlm_command={command}\n" in built(spec).files[paths.COMMAND].decode()


def test_the_setup_keeps_its_bytes_and_its_siblings_their_names() -> None:
    setup = EnvSetup("/h/my env.sh", {"my env.sh": to_text(b"A=\xff\r\n"), "lib/x.sh": "X=1\n"})
    files = built(run_spec(setup=setup)).files
    assert files["env/setup.sh"] == b"A=\xff\r\n"
    assert files["env/lib/x.sh"] == b"X=1\n"


def test_the_files_of_values_are_sourced_in_the_order_of_precedence() -> None:
    assert built().files[paths.ORDER].decode().split() == ["env/profile.sh", "env/setup.sh", "env/overrides.sh"]


# --- secrets -----------------------------------------------------------------------------------


def assert_hidden(made: Bundle, secret: str = TOKEN) -> None:
    assert holding(made, secret) == []
    assert any(secret.encode() in content for content in made.secrets.values()), "the job must get it all the same"


def test_a_secret_of_the_environment() -> None:
    made = built(HF_TOKEN=TOKEN)
    assert_hidden(made)
    assert "secrets/env.sh" in made.files[paths.ORDER].decode()


def test_a_secret_in_the_env_setup_hides_the_whole_file() -> None:
    content = f"TP=8\nexport HF_TOKEN={TOKEN}\n"
    made = built(run_spec(setup=EnvSetup("/h/s.sh", {"s.sh": content, "lib/x.sh": "X=1\n"})), HF_TOKEN=TOKEN)
    assert_hidden(made)
    assert made.secrets["secrets/setup.sh"] == content.encode()
    assert made.secrets["secrets/lib/x.sh"] == b"X=1\n"
    assert made.files["env/setup.sh"] == b"TP=8\nexport HF_TOKEN=***\n"
    assert made.files[paths.ORDER].decode().split() == [
        "env/profile.sh", "secrets/env.sh", "secrets/setup.sh", "env/overrides.sh",
    ]  # fmt: skip


def test_a_secret_in_an_override() -> None:
    made = built(run_spec(overrides={"HF_TOKEN": TOKEN, "TP": "4"}), HF_TOKEN=TOKEN)
    assert_hidden(made)
    assert b"TP=4\n" in made.files[paths.OVERRIDES]
    assert b"HF_TOKEN" not in made.files[paths.OVERRIDES]
    assert made.files[paths.ORDER].decode().split()[-1] == "secrets/overrides.sh"


def test_a_secret_name_is_enough_however_short_its_value() -> None:
    made = built(run_spec(overrides={"HF_TOKEN": "x"}, profile_env={"WANDB_API_KEY": "y"}))
    assert b"HF_TOKEN" not in made.files[paths.OVERRIDES]
    assert made.secrets["secrets/overrides.sh"].endswith(b"HF_TOKEN=x\n")
    assert b"WANDB_API_KEY" not in made.files[paths.PROFILE_ENV]
    assert made.secrets["secrets/env.sh"] == b"WANDB_API_KEY=y\n"


def test_a_secret_within_another_value_of_an_override() -> None:
    made = built(run_spec(overrides={"HEADER": f"Bearer {TOKEN}"}), HF_TOKEN=TOKEN)
    assert_hidden(made)
    assert b"HEADER=" in made.secrets["secrets/overrides.sh"]


def test_a_secret_of_the_profile() -> None:
    made = built(run_spec(profile_env={"HF_TOKEN": TOKEN}), HF_TOKEN=TOKEN)
    assert_hidden(made)


def test_a_secret_within_another_value_of_the_profile() -> None:
    made = built(run_spec(profile_env={"HEADER": f"Bearer {TOKEN}"}), HF_TOKEN=TOKEN)
    assert_hidden(made)
    assert any(b"HEADER=" in content for content in made.secrets.values())


def test_a_secret_that_is_quoted_in_the_env_setup() -> None:
    made = built(run_spec(setup=EnvSetup("/h/s.sh", {"s.sh": 'HF_TOKEN="pass\\$word"\n'})), HF_TOKEN="pass$word")
    assert holding(made, "pass\\$word") == []


def test_a_secret_of_which_another_value_wins() -> None:
    setup = EnvSetup("/h/s.sh", {"s.sh": "HF_TOKEN=hf_of_the_setup\n"})
    made = built(run_spec(setup=setup, overrides={"HF_TOKEN": TOKEN}), HF_TOKEN=TOKEN)
    assert_hidden(made)
    assert_hidden(made, "hf_of_the_setup")


def test_the_longer_of_two_secrets_leaves_no_rest() -> None:
    setup = EnvSetup("/h/s.sh", {"s.sh": "A=abcdefgh\nB=abcdefghijkl\n"})
    made = built(run_spec(setup=setup), A="abcdefgh", B="abcdefghijkl")
    assert made.files["env/setup.sh"] == b"A=***\nB=***\n"


def test_a_value_of_a_few_characters_is_not_looked_for_everywhere() -> None:
    made = built(run_spec(setup=EnvSetup("/h/s.sh", {"s.sh": "TP=1\n"})), WANDB_API_KEY="1")
    assert made.files["env/setup.sh"] == b"TP=1\n"


def test_without_secrets_there_is_no_secret_file() -> None:
    assert built().secrets == {}
