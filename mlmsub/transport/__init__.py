"""How mlmsub reaches the cluster: `open()` gives one `Transport`, whatever lies between.

Rooms: `local` (this machine), `ssh_paramiko` (SSH without an ssh program), `openssh` (the user's own ssh). paramiko is
imported when a connection by it is opened, not before.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from mlmsub.transport.base import Prompter, Result, Transport
from mlmsub.transport.local import LocalTransport
from mlmsub.transport.openssh import OpenSSHTransport

__all__ = ["LocalTransport", "OpenSSHTransport", "Prompter", "Result", "Transport", "open"]

Kind = Literal["auto", "paramiko", "openssh", "local"]


def open(
    host: str | None = None,
    kind: Kind = "auto",
    *,
    ssh_config: str | None = None,
    user: str | None = None,
    port: int | None = None,
    prompter: Prompter | None = None,
    no_prompt: bool = False,
    accept_new: bool = False,
    connect_timeout: float = 20.0,
) -> Transport:
    """The way to `host` (a name of the ssh configuration, or `user@host`); None is this machine.

    `auto` takes a master connection that the user's ssh has open, else paramiko, which asks every question
    once per command through `prompter`. `accept_new` adds an unknown host to known_hosts; a changed key is
    never accepted. `connect_timeout` is in seconds, for each hop. Raises a TransportError: paramiko connects
    and logs in here, openssh with each `run`.
    """
    if kind == "local" or (kind == "auto" and host is None):
        return LocalTransport()
    if host is None:
        raise ValueError(f"the {kind} transport needs a host")
    login, _, name = host.rpartition("@")
    user = user or login or None
    ssh_config = str(Path(ssh_config).expanduser()) if ssh_config else None
    if kind != "paramiko" and (kind == "openssh" or shutil.which("ssh")):
        ssh = OpenSSHTransport(
            name,
            ssh_config=ssh_config,
            user=user,
            port=port,
            no_prompt=no_prompt,
            accept_new=accept_new,
            connect_timeout=connect_timeout,
        )
        if kind == "openssh" or ssh.has_master():
            return ssh
        ssh.close()
    from mlmsub.transport import ssh_config as config
    from mlmsub.transport.ssh_paramiko import ParamikoTransport

    return ParamikoTransport(
        config.chain(config.load(name, ssh_config=ssh_config, user=user, port=port), ssh_config=ssh_config),
        prompter=None if no_prompt else prompter,
        accept_new=accept_new,
        connect_timeout=connect_timeout,
    )
