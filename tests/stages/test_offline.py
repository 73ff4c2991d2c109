"""No network at run time; where something must be fetched, one process of the run does it, and once."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub
from rig import ENOUGH, MODEL, ROOT, Runner, free_port

TOKEN = "hf_abcdefghijklmnop"
GUARD = """\
import os, socket

inner = socket.socket.connect


def connect(self, address):
    host = address[0] if isinstance(address, tuple) else ""
    if self.family != socket.AF_UNIX and host not in ("127.0.0.1", "::1", "localhost"):
        with open(os.environ["CALLS"], "a") as calls:
            calls.write(f"{address}\\n")
        raise OSError(f"no network here: {address}")
    return inner(self, address)


def lookup(host, *words, **options):
    if host not in (None, "", "127.0.0.1", "::1", "localhost", socket.gethostname()):
        with open(os.environ["CALLS"], "a") as calls:
            calls.write(f"{host}\\n")
        raise OSError(f"no names here: {host}")
    return names(host, *words, **options)


names, socket.getaddrinfo = socket.getaddrinfo, lookup
socket.socket.connect = connect
"""
# the stages one after another in one process, each as `python -m mlmsub.runtime` would run it
CHAIN = """\
import json, os, sys
from mlmsub.runtime.__main__ import main

for words, variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    code = main(words)
    if code:
        sys.exit(code)
"""


def guarded(tmp_path: Path, *command: str, **variables: object) -> tuple[subprocess.CompletedProcess, str]:
    """Run Python with a guard on its sockets; returns what it tried to reach, too."""
    (tmp_path / "guard").mkdir(exist_ok=True)
    (tmp_path / "guard" / "sitecustomize.py").write_text(GUARD)
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")}
    environment = {
        **kept, "PYTHONPATH": f"{tmp_path / 'guard'}:{ROOT}", "CALLS": str(tmp_path / "calls"), "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf-home"), "OMP_NUM_THREADS": "1",
        **{key: str(value) for key, value in variables.items()},
    }  # fmt: skip
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    calls = tmp_path / "calls"
    return done, calls.read_text() if calls.exists() else ""


def test_the_guard_guards(tmp_path: Path) -> None:
    done, calls = guarded(tmp_path, "-c", "import socket; socket.create_connection(('192.0.2.1', 80), 1)")
    assert done.returncode == 1 and "no names here" in done.stderr and "192.0.2.1" in calls


def test_every_stage_works_without_a_network(stage: Runner, source: Path, tmp_path: Path) -> None:
    run_dir, mlm, quantized = stage.run_dir(), tmp_path / "mlm", tmp_path / "q"
    chain = [
        (["convert", MODEL], {"MLM_MODEL_SAVE": mlm, "MLM_EXTRA_ARGS": "--algorithm eagle3"}),
        (["convert", MODEL], {"MLM_MODEL_SAVE": tmp_path / "plain", "MLM_EXTRA_ARGS": ""}),
        (["quantize", MODEL, "fp8"], {"MLM_MODEL_CKPT": tmp_path / "plain", "MLM_MODEL_SAVE": quantized,
                                      "MLM_EXTRA_ARGS": ENOUGH}),
        (["export", MODEL], {"MLM_MODEL_CKPT": quantized, "EXPORT_DIR": tmp_path / "out", "MLM_EXTRA_ARGS": ""}),
    ]  # fmt: skip
    words = json.dumps([(words, {key: str(value) for key, value in given.items()}) for words, given in chain])
    done, calls = guarded(tmp_path, "-c", CHAIN, words, MLMSUB_RUN_DIR=run_dir, HF_MODEL_CKPT=source)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "hf_quant_config.json").is_file()
    assert calls == ""


# --- fetching -------------------------------------------------------------------------------


@pytest.fixture
def hub(source: Path, tmp_path: Path) -> Iterator[FakeHub]:
    folder = tmp_path / "repository"
    shutil.copytree(source, folder)
    (folder / "pytorch_model.bin").write_bytes(b"the same once more")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"and once more")
    (tmp_path / "data").mkdir()
    for name in ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"):
        (tmp_path / "data" / name).write_text('{"text": "some words"}\n')
    made = FakeHub({MODEL: folder, "datasets/some/data": tmp_path / "data"})
    yield made
    made.server.shutdown()


# two ranks that meet and ask for the same, without Megatron, whose import takes seconds
FETCH = """\
import sys
import torch.distributed as dist
from mlmsub.runtime.checkpoints import prefetch
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError

env = Env()
dist.init_process_group("gloo")
try:
    print("FOUND", eval(sys.argv[1]), flush=True)
except StageError as error:
    print("ERROR", error, flush=True)
dist.barrier()
dist.destroy_process_group()
"""
MODEL_CALL = f"prefetch.model({MODEL!r}, env, weights=True)"


def fetch(
    tmp_path: Path, hub: FakeHub, call: str, homes: tuple[str, str] = ("home", "home"), **variables: str
) -> list[str]:
    """What each of two ranks got; ranks with a home of their own are on nodes of their own."""
    port = free_port()
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LD_LIBRARY_PATH", "TMPDIR")}
    apart = homes[0] != homes[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FETCH, call], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={
                **kept, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / homes[rank]),
                "HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "WORLD_SIZE": "2", "RANK": str(rank),
                "LOCAL_RANK": "0" if apart else str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1", **variables,
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    return [process.communicate(timeout=120)[0] for process in processes]


def test_one_process_fetches_and_a_restart_asks_nothing(hub: FakeHub, source: Path, tmp_path: Path) -> None:
    outs = fetch(tmp_path, hub, MODEL_CALL)
    folder = tmp_path / "home" / "hub" / f"models--{MODEL.replace('/', '--')}" / "snapshots" / COMMIT
    assert all(f"FOUND {folder}" in out for out in outs), outs
    got = [request for request in hub.asked if request.startswith("GET") and "resolve" in request]
    assert len(got) == len(set(got)), "each file once"
    assert {path.name for path in folder.iterdir()} == {path.name for path in source.iterdir()}, "no .bin, no .pth"
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert f"Bearer {TOKEN}" in hub.tokens and TOKEN not in "".join(outs)
    hub.asked.clear()
    assert all(f"FOUND {folder}" in out for out in fetch(tmp_path, hub, MODEL_CALL))
    assert hub.asked == []


def test_without_weights_only_the_small_files(hub: FakeHub, tmp_path: Path) -> None:
    outs = fetch(tmp_path, hub, f"prefetch.model({MODEL!r}, env, weights=False)", ("one", "two"))
    assert all("FOUND" in out for out in outs), outs
    assert "2 of them" not in outs[0] and "1 of them fetch their own" in outs[0], "the node that has it does not ask"
    assert (tmp_path / "two" / "hub").is_dir()
    assert not any(name.endswith((".safetensors", ".bin")) for name in hub.asked)


def test_a_data_set_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    outs = fetch(tmp_path, hub, "prefetch.dataset('some/data', env)")
    assert all("train-00000-of-00002.jsonl" in out and "00001-of-00002" not in out for out in outs), outs


def test_what_the_hub_does_not_have_is_told_by_all(hub: FakeHub, tmp_path: Path) -> None:
    outs = fetch(tmp_path, hub, "prefetch.model('no/such', env, weights=True)")
    for out in outs:
        assert "ERROR HF_MODEL_CKPT: no/such cannot be fetched" in out and "Fix: set HF_MODEL_CKPT" in out, out
        assert TOKEN not in out


def test_a_cache_that_was_filled_by_others_serves_offline(hub: FakeHub, tmp_path: Path) -> None:
    fetch(tmp_path, hub, MODEL_CALL)
    (marker,) = (tmp_path / "home").rglob("mlmsub-*.json")
    marker.unlink()
    hub.asked.clear()
    outs = fetch(tmp_path, hub, MODEL_CALL, HF_HUB_OFFLINE="1")
    assert all("FOUND" in out for out in outs), outs
    assert hub.asked == []
