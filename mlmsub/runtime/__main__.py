"""``python -m mlmsub.runtime STAGE[+STAGE...] MODEL [ARG...]``: run stages in this process, as one of its ranks."""

import argparse
import sys

from mlmsub.runtime import distributed, lost_peer
from mlmsub.runtime.driver import AND, Run
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError, Stopped

STAGES = {
    "convert": "make a Megatron checkpoint: convert MODEL [--algorithm eagle3]",
    "quantize": "calibrate to a low-precision format: quantize MODEL [QFORMAT]",
    "eagle3": "convert to a model with an EAGLE3 draft, then train the draft: eagle3 MODEL",
    "finetune": "train on answers, also through quantizers: finetune MODEL [FLAG...]",
    "generate": "complete prompts: generate MODEL [PROMPT...] [FLAG...]",
    "mmlu": "score on MMLU's questions: mmlu MODEL",
    "validate": "measure a draft's acceptance length: validate MODEL",
    "extract": "store a base's hidden states, to train a draft offline: extract MODEL",
    "prune": "take out layers, or make them narrower: prune MODEL",
    "export": "write a Hugging Face checkpoint: export MODEL",
}


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done and verified (or stopped as asked), 1 the stage's own check failed, 2 an input is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m mlmsub.runtime",
        description="Run one stage, or several in order (quantize+export). The inputs are variables: HF_MODEL_CKPT, "
        "MLM_MODEL_CKPT, TP, PP, ...",
        epilog="\n".join(f"{name:10} {text}" for name, text in STAGES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", type=_stages, help=f"a name, or several with {AND} between: {', '.join(STAGES)}")
    parser.add_argument("model", help="its name, e.g. HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARG", help="the stages' own arguments")
    given = parser.parse_args(argv)
    env = Env()
    run = Run(given.stage, given.model, given.words, env)
    try:
        run()
    except StageError as error:
        _tell(env, run.current, error)
        return error.exit_code
    except Stopped:  # as the job asked; that done.json is missing says that there is more to do
        return 0
    except Exception as error:
        if lost_peer.seen_in(error):
            _tell(env, run.current, lost_peer.told(env, error))
            lost_peer.wait_for_its_code(env)
            return 1
        print(f"{run.current}: ended by an error that mlmsub did not expect", file=sys.stderr, flush=True)
        raise
    return 0


def _stages(text: str) -> str:
    for name in text.split(AND):
        if name not in STAGES:
            raise argparse.ArgumentTypeError(f"{name!r} is no stage (choose from {', '.join(STAGES)})")
    return text


def _tell(env: Env, stage: str, error: StageError) -> None:
    """Print a user's error. Before the ranks have met, all of a node find the same, so one of them prints."""
    torch = sys.modules.get("torch")
    met = torch is not None and torch.distributed.is_initialized()
    if error.told_elsewhere:
        return
    if met or env.text("LOCAL_RANK", "0") == "0":
        rank = env.text("RANK", "0")
        print(f"{stage}: ERROR{'' if rank == '0' else f' (rank {rank})'}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    distributed.end(main)
