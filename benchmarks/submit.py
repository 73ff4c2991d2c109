"""How long a submission takes over a slow link: `mlmsub submit` beside a bare `ssh host 'cat > f && sbatch f'`.

    python benchmarks/submit.py               # as root, on Linux with sshd; about a minute
    python benchmarks/submit.py --rtt 150 --rounds 15

Two network namespaces, a laptop and a login node, are joined by a link that delays each packet by half the round-trip
time: two TUN devices with a process between them, since not every kernel has netem. On the login node stands a real
sshd; sbatch and squeue are stand-ins that take as long as the real ones on a small cluster. All ways take turns, so
that what else the machine does strikes them alike. Logins and channels are counted in sshd's log, bytes at the link.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import json
import multiprocessing
import os
import re
import select
import shlex
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LAPTOP, LOGIN = "mlmsub-laptop", "mlmsub-login"
ADDRESSES = {LAPTOP: "10.231.0.1", LOGIN: "10.231.0.2"}
SLURM_SECONDS = {"sbatch": 0.009, "squeue": 0.007}  # medians of Slurm 22.05 on one machine
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000


@dataclass
class Way:
    """One way to submit, and what it took in each round."""

    name: str
    argv: Sequence[str]
    base: str = ""  # the way that it is compared with
    goal: str = ""
    seconds: list[float] = field(default_factory=list)
    logins: int = 0
    channels: int = 0
    bytes: int = 0


def sh(*argv: object) -> str:
    return subprocess.run([str(word) for word in argv], check=True, capture_output=True, text=True).stdout


def open_tun(namespace: str) -> int:
    """The file of a new TUN device in a namespace: what is routed to the other end is read from it."""
    name = namespace[:15]
    (peer,) = (address for other, address in ADDRESSES.items() if other != namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    sh("ip", "link", "set", name, "netns", namespace)
    sh("ip", "-n", namespace, "addr", "add", ADDRESSES[namespace], "peer", peer, "dev", name)
    sh("ip", "-n", namespace, "link", "set", name, "mtu", 1500, "txqueuelen", 5000, "up")
    sh("ip", "-n", namespace, "link", "set", "lo", "up")
    return device


def carry(ends: tuple[int, int], delay: float) -> None:
    """Hand each packet on, `delay` seconds late; the delay is the same for all, so they stay in order."""
    under_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], wait)[0]:
            other = ends[1] if end == ends[0] else ends[0]
            try:
                while True:
                    packet = os.read(end, 1 << 16)
                    under_way.append((time.monotonic() + delay, other, packet))
            except BlockingIOError:
                continue
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            os.write(end, packet)


@contextmanager
def link(round_trip: float) -> Iterator[None]:
    """The two namespaces, joined."""
    with ExitStack() as undo:
        for namespace in (LAPTOP, LOGIN):
            sh("ip", "netns", "add", namespace)
            undo.callback(sh, "ip", "netns", "del", namespace)
        ends = open_tun(LAPTOP), open_tun(LOGIN)
        carrier = multiprocessing.get_context("fork").Process(target=carry, args=(ends, round_trip / 2), daemon=True)
        carrier.start()
        undo.callback(carrier.join)
        undo.callback(carrier.terminate)
        yield


def transferred() -> int:
    """Bytes over the link so far, both ways, with IP's and TCP's headers."""
    (shown,) = json.loads(sh("ip", "-n", LAPTOP, "-s", "-j", "link", "show", LAPTOP[:15]))
    return sum(shown["stats64"][way]["bytes"] for way in ("rx", "tx"))


def inside(namespace: str, *argv: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{namespace}", *argv]


@contextmanager
def login_node(folder: Path) -> Iterator[Path]:
    """A real sshd, with stand-ins for Slurm; gives its log."""
    for key in ("host_key", "user_key"):
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key)
    bin_ = folder / "bin"
    bin_.mkdir()
    for name, seconds in SLURM_SECONDS.items():
        (bin_ / name).write_text(f"#!/bin/sh\nsleep {seconds}\n{'echo 4711' if name == 'sbatch' else ':'}\n")
        (bin_ / name).chmod(0o755)
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    options = {
        "ListenAddress": ADDRESSES[LOGIN], "Port": "22", "HostKey": folder / "host_key", "PidFile": "none",
        "AuthorizedKeysFile": folder / "authorized_keys", "StrictModes": "no", "PermitRootLogin": "prohibit-password",
        "LogLevel": "DEBUG1", "UseDNS": "no", "UsePAM": "no", "SetEnv": f"PATH={bin_}:/usr/bin:/bin",
    }  # fmt: skip
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    Path("/run/sshd").mkdir(exist_ok=True)
    log = folder / "sshd.log"
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin") or "sshd"
    with log.open("wb") as out:
        server = subprocess.Popen(inside(LOGIN, sshd, "-D", "-e", "-f", str(folder / "sshd_config")), stderr=out)
    try:
        while "Server listening" not in log.read_text():
            if server.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.01)
        yield log
    finally:
        server.terminate()
        server.wait()


def client(folder: Path) -> dict[str, str]:
    """The laptop: ssh configurations with and without a master connection, profiles for both; its environment."""
    key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"{ADDRESSES[LOGIN]} {key}")
    host = [
        f"HostName {ADDRESSES[LOGIN]}", "User root", f"IdentityFile {folder}/user_key", "IdentitiesOnly yes",
        f"UserKnownHostsFile {folder}/known_hosts",
    ]  # fmt: skip
    (folder / "alone").write_text("\n ".join(["Host cluster", *host]) + "\n")
    (folder / "master").write_text("\n ".join(["Host cluster", *host, f"ControlPath {folder}/control"]) + "\n")
    profiles = folder / "config/mlmsub/profiles"
    profiles.mkdir(parents=True)
    for name, transport, config in (
        ("paramiko",) * 2 + ("alone",),
        ("openssh",) * 2 + ("alone",),
        ("auto",) * 2 + ("master",),
    ):
        data = {"host": "cluster", "transport": transport, "ssh_config": str(folder / config),
                "scratch": str(folder / "scratch"), "image": "registry.example#image:1"}  # fmt: skip
        (profiles / f"{name}.yaml").write_text(json.dumps(data))
    (folder / "scratch").mkdir()
    return {
        "HOME": str(folder), "PATH": os.environ["PATH"], "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(REPOSITORY),
        "PYTHONPYCACHEPREFIX": str(folder / "pycache"),  # compiled, as pip leaves an installed package
    }  # fmt: skip


def ways(folder: Path) -> list[Way]:
    """What is measured: submissions of one stage on a model of the catalogue, and the bare ssh beside them."""
    mlmsub = [sys.executable, "-m", "mlmsub.cli.main", "submit", "quantize", "HuggingFaceTB/SmolLM2-135M-Instruct",
              "FP8_DEFAULT_CFG", "--no-prompt", "--profile"]  # fmt: skip

    def bare(config: str) -> list[str]:
        job = f"cat >{folder}/scratch/job.sbatch && sbatch {folder}/scratch/job.sbatch"
        ssh = shlex.join(["ssh", "-F", str(folder / config), "-T", "cluster", job])
        return ["sh", "-c", f"exec {ssh} <{REPOSITORY}/slurm/job.sbatch.j2"]

    return [
        Way("bare ssh", bare("alone")),
        Way("mlmsub, paramiko", [*mlmsub, "paramiko"], "bare ssh", "at most 1.5 times"),
        Way("mlmsub, openssh", [*mlmsub, "openssh"], "bare ssh", "at most 1.3 times"),
        Way("bare ssh, open master", bare("master")),
        Way("mlmsub, open master", [*mlmsub, "auto"], "bare ssh, open master", "under 0.6 s"),
    ]


def measure(way: Way, environment: dict[str, str], log: Path) -> None:
    """One submission; what it took is added to the way's."""
    said, sent = log.stat().st_size, transferred()
    start = time.perf_counter()
    done = subprocess.run(inside(LAPTOP, *way.argv), env=environment, cwd=environment["HOME"], capture_output=True)
    way.seconds.append(time.perf_counter() - start)
    if done.returncode != 0 or b"4711" not in done.stdout:
        raise SystemExit(f"{way.name}: exit code {done.returncode}\n{done.stderr.decode()}")
    time.sleep(0.2)  # the last packets
    new = log.read_bytes()[said:].decode(errors="replace")
    way.logins = len(re.findall("^Accepted publickey for", new, re.MULTILINE))
    way.channels = len(re.findall("server_input_channel_open: ctype session", new))
    way.bytes = transferred() - sent


def report(all_ways: Sequence[Way], round_trip: float, rounds: int) -> None:
    medians = {way.name: statistics.median(way.seconds) for way in all_ways}
    print(
        f"round trip {1000 * round_trip:.0f} ms, {rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':24}{'median s':>9}{'fastest s':>10}{'ratio':>7}{'logins':>8}{'channels':>9}{'kB':>8}  goal")
    for way in all_ways:
        ratio = f"{medians[way.name] / medians[way.base]:.2f}" if way.base else ""
        print(
            f"{way.name:24}{medians[way.name]:9.2f}{min(way.seconds):10.2f}{ratio:>7}{way.logins:8}{way.channels:9}"
            f"{way.bytes / 1000:8.0f}  {way.goal}".rstrip()
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rtt", type=float, default=50, help="round-trip time in ms")
    parser.add_argument("--rounds", type=int, default=9, help="how often each way is measured, after one to warm up")
    options = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root")
    round_trip = options.rtt / 1000
    with tempfile.TemporaryDirectory(prefix="mlmsub-bench-") as name, link(round_trip), login_node(Path(name)) as log:
        environment = client(Path(name))
        master = ["ssh", "-F", f"{name}/master", "-fNM", "-o", "ControlPersist=600", "cluster"]
        subprocess.run(inside(LAPTOP, *master), check=True, env=environment, stdout=subprocess.DEVNULL)
        try:
            measured = ways(Path(name))
            for round_ in range(options.rounds + 1):
                for way in measured:
                    measure(way, environment, log)
                    if round_ == 0:
                        way.seconds.clear()
        finally:
            sh("ssh", "-F", f"{name}/master", "-O", "exit", "cluster")
    report(measured, round_trip, options.rounds)


if __name__ == "__main__":
    main()
