"""A process whose peer is gone: told in one sentence, since the reason is in the peer's log and not in this one's."""

import os
import re
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import CheckFailed, first_line

# gloo's and NCCL's words, which torch raises as a plain RuntimeError or one of torch.distributed's
_GONE = re.compile(
    r"gloo/transport|Connection (closed|reset) by peer|Broken pipe|ncclRemoteError|remote process exit"
    r"|ncclSystemError|Connection was likely closed|Failed to (recv|send)|Watchdog caught collective"
)
_PLACE_IN_SOURCE = re.compile(r"^\[[^\]]*\.(cc|cpp|h):\d+\] ")
# For the peer's own exit code to be written, and for Slurm to end the rest: else this rank would pass for the first one
# that failed.
GRACE_S = 5.0


def seen_in(error: BaseException) -> bool:
    """Whether a connection to another process has ended under a collective, or under a look at the store."""
    found: BaseException | None = error
    while found is not None:
        if _is_it(found):
            return True
        found = found.__cause__
    return False


def told(env: Env, error: BaseException) -> CheckFailed:
    """The sentence. The traceback goes to ``state/<restart>/traceback-<rank>.txt``."""
    file = _state(env) / f"traceback-{env.rank}.txt"
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(traceback.format_exception(error)))
    lost = f"rank {1 - env.rank}" if env.world_size == 2 else "another rank"
    reason = _PLACE_IN_SOURCE.sub("", first_line(error))[:200]
    return CheckFailed(
        lost, f"has ended, or does not answer any more ({reason}).",
        f"look for the first rank that failed. Where this rank was: {file}",
    )  # fmt: skip


def wait_for_its_code(env: Env) -> None:
    """Under Slurm: until the entrypoint of a rank has left ``first_failure``, or for a few seconds."""
    end = time.monotonic() + (GRACE_S if env.text("MLMSUB_RESTART") else 0.0)
    while time.monotonic() < end and not os.path.lexists(_state(env) / "first_failure"):
        time.sleep(0.1)


def _is_it(error: BaseException) -> bool:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistNetworkError | dist.DistStoreError) or bool(_GONE.search(str(error)))


def _state(env: Env) -> Path:
    return env.run_dir / "state" / str(env.integer("MLMSUB_RESTART", 0))
