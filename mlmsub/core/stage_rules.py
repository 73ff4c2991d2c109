"""Rules on what a stage, a model or a value can do, whatever the number of ranks.

Each function yields (field, message, fix) for what it finds; core/rules.py says when it is asked.
"""

from __future__ import annotations

import difflib
import re

from mlmsub.core import prune_rules
from mlmsub.core.architecture import flag, unlike
from mlmsub.core.facts import ARGUMENT_VARIABLES, SIZE_ARGUMENTS, Facts, Found

# Variables that mlmsub's runtime, its entrypoint or Megatron-LM's examples read.
VARIABLES = (
    "HF_MODEL_CKPT", "MLM_MODEL_CKPT", "MLM_MODEL_SAVE", "MLM_MODEL_CFG", "MLM_MODEL_LOAD", "MLM_WORK_DIR",
    "MLM_ENV_SETUP", "MLM_SKIP_INSTALL", "MLM_EXTRA_ARGS", "MLM_DATA_ARGS", "MLM_TRAIN_ARGS", "MLM_OPTIM_ARGS",
    "MLM_EVAL_ARGS", "MLM_RESUME_ARGS", "MLM_DEFAULT_ARGS", "MLM_CALIB_DATA", "MLM_OVERWRITE", "MLM_REF_LABEL",
    "MLM_LOWER_BOUND", "EXPORT_DIR", "EXTRACT_DIR", "QFORMAT", "PROMPTS_PATH", "TP", "PP", "EP", "ETP", "CP", "DP",
    "GENERATE_OUT", "MMLU_DATA", "MMLU_OUT", "VALIDATE_OUT", "STEPS", "OSL", "GT_PATH", "SAVE_GT_PATH",
    "LAUNCH_SCRIPT", "SANDBOX_ROOT", "SANDBOX_DIR", "SANDBOX_ENV_SETUP", "USER_FSW", "CONTAINER_IMAGE",
    "TOKENIZER_MODEL", "MODEL_ARGS", "HF_TOKEN", "HF_HOME", "WANDB_API_KEY",
    *prune_rules.VARIABLES,
)  # fmt: skip
_OLD_GPUS = re.compile(r"[ahlv]\d+|gh200|h20")  # before Blackwell


def unsupported(facts: Facts) -> Found:
    draft = facts.stage == "convert" and facts.args.get("algorithm", "None") != "None"
    for stage in (facts.stage, "eagle3") if draft else (facts.stage,):
        if facts.conf and stage in facts.conf.unsupported:
            reason = facts.conf.unsupported[stage]
            yield "stage", f"{stage} is not supported for {facts.model}: {reason}", "choose another stage or model"


def quantize_experts(facts: Facts) -> Found:
    at = facts.layout
    if facts.experts and at.tp > 1 and at.ep > 1:
        message = f"TP={at.tp} with EP={at.ep}: ModelOpt quantizes experts one by one, and then only with TP or EP"
        yield "TP", message, f"set TP=1 ETP=1 and keep EP={at.ep}"


def single_pipeline(facts: Facts) -> Found:
    if facts.layout.pp > 1:
        yield "PP", f"{facts.stage} needs PP=1, not {facts.layout.pp}", "set PP=1, and split by TP and EP instead"


def export_tp(facts: Facts) -> Found:
    if facts.asked.tp > 1:
        message = f"export writes whole tensors and splits by layers only: TP={facts.asked.tp} is taken as 1"
        yield "TP", message, "use PP to spread the model over GPUs"


def export_others(facts: Facts) -> Found:
    asked = facts.asked
    others = {"CP": asked.cp, "EP": asked.ep, "ETP": asked.etp or 1}
    if ignored := [f"{name}={size}" for name, size in others.items() if size > 1]:
        yield "EP", f"export uses PP only: {' '.join(ignored)} are taken as 1", ""


def gpt_oss(facts: Facts) -> Found:
    if facts.imports and _family(facts, "gpt-oss", "gpt_oss") and facts.layout.expert_tp > 1:
        message = f"ETP={facts.layout.expert_tp}: ModelOpt cannot import gpt-oss with experts split by ETP"
        yield "ETP", message, "set ETP=1; use EP to split the experts"


def llama4(facts: Facts) -> Found:
    at = facts.layout
    if facts.imports and _family(facts, "llama-4", "llama4") and at.ep > 1 and at.expert_tp > 1:
        message = f"EP={at.ep} with ETP={at.expert_tp}: ModelOpt imports packed experts with EP or with ETP, not both"
        yield "ETP", message, "set ETP=1 (or EP=1)"


def context_parallel(facts: Facts) -> Found:
    if facts.layout.cp > 1:
        message = f"CP={facts.layout.cp} works with Transformer Engine's attention only"
        yield "CP", message, "use an image with Transformer Engine, or CP=1"


def virtual_pipeline(facts: Facts) -> Found:
    names = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
    if facts.has(*names):
        kd = " (nor its distillation)" if facts.has("export-kd-teacher-load") else ""
        yield "MLM_EXTRA_ARGS", f"ModelOpt{kd} does not support interleaved pipeline stages", f"leave out --{names[0]}"


def simulated_nvfp4(facts: Facts) -> Found:
    wanted = " ".join((*facts.words, facts.values.get("QFORMAT", ""))).lower()
    if "nvfp4" in wanted and _OLD_GPUS.fullmatch(facts.gpu_type.lower()):
        yield "QFORMAT", f"NVFP4 is simulated on {facts.gpu_type}; only Blackwell computes in it", ""


def kv_format(facts: Facts) -> Found:
    kind = facts.args.get("export-kv-cache-quant", "none")
    if kind != "none" and facts.arch and facts.arch.mla:
        message = f"KV cache in {kind}: ModelOpt exports no KV scales of multi-head latent attention"
        yield "export-kv-cache-quant", message, "leave it out, and let the server choose its KV cache's format"


def resume(facts: Facts) -> Found:
    if flag(facts.args, "use-distributed-optimizer") and not facts.has("dist-ckpt-optim-fully-reshardable"):
        message = "a resume must use the same TP, PP, EP and ETP: the optimizer's state is saved by data-parallel rank"
        yield "MLM_MODEL_SAVE", message, ""


def layout_overruled(facts: Facts) -> Found:
    for argument, name in SIZE_ARGUMENTS.items():
        said, used = facts.values.get(name.upper(), "").strip(), facts.user_args.get(argument, "")
        if used and said and said != used and name.upper() in facts.assigned:
            message = f"{name.upper()}={said} is overridden by --{argument} {used} in MLM_EXTRA_ARGS"
            yield name.upper(), message, "say it once"


def checkpoint_matches(facts: Facts) -> Found:
    name = facts.values.get("HF_MODEL_CKPT", "").rstrip("/").rpartition("/")[2]
    if odd := unlike(name, facts.model):
        message = f"{name} does not look like {facts.model.rpartition('/')[2]}: {odd}"
        yield "HF_MODEL_CKPT", message, "give this model's checkpoint, or the other model's name"


def unknown_names(facts: Facts) -> Found:
    for name in sorted(facts.assigned.difference(VARIABLES)):
        near = difflib.get_close_matches(name, VARIABLES, 1, cutoff=0.78)
        if name.startswith("MLM_") or near:
            yield name, "is read by nothing", f"did you mean {near[0]}?" if near else ""


def unread_arguments(facts: Facts) -> Found:
    name_of_run = "+".join(facts.run) or facts.stage
    read = {name for stage in (facts.stage, *facts.run) for name in ARGUMENT_VARIABLES.get(stage, ())}
    for name in ("MLM_DATA_ARGS", "MLM_TRAIN_ARGS", "MLM_OPTIM_ARGS", "MLM_EVAL_ARGS", "MLM_RESUME_ARGS"):
        if name in facts.assigned and name not in read:
            yield name, f"{name_of_run} does not read it", "MLM_EXTRA_ARGS is read by every stage"


def _family(facts: Facts, *names: str) -> bool:
    text = f"{facts.model} {facts.conf.model if facts.conf else ''} {getattr(facts.conf, 'family', '')}".lower()
    return any(name in text for name in names)
