"""The frame round every stage: read the inputs, form the groups, leave in order."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed, hf, megatron_args, modelconf
from mlmsub.runtime.env import Env, Layout
from mlmsub.runtime.modelconf import ModelConf
from mlmsub.runtime.progress import Steps, quiet, say


@dataclass(frozen=True)
class Job:
    """What was asked: the stage, the model's name and the words after it; read before torch is imported."""

    stage: str
    model: str
    words: list[str]
    env: Env
    steps: Steps

    def conf(self) -> ModelConf:
        conf = modelconf.load(self.env, self.model)
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
    """Join the process group, find the source, parse the arguments, make Megatron's groups; then yield."""
    env = job.env
    with job.steps("start", f"{job.stage} {job.model}: importing torch, Megatron and modelopt"):
        quiet()
        from mlmsub.runtime import model  # torch and Megatron are imported from here on

        model.prepare()
    with distributed.process_group(env, world_size):
        with job.steps("groups"):
            source = hf.source(env.text("HF_MODEL_CKPT"), conf, env.local_rank)
            common = _source_words(hf.config(source), source, conf)
            args = megatron_args.parse(conf, layout, env.arguments("MLM_EXTRA_ARGS"), add_arguments, common + defaults)
            distributed.model_parallel(args)
            say(
                f"{world_size or env.world_size} processes on {model.device(args)}:"
                f" TP {args.tensor_model_parallel_size} PP {args.pipeline_model_parallel_size}"
                f" CP {args.context_parallel_size}"
                f" EP {args.expert_model_parallel_size} ETP {args.expert_tensor_parallel_size}"
                f" DP {args.data_parallel_size}, source {source}"
            )
        trusted = conf.trust_remote_code or args.trust_remote_code
        yield Session(replace(conf, trust_remote_code=trusted), source, args)


def _source_words(config: dict[str, Any], source: Path, conf: ModelConf) -> list[str]:
    """Flags that follow from the source checkpoint. The vocabulary is its rows, not the tokenizer's count."""
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(source)]
    words += ["--bf16", "--micro-batch-size", "1", "--ckpt-format", "torch_dist", "--no-initialization"]
    words += ["--vocab-size", str(config["vocab_size"]), "--padded-vocab-size", str(config["vocab_size"])]
    given = set(conf.arguments())
    if not config.get("tie_word_embeddings", False) and "--untie-embeddings-and-output-weights" not in given:
        words.append("--untie-embeddings-and-output-weights")
    return words
