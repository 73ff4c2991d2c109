"""This machine: mlmsub on a login node, by the same path as over SSH."""

from __future__ import annotations

from mlmsub.transport.errors import ConnectionLost, TransportError
from mlmsub.transport.process import ProcessChannel
from mlmsub.transport.wire import Ended, ScriptRunner


class LocalTransport(ScriptRunner):
    """Runs scripts under /bin/sh here, with this process's environment and working directory.

    A timeout ends the script and all it started.
    """

    where = "this machine"

    def _exec(self, command: str) -> ProcessChannel:
        return ProcessChannel(["/bin/sh", "-c", command], own_group=True)

    def _error(self, command: str, ended: Ended) -> TransportError:
        return ConnectionLost(
            "the shell was killed before the script ended",
            where=self.where,
            command=command,
            exit_code=ended.status,
            stderr=ended.said,
            fix="look whether this machine ends processes of users (memory or time limits on a login node)",
        )
