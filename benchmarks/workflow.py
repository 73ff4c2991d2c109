"""How long a workflow of 200 steps takes to plan and to submit, beside one step; and what one exec carries.

    python benchmarks/workflow.py               # a minute; no cluster: sbatch and squeue are stand-ins
    python benchmarks/workflow.py --cells 50

The workflow is a sweep: each cell quantizes and exports one of `conf/`'s models. Commands take turns, so that what
else the machine does strikes them alike.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
STEPS = """\
steps:
  quantize:
    stage: quantize
    model: meta-llama/Llama-3.1-8B-Instruct
    args: [FP8_DEFAULT_CFG]
    env_setup: setup.sh
    matrix: &cells {{cell: [{cells}]}}
    set: {{MLM_MODEL_SAVE: '/workspace/scratch/${{matrix.cell}}'}}
  export:
    stage: export
    model: meta-llama/Llama-3.1-8B-Instruct
    env_setup: setup.sh
    matrix: *cells
    set: {{MLM_MODEL_CKPT: '${{steps.quantize.MLM_MODEL_SAVE}}', EXPORT_DIR: '/workspace/scratch/e/${{matrix.cell}}'}}
"""


def prepare(folder: Path, cells: int) -> dict[str, str]:
    """Workflow files of one cell and of many, and stand-ins; the environment of the user."""
    (folder / "setup.sh").write_text("TP=1\nPP=1\n")
    (folder / "one.yaml").write_text(STEPS.format(cells="a"))
    (folder / "many.yaml").write_text(STEPS.format(cells=", ".join(f"c{number}" for number in range(cells))))
    (folder / "bin").mkdir()
    for name, line in (("sbatch", f"echo x >>{folder}/jobs; wc -l <{folder}/jobs"), ("squeue", ":")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / "bin" / name).chmod(0o755)
    return {
        "PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder), "USER_FSW": str(folder / "scratch"),
        "CONTAINER_IMAGE": "registry.example#image:1", "PYTHONPATH": str(REPOSITORY),
        "PYTHONPYCACHEPREFIX": str(folder / "pycache"),  # compiled, as pip leaves an installed package
    }  # fmt: skip


def seconds(folder: Path, environment: dict[str, str], *words: str) -> float:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "mlmsub.cli.main", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", type=int, default=100, help="of two steps each")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured, after one to warm up")
    options = parser.parse_args()
    steps = 2 * options.cells
    with tempfile.TemporaryDirectory(prefix="mlmsub-bench-") as name:
        folder = Path(name)
        environment = prepare(folder, options.cells)
        (folder / "scratch").mkdir()
        verbs = {"--version": ("--version",), "plan, 2 steps": ("workflow", "plan", "one.yaml"),
                 f"plan, {steps} steps": ("workflow", "plan", "many.yaml"),
                 "submit, 2 steps": ("workflow", "submit", "one.yaml", "--new"),
                 f"submit, {steps} steps": ("workflow", "submit", "many.yaml", "--new")}  # fmt: skip
        taken: dict[str, list[float]] = {verb: [] for verb in verbs}
        for round_ in range(options.rounds + 1):
            for verb, words in verbs.items():
                took = seconds(folder, environment, *words)
                if round_:
                    taken[verb].append(took)
                shutil.rmtree(folder / "scratch/.mlmsub", ignore_errors=True)
                shutil.rmtree(folder / ".local", ignore_errors=True)
        print(f"{options.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        base = statistics.median(taken["--version"])
        print(f"{'':20}{'median s':>9}{'fastest s':>10}{'of --version':>13}")
        for verb, took in taken.items():
            median = statistics.median(took)
            print(f"{verb:20}{median:9.2f}{min(took):10.2f}{median / base:13.1f}")


if __name__ == "__main__":
    main()
