"""Builders for tests of layouts, rules and memory: Facts of a model of the catalogue, or of a small one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import yaml

from mlmsub.core import memory
from mlmsub.core.facts import Facts
from mlmsub.core.layout import Layout
from mlmsub.core.modelconf import ModelConf
from mlmsub.core.strict import build

CONF = Path(__file__).resolve().parents[2] / "conf"
KIMI, LLAMA, QWEN_MOE = "moonshotai/Kimi-K2-Instruct", "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-30B-A3B"
GPT_OSS, SCOUT = "openai/gpt-oss-20b", "meta-llama/Llama-4-Scout-17B-16E-Instruct"
NANO = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
MODELS = sorted(str(path.relative_to(CONF).with_suffix("")) for path in CONF.glob("*/*.yaml"))


@cache
def conf(model: str) -> ModelConf:
    return build(ModelConf, yaml.load((CONF / f"{model}.yaml").read_text(), Loader=yaml.BaseLoader), model)


def facts(model: str, stage: str, layout: str, gpu: str = "h100", words: tuple[str, ...] = (), **args: str) -> Facts:
    """The model under `stage` and a layout such as `TP=8 EP=64 ETP=1 8x8`; `args` are the user's Megatron arguments."""
    asked = Layout.parse(layout)
    used = Layout(pp=asked.pp, nodes=asked.nodes, gpus_per_node=asked.gpus_per_node) if stage == "export" else asked
    own = {name.replace("_", "-"): value for name, value in args.items()}
    known = conf(model)
    return Facts(
        stage, asked, used, args={**known.megatron_args, **own}, user_args=own, words=words, conf=known, model=model,
        gpu_type=gpu, gpu_gib=memory.gpu_gib(0, gpu),
    )  # fmt: skip


def said(found: Facts, **values: str) -> Facts:
    """The same facts with variables that the env setup assigns."""
    return replace(found, values=values, assigned=frozenset(values))
