"""What a cluster's answers mean for a profile: findings, each with a fix and with the profile key that it settles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mlmsub.core.profile import Profile

PYXIS = ("container-image", "container-mounts", "container-workdir", "no-container-mount-home")
Answers = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Finding:
    """One line of the table. `settles` holds profile keys that the answer determines."""

    what: str
    severity: Literal["ok", "info", "warning", "error"]
    found: str
    fix: str = ""
    settles: dict[str, str] = field(default_factory=dict)


def parse(answer: str) -> dict[str, list[str]]:
    """The lines `kind|value` of slurm/remote/doctor.sh, by kind."""
    answers: dict[str, list[str]] = {}
    for line in answer.splitlines():
        kind, bar, value = line.partition("|")
        if bar:
            answers.setdefault(kind, []).append(value)
    return answers


def judge(answers: Answers, profile: Profile) -> list[Finding]:
    """All findings, in the order of the table."""
    if "no-sbatch" in answers:
        path = answers["no-sbatch"][0]
        fix = "set the profile's `slurm_bin`, or `prelude` to what puts sbatch on PATH"
        return [Finding("Slurm", "error", f"sbatch was not found on {path}", fix)]
    if "no-answer" in answers or "version" not in answers:
        said = _first(answers, "no-answer") or "nothing"
        return [Finding("Slurm", "error", f"it does not answer: {said}", "see `sinfo`; set `prelude` or SLURM_CONF")]
    return [
        Finding("Slurm", "ok", _first(answers, "version")),
        *_partitions(answers, profile),
        *_gpus(answers, profile),
        _mpi(answers, profile),
        _pyxis(answers),
        *_limits(answers),
        *_preemption(answers, profile),
        _accounting(answers),
        _account(answers, profile),
        *_places(answers),
        *_image(answers, profile),
        *_hooks(answers),
    ]


def _first(answers: Answers, kind: str) -> str:
    return (answers.get(kind) or [""])[0]


def _rows(answers: Answers) -> list[list[str]]:
    """Partitions: name (`*` marks the default), availability, time limit, nodes, GRES, memory in MB, CPUs."""
    return [row for text in answers.get("partition", ()) if len(row := text.split("|")) == 7]


def _chosen(answers: Answers, profile: Profile) -> list[list[str]]:
    """The rows of the partition that a job would go to."""
    wanted = [name for name in profile.partition.split(",") if name]
    return [row for row in _rows(answers) if (row[0].rstrip("*") in wanted if wanted else row[0].endswith("*"))]


def _partitions(answers: Answers, profile: Profile) -> Iterator[Finding]:
    rows = _rows(answers)
    names = sorted({row[0].rstrip("*") for row in rows})
    if not rows:
        yield Finding("partitions", "error", "sinfo shows none", "ask your administrators, or set `prelude`")
    elif not _chosen(answers, profile):
        said = f"there is no partition {profile.partition!r}" if profile.partition else "there is no default partition"
        yield Finding("partition", "error", said, f"set `partition` to one of {', '.join(names)}")
    for name, up, limit, nodes, *_ in _chosen(answers, profile):
        state = "ok" if up == "up" else "warning"
        settles = {"max_nodes": nodes} | ({"max_time": limit} if limit[:1].isdigit() else {})
        found = f"{name.rstrip('*')}: {nodes} nodes, at most {limit}, {up}"
        yield Finding("partition", state, found, "", settles)  # type: ignore[arg-type]


def _gpus(answers: Answers, profile: Profile) -> Iterator[Finding]:
    """GRES as `gpu:h100:8(S:0-1)`, or `gpu:8`, among others."""
    for row in _chosen(answers, profile):
        match = re.search(r"gpu:(?:([^:,()]+):)?(\d+)", row[4])
        if not match:
            fix = "" if profile.gpu_request == "none" else "Slurm does not manage GPUs here: `gpu_request: none`"
            severity: Literal["ok", "error"] = "error" if fix else "ok"
            yield Finding("GPUs", severity, f"{row[0].rstrip('*')} has no GPU GRES", fix, {"gpu_request": "none"})
            continue
        kind, count = match[1] or "", match[2]
        settles = {"gpus_per_node": count} | ({"gpu_type": kind} if kind else {})
        found = f"{count} {kind or 'GPUs'} a node in {row[0].rstrip('*')}"
        if int(count) != profile.gpus_per_node:
            fix = f"the profile says {profile.gpus_per_node}: set `gpus_per_node: {count}`"
            yield Finding("GPUs", "error" if profile.gpus_per_node > int(count) else "warning", found, fix, settles)
        else:
            yield Finding("GPUs", "ok", found, "", settles)


def _mpi(answers: Answers, profile: Profile) -> Finding:
    words = [line.strip() for line in answers.get("mpi", ())]
    types = [word for word in words if re.fullmatch(r"[a-z0-9_]+", word)]
    found = f"srun --mpi knows {', '.join(types) or 'nothing'}"
    if profile.mpi in ("", *types):
        return Finding("MPI", "ok", found)
    best = next((t for t in ("pmix", "pmi2") if t in types), "none")
    return Finding("MPI", "error", found, f"the profile says {profile.mpi}: set `mpi: {best}`", {"mpi": best})


def _pyxis(answers: Answers) -> Finding:
    options = answers.get("pyxis", ())
    missing = [option for option in PYXIS if option not in options]
    if not options:
        fix = "mlmsub starts containers by Pyxis: ask your administrators for it"
        return Finding("Pyxis", "error", "srun has no --container-image", fix)
    if missing:
        return Finding("Pyxis", "error", f"srun lacks --{', --'.join(missing)}", "a newer Pyxis is needed")
    return Finding("Pyxis", "ok", f"there, with {len(options)} options")


def _limits(answers: Answers) -> Iterator[Finding]:
    config = dict(line.split("=", 1) for line in answers.get("config", ()) if "=" in line)
    if config.get("WaitTime", "0").split(" ")[0] != "0":
        found = f"WaitTime={config['WaitTime']}: kills ranks that finish late"
        yield Finding("WaitTime", "info", found, "nothing to do: mlmsub gives srun --wait=0")
    if config.get("EnforcePartLimits", "ALL") == "NO":
        yield Finding("limits", "info", "jobs beyond a partition's limits are accepted, and never start",
                      "nothing to do: mlmsub looks after it submits")  # fmt: skip


def _preemption(answers: Answers, profile: Profile) -> Iterator[Finding]:
    """What becomes of a job that has to give way to another: by partition, with the seconds that it has to save."""
    config = dict(line.split("=", 1) for line in answers.get("config", ()) if "=" in line)
    named = [f"{name}={config[name]}" for name in ("PreemptMode", "KillWait") if name in config]
    if named:
        yield Finding("preemption", "info", ", ".join(named))
    chosen = [row[0].rstrip("*") for row in _chosen(answers, profile)]
    for name, mode, grace in (row for text in answers.get("preempt", ()) if len(row := text.split("|")) == 3):
        if name in chosen and mode != "OFF":
            fix = "" if "REQUEUE" in mode else "a preempted run is not started again: submit with --chain"
            yield Finding(f"preemption in {name}", "info", f"PreemptMode={mode}, GraceTime={grace}", fix)


def _accounting(answers: Answers) -> Finding:
    if _first(answers, "sacct") == "yes":
        return Finding("accounting", "ok", "sacct answers")
    return Finding("accounting", "info", "no sacct: states come from squeue and from the runs' own files")


def _account(answers: Answers, profile: Profile) -> Finding:
    accounts = sorted({line.split("|")[0] for line in answers.get("association", ()) if line.split("|")[0]})
    default = _first(answers, "account").strip("|")
    if profile.account and accounts and profile.account not in accounts:
        return Finding("account", "error", f"you may not use {profile.account}", f"set `account` to one of {accounts}")
    if not default and not profile.account and accounts:
        return Finding("account", "warning", "no default account", f"set `account` to one of {', '.join(accounts)}")
    return Finding("account", "ok", profile.account or default or "Slurm names none")


def _places(answers: Answers) -> Iterator[Finding]:
    for kind, name in (("runs", "run directories"), ("scratch", "scratch")):
        word, _, rest = _first(answers, kind).partition("|")
        key = "runs_root" if kind == "runs" else "scratch"
        if word == "writable":
            free = int(rest) / 2**20 if rest.isdigit() else 0.0
            severity: Literal["ok", "warning"] = "ok" if free >= 1 else "warning"
            yield Finding(name, severity, f"writable, {free:,.0f} GiB free", "" if free >= 1 else "free some space")
        elif word:
            said = f"{rest} is not there" if word == "missing" else f"cannot write to {rest}"
            yield Finding(name, "error", said, f"make it, or set the profile's `{key}`")


def _image(answers: Answers, profile: Profile) -> Iterator[Finding]:
    if word := _first(answers, "image"):
        there = word == "there"
        fix = "" if there else "set the profile's `image`"
        yield Finding("image", "ok" if there else "error", f"{profile.image} is {word}", fix)
    elif profile.image:
        importable = "enroot" in answers
        fix = "import it once: enroot import -o FILE.sqsh docker://..., and name that file"
        yield Finding(
            "image", "warning", f"{profile.image}: each node imports it for itself", fix if importable else ""
        )


def _hooks(answers: Answers) -> Iterator[Finding]:
    if hooks := answers.get("hook"):
        yield Finding("Enroot hooks", "info", ", ".join(hooks), "nothing to do: ranks do not depend on them")
