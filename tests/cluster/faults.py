"""A script that trains, as far as Slurm can see, for the tests of faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command import Mlmsub

# Counts to $TOTAL, one iteration each half second; rank 0 saves where it is asked to, the others wait for it.
SCRIPT = r"""
state=$MLMSUB_RUN_DIR/state/$MLMSUB_RESTART own=/workspace/scratch/$NAME
mkdir -p "$own"
trap 'asked=1' TERM
if [[ $RANK != 0 ]]; then
    until [[ -e $state/saved || -e $own/done ]]; do sleep 0.2; done
    exit 0
fi
echo "HF_TOKEN is $HF_TOKEN"
if [[ ${DEAF-} && $MLMSUB_RESTART == 0 ]]; then until [[ -e $state/stop ]]; do sleep 0.1; done; sleep 3; fi
n=$(cat "$own/iteration" 2>/dev/null || echo 0)
while ((n < TOTAL)); do
    ((n += 1))
    echo "$n" >>"$own/trace"
    [[ $n != "${FAILS_AT-}" ]] || exit 7
    sleep 0.5
    if [[ -e $state/stop || ${asked-} ]]; then
        sleep "${SLOW_SAVE-0}"
        echo "$n" >"$own/iteration"
        echo "$n" >"$state/saved"
        exit 0
    fi
done
touch "$own/done"
"""
# Slurm's shortest limit is a minute; its signal comes when 50 to 20 s of it are left.
SOON = ("--time", "1", "--stop-before", "50", "--allow", "stop-before")


class Training:
    """Runs of the script by name, each with a folder of its name in the scratch."""

    def __init__(self, mlm: Mlmsub) -> None:
        self.mlm = mlm
        self.runs: dict[str, dict[str, Any]] = {}
        mlm.profile(gpus_per_node=2)
        mlm.script("train.sh", SCRIPT)
        mlm.script(
            "child.sh", "[[ $RANK != 0 ]] || tail -n 1 /workspace/scratch/$NAME/trace >/workspace/scratch/$NAME/seen"
        )

    def submit(self, name: str, total: int, *options: str) -> dict[str, Any]:
        values = ("--set", f"TOTAL={total}", "--set", f"NAME={name}")
        run = self.mlm.submit("script", *values, *options, "--", "train.sh", env={"HF_TOKEN": "hf_kept"})
        self.runs[name] = run
        return run

    def child(self, *parents: str) -> dict[str, Any]:
        """A run that waits for these, and keeps what it sees of the first."""
        after = [word for parent in parents for word in ("--after", self.runs[parent]["run_id"])]
        run = self.mlm.submit("script", *after, "--set", f"NAME={parents[0]}", "--", "child.sh")
        self.runs[f"child of {parents[0]}"] = run
        return run

    def seen_by_child(self, name: str) -> str:
        file = self.mlm.scratch / name / "seen"
        return file.read_text().strip() if file.exists() else ""

    def wait(self, name: str) -> tuple[str, str]:
        """Slurm's state and exit code, once the job has ended for good."""
        end = self.mlm.lab.wait(self.runs[name]["job_id"], timeout=300)
        return end.state, end.exit_code

    def jobs(self, name: str) -> list[str]:
        run = self.runs[name]
        return [run["job_id"], *run["links"]]

    def ends(self, name: str) -> list[str]:
        """Slurm's states of all the jobs of a chain, once they have ended for good."""
        return [self.mlm.lab.wait(job, timeout=300).state for job in self.jobs(name)]

    def log(self, name: str) -> str:
        return self.mlm.log(self.runs[name])

    def attempts(self, name: str) -> list[dict[str, Any]]:
        file = Path(self.runs[name]["run_dir"]) / "state/attempts.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]

    def trace(self, name: str) -> list[int]:
        """The iterations that were done, in order."""
        file = self.mlm.scratch / name / "trace"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def state(self, name: str, file: str, restart: int = 0) -> bool:
        return (Path(self.runs[name]["run_dir"]) / "state" / str(restart) / file).exists()

    def secrets(self, name: str) -> Path:
        return Path(self.runs[name]["run_dir"]) / "secrets"
