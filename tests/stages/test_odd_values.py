"""Flags of a training with odd values: each trains, or is refused in one line before a model is loaded."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
from rig import MODEL, Runner, make_conf
from test_eagle3 import place, variables

from mlmsub.runtime import megatron_args, modelconf
from mlmsub.runtime.data import dataset
from mlmsub.runtime.env import Env, Layout
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.modelconf import ModelConf
from mlmsub.runtime.models import eagle
from mlmsub.runtime.training import arguments

__all__ = ["place"]

NOT_NUMBERS = ("x", "", "nan", "inf", "-inf", "1e38", "9" * 30)
COUNTS = (
    "train-samples", "train-iters", "lr-decay-samples", "lr-decay-iters", "micro-batch-size", "global-batch-size",
    "recompute-num-layers", "distributed-timeout-minutes", "rotary-base", "max-position-embeddings",
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
    "expert-model-parallel-size", "expert-tensor-parallel-size", "draft-vocab-size",
)  # fmt: skip
FROM_ZERO = (
    "seed", "lr-warmup-samples", "lr-warmup-iters", "eval-iters", "eval-interval", "save-interval", "log-interval",
    "keep-last",
)  # fmt: skip
FRACTIONS = ("adam-beta1", "adam-beta2", "attention-dropout", "hidden-dropout", "lr-warmup-fraction")
RATES = ("lr", "min-lr", "lr-warmup-init", "weight-decay", "clip-grad", "init-method-std")
REFUSED: list[tuple[str, str]] = [
    *((f"--{name} {value}", name) for name in COUNTS for value in ("0", "-4", "1.5", *NOT_NUMBERS[:3])),
    *((f"--{name} {value}", name) for name in FROM_ZERO for value in ("-1", "1.5", *NOT_NUMBERS[:3])),
    *((f"--{name} {value}", name) for name in FRACTIONS for value in ("-0.1", "2", *NOT_NUMBERS[:4])),
    *((f"--{name} {value}", name) for name in RATES for value in ("-1", *NOT_NUMBERS[:-1])),
    ("--seed 4294967296", "seed"),
    *((f"--seq-length {value}", "seq-length") for value in ("0", "1", "-8", "5000", "x")),
    *((f"--norm-epsilon {value}", "norm-epsilon") for value in ("0", "-1", "nan", "2")),
    *((f"--adam-eps {value}", "adam-eps") for value in ("0", "-1", "nan")),
    ("--rope-scaling-factor 0", "rope-scaling-factor"),
    ("--lr 1e-5 --min-lr 1e-3", "--min-lr, --lr"),
    ("--micro-batch-size 3 --global-batch-size 4", "--global-batch-size"),
    ("--global-batch-size 1000000", "less than one global batch"),
    ("--train-samples 3 --global-batch-size 4", "--train-samples: 3 are less"),
    ("--train-iters 4", "--train-iters"),  # beside the samples
    ("--lr-warmup-samples 128000", "lr_warmup_steps < self.lr_decay_steps"),
    ("--lr-decay-style WSD", "MLM_OPTIM_ARGS"),
    ("--optimizer sgd", "--use-distributed-optimizer"),
    *((f"--optimizer {name}", "emerging-optimizers") for name in ("muon", "lion", "soap", "dist_muon")),
    ("--use-precision-aware-optimizer", "MLM_OPTIM_ARGS"),
    ("--main-grads-dtype bf16", "MLM_OPTIM_ARGS"),
    ("--optimizer foo", "--optimizer"),
    ("--algorithm medusa", "--algorithm"),
    ("--loss-on foo", "--loss-on"),
    ("--long-documents foo", "--long-documents"),
    ("--train-smples 2", "Nearest: --train-samples"),
    ("--bf16 ", "knows ''"),  # an empty word
]  # fmt: skip
TAKEN = (
    "--eval-iters 0", "--eval-interval 0", "--save-interval 0", "--log-interval 0", "--seed 0", "--clip-grad 0",
    "--lr 0 --min-lr 0", "--min-lr 0", "--train-samples 3 --lr-decay-samples 3 --global-batch-size 2",
    "--adam-beta1 0 --adam-beta2 0", "--keep-last 0", "--seq-length 2",
)  # fmt: skip


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> ModelConf:
    from mlmsub.runtime.models import model

    model.prepare()
    here = tmp_path_factory.mktemp("conf")
    (here / "conf").mkdir()
    make_conf(here / "conf" / "model.yaml")
    return modelconf.load(Env({"MLMSUB_RUN_DIR": str(here)}), MODEL)


def parsed(conf: ModelConf, words: list[str], groups: dict[str, str] | None = None) -> Namespace:
    """What eagle3 does with its arguments before it loads anything, with the defaults of all groups."""

    def add(parser: ArgumentParser) -> None:
        for own in (eagle, dataset, arguments):
            own.add_arguments(parser)

    defaults = arguments.words(Env(groups or {}))
    frame = "--bf16 --micro-batch-size 1 --vocab-size 512 --padded-vocab-size 512 --tokenizer-type NullTokenizer"
    args = megatron_args.parse(conf, Layout(), words, add, [*frame.split(), *defaults])
    arguments.check(args)
    return args


@pytest.mark.parametrize(("text", "told"), REFUSED, ids=lambda value: value)
def test_an_odd_value_is_refused_by_name(text: str, told: str, conf: ModelConf) -> None:
    flag = text.partition(" ")[0]
    words = [flag, ""] if text.endswith(" ") else text.split()
    with pytest.raises(StageError) as error:
        parsed(conf, words)
    assert told in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("text", TAKEN)
def test_an_end_of_a_range_is_taken(text: str, conf: ModelConf) -> None:
    assert parsed(conf, text.split()).train_iters >= 1


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ({"MLM_OPTIM_ARGS": "--clip-grad 1.0"}, "--lr: is not given: MLM_OPTIM_ARGS replaces"),
        ({"MLM_DATA_ARGS": "--split 90,10,0"}, "--train-samples: None are less"),
        ({"MLM_OPTIM_ARGS": "--optimizer sgd --lr 1 --min-lr 0"}, "add --no-save-optim"),
    ],
)
def test_a_group_that_leaves_too_much_out(groups: dict[str, str], told: str, conf: ModelConf) -> None:
    with pytest.raises(StageError, match=told):
        parsed(conf, [], groups)


def test_the_submit_side_knows_the_same_numbers() -> None:
    from mlmsub.core.megatron_arguments import RANGES

    assert RANGES == megatron_args.RANGES


# --- whole stages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle3", "finetune"])
@pytest.mark.parametrize(
    ("group", "words", "told"),
    [
        ("MLM_TRAIN_ARGS", "--micro-batch-size 2 --rampup-batch-size 2 2 8", "--rampup-batch-size is not implemented"),
        ("MLM_EVAL_ARGS", "--exit-interval 3", "Fix: give --train-iters"),
        ("MLM_OPTIM_ARGS", "--clip-grad 1.0", "--lr: is not given"),
        ("MLM_OPTIM_ARGS", "--lr 1e38", "--lr: 1e38"),
    ],
)
def test_it_is_told_before_anything_is_read(
    name: str, group: str, words: str, told: str, stage: Runner, source: Path, place: Path, tmp_path: Path
) -> None:
    given = {**variables(place, tmp_path / "out"), "MLM_EXTRA_ARGS": "--seq-length 64", group: words}
    result = stage(name, HF_MODEL_CKPT=source, **given)
    assert result.code == 2 and told in result.out.splitlines()[-1], result.out
    assert "[data]" not in result.out and "Traceback" not in result.out


def test_another_algorithm_is_none_of_eagle3(stage: Runner, source: Path, place: Path, tmp_path: Path) -> None:
    given = {**variables(place, tmp_path / "out"), "MLM_EXTRA_ARGS": "--algorithm None"}
    result = stage("eagle3", HF_MODEL_CKPT=source, **given)
    assert result.code == 2 and "--algorithm: eagle3 trains a draft" in result.out


@pytest.mark.parametrize(
    ("data", "evaluate", "told"),
    [
        ("90,10,0", "--eval-iters 0 --eval-interval 1", "no evaluation: --eval-iters is 0"),
        ("90,10,0", "--eval-iters 1 --eval-interval 0", "--eval-interval 0"),
        ("90,10,0", "--eval-iters 1 --eval-interval 9", "one evaluation, at the end: --eval-interval 9 of 1"),
        ("100,0,0", "--eval-iters 1 --eval-interval 1", "no validation loss: --split 100,0,0"),
        ("90,10,0", "--no-eval", "no evaluation: --no-eval"),
        ("90,10,0", "--eval-iters 1 --eval-interval 1", ""),
    ],
)
def test_less_evaluation_than_it_seems_is_told_once(
    data: str, evaluate: str, told: str, capsys: pytest.CaptureFixture, conf: ModelConf
) -> None:
    args = parsed(conf, ["--split", data, *(word for word in evaluate.split() if word != "--no-eval")])
    args.no_eval, args.train_iters = "--no-eval" in evaluate, 1
    arguments.tell_evaluations(args, 0 if data == "100,0,0" else 5)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == bool(told) and all(told in line for line in lines)
