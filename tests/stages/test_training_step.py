"""One iteration: it does not wait for the device, finds what is not finite, and makes its logits in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rig import Result, Runner
from test_calibration import events
from torch.utils._python_dispatch import TorchDispatchMode
from training_rig import ADAM, iterations, logits_in_chunks, training_session, variables

VOCABULARY = 512


class Watch(TorchDispatchMode):
    """Counts what would make the host wait for a GPU, and keeps the size of the largest tensor that was made."""

    WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in self.WAITS:
            self.waits.append(function.overloadpacket.__name__)
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.largest = max(self.largest, made.numel())
        return made


@contextmanager
def learner(stage: Runner, source: Path, data: Path, tmp_path: Path, optim: str) -> Iterator[tuple[Any, Any, Any]]:
    """A trainer of the tiny model, its batches and its forward step."""
    from mlmsub.runtime.checkpoints import hf_import
    from mlmsub.runtime.data import dataset
    from mlmsub.runtime.env import Env
    from mlmsub.runtime.models import model
    from mlmsub.runtime.progress import Steps
    from mlmsub.runtime.session import Job
    from mlmsub.runtime.training import loop, losses, trainer

    with training_session(stage, variables(source, tmp_path / "out", data, optim)) as opened:
        args = opened.args
        packed = dataset.of(Job("finetune", "test/tiny", [], Env(), Steps()), opened)
        module = model.build(args, opened.conf, "cpu")
        hf_import.import_weights(module, source, opened.conf, args.params_dtype)
        made = trainer.prepare(module, args)
        yield made, loop.batches(packed, args, "train", 0), losses.supervised(made)


@pytest.mark.parametrize("optim", [ADAM, f"{ADAM} --use-distributed-optimizer"], ids=["plain", "distributed"])
def test_an_iteration_does_not_wait_for_the_device(
    optim: str, stage: Runner, source: Path, data: Path, tmp_path: Path
) -> None:
    """torch's Adam is left out: it counts its steps in host memory, which looks the same on a CPU."""
    from mlmsub.runtime.training import state, trainer

    with learner(stage, source, data, tmp_path, optim) as (made, batches, forward):
        made.step(batches, forward)
        for adam in state._torch_optimizers(made.optimizer):
            adam.step = lambda: None
        with Watch() as watch:
            values = made.step(batches, forward)
        assert not watch.waits
        told = trainer.read(values)
        assert told.keys() == {"lm loss", "lr", "grad_norm"} and told["lm loss"] > 1 and told["grad_norm"] > 0


def test_an_eagle3_iteration_does_not_wait_for_the_device(stage: Runner, source: Path) -> None:
    from test_eagle_step import batch, opened, with_draft

    from mlmsub.runtime.models.eagle_training import DraftStep

    with opened(stage, source, "--draft-vocab-size", "100") as session:
        model = with_draft(session, source)
        forward = DraftStep(model)
        with Watch() as watch:
            output, loss_of = forward(model, batch())
            loss_of(output)[0].backward()
        assert not watch.waits


@pytest.mark.parametrize("interval", [1, 100], ids=["told each", "told at the end"])
def test_what_is_not_finite_ends_the_run_before_a_save(
    interval: int, stage: Runner, source: Path, data: Path, tmp_path: Path
) -> None:
    """A gradient of iteration 3 is not: the last good save is that of iteration 2."""
    from mlmsub.runtime.training import losses

    summed, count = losses.summed, iter(range(10**6))

    def spoiled(found: Any, mask: Any) -> Any:
        total, tokens, report = summed(found, mask)
        return (total * float("nan") if next(count) == 2 * 4 else total), tokens, report

    given = variables(source, tmp_path / "out", data, extra=f"--save-interval 2 --log-interval {interval}")
    given["MLM_EVAL_ARGS"] = "--eval-iters 0"
    with mock.patch.object(losses, "summed", spoiled):
        result = stage("finetune", **given)
    assert result.code == 1, result.out
    told = "iteration 3" if interval == 1 else "one of the iterations 1 to 4"
    assert f"grad_norm of {told} is not finite" in result.out, result.out
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert not (tmp_path / "out" / "iter_0000004").exists()


def test_a_weight_that_is_not_finite_is_not_saved(stage: Runner, source: Path, data: Path, tmp_path: Path) -> None:
    from mlmsub.runtime.training import trainer

    step = trainer.Trainer.step

    def spoil(self: trainer.Trainer, *args: Any) -> Any:
        values = step(self, *args)
        if self.iteration == 4:
            self.module.decoder.layers[1].mlp.linear_fc2.weight.data[3, 5] = float("inf")
        return values

    given = variables(source, tmp_path / "out", data, extra="--save-interval 2")
    with mock.patch.object(trainer.Trainer, "step", spoil):
        result = stage("finetune", **given)
    assert result.code == 1 and "after iteration 4 1 weights are not finite" in result.out, result.out
    assert "decoder.layers.1.mlp.linear_fc2.weight" in result.out
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_the_log_has_means_of_its_iterations(stage: Runner, source: Path, data: Path, tmp_path: Path) -> None:
    each = run(stage, source, data, tmp_path / "each", "--log-interval 1")
    some = run(stage, source, data, tmp_path / "some", "--log-interval 3")
    one = iterations(each)
    assert iterations(some) == pytest.approx([sum(one[:3]) / 3, sum(one[3:6]) / 3, sum(one[6:]) / 2], rel=1e-12)
    norms = iterations(each, "grad_norm")
    assert iterations(some, "grad_norm") == [norms[2], norms[5], norms[7]], "of the last iteration"
    assert [event["iteration"] for event in events(some, "iteration")] == [3, 6, 8]


def run(stage: Runner, source: Path, data: Path, out: Path, extra: str) -> Result:
    result = stage("finetune", **variables(source, out, data, ADAM, extra))
    assert result.code == 0, result.out
    return result


# --- logits in chunks ----------------------------------------------------------------------------------------------


def gradients(made: Any, batches: Any, forward: Any, chunk: int) -> tuple[Any, dict[str, torch.Tensor], int]:
    """Of one micro-batch: its losses per token, the gradients, and the size of the largest tensor."""
    batch = next(batches)
    with logits_in_chunks(chunk), Watch() as watch:
        output, loss_of = forward(made.module, batch)
        total, tokens, _ = loss_of(output)
        (total / tokens).backward()
    found = {name: value.main_grad.clone() for name, value in made.module.named_parameters()}
    made.wrapped.zero_grad_buffer()
    for value in made.module.parameters():
        value.grad = None
    return output.detach(), found, watch.largest


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("tokens", [1, 7, 63], ids=str)
def test_chunks_have_the_losses_and_gradients_of_the_whole(
    tokens: int, tied: bool, stage: Runner, source: Path, tied_source: Path, data: Path, tmp_path: Path
) -> None:
    """Rows of 64 tokens in pieces of ``tokens``, the last one shorter; no tensor is as large as the logits."""
    from training_rig import in_fp32

    here = tied_source if tied else source
    runner = Runner(tmp_path / "runs", in_fp32(stage.conf, tmp_path / "model.yaml"))
    with learner(runner, here, data, tmp_path, ADAM) as (made, batches, forward):
        batch = next(batches)
        whole, want, large = gradients(made, iter([batch]), forward, 0)
        pieces, got, small = gradients(made, iter([batch]), forward, tokens * 2 * VOCABULARY)
        torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-6)
        for name, grad in want.items():
            torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-6, msg=name)
        weights = max(value.numel() for value in made.module.parameters())
        assert large == 64 * 2 * VOCABULARY and small <= max(tokens * 2 * VOCABULARY, weights)
        with logits_in_chunks(tokens * 2 * VOCABULARY), torch.no_grad():
            torch.testing.assert_close(forward(made.module, batch)[0], whole, rtol=1e-6, atol=1e-6)
