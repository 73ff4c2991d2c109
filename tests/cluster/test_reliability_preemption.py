"""Preemption on a real Slurm, with and without grace: the run goes on by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from command import Mlmsub
from faults import Training
from lab import Lab
from until import until

# Partitions whose jobs give way to those of `urgent`; the lab itself has no preemption.
PREEMPTIVE = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE
PartitionName=grace Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=killed Nodes=ALL PriorityTier=1 PreemptMode=CANCEL
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


@pytest.fixture(scope="module")
def preemptive(lab: Lab) -> Iterator[Lab]:
    lab.end("slurmctld")
    with lab.slurm_conf.open("a") as conf:
        conf.write(PREEMPTIVE)
    lab.run(["slurmctld"])
    until(lambda: lab.run("sinfo -h -N -p urgent -t idle", check=False).stdout.count("\n") == lab.nodes)
    yield lab
    lab.end("slurmctld")
    lab.start()  # writes its own configuration


@pytest.fixture
def train(preemptive: Lab, mlm: Mlmsub) -> Training:
    return Training(mlm)


def preempt(train: Training, partition: str, *options: str, total: int = 40) -> None:
    train.mlm.profile(gpus_per_node=2, partition=partition, nodelist="node3", exclusive=True)
    train.submit("one", total, *options)
    until(lambda: len(train.trace("one")) > 2)
    urgent = ["sbatch", "-p", "urgent", "-w", "node3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3"]
    train.mlm.lab.run(urgent, train.mlm.user)


def test_preempted_without_grace(train: Training) -> None:
    """No save can be promised: what was done since the last one is done again."""
    preempt(train, "low", "--requeue")
    assert train.wait("one") == ("COMPLETED", "0:0"), train.log("one")
    assert [one["cause"] for one in train.attempts("one")] == ["preempted", "finished"]
    assert "HF_TOKEN is hf_kept" in train.log("one").split("restart 1")[1]
    assert not train.secrets("one").exists()


def test_preempted_with_grace(train: Training) -> None:
    """The ranks are told by SIGTERM, save and end; the job must not count as done before Slurm takes its nodes."""
    preempt(train, "grace", "--requeue")
    assert train.wait("one") == ("COMPLETED", "0:0"), train.log("one")
    assert train.trace("one") == list(range(1, 41)), "each iteration once"
    cut, last = train.attempts("one")
    assert (cut["cause"], last["cause"]) == ("preempted", "finished") and cut["iteration"] > 0


def test_preempted_by_cancelling(train: Training) -> None:
    preempt(train, "killed", "--requeue")
    assert train.wait("one")[0] == "PREEMPTED"
    assert train.mlm.status(train.runs["one"]["run_id"])["state"] == "preempted"
    assert train.log("one").count("=== mlmsub") == 1
    assert not train.secrets("one").exists()


def test_a_chain_goes_on_after_preemption_by_cancelling(train: Training) -> None:
    preempt(train, "killed", "--no-requeue", "--chain", "1", total=12)
    assert train.ends("one") == ["PREEMPTED", "COMPLETED"], train.log("one")
    assert [one["cause"] for one in train.attempts("one")] == ["preempted", "finished"]
    assert train.log("one").count("HF_TOKEN is hf_kept") == 2 and not train.secrets("one").exists()
    assert train.mlm.status(train.runs["one"]["run_id"])["state"] == "succeeded"


def test_doctor_tells_of_preemption(preemptive: Lab, mlm: Mlmsub) -> None:
    mlm.profile(partition="grace,killed")
    said = mlm.run("doctor").stdout
    assert "PreemptMode=REQUEUE, KillWait=5 sec" in said
    assert "PreemptMode=REQUEUE, GraceTime=20" in said and "PreemptMode=CANCEL, GraceTime=0" in said
    assert "preemption in killed: a preempted run is not started again" in said
