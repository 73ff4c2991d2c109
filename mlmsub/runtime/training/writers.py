"""The log's numbers for TensorBoard and Weights & Biases, where Megatron's own flags ask for them."""

from argparse import Namespace
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.errors import StageError

PACKAGES = {"--tensorboard-dir": "torch.utils.tensorboard", "--wandb-project": "wandb"}


class Writers:
    """What ``--tensorboard-dir`` and ``--wandb-project`` ask for; rank 0 writes. All ranks make one."""

    def __init__(self, args: Namespace) -> None:
        self._board: Any = None
        self._run: Any = None
        distributed.on_main(lambda: self._open(args))

    def add(self, iteration: int, values: Mapping[str, float | None]) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        if self._board is not None:
            for name, value in known.items():
                self._board.add_scalar(name, value, iteration)
            self._board.flush()
        if self._run is not None:
            self._run.log(known, step=iteration)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self._run.finish()

    def _open(self, args: Namespace) -> None:
        board, wandb = (_package(args, flag) for flag in PACKAGES)
        if board is not None:
            self._board = board.SummaryWriter(args.tensorboard_dir, max_queue=args.tensorboard_queue_size)
        if wandb is not None:
            self._run = wandb.init(
                project=args.wandb_project, entity=args.wandb_entity or None, name=args.wandb_exp_name,
                dir=args.wandb_save_dir or None, config={name: str(value) for name, value in vars(args).items()},
            )  # fmt: skip


def check(args: Namespace) -> None:
    """Raise StageError if a package is missing that is asked for, or a Weights & Biases run has no name."""
    for flag in PACKAGES:
        _package(args, flag)
    if args.wandb_project and not args.wandb_exp_name:
        raise StageError("--wandb-exp-name", "is not given.", "name this run beside --wandb-project.")


def _package(args: Namespace, flag: str) -> Any:
    """The package that ``flag`` needs, or None where it is not given."""
    if not getattr(args, flag.removeprefix("--").replace("-", "_")):
        return None
    try:
        return import_module(PACKAGES[flag])
    except ImportError as error:
        package = PACKAGES[flag].rpartition(".")[2]
        problem = f"{package} is not installed here."
        raise StageError(flag, problem, f"install it in the image, or leave {flag} out.") from error
