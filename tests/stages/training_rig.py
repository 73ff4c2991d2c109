"""Data to train on, and runs of finetune that can be cut off: in this process, or by two over gloo."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from rig import MODEL, ROOT, Result, Runner, free_port, result_of_pair, wait

LENGTH, ITERATIONS = 64, 8
PAIR = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
cases, rank = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
from mlmsub.runtime import __main__ as runtime
import training_rig
for case in cases:
    run_dir = Path(case["env"]["MLMSUB_RUN_DIR"])
    log = open(run_dir / f"rank{rank}", "a")
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    os.environ.update(case["env"], RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    with training_rig.stopping(case["stop_after"]), training_rig.logits_in_chunks(case["chunk"]):
        code = runtime.main(["finetune", case["model"]])
    from mlmsub.runtime import distributed
    if __import__("torch").distributed.is_initialized():
        distributed._leave()
    (run_dir / f"code{rank}").write_text(str(code))
    log.flush()
"""


@dataclass(frozen=True)
class Case:
    """One run of two processes.

    ``stops``: the iterations after which it is stopped and started again; ``chunk``: logits of a rank at a time.
    """

    name: str
    layout: dict[str, int] = field(default_factory=dict)
    optim: str = ""
    extra: str = ""
    stops: tuple[int, ...] = ()
    chunk: int = 0


def write_data(file: Path, records: int = 120) -> Path:
    """Texts of 4 to 30 words."""
    draw = random.Random(3)
    words = (ROOT / "mlmsub" / "runtime" / "quantization" / "calibration.txt").read_text().split()
    with file.open("w") as lines:
        for _ in range(records):
            at = draw.randrange(len(words) - 30)
            lines.write(json.dumps({"text": " ".join(words[at : at + draw.randrange(4, 30)])}) + "\n")
    return file


def variables(source: Path, save: Path, data: Path, optim: str = "", extra: str = "") -> dict[str, object]:
    return {
        "HF_MODEL_CKPT": source,
        "MLM_MODEL_SAVE": save,
        "MLM_DATA_ARGS": f"--finetune-hf-dataset {data} --data-cache-path {data.parent / 'cache'} --split 90,10,0"
        f" --train-iters {ITERATIONS} --lr-warmup-iters 2 --seq-length {LENGTH}",
        "MLM_OPTIM_ARGS": optim or f"{ADAM} --use-distributed-optimizer",
        "MLM_TRAIN_ARGS": "--micro-batch-size 2 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0",
        "MLM_EVAL_ARGS": "--eval-iters 1 --eval-interval 4 --save-interval 100 --log-interval 1",
        "MLM_EXTRA_ARGS": extra,
    }


ADAM = "--lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95"


def in_fp32(conf: Path, file: Path) -> Path:
    """The model conf for training in float32, in which layouts differ by the order of sums alone."""
    found = yaml.safe_load(conf.read_text())
    file.write_text(yaml.safe_dump({**found, "config": {**found.get("config", {}), "bf16": False}}))
    return file


@contextmanager
def stopping(after: int | None) -> Iterator[None]:
    """Have the job ask for its end when ``after`` iterations are done, by its file."""
    from mlmsub.runtime.training.stopping import StopFile

    asked, count = StopFile.asked, iter(range(10**6))

    def ask(self: StopFile) -> bool:
        if next(count) == after:
            self.stop.parent.mkdir(parents=True, exist_ok=True)
            self.stop.touch()
        return asked(self)

    with mock.patch.object(StopFile, "asked", ask):
        yield


@contextmanager
def logits_in_chunks(size: int) -> Iterator[None]:
    """Have a rank make this many logits at a time; 0: as it does by itself."""
    from mlmsub.runtime.training import losses

    with mock.patch.object(losses, "CHUNK", size or losses.CHUNK):
        yield


@contextmanager
def training_session(stage: Runner, given: dict[str, object]) -> Iterator[Any]:
    """The session that finetune works in, for tests of the rooms below it."""
    from mlmsub.runtime.env import Env
    from mlmsub.runtime.progress import Steps
    from mlmsub.runtime.session import Job, start
    from mlmsub.runtime.stages.finetune import Stage

    with mock.patch.dict(os.environ, stage.environment(stage.run_dir(), given), clear=True):
        made = Stage(Job("finetune", MODEL, [], Env(), Steps()))
        with start(made.job, made.conf, made.layout, made.add_arguments, made.defaults) as opened:
            yield opened


def iterations(result: Result, name: str = "lm_loss") -> list[float]:
    """A value of every iteration, as far as the run went at last."""
    lines = (result.run_dir / "state" / "events.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "iteration"]
    return list({event["iteration"]: event[name] for event in events}.values())


def run_pairs(stage: Runner, source: Path, folder: Path, data: Path, cases: list[Case]) -> dict[str, Result]:
    """Run all cases, one after the other, in one pair of processes: importing the libraries is most of the time."""
    jobs, run_dirs = [], {}
    for case in cases:
        run_dirs[case.name] = stage.run_dir()
        given = variables(source, folder / case.name, data, case.optim, case.extra)
        ends = [*case.stops, ITERATIONS]
        for restart, (last, end) in enumerate(zip([0, *case.stops], ends, strict=True)):
            made = {"TP": "", "PP": "", "EP": "", "ETP": "", **given, **case.layout, "MASTER_PORT": free_port()}
            environment = stage.environment(run_dirs[case.name], {**made, "MLMSUB_RESTART": restart})
            after = None if end == ITERATIONS else end - last
            jobs.append({"env": environment, "model": MODEL, "stop_after": after, "chunk": case.chunk})
    plan = folder / "jobs.json"
    plan.write_text(json.dumps(jobs))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PAIR, str(plan), str(rank), str(Path(__file__).parent)],
            env={**jobs[0]["env"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    wait(processes)
    return {name: result_of_pair(run_dir) for name, run_dir in run_dirs.items()}
