"""Checkpoints go both ways between these stages and megatron.training's own save and load."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rig import Result, Runner, logits, session

IDS = torch.arange(1, 49).view(2, 24)


@contextmanager
def megatron_arguments(args: object, **changes: object) -> Iterator[None]:
    """Make parsed arguments Megatron's global ones, as its own scripts have them."""
    from megatron.training import global_vars

    for name, value in {"no_load_optim": True, "no_load_rng": True, "no_save_optim": True, **changes}.items():
        setattr(args, name, value)
    global_vars.set_args(args)
    try:
        yield
    finally:
        global_vars._GLOBAL_ARGS = None


def test_megatron_loads_a_quantized_checkpoint_of_ours(stage: Runner, fp8: Result, source: Path, folder: Path) -> None:
    from megatron.training.checkpointing import load_checkpoint
    from modelopt.torch.opt.plugins import restore_sharded_modelopt_state

    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.models import compat, model

    with session(stage, source) as opened:
        ours = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(ours, folder / "fp8" / "release")
        theirs = model.build(opened.args, opened.conf, "cpu")
        compat.zero_parameters(theirs)
        restore_sharded_modelopt_state([theirs], str(folder / "fp8" / "release"))
        with megatron_arguments(opened.args, load=str(folder / "fp8"), finetune=True):
            load_checkpoint([theirs], None, None, strict=True)
        assert torch.equal(logits(theirs, IDS), logits(ours, IDS))


def test_we_load_a_checkpoint_of_megatron(stage: Runner, source: Path, tmp_path: Path) -> None:
    from megatron.training.checkpointing import save_checkpoint

    from mlmsub.runtime.checkpoints import checkpoint, hf_import
    from mlmsub.runtime.models import model

    with session(stage, source) as opened:
        theirs = model.build(opened.args, opened.conf, "cpu")
        hf_import.import_weights(theirs, source, opened.conf, torch.bfloat16)
        with megatron_arguments(opened.args, save=str(tmp_path), no_save_rng=True):
            save_checkpoint(7, [theirs], None, None, 0)
        checkpoint.require_complete(tmp_path)
        ours = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(ours, checkpoint.folder(tmp_path))
        assert torch.equal(logits(ours, IDS), logits(theirs, IDS))
    assert checkpoint.folder(tmp_path).name == "iter_0000007"
