"""Opens the transport to a run's cluster."""

from __future__ import annotations

from mlmsub.transport import LocalTransport, Transport


def to(host: str) -> Transport:
    """This machine, for a profile without `host`."""
    return LocalTransport()
