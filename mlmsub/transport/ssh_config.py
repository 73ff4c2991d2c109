"""What the user's ssh configuration says about a host.

`ssh -G` is asked where there is an ssh program: it alone reads Match, Include and tokens as ssh does. Without
it paramiko's parser is used, and what it cannot do is told as a warning.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlmsub.transport.errors import ConnectFailed

_DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_DEFAULT_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_DEFAULT_GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
_SYSTEM_CONFIG = "/etc/ssh/ssh_config"
_MAX_DEPTH = 8


@dataclass(frozen=True)
class HostConfig:
    """One hop, complete: where it is, who to be there, which keys to offer and which to expect."""

    alias: str
    hostname: str
    user: str
    port: int = 22
    identity_files: tuple[str, ...] = ()
    identities_only: bool = False
    identity_agent: str = ""
    host_key_alias: str = ""
    known_hosts: tuple[str, ...] = ()
    global_known_hosts: tuple[str, ...] = ()
    hash_known_hosts: bool = False
    proxy_jump: str = ""
    proxy_command: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """user@alias, with the port when it is unusual."""
        return f"{self.user}@{self.alias}" + (f":{self.port}" if self.port != 22 else "")


def parse_destination(text: str) -> tuple[str, str | None, int | None]:
    """`[user@]host[:port]`, `[user@][v6]:port` or an ssh:// URI, as in ProxyJump: host, user, port."""
    user, _, rest = text.removeprefix("ssh://").rstrip("/").rpartition("@")
    match = re.fullmatch(r"\[([^]]+)\](?::(\d+))?|([^:]+)(?::(\d+))?|([0-9A-Fa-f:.]+)", rest)
    if match is None:
        raise ValueError(f"not a host: {text!r}")
    port = match[2] or match[4]
    return match[1] or match[3] or match[5], user or None, int(port) if port else None


def load(
    host: str,
    *,
    ssh_config: str | None = None,
    user: str | None = None,
    port: int | None = None,
    ssh: str | None = None,
) -> HostConfig:
    """The configuration of `host`; `user` and `port` overrule it. `ssh` is the program, "" for none."""
    program = shutil.which("ssh") if ssh is None else ssh
    if program:
        values = _ask_ssh(program, host, ssh_config, user, port)
        warnings: list[str] = []
    else:
        values, warnings = _ask_paramiko(host, ssh_config)
    return _build(host, values, user, port, warnings)


def chain(
    target: HostConfig, *, ssh_config: str | None = None, ssh: str | None = None, depth: int = 0
) -> list[HostConfig]:
    """`target` and the jump hosts before it, in the order of connecting."""
    if target.proxy_command or not target.proxy_jump:
        return [target]
    if depth > _MAX_DEPTH:
        raise ConnectFailed(
            "ProxyJump leads in a circle",
            where=target.where,
            fix="look at ProxyJump in your ssh configuration: does a jump host need itself?",
        )
    hops: list[HostConfig] = []
    for spec in target.proxy_jump.split(","):
        host, user, port = parse_destination(spec.strip())
        hop = load(host, ssh_config=ssh_config, user=user, port=port, ssh=ssh)
        if hops:  # reached through the hop before it, whatever its own configuration says
            hop = replace(hop, proxy_jump="", proxy_command="")
        hops += chain(hop, ssh_config=ssh_config, ssh=ssh, depth=depth + 1)
    return [*hops, target]


def _ask_ssh(
    program: str, host: str, ssh_config: str | None, user: str | None, port: int | None
) -> dict[str, list[str]]:
    argv = [program, "-G"]
    argv += ["-F", ssh_config] if ssh_config else []
    argv += ["-l", user] if user else []
    argv += ["-p", str(port)] if port else []
    done = subprocess.run([*argv, "--", host], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConnectFailed(
            f"the ssh configuration cannot be read: {done.stderr.strip()}",
            where=host,
            fix="correct the line that ssh names",
            exit_code=done.returncode,
            stderr=done.stderr,
        )
    values: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        values.setdefault(name.lower(), []).append(value)
    return values


def _ask_paramiko(host: str, ssh_config: str | None) -> tuple[dict[str, list[str]], list[str]]:
    from paramiko import SSHConfig

    files = [ssh_config] if ssh_config else [str(Path.home() / ".ssh/config"), _SYSTEM_CONFIG]
    texts, warnings = [], []
    for file in files:
        try:
            text = Path(file).read_text("utf-8", "replace")
        except OSError:
            continue
        text, lost = readable_part(text)
        texts.append(text)
        warnings += [f"{file}: {what} is not supported without an ssh program" for what in lost]
    found = SSHConfig.from_text("\nHost *\n".join(texts)).lookup(host)
    as_lists = {name: value if isinstance(value, list) else [value] for name, value in found.items()}
    return as_lists, warnings


def readable_part(text: str) -> tuple[str, list[str]]:
    """What paramiko's parser can read of a configuration file, and the directives that were left out."""
    kept: list[str] = []
    lost: list[str] = []
    skipping = False
    for line in text.splitlines():
        words = line.replace("=", " ", 1).split()
        keyword = words[0].lower() if words else ""
        criteria = {word.lower().removeprefix("!") for word in words[1:]}
        if keyword in ("host", "match"):
            unread = criteria & {"exec", "tagged", "localnetwork", "canonical", "final"}
            skipping = keyword == "match" and bool(unread)
            lost += [f"Match {name}" for name in sorted(unread)] if skipping else []
        elif keyword == "include" or keyword.startswith("canonical"):
            lost.append(words[0])
            continue
        if not skipping:
            kept.append(line)
    return "\n".join(kept), list(dict.fromkeys(lost))


def _build(
    alias: str, values: Mapping[str, list[str]], user: str | None, port: int | None, warnings: Iterable[str]
) -> HostConfig:
    def one(name: str, default: str = "") -> str:
        value = values.get(name, [default])[0]
        return default if value.lower() == "none" else value

    hostname = one("hostname", alias)
    login = user or one("user") or getpass.getuser()
    number = port or int(one("port", "22"))
    tokens = _tokens(alias, hostname, login, number)
    no_agent = values.get("identityagent", [""])[0].lower() == "none"
    files = [f for f in values.get("identityfile", _DEFAULT_KEYS) if f.lower() != "none"]

    def paths(texts: Iterable[str]) -> tuple[str, ...]:
        return tuple(_path(text, tokens) for text in texts)

    return HostConfig(
        alias=alias,
        hostname=hostname,
        user=login,
        port=number,
        identity_files=paths(files),
        identities_only=one("identitiesonly", "no").lower() == "yes",
        identity_agent="none" if no_agent else _path(one("identityagent"), tokens),
        host_key_alias=one("hostkeyalias"),
        known_hosts=paths(_words(one("userknownhostsfile", _DEFAULT_KNOWN_HOSTS))),
        global_known_hosts=paths(_words(one("globalknownhostsfile", _DEFAULT_GLOBAL_KNOWN_HOSTS))),
        hash_known_hosts=one("hashknownhosts", "no").lower() == "yes",
        proxy_jump=one("proxyjump"),
        proxy_command=_percent(one("proxycommand"), tokens),
        warnings=(*warnings, *_unsupported(values)),
    )


def _unsupported(values: Mapping[str, list[str]]) -> list[str]:
    return [
        f"{name} (ssh configuration) is not supported by the paramiko transport; use openssh"
        for name in ("KnownHostsCommand", "PKCS11Provider", "BindInterface", "BindAddress")
        if values.get(name.lower(), ["none"])[0].lower() not in ("none", "")
    ]


def _words(text: str) -> Sequence[str]:
    return [word.strip('"') for word in text.split()]


def _tokens(alias: str, hostname: str, user: str, port: int) -> dict[str, str]:
    host = socket.gethostname()
    return {
        "%": "%",
        "d": str(Path.home()),
        "h": hostname,
        "i": str(os.getuid()) if hasattr(os, "getuid") else "",
        "l": host,
        "L": host.partition(".")[0],
        "n": alias,
        "p": str(port),
        "r": user,
        "u": getpass.getuser(),
    }


def _percent(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), text)


def _path(text: str, tokens: Mapping[str, str]) -> str:
    return os.path.expandvars(Path(_percent(text, tokens)).expanduser()) if text else ""
