"""However a submission is cut off, the same command again ends with exactly one job that does the work."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from pathlib import Path

import pytest
from laptop import Laptop

WORK = "echo once >>/workspace/scratch/$SLURM_JOB_NAME\n"

# Stands before the real sbatch; what it does at one call is the test's, other calls are sbatch's own.
SBATCH = """#!/bin/bash
call=1
until mkdir {state}/call-$call 2>/dev/null; do ((call += 1)); done
((call == {number})) || exec /usr/bin/sbatch "$@"
cut() {{ # end the connection that this command came over
    pid=$PPID
    until [[ $(ps -o comm= -p "$pid") == sshd ]]; do pid=$(ps -o ppid= -p "$pid" | tr -d ' '); done
    kill -9 "$pid"
}}
timed_out() {{
    echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2
    exit 1
}}
{first}
"""


class Cut:
    """Passes a connection on, until it has passed so many bytes one way."""

    def __init__(self, port: int, *, up: float = float("inf"), down: float = float("inf")) -> None:
        self.left = {"up": up, "down": down}
        self.passed = {"up": 0, "down": 0}
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        far = socket.create_connection(("127.0.0.1", self._target))
        for way, source, sink in (("up", near, far), ("down", far, near)):
            threading.Thread(target=self._pump, args=(way, source, sink), daemon=True).start()

    def _pump(self, way: str, source: socket.socket, sink: socket.socket) -> None:
        try:
            while self.left[way] > 0 and (data := source.recv(4096)):
                data = data[: int(min(self.left[way], len(data)))]
                self.left[way] -= len(data)
                self.passed[way] += len(data)
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def through(laptop: Laptop, cut: Cut) -> None:
    """Send the laptop's connections this way; the host is still the same one."""
    laptop.configure(f"Port {cut.port}", f"HostKeyAlias [127.0.0.1]:{laptop.server.port}")


def first_sbatch(laptop: Laptop, does: str, number: int = 1) -> None:
    """Let the next sbatch, or the one of this number, do this in place of submitting."""
    state = laptop.there / "state"
    state.mkdir()
    state.chmod(0o777)
    laptop.script("bin/sbatch", SBATCH.format(state=state, first=does, number=number))
    laptop.profile(slurm_bin=str(laptop.sandbox / "bin"))


def jobs_of(laptop: Laptop, run_id: str) -> list[str]:
    """All jobs that were ever made of a run."""
    shown = laptop.lab.run(["squeue", "-h", "-t", "all", "-o", "%i|%Z"]).stdout
    return [line.partition("|")[0] for line in shown.splitlines() if line.endswith(f"/{run_id}")]


def test_a_connection_cut_at_every_step(laptop: Laptop) -> None:
    """In the handshake, at login, in the script, in the tar, and before the answer."""
    laptop.script("work.sh", WORK)
    whole = Cut(laptop.server.port)
    through(laptop, whole)
    laptop.submit("script", "--job-name", "uncut", "--", "work.sh")
    whole.close()
    up, down = whole.passed["up"], whole.passed["down"]
    cuts = [{"up": int(up * part)} for part in (0.05, 0.15, 0.3, 0.5, 0.8, 0.97)]
    cuts += [{"down": int(down * part)} for part in (0.3, 0.75)] + [{"down": down - 200}]
    runs, refused = {"uncut": laptop.records()[0].stem}, 0
    for number, limits in enumerate(cuts):
        name = f"cut{number}"
        submit = ("script", "--job-name", name, "--", "work.sh")
        cut = Cut(laptop.server.port, **limits)
        through(laptop, cut)
        done = laptop.run("submit", *submit, check=False)
        cut.close()
        assert done.returncode in (0, 4) and "Traceback" not in done.stderr, done.stderr
        refused += done.returncode == 4
        laptop.configure()
        if done.returncode == 4:
            runs[name] = laptop.submit(*submit)["run_id"]
        else:
            runs[name] = next(path.stem for path in laptop.records() if f'"{name}"' in path.read_text())
    assert refused >= len(cuts) - 1, "the cuts did cut"
    states = json.loads(laptop.run("status", *runs.values(), "--json").stdout)
    for state in states:
        laptop.lab.wait(state["job_id"])
    assert {name: (laptop.scratch / name).read_text() for name in runs} == dict.fromkeys(runs, "once\n")
    assert {name: len(jobs_of(laptop, run)) for name, run in runs.items()} == dict.fromkeys(runs, 1)
    assert len(laptop.records()) == len(runs)
    assert sorted(path.name for path in laptop.scratch.glob(".mlmsub/runs/*/*")) == sorted(runs.values())


@pytest.mark.parametrize(
    "first",
    [
        "cut; sleep 1; exit 1",
        'cut; exec /usr/bin/sbatch "$@"',
        '/usr/bin/sbatch "$@" >/dev/null; cut; sleep 1; kill -9 $PPID',
        '/usr/bin/sbatch "$@" >/dev/null; timed_out',
        "timed_out",
    ],
    ids=["cut-before-sbatch", "cut-while-sbatch", "killed-after-sbatch", "timeout-with-job", "timeout-without-job"],
)
def test_an_answer_that_never_came(laptop: Laptop, first: str) -> None:
    laptop.script("work.sh", WORK)
    first_sbatch(laptop, first)
    submit = ("script", "--job-name", laptop.home.parent.name, "--", "work.sh")
    begun = laptop.run("submit", *submit, check=False)
    found_at_once = first.startswith("/usr") and "timed_out" in first
    assert begun.returncode == (0 if found_at_once else 5 if "timed_out" in first else 4), begun.stderr
    run = laptop.submit(*submit) if begun.returncode else json.loads(laptop.run("list", "--json").stdout)[0]
    laptop.lab.wait(run["job_id"])
    assert laptop.status(run["run_id"])["state"] == "succeeded"
    assert (laptop.scratch / laptop.home.parent.name).read_text() == "once\n"
    assert len(laptop.records()) == 1
    if begun.returncode:  # on purpose, the same command can still make another
        again = laptop.submit(*submit[:1], "--new", *submit[1:])
        assert again["run_id"] != run["run_id"] and not again["existed"]
        laptop.lab.wait(again["job_id"])
        assert (laptop.scratch / laptop.home.parent.name).read_text() == "once\n" * 2


@pytest.mark.parametrize(
    "second",
    ["cut; kill -9 $PPID", '/usr/bin/sbatch "$@" >/dev/null; cut; sleep 1; kill -9 $PPID'],
    ids=["killed-before-sbatch", "killed-after-sbatch"],
)
def test_a_chain_that_is_cut_between_two_links(laptop: Laptop, second: str) -> None:
    laptop.script("work.sh", WORK)
    first_sbatch(laptop, second, number=2)
    submit = ("script", "--chain", "2", "--sbatch-arg=--hold", "--job-name", "chain", "--", "work.sh")
    assert laptop.run("submit", *submit, check=False).returncode == 4
    assert laptop.run("status", check=False).stdout.count("repeat its command") == 1
    run = laptop.submit(*submit)
    links = [run["job_id"], *run["links"]]
    assert run["existed"] and sorted(jobs_of(laptop, run["run_id"])) == links and len(links) == 3
    for job in reversed(links):  # the first takes the others away when it is done
        laptop.lab.run(["scontrol", "release", job])
    assert [laptop.lab.wait(job).state for job in links] == ["COMPLETED", "CANCELLED", "CANCELLED"]
    assert (laptop.scratch / "chain").read_text() == "once\n"
    assert len(laptop.records()) == 1


def test_a_chain_of_which_a_link_is_refused(laptop: Laptop) -> None:
    laptop.script("work.sh", f"sleep 5; {WORK}")
    first_sbatch(laptop, 'exec /usr/bin/sbatch --partition=none "$@"', number=2)
    done = laptop.run("submit", "script", "--chain", "2", "--job-name", "refused", "--", "work.sh", check=False)
    assert done.returncode == 5 and "partition does not exist" in done.stderr
    assert laptop.records() == [] and list(laptop.scratch.glob(".mlmsub/runs/*/*")) == []
    assert laptop.lab.run("squeue -h -o %j | grep -c refused", check=False).stdout == "0\n"
    assert not (laptop.scratch / "refused").exists()


@pytest.mark.parametrize("late_one_first", [True, False], ids=["late-claims", "late-finds-it-claimed"])
def test_a_job_that_appears_late(laptop: Laptop, late_one_first: bool) -> None:
    """sbatch says that it timed out, and its job is there only after another one was made."""
    laptop.script("work.sh", WORK)
    go = laptop.there / "state/go"
    first_sbatch(laptop, (
        f"(until [[ -e {go} ]]; do sleep 0.1; done; /usr/bin/sbatch \"$@\" >{go}.late 2>&1) &>/dev/null &\ntimed_out"
    ))  # fmt: skip
    submit = ("script", "--sbatch-arg=--hold", "--job-name", "late", "--", "work.sh")
    begun = laptop.run("submit", *submit, check=False)
    assert begun.returncode == 5 and "repeat the same command" in begun.stderr
    run = laptop.submit(*submit)
    go.touch()
    late = wait_for(Path(f"{go}.late"))
    for job in (late, run["job_id"]) if late_one_first else (run["job_id"], late):
        laptop.lab.run(["scontrol", "release", job])
        laptop.lab.wait(job)
    assert (laptop.scratch / "late").read_text() == "once\n"
    shown = json.loads(laptop.run("status", run["run_id"], "--json").stdout)[0]
    assert shown["status"]["state"] == "succeeded"
    assert shown["job_id"] == (late if late_one_first else run["job_id"]), "the record names the job that did it"
    assert json.loads(laptop.records()[0].read_text())["job_id"] == shown["job_id"]
    assert f"job {shown['job_id']}  restart" in laptop.run("logs", "-f", run["run_id"]).stdout


def test_cancelling_ends_a_late_job_too(laptop: Laptop) -> None:
    laptop.script("work.sh", WORK)
    go = laptop.there / "state/go"
    first_sbatch(laptop, (
        f"(until [[ -e {go} ]]; do sleep 0.1; done; /usr/bin/sbatch \"$@\" >{go}.late 2>&1) &>/dev/null &\ntimed_out"
    ))  # fmt: skip
    submit = ("script", "--sbatch-arg=--hold", "--job-name", "late", "--", "work.sh")
    assert laptop.run("submit", *submit, check=False).returncode == 5
    run = laptop.submit(*submit)
    laptop.run("cancel", run["run_id"])
    go.touch()
    late = wait_for(Path(f"{go}.late"))
    laptop.lab.run(["scontrol", "release", late])
    assert laptop.lab.wait(late).state != "COMPLETED"
    assert not (laptop.scratch / "late").exists()
    assert laptop.status(run["run_id"])["state"] == "cancelled"


def test_a_queue_that_does_not_answer_is_waited_for(laptop: Laptop) -> None:
    """Nobody knows whether the first attempt made a job, so a second one must not be made, nor the run removed."""
    laptop.script("work.sh", WORK)
    first_sbatch(laptop, '/usr/bin/sbatch "$@" >/dev/null; cut; sleep 1; kill -9 $PPID')
    submit = ("script", "--sbatch-arg=--hold", "--job-name", "unsure", "--", "work.sh")
    assert laptop.run("submit", *submit, check=False).returncode == 4
    laptop.script(
        "bin/squeue", "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n"
    )
    unsure = laptop.run("submit", *submit, check=False)
    assert unsure.returncode == 5 and "squeue does not answer" in unsure.stderr
    (laptop.sandbox / "bin/squeue").unlink()
    run = laptop.submit(*submit)
    assert run["existed"]
    laptop.lab.run(["scontrol", "release", run["job_id"]])
    assert laptop.lab.wait(run["job_id"]).state == "COMPLETED"
    assert (laptop.scratch / "unsure").read_text() == "once\n"


def wait_for(file: Path, timeout: float = 30) -> str:
    """The job id that a late sbatch prints."""
    for _ in range(int(timeout / 0.1)):
        if file.exists() and (text := file.read_text().strip()):
            return text.split(";")[0]
        threading.Event().wait(0.1)
    raise TimeoutError(f"{file} stays empty")
