"""Saves of large models, alone and shared between two processes; imports of two, which such saves put together."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rig import MODEL, ROOT, Runner, free_port, logits, session
from test_megatron_checkpoints import IDS, megatron_arguments
from test_reader import make_fp8_twin, split
from test_twins import TWINS, make, opened

from mlmsub.core import hf_config, modelconf
from mlmsub.runtime.checkpoints import checkpoint, checkpoint_writer, hf_import
from mlmsub.runtime.errors import CheckFailed, StageError
from mlmsub.runtime.models import model

# what a stage does with a source, up to its save, without the stage; LARGE: the first argument
PROCESS = f"""
import sys
from pathlib import Path
from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import checkpoint, checkpoint_writer, hf_import
from mlmsub.runtime.models import model
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.progress import Steps
from mlmsub.runtime.session import Job, start

def convert():
    checkpoint_writer.LARGE = int(sys.argv[1])
    job = Job("convert", "{MODEL}", [], Env(), Steps())
    try:
        with start(job, job.conf(), job.env.layout(), lambda parser: None, []) as session:
            made = model.build(session.args, session.conf, "cpu")
            hf_import.import_weights(made, session.source, session.conf, session.args.params_dtype)
            checkpoint.save(made, session.args, Path(sys.argv[2]))
    except StageError as error:
        print(f"refused by rank {{job.env.rank}}: {{error}}", flush=True)
        return error.exit_code
    return 0

distributed.end(convert)
"""


UNEVEN = "--decoder-first-pipeline-num-layers 1"  # of three


def two_processes(folder: Path, source: Path, extra: str = "", **layout: int) -> list[subprocess.CompletedProcess]:
    """Import and save as two processes of this layout, to `folder`/ckpt."""
    conf = hf_config.convert(json.loads((source / "config.json").read_text()), MODEL)
    conf.megatron_args["seq-length"] = "512"
    folder.mkdir(exist_ok=True)
    (folder / "model.yaml").write_text(modelconf.render(conf))
    (folder / "ckpt").mkdir()
    runner = Runner(folder / "runs", folder / "model.yaml")
    port = free_port()
    values = {
        "HF_MODEL_CKPT": source, "MLM_EXTRA_ARGS": f"--moe-token-dispatcher-type allgather {extra}", "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1, **layout,
    }  # fmt: skip
    environment = runner.environment(runner.run_dir(), values)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, "0", str(folder / "ckpt")],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outs = [process.communicate(timeout=300)[0] for process in started]
    return [subprocess.CompletedProcess([], one.returncode, out) for one, out in zip(started, outs, strict=True)]


def differences(tmp_path: Path, source: Path, ckpt: Path) -> list[str]:
    """Tensors in which the checkpoint is not what one process imports from `source`."""
    with opened(tmp_path, source) as session:
        want, got = (model.build(session.args, session.conf, "cpu") for _ in range(2))
        hf_import.import_weights(want, source, session.conf, torch.bfloat16)
        checkpoint.require_complete(ckpt)
        checkpoint.load(got, checkpoint.folder(ckpt))
        found = got.state_dict()
        pairs = [(name, tensor) for name, tensor in want.state_dict().items() if isinstance(tensor, torch.Tensor)]
        return [name for name, tensor in pairs if not torch.equal(found[name], tensor)]


@pytest.fixture(scope="module")
def fp8_twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    low, plain = make_fp8_twin(tmp_path_factory.mktemp("fp8"))
    split(low, 4)
    return low, plain


def test_tensor_parallel_slices_of_fp8_blocks_make_the_whole(fp8_twin: tuple, tmp_path: Path) -> None:
    """Half of 160 or 320 rows and columns ends inside of a block."""
    ranks = two_processes(tmp_path / "two", fp8_twin[0], TP=2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stdout + ranks[1].stdout
    assert differences(tmp_path, fp8_twin[1], tmp_path / "two" / "ckpt") == []


def test_data_parallel_processes_share_the_save(fp8_twin: tuple, tmp_path: Path) -> None:
    """EP=2: each reads its own experts; what both hold alike is written once, by one or the other."""
    ranks = two_processes(tmp_path / "two", fp8_twin[0], EP=2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stdout + ranks[1].stdout
    assert "shared among 2 data-parallel processes" in ranks[0].stdout
    ckpt = tmp_path / "two" / "ckpt"
    sizes = [sum(file.stat().st_size for file in (ckpt / "release").glob(f"__{rank}_*.distcp")) for rank in range(2)]
    assert 0.8 < sizes[0] / sizes[1] < 1.25
    assert differences(tmp_path, fp8_twin[1], ckpt) == []


def test_tied_embedding_reaches_the_last_pipeline_stage(tmp_path: Path) -> None:
    make(tmp_path / "hf", *TWINS["llama-tied"])
    ranks = two_processes(tmp_path / "two", tmp_path / "hf", UNEVEN, PP=2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stdout + ranks[1].stdout
    assert differences(tmp_path, tmp_path / "hf", tmp_path / "two" / "ckpt") == []


def test_what_one_process_finds_all_say(tmp_path: Path) -> None:
    """The first pipeline stage does not read the damaged file, and must not wait for the second."""
    make(tmp_path / "hf", *TWINS["llama"])
    split(tmp_path / "hf", 4)
    file = tmp_path / "hf" / "model-00004-of-00004.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    ranks = two_processes(tmp_path / "two", tmp_path / "hf", UNEVEN, PP=2)
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "refused by rank 0" in ranks[0].stdout and f"{file} is cut off" in ranks[0].stdout, ranks[0].stdout


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "LARGE", 1)


@pytest.mark.usefixtures("large")
def test_a_large_save_is_read_by_us_and_by_megatron(
    stage: Runner, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from megatron.training.checkpointing import load_checkpoint

    with session(stage, source) as opened:
        made, ours, theirs = (model.build(opened.args, opened.conf, "cpu") for _ in range(3))
        hf_import.import_weights(made, source, opened.conf, torch.bfloat16)
        checkpoint.save(made, opened.args, tmp_path)
        assert "4 threads" in capsys.readouterr().out
        assert len(list((tmp_path / "release").glob("__0_*.distcp"))) == 4
        checkpoint.load(ours, checkpoint.folder(tmp_path))
        with megatron_arguments(opened.args, load=str(tmp_path), finetune=True):
            load_checkpoint([theirs], None, None, strict=True)
        assert torch.equal(logits(ours, IDS), logits(made, IDS))
        assert torch.equal(logits(theirs, IDS), logits(made, IDS))


@contextmanager
def longest_file(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("threads", ["one", "several"])
def test_a_save_that_the_disk_refuses_says_why(
    threads: str, stage: Runner, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "LARGE", 1 if threads == "several" else 2**40)
    with session(stage, source) as opened:
        made = model.build(opened.args, opened.conf, "cpu")
        hf_import.import_weights(made, source, opened.conf, torch.bfloat16)
        with longest_file(16384), pytest.raises(CheckFailed, match=r"cannot be written: .*File too large"):
            checkpoint.save(made, opened.args, tmp_path)
    with pytest.raises(StageError, match="not a complete checkpoint"):
        checkpoint.folder(tmp_path)
