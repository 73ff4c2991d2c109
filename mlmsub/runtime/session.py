"""What a stage works in: its job as it was asked, then a session with process groups and Megatron's arguments."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed, megatron_args, modelconf
from mlmsub.runtime.checkpoints import hf
from mlmsub.runtime.env import Env, Layout
from mlmsub.runtime.modelconf import ModelConf
from mlmsub.runtime.progress import Steps, quiet, say


@dataclass(frozen=True)
class Job:
    """What was asked: the stage, the model's name and the words after it; read before torch is imported.

    The rest is its place among the stages of one run: ``number`` is 2 where it comes for the second time, ``made_by``
    the stage that makes its MLM_MODEL_CKPT; ``live``: it is handed the model; ``saves``: its output is to be written.
    """

    stage: str
    model: str
    words: list[str]
    env: Env
    steps: Steps
    flags: tuple[str, ...] = ()
    number: int = 1
    made_by: str = ""
    live: bool = False
    saves: bool = True

    def conf(self) -> ModelConf:
        conf = modelconf.load(self.env, self.model)
        conf.require_of(self.model)
        conf.require(self.stage)
        return conf


@dataclass(frozen=True)
class Session:
    """A job whose process group stands: the source folder and Megatron's arguments are known."""

    conf: ModelConf
    source: Path
    args: Namespace


@contextmanager
def start(
    job: Job,
    conf: ModelConf,
    layout: Layout,
    add_arguments: megatron_args.AddArguments,
    defaults: list[str],
    world_size: int | None = None,
) -> Iterator[Session]:
    """Import the libraries, join the process group, and form a session of one stage in it."""
    load_libraries(job)
    with distributed.process_group(job.env, world_size):
        yield form(job, conf, layout, add_arguments, defaults)


def load_libraries(job: Job) -> None:
    """Torch, Megatron and modelopt are imported from here on."""
    with job.steps("start", f"{job.stage} {job.model}: importing torch, Megatron and modelopt"):
        quiet()
        from mlmsub.runtime.models import model

        model.prepare()


def form(
    job: Job, conf: ModelConf, layout: Layout, add_arguments: megatron_args.AddArguments, defaults: list[str]
) -> Session:
    """Find the source, parse the arguments, make Megatron's groups unless a stage before has made them."""
    from mlmsub.runtime.models.model import device

    env = job.env
    with job.steps("groups"):
        source = hf.source(env, conf)
        args = arguments(job, conf, source, layout, add_arguments, defaults)
        distributed.model_parallel(args)
        say(
            f"{distributed.world_size()} processes on {device(args)}:"
            f" TP {args.tensor_model_parallel_size} PP {args.pipeline_model_parallel_size}"
            f" CP {args.context_parallel_size}"
            f" EP {args.expert_model_parallel_size} ETP {args.expert_tensor_parallel_size}"
            f" DP {args.data_parallel_size}, source {source}"
        )
    trusted = conf.trust_remote_code or args.trust_remote_code
    hf.load_code(source, trusted, env.local_rank)
    return Session(replace(conf, trust_remote_code=trusted), source, args)


def arguments(
    job: Job,
    conf: ModelConf,
    source: Path,
    layout: Layout,
    add_arguments: megatron_args.AddArguments,
    defaults: list[str],
) -> Namespace:
    """Megatron's arguments of a model with this conf in this job; ``source`` has its tokenizer and its vocabulary."""
    words = [*_source_words(hf.config(source), source, conf), *defaults, *job.flags]
    return megatron_args.parse(conf, layout, job.env.arguments("MLM_EXTRA_ARGS"), add_arguments, words)


def _source_words(config: dict[str, Any], source: Path, conf: ModelConf) -> list[str]:
    """Flags that follow from the source checkpoint. The vocabulary is its rows, not the tokenizer's count."""
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(source)]
    words += ["--bf16", "--micro-batch-size", "1", "--ckpt-format", "torch_dist", "--no-initialization"]
    words += ["--vocab-size", str(config["vocab_size"]), "--padded-vocab-size", str(config["vocab_size"])]
    given = set(conf.arguments())
    if not config.get("tie_word_embeddings", False) and "--untie-embeddings-and-output-weights" not in given:
        words.append("--untie-embeddings-and-output-weights")
    return words
