"""The early end of a training: the job asks by a file, and is told by another that all is saved."""

from typing import NoReturn

from mlmsub.runtime import distributed
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import Stopped, writing
from mlmsub.runtime.outputs import write_json
from mlmsub.runtime.progress import is_main, say


class StopFile:
    """``state/<restart>/stop`` in the run directory asks; ``saved`` beside it answers, with the iteration."""

    def __init__(self, env: Env) -> None:
        folder = env.run_dir / "state" / str(env.integer("MLMSUB_RESTART", 0))
        self.stop, self.saved = folder / "stop", folder / "saved"

    def asked(self) -> bool:
        return self.stop.exists()

    def end(self, iteration: int) -> NoReturn:
        """Say that all is saved and the training can go on after ``iteration``, and raise Stopped; all ranks."""
        distributed.barrier()
        if is_main():
            with writing("MLMSUB_RUN_DIR", self.saved):
                write_json(self.saved, {"iteration": iteration})
        say(f"stopped after iteration {iteration}, as {self.stop} asks: all is saved, the training is not finished.")
        raise Stopped
