"""Why a submission was refused, in a sentence with the flag or profile key that cures it."""

from __future__ import annotations

import re

from mlmsub.core.errors import ClusterLacks, MlmsubError, SchedulerRefused

# what sbatch prints -> what it means, and the cure (texts of Slurm 22.05 to 24.11)
_SBATCH = (
    (r"[Mm]emory specification", "that much memory per node is not there", "set the profile's `mem` (0 asks for all of the node)"),
    (r"QOS\w*Limit|Assoc\w*Limit|limit (?:exceeded|policy)|violates accounting", "a limit of your account or QOS is reached", "see `squeue --me` and `sacctmgr show qos`; submit less, or use another `qos`"),
    (r"[Ii]nvalid partition", "the partition does not exist", "see `sinfo -s`; set --partition or the profile's `partition`"),
    (r"[Ii]nvalid account|account/partition combination", "the account may not be used", "see `sacctmgr show assoc user=$USER`; set --account or the profile's `account`"),
    (r"[Ii]nvalid qos", "the QOS may not be used", "see `sacctmgr show assoc user=$USER format=qos`; set the profile's `qos`"),
    (r"time limit|--time|PartitionTimeLimit", "the time limit is not allowed", "set a shorter --time (see `sinfo -o '%P %l'`)"),
    (r"generic resource|gres", "the GPUs cannot be asked for like this", "set the profile's `gpu_request` (gpus-per-node, gres or none) and `gpu_type`"),
    (r"[Nn]ode configuration is not available|More processors|[Nn]ode count", "no such nodes in this partition", "see `sinfo -N -l`; check --nodes and the profile's `gpus_per_node`, `mem`, `cpus_per_task`, `constraint`"),
    (r"[Rr]eservation", "the reservation cannot be used", "see `scontrol show reservation`; set the profile's `reservation`"),
    (r"unrecognized option|invalid option", "this Slurm does not know an option", "look at --sbatch-arg and the profile's `sbatch_args`"),
    (r"[Dd]ependency", "the run to wait for cannot be waited for", "see `mlmsub status` of the run given by --after"),
    (r"[Uu]nable to contact slurm controller|Connection refused|controller (?:not|is) ", "slurmctld does not answer", "try again later; see `sinfo` and ask your administrators"),
    (r"[Tt]imed out", "slurmctld did not answer in time; the job may exist", "repeat the same command: it finds the job, or submits it"),
    (r"slurm\.conf|configuration", "Slurm is not set up here", "run on a login node, or set SLURM_CONF and the profile's `prelude`"),
)  # fmt: skip

# what submit.sh found wrong by itself -> message, cure; {} is the place
_OURS = {
    "not-writable": ("cannot write runs to {}", "set the profile's `runs_root`, or a USER_FSW that you may write to"),
    "no-space": ("no space is left where runs go: {}", "free some, or set the profile's `runs_root`"),
    "no-inodes": ("no inodes are left where runs go: {}", "remove files, or set the profile's `runs_root`"),
    "no-image": ("the container image {} is not there, or cannot be read", "set CONTAINER_IMAGE or the profile's `image`"),
    "no-mount-source": ("{} is to be mounted, but is not there", "make it, or change USER_FSW, SANDBOX_DIR or the profile's `mounts`"),
    "no-setup": ("the env setup {} is not there on the cluster, or cannot be read", "give another --env-setup cluster:/path"),
    "parent-failed": ("{} has failed, so what waits for it would never start", "give another --after"),
    "parent-succeeded": ("{} has succeeded, so what waits for its failure would never start", ""),
    "parent-unknown": ("{}, which is to be waited for, is not submitted, or its run directory is gone", "submit it first"),
    "no-script": ("the script {} is not there", "SANDBOX_DIR is where scripts are looked for"),
    "not-unpacked": ("the run directory did not arrive whole: {}", "try again"),
    "PartitionTimeLimit": ("the partition does not allow that time limit, so job {} was cancelled", "set a shorter --time, or another --partition (see `sinfo -o '%P %l'`)"),
    "PartitionNodeLimit": ("the partition does not have that many nodes, so job {} was cancelled", "set --nodes, or another --partition (see `sinfo -o '%P %D'`)"),
    "no-sbatch": ("sbatch was not found on {}", "set the profile's `slurm_bin` to its folder, or `prelude` to what puts it on PATH (such as `module load slurm`)"),
    "twin-unknown": ("the same may be at work already, and squeue does not answer ({})", "repeat the command later, or give --new"),
    "no-queue": ("this may be submitted already, and squeue does not answer ({})", "repeat the same command later: it finds the job, or submits it"),
}  # fmt: skip
_SLURMS = (
    "no-sbatch",
    "no-queue",
    "twin-unknown",
    "PartitionTimeLimit",
    "PartitionNodeLimit",
)  # the others the cluster lacks


def ours(word: str, place: str, stderr: str = "") -> MlmsubError:
    """The error for what was found wrong before sbatch was called."""
    message, fix = _OURS[word]
    message = message.format(place)
    if word == "no-sbatch" and stderr.strip():
        message += f"; the profile's prelude said: {stderr.strip().splitlines()[-1]}"
    if word in _SLURMS:
        return SchedulerRefused(message, fix=fix, stderr=stderr, may_exist=word == "no-queue")
    return ClusterLacks(message, fix=fix)


def sbatch(code: int, stderr: str) -> SchedulerRefused:
    """The error for an sbatch that did not make a job."""
    text = " ".join(
        line.removeprefix("sbatch: ").removeprefix("error: ") for line in stderr.splitlines() if line.strip()
    )
    may_exist = "imed out" in stderr
    for pattern, message, fix in _SBATCH:
        if re.search(pattern, stderr):
            return SchedulerRefused(
                f"Slurm refused the job: {message} ({text})",
                command="sbatch", code=code, stderr=stderr, fix=fix, may_exist=may_exist,
            )  # fmt: skip
    reason = text or f"exit code {code} without a word"
    return SchedulerRefused(
        f"Slurm refused the job: {reason}", command="sbatch", code=code, stderr=stderr, may_exist=may_exist
    )
