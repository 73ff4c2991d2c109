"""Opens the transport to a run's cluster."""

from __future__ import annotations

from mlmsub.core.errors import UsageError
from mlmsub.transport import LocalTransport, Transport


def to(host: str) -> Transport:
    """This machine, for a profile without `host`."""
    if host:
        raise UsageError(
            f"`host: {host}`: profiles behind SSH are not supported yet", fix="run mlmsub on the login node"
        )
    return LocalTransport()
