"""``python -m mlmsub.runtime STAGE MODEL [ARG...]``: run one stage in this process, as one of its ranks."""

import argparse
import importlib
import sys

from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.progress import Steps
from mlmsub.runtime.session import Job

STAGES = {
    "quantize": "calibrate to a low-precision format: quantize MODEL [QFORMAT]",
    "export": "write a Hugging Face checkpoint: export MODEL",
}


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done and verified, 1 the stage's own check failed, 2 an input is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m mlmsub.runtime",
        description="Run one stage. Its inputs are variables: HF_MODEL_CKPT, MLM_MODEL_CKPT, TP, PP, ...",
        epilog="\n".join(f"{name:10} {text}" for name, text in STAGES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("model", help="its name, e.g. HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("words", nargs="*", metavar="ARG", help="the stage's own arguments")
    given = parser.parse_args(argv)
    env = Env()
    try:
        job = Job(given.stage, given.model, given.words, env, Steps())
        importlib.import_module(f"mlmsub.runtime.stages.{given.stage}").run(job)
    except StageError as error:
        _tell(env, given.stage, error)
        return error.exit_code
    return 0


def _tell(env: Env, stage: str, error: StageError) -> None:
    """Print a user's error. Before the ranks have met, all of a node find the same, so one of them prints."""
    torch = sys.modules.get("torch")
    met = torch is not None and torch.distributed.is_initialized()
    if met or env.text("LOCAL_RANK", "0") == "0":
        rank = env.text("RANK", "0")
        print(f"{stage}: ERROR{'' if rank == '0' else f' (rank {rank})'}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
