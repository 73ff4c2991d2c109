"""A process is killed: the others say in one sentence that they have lost it, and are not taken for the cause."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rig import ENOUGH, MODEL, ROOT, Runner, free_port

from mlmsub.runtime import lost_peer
from mlmsub.runtime.env import Env


@pytest.mark.parametrize("victim", [0, 1])
def test_the_rank_that_is_left_says_whom_it_lost(victim: int, stage: Runner, source: Path, tmp_path: Path) -> None:
    run_dir = stage.run_dir()
    given = {"HF_MODEL_CKPT": source, "MLM_MODEL_SAVE": tmp_path / "out", "MLM_EXTRA_ARGS": ENOUGH}
    common = stage.environment(run_dir, given) | {
        "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "mlmsub.runtime", "quantize", MODEL, "fp8"],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    assert ranks[0].stdout
    for line in ranks[0].stdout:
        if line.startswith("[groups] done"):  # both have met
            break
    ranks[victim].kill()
    out = ranks[1 - victim].communicate(timeout=120)[0]
    ranks[victim].communicate(timeout=60)
    assert ranks[1 - victim].returncode == 1, out
    (said,) = [line for line in out.splitlines() if "ERROR" in line]
    assert f"rank {victim}: has ended, or does not answer any more" in said
    assert "look for the first rank that failed" in said
    assert "Traceback" not in out
    assert "frame #0" not in out
    file = run_dir / "state" / "0" / f"traceback-{1 - victim}.txt"
    assert str(file) in said
    assert "Traceback" in file.read_text()


def test_a_rank_that_lost_another_lets_that_one_tell_its_code_first(tmp_path: Path) -> None:
    state = tmp_path / "state" / "3"
    state.mkdir(parents=True)

    def entrypoint_of_the_other() -> None:
        time.sleep(0.3)
        (state / "first_failure").symlink_to("137 by rank 1 on node")

    other = threading.Thread(target=entrypoint_of_the_other)
    other.start()
    lost_peer.wait_for_its_code(Env({"MLMSUB_RUN_DIR": str(tmp_path), "MLMSUB_RESTART": "3"}))
    assert (state / "first_failure").is_symlink()
    other.join()


def test_an_error_of_ones_own_is_no_lost_peer() -> None:
    assert not lost_peer.seen_in(RuntimeError("CUDA error: out of memory"))
    assert not lost_peer.seen_in(KeyError("Connection closed by peer"))
    gloo = RuntimeError("[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    wrapped = ValueError("the save failed")
    wrapped.__cause__ = gloo
    assert lost_peer.seen_in(gloo)
    assert lost_peer.seen_in(wrapped)
