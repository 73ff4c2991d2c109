"""A training that is stopped, or killed, goes on as if it had not been: the same losses, bit by bit."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from rig import Result, Runner
from training_rig import ADAM, ITERATIONS, iterations, stopping, training_session, variables

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


@pytest.fixture(scope="module")
def whole(stage: Runner, source: Path, folder: Path, data: Path) -> Result:
    """Eight iterations without an interruption, with dropout, so that the random generators count."""
    return stage("finetune", **variables(source, folder / "whole", data, extra=DROPOUT))


def test_a_run_ends_with_its_checkpoint_named_and_its_promise(whole: Result, folder: Path) -> None:
    assert whole.code == 0, whole.out
    assert whole.done["outputs"] == {"MLM_MODEL_SAVE": str(folder / "whole")}
    assert (folder / "whole" / "latest_checkpointed_iteration.txt").read_text() == str(ITERATIONS)
    assert len(iterations(whole)) == ITERATIONS


@pytest.mark.parametrize("optim", [f"{ADAM} --use-distributed-optimizer", ADAM], ids=["distributed", "plain"])
def test_stopped_twice_it_has_the_same_losses(
    optim: str, stage: Runner, source: Path, tmp_path: Path, data: Path, whole: Result
) -> None:
    if "distributed" not in optim:
        whole = stage("finetune", **variables(source, tmp_path / "whole", data, optim, DROPOUT))
    given = variables(source, tmp_path / "out", data, optim, DROPOUT)
    run_dir = stage.run_dir()
    for restart, (last, stop) in enumerate([(0, 3), (3, 5)]):
        with stopping(stop - last):
            result = stage("finetune", run_dir=run_dir, MLMSUB_RESTART=restart, **given)
        state = run_dir / "state" / str(restart)
        assert result.code == 0, result.out
        assert json.loads((state / "saved").read_text()) == {"iteration": stop}
        assert not (state / "done.json").exists() and "the training is not finished" in result.out
    result = stage("finetune", run_dir=run_dir, MLMSUB_RESTART=2, **given)
    assert result.code == 0 and f"goes on after iteration 5 of {ITERATIONS}" in result.out, result.out
    assert (run_dir / "state" / "2" / "done.json").exists()
    assert iterations(result) == iterations(whole)
    assert iterations(result, "grad_norm") == iterations(whole, "grad_norm")
    assert iterations(result, "lr") == iterations(whole, "lr")


def test_killed_between_saves_it_goes_on_from_the_last(
    stage: Runner, source: Path, tmp_path: Path, data: Path, whole: Result
) -> None:
    from mlmsub.runtime.training import trainer

    given = variables(source, tmp_path / "out", data, extra=f"{DROPOUT} --save-interval 2")
    run_dir, step = stage.run_dir(), trainer.Trainer.step

    def die(self: trainer.Trainer, *args: object) -> object:
        if self.iteration == 5:
            raise KeyboardInterrupt
        return step(self, *args)

    with mock.patch.object(trainer.Trainer, "step", die), pytest.raises(KeyboardInterrupt):
        stage("finetune", run_dir=run_dir, **given)
    # what a kill in the middle of the next save leaves
    half = tmp_path / "out" / "iter_0000006"
    shutil.copytree(tmp_path / "out" / "iter_0000004", half)
    (half / "metadata.json").unlink()
    result = stage("finetune", run_dir=run_dir, MLMSUB_RESTART=1, **given)
    assert result.code == 0, result.out
    assert f"{half} is ignored" in result.out and "goes on after iteration 4" in result.out
    assert iterations(result) == iterations(whole)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    stage: Runner, source: Path, tmp_path: Path, data: Path, whole: Result
) -> None:
    given = variables(source, tmp_path / "out", data, extra=f"{DROPOUT} --save-interval 2")
    run_dir = stage.run_dir()
    with stopping(4):
        assert stage("finetune", run_dir=run_dir, **given).code == 0
    largest = max((tmp_path / "out" / "iter_0000004").glob("*.distcp"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    result = stage("finetune", run_dir=run_dir, MLMSUB_RESTART=1, **given)
    assert result.code == 0, result.out
    assert "iter_0000004 is ignored, it is not a complete checkpoint" in result.out
    assert "goes on after iteration 2" in result.out and iterations(result) == iterations(whole)


def test_keep_last_leaves_that_many(stage: Runner, source: Path, tmp_path: Path, data: Path) -> None:
    given = variables(source, tmp_path / "out", data, extra="--save-interval 2 --keep-last 2")
    assert stage("finetune", **given).code == 0
    assert sorted(path.name for path in (tmp_path / "out").glob("iter_*")) == ["iter_0000006", "iter_0000008"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("--global-batch-size 16", "--global-batch-size"),
        ("--seed 7", "--seed"),
        ("--seq-length 32", "--finetune-hf-dataset"),
        ("--lr 5e-4", "MLM_OPTIM_ARGS"),
    ],
)
def test_another_training_is_not_gone_on_with(
    change: str, field: str, stage: Runner, source: Path, data: Path, whole: Result, folder: Path
) -> None:
    given = variables(source, folder / "whole", data, extra=f"{DROPOUT} {change}")
    result = stage("finetune", **given)
    assert result.code == 2 and f"finetune: ERROR: {field}: " in result.out, result.out


def test_megatron_finds_what_it_looks_for(stage: Runner, source: Path, data: Path, whole: Result, folder: Path) -> None:
    """Its own loader, told to continue: iteration, samples, weights, optimizer and schedule."""
    from megatron.training import checkpointing
    from test_megatron_checkpoints import megatron_arguments

    from mlmsub.runtime.checkpoints import checkpoint
    from mlmsub.runtime.models import model
    from mlmsub.runtime.training import trainer

    with training_session(stage, variables(source, folder / "whole", data, ADAM)) as opened:
        ours = model.build(opened.args, opened.conf, "cpu")
        checkpoint.load(ours, folder / "whole" / "iter_0000008")
    plain = variables(source, folder / "plain", data, ADAM)
    assert stage("finetune", **plain).code == 0
    with training_session(stage, plain) as opened, mock.patch.object(checkpointing, "update_num_microbatches"):
        args = opened.args
        theirs = trainer.prepare(model.build(args, opened.conf, "cpu"), args)
        # a CPU has no states of a CUDA generator, without which Megatron's loader refuses those of torch
        kept = {"load": str(folder / "plain"), "no_load_optim": False, "no_save_optim": False, "no_load_rng": True}
        with megatron_arguments(args, **kept):
            iteration, _ = checkpointing.load_checkpoint([theirs.wrapped], theirs.optimizer, theirs.schedule)
        assert iteration == ITERATIONS and args.consumed_train_samples == ITERATIONS * 8
        assert theirs.schedule.num_steps == ITERATIONS * 8
        steps = {float(state["step"]) for state in theirs.optimizer.optimizer.state.values()}
        assert steps == {ITERATIONS}
        for (name, got), want in zip(theirs.module.named_parameters(), ours.parameters(), strict=True):
            assert torch.allclose(got.float(), want.float(), atol=0.02), name


def test_an_optimizer_that_counts_steps_in_its_groups_keeps_the_count() -> None:
    """Transformer Engine's Adam does; it cannot save a state that has a count for each parameter."""
    from types import SimpleNamespace

    from mlmsub.runtime.training import state

    own = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    own.param_groups[0]["step"] = 3
    state._restore_step(SimpleNamespace(optimizer=own))
    assert own.param_groups[0]["step"] == 3 and not own.state
