"""Every rule in a case that breaks it and one that does not; the page that documents them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from modelfacts import GPT_OSS, KIMI, LLAMA, MODELS, NANO, QWEN_MOE, SCOUT, conf, facts, said

from mlmsub.core import rules
from mlmsub.core.facts import Facts
from mlmsub.core.issues import Issue

ROOT = Path(__file__).resolve().parents[2]
R1 = "deepseek-ai/DeepSeek-R1"
DENSE = facts(LLAMA, "quantize", "TP=8 1x8")
UNEVEN = {"decoder_first_pipeline_num_layers": "3", "decoder_last_pipeline_num_layers": "2"}
SHARDED = {"use_distributed_optimizer": "true"}

# code -> (a case that the rule finds, a case that it does not)
CASES: dict[str, tuple[Facts, Facts]] = {
    "world-size": (facts(LLAMA, "quantize", "TP=8 PP=2 3x8"), facts(LLAMA, "quantize", "TP=8 PP=2 2x8")),
    "expert-world-size": (facts(KIMI, "eagle3", "TP=8 EP=64 8x8"), facts(KIMI, "eagle3", "TP=8 EP=64 ETP=1 8x8")),
    "etp-is-tp": (facts(KIMI, "eagle3", "TP=8 EP=8 8x8"), facts(KIMI, "eagle3", "TP=8 EP=8 ETP=8 8x8")),
    "tp-across-nodes": (facts(LLAMA, "quantize", "TP=8 2x4"), DENSE),
    "experts": (facts(KIMI, "eagle3", "EP=60 60x8"), facts(KIMI, "eagle3", "EP=64 8x8")),
    "no-experts": (facts(LLAMA, "quantize", "EP=2 1x8"), DENSE),
    "heads": (facts(LLAMA, "train", "TP=3 1x3"), DENSE),
    "query-groups": (facts(QWEN_MOE, "quantize", "TP=8 ETP=1 1x8"), facts(QWEN_MOE, "train", "TP=8 ETP=1 1x8")),
    "vocabulary": (facts(LLAMA, "train", "TP=5 1x5"), DENSE),
    "mlp": (facts(LLAMA, "train", "TP=3 1x3"), DENSE),
    "expert-mlp": (facts(QWEN_MOE, "train", "TP=1 ETP=5 1x5"), facts(QWEN_MOE, "train", "TP=1 ETP=4 1x4")),
    "shared-expert": (facts(KIMI, "train", "TP=3 1x3"), facts(KIMI, "train", "TP=4 1x4")),
    "mamba": (facts(NANO, "quantize", "TP=16 ETP=1 2x8"), facts(NANO, "quantize", "TP=8 ETP=1 1x8")),
    "fp8-blocks": (facts(R1, "convert", "ETP=32 4x8"), facts(R1, "convert", "ETP=16 2x8")),
    "layers": (facts(KIMI, "quantize", "PP=8 1x8"), facts(KIMI, "quantize", "PP=16 2x8", **UNEVEN)),
    "virtual-pipeline": (
        facts(LLAMA, "finetune", "PP=4 1x8", num_layers_per_virtual_pipeline_stage="4", export_kd_teacher_load="/t"),
        facts(LLAMA, "finetune", "PP=4 1x8", export_kd_teacher_load="/t"),
    ),
    "single-pipeline": (facts(LLAMA, "eagle3", "PP=2 1x8"), facts(LLAMA, "eagle3", "TP=2 1x8")),
    "sequence-parallel-needed": (
        facts(QWEN_MOE, "finetune", "TP=2 ETP=1 1x8", sequence_parallel="false"),
        facts(QWEN_MOE, "finetune", "TP=2 ETP=1 1x8", sequence_parallel="true"),
    ),
    "sequence-parallel-off": (facts(KIMI, "export", "PP=16 2x8"), facts(KIMI, "eagle3", "TP=8 EP=64 ETP=1 8x8")),
    "context-length": (
        facts(LLAMA, "finetune", "CP=4 1x8", seq_length="4100"),
        facts(LLAMA, "finetune", "CP=4 1x8", seq_length="4096"),
    ),
    "context-parallel": (facts(LLAMA, "finetune", "CP=2 1x8"), DENSE),
    "quantize-experts": (facts(KIMI, "quantize", "TP=8 EP=64 ETP=1 8x8"), facts(KIMI, "quantize", "EP=64 8x8")),
    "auto-quantize": (
        facts(LLAMA, "quantize", "PP=2 1x8", words=("auto",)),
        facts(LLAMA, "quantize", "TP=8 1x8", words=("auto",), auto_quantize_bits="4.8"),
    ),
    "quantize-format": (
        facts(LLAMA, "quantize", "TP=8 1x8", words=("FP8_DEFALT_CFG",)),
        facts(LLAMA, "quantize", "TP=8 1x8", words=("FP8_DEFAULT_CFG",)),
    ),
    "export-tp": (facts(LLAMA, "export", "TP=8 1x8"), facts(LLAMA, "export", "PP=8 1x8")),
    "export-layout": (facts(QWEN_MOE, "export", "EP=8 1x8"), facts(QWEN_MOE, "export", "PP=8 1x8")),
    "export-idle": (facts(LLAMA, "export", "PP=2 1x8"), facts(LLAMA, "export", "PP=8 1x8")),
    "prune-tp": (facts(LLAMA, "prune", "TP=2 1x8"), facts(LLAMA, "prune", "PP=2 1x8")),
    "prune-targets": (facts(LLAMA, "prune", "1x8"), facts(LLAMA, "prune", "1x8", target_num_layers="24")),
    "prune-widths": (
        facts(LLAMA, "prune", "1x8", target_hidden_size="3000"),
        facts(LLAMA, "prune", "1x8", target_hidden_size="3072"),
    ),
    "prune-layers": (
        facts(LLAMA, "prune", "PP=8 1x8", target_num_layers="28"),
        facts(LLAMA, "prune", "PP=4 1x8", target_num_layers="28"),
    ),
    "prune-engine": (
        facts(LLAMA, "prune", "1x8", target_hidden_size="3072"), facts(LLAMA, "prune", "1x8", target_num_layers="24"),
    ),
    "gpt-oss-etp": (facts(GPT_OSS, "quantize", "TP=2 1x8"), facts(GPT_OSS, "quantize", "TP=2 ETP=1 1x8")),
    "llama-4-experts": (facts(SCOUT, "convert", "TP=2 EP=2 1x8"), facts(SCOUT, "convert", "TP=2 EP=2 ETP=1 1x8")),
    "stage-unsupported": (facts(KIMI, "prune", "1x8"), DENSE),
    "kv-format": (
        facts(KIMI, "quantize", "EP=64 8x8", export_kv_cache_quant="fp8"),
        facts(LLAMA, "quantize", "1x8", export_kv_cache_quant="fp8"),
    ),
    "nvfp4-simulated": (
        facts(LLAMA, "quantize", "1x8", words=("NVFP4_DEFAULT_CFG",)),
        facts(LLAMA, "quantize", "1x8", "gb200", words=("NVFP4_DEFAULT_CFG",)),
    ),
    "resume-layout": (
        facts(LLAMA, "finetune", "1x8", **SHARDED),
        facts(LLAMA, "finetune", "1x8", **SHARDED, dist_ckpt_optim_fully_reshardable="true"),
    ),
    "layout-overridden": (
        said(facts(LLAMA, "train", "TP=4 1x8", tensor_model_parallel_size="4"), TP="8"),
        said(facts(LLAMA, "train", "TP=4 1x8", tensor_model_parallel_size="4"), TP="4"),
    ),
    "checkpoint-mismatch": (
        said(facts("openai/gpt-oss-120b", "quantize", "1x8"), HF_MODEL_CKPT="/scratch/openai/gpt-oss-20b"),
        said(facts("openai/gpt-oss-120b", "quantize", "1x8"), HF_MODEL_CKPT="/scratch/openai/gpt-oss-120b-bf16"),
    ),
    "unknown-variable": (said(DENSE, MLM_MODEL_CPKT="/x"), said(DENSE, MLM_MODEL_CKPT="/x", NCCL_DEBUG="INFO", MY="1")),
    "unread-arguments": (
        said(DENSE, MLM_TRAIN_ARGS="--x"), said(facts(LLAMA, "finetune", "1x8"), MLM_TRAIN_ARGS="--x"),
    ),
    "weights-memory": (facts(KIMI, "quantize", "EP=8 1x8"), facts(KIMI, "quantize", "EP=64 8x8")),
    "memory": (facts(LLAMA, "finetune", "1x8"), DENSE),
}  # fmt: skip


def found(case: Facts, code: str) -> list[Issue]:
    return [issue for issue in rules.check(case) if issue.code == code]


def test_every_rule_has_a_case() -> None:
    assert sorted(CASES) == sorted(rule.code for rule in rules.RULES)


@pytest.mark.parametrize("code", CASES)
def test_the_rule_finds_what_breaks_it(code: str) -> None:
    issues = found(CASES[code][0], code)
    assert issues and all(issue.field and issue.message for issue in issues)
    assert all(issue.fix for issue in issues if issue.severity == "error")


@pytest.mark.parametrize("code", CASES)
def test_the_rule_is_silent_otherwise(code: str) -> None:
    assert found(CASES[code][1], code) == []


@pytest.mark.parametrize(
    ("case", "field", "message", "fix"),
    [
        (facts(KIMI, "eagle3", "EP=60 60x8"), "EP", "384 experts do not divide over EP=60",
         "EP may be 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 384"),
        (facts(KIMI, "quantize", "EP=48 4x8"), "EP",
         "ETP*EP*PP = 1*48*1 = 48 does not divide the 32 GPUs of 4 nodes x 8",
         "ETP*EP*PP must be one of 1, 2, 4, 8, 16, 32; or use --nodes 6"),
        (facts(KIMI, "quantize", "PP=8 1x8"), "PP", "61 layers do not divide over PP=8",
         "PP may be 1, 61; or keep PP=8 with --decoder-first-pipeline-num-layers 7 "
         "--decoder-last-pipeline-num-layers 6 (7+6x8+6)"),
        (facts(KIMI, "eagle3", "TP=8 EP=64 8x8"), "EP",
         "ETP*EP*PP = 8*64*1 = 512 does not divide the 64 GPUs of 8 nodes x 8 (ETP is not set, so it is TP)",
         "set ETP=1; ETP*EP*PP must be one of 1, 2, 4, 8, 16, 32, 64; or use --nodes 64"),
        (facts(LLAMA, "quantize", "TP=8 PP=2 3x8"), "TP",
         "TP*PP*CP = 8*2*1 = 16 does not divide the 24 GPUs of 3 nodes x 8",
         "TP*PP*CP must be one of 1, 2, 3, 4, 6, 8, 12, 24; or use --nodes 2"),
        (facts(QWEN_MOE, "quantize", "TP=8 ETP=1 1x8"), "TP", "4 query groups do not divide over TP=8",
         "TP may be 1, 2, 4; or load a Megatron checkpoint instead of importing"),
        (facts(R1, "convert", "ETP=32 4x8"), "ETP",
         "moe-ffn-hidden-size 2048 over ETP=32 is 64 a rank, which cuts FP8 blocks of 128",
         "ETP may be 1, 2, 4, 8, 16"),
    ],
)  # fmt: skip
def test_a_message_names_the_field_and_the_legal_values(case: Facts, field: str, message: str, fix: str) -> None:
    assert (field, message, fix) in [(issue.field, issue.message, issue.fix) for issue in rules.check(case)]


def test_unsure_values_warn_and_never_refuse() -> None:
    broken = facts(KIMI, "quantize", "TP=3 PP=7 EP=60 1x8")
    assert any(issue.severity == "error" for issue in rules.check(broken))
    assert not [issue for issue in rules.check(broken, unsure=True) if issue.severity == "error"]


def test_a_model_without_known_dimensions_gets_the_rules_on_groups_alone() -> None:
    bare = Facts("quantize", facts(KIMI, "quantize", "TP=3 1x8").asked, facts(KIMI, "quantize", "TP=3 1x8").layout)
    assert [issue.code for issue in rules.check(bare)] == ["world-size"]


# --- reports.md, small inputs ---------------------------------------------------------------


def errors(case: Facts) -> set[str]:
    return {issue.code for issue in rules.check(case) if issue.severity == "error"}


def test_p6_61_layers() -> None:
    assert errors(facts(KIMI, "export", "PP=16 2x8", **UNEVEN)) == set()
    assert errors(facts(KIMI, "export", "PP=8 2x8", **UNEVEN)) == {"layers"}


def test_p10_experts_and_world() -> None:
    assert "experts" in errors(facts(KIMI, "eagle3", "EP=60 60x8"))
    assert "expert-world-size" in errors(facts(KIMI, "quantize", "ETP=2 EP=24 4x8"))


@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        (said(facts(LLAMA, "prune", "1x8"), TARGET_NUM_LAYERS="33"), "prune-targets", "33 is more than the model"),
        (said(facts(LLAMA, "prune", "1x8"), TARGET_NUM_LAYERS="32"), "prune-targets", "nothing would be pruned"),
        (said(facts(LLAMA, "prune", "1x8"), TARGET_NUM_LAYERS="x"), "prune-targets", "'x' is no number"),
        (said(facts(LLAMA, "prune", "1x8"), TARGET_NUM_MOE_EXPERTS="4"), "prune-targets", "has no num-experts"),
        (said(facts(LLAMA, "prune", "1x8", target_num_layers="30"), LAYERS_TO_DROP="1"), "prune-targets", "no other"),
        (said(facts(LLAMA, "prune", "1x8"), LAYERS_TO_DROP="3 33"), "prune-layers", "there is no layer 33"),
        (said(facts(LLAMA, "prune", "1x8"), TARGET_NUM_ATTENTION_HEADS="12"), "prune-widths", "8 query groups"),
        (said(facts(QWEN_MOE, "prune", "1x8"), TARGET_NUM_MOE_EXPERTS="4"), "prune-widths", "goes to 8 experts"),
        (said(facts(QWEN_MOE, "prune", "1x8"), TARGET_FFN_HIDDEN_SIZE="64"), "prune-widths", "the MLPs are experts"),
        (said(facts(NANO, "prune", "1x8"), TARGET_NUM_LAYERS="20"), "prune-layers", "not hybrid ones"),
        (said(facts(QWEN_MOE, "prune", "EP=8 1x8"), TARGET_NUM_LAYERS="24"), "prune-tp", "EP=1, not CP=1 EP=8"),
    ],
)
def test_what_pruning_asks_for_is_held_against_the_model(case: Facts, code: str, message: str) -> None:
    assert any(message in issue.message for issue in found(case, code)), found(case, code)


BITS = {"auto_quantize_bits": "4.8"}


@pytest.mark.parametrize(
    ("case", "field", "message"),
    [
        (facts(LLAMA, "quantize", "1x8", words=("FP8_DEFALT_CFG",)), "QFORMAT", "did you mean 'FP8_DEFAULT_CFG'"),
        (facts(LLAMA, "quantize", "1x8", words=("nvpf4",)), "QFORMAT", "did you mean 'nvfp4'"),
        (facts(LLAMA, "quantize", "1x8", words=("FP8_KV_CFG",)), "QFORMAT", "no format 'FP8_KV_CFG'"),
        (said(facts(LLAMA, "quantize", "1x8"), QFORMAT="FP8_CFG"), "QFORMAT", "no format 'FP8_CFG'"),
        (facts(LLAMA, "quantize", "1x8", export_quant_cfg="W4A16"), "--export-quant-cfg", "mean 'W4A16_NVFP4_CFG'"),
        (facts(LLAMA, "quantize", "1x8", words=("auto",)), "MLM_EXTRA_ARGS", "needs the bits to reach"),
        (said(facts(LLAMA, "quantize", "1x8"), QFORMAT="auto"), "MLM_EXTRA_ARGS", "needs the bits to reach"),
        (facts(LLAMA, "quantize", "1x8", auto_quantize_bits="17"), "--auto-quantize-bits", "above 0 and at most 16"),
        (facts(LLAMA, "quantize", "1x8", auto_quantize_bits="nan"), "--auto-quantize-bits", "above 0 and at most 16"),
        (
            facts(LLAMA, "quantize", "1x8", **BITS, auto_quantize_formats="fp8 NVFP4_DEFAUL_CFG"),
            "--auto-quantize-formats",
            "did you mean 'NVFP4_DEFAULT_CFG'",
        ),
        (facts(LLAMA, "quantize", "1x8", **BITS, auto_quantize_method="kl"), "--auto-quantize-method", "mean 'kl_div'"),
        (facts(LLAMA, "quantize", "1x8", export_kv_cache_quant="fp9"), "--export-kv-cache-quant", "did you mean 'fp8'"),
    ],
)
def test_a_format_that_there_is_not_is_told_with_the_nearest_name(case: Facts, field: str, message: str) -> None:
    (issue,) = found(case, "quantize-format")
    assert (issue.field, message in issue.message) == (field, True), issue


@pytest.mark.parametrize(
    "case",
    [
        facts(LLAMA, "quantize", "1x8"), facts(LLAMA, "quantize", "1x8", words=("FP8",)),
        facts(LLAMA, "quantize", "1x8", words=("general/ptq/nvfp4_default-kv_fp8",)),
        facts(LLAMA, "quantize", "1x8", words=("mine.yaml",)), facts(LLAMA, "quantize", "1x8", recipe="mine"),
        facts(LLAMA, "quantize", "1x8", words=("auto",), **BITS, auto_quantize_formats="fp8 NVFP4_DEFAULT_CFG"),
        facts(LLAMA, "quantize", "1x8", words=("typo",), export_quant_cfg="fp8", export_kv_cache_quant="fp8"),
    ],
)  # fmt: skip
def test_formats_and_recipes_that_there_may_be_pass(case: Facts) -> None:
    assert found(case, "quantize-format") == []


def test_p11_stages() -> None:
    assert errors(facts(LLAMA, "prune", "TP=2 1x8", layers_to_drop="1 2")) == {"prune-tp"}
    assert errors(facts(LLAMA, "quantize", "PP=2 1x8", words=("auto",), auto_quantize_bits="4")) == {"auto-quantize"}


# --- what is known to work ------------------------------------------------------------------

VERIFIED = [
    (KIMI, "eagle3", "TP=8 EP=64 ETP=1 8x8", {}), (KIMI, "export", "PP=16 2x8", UNEVEN),
    (KIMI, "quantize", "EP=64 8x8", {}), (LLAMA, "quantize", "TP=8 1x8", {}), (LLAMA, "finetune", "TP=8 1x8", SHARDED),
    (QWEN_MOE, "quantize", "EP=8 1x8", {}), (GPT_OSS, "quantize", "EP=8 1x8", {}),
    ("Qwen/Qwen3-8B", "prune", "PP=2 1x2", {"target_num_layers": "30"}),
    ("meta-llama/Llama-3.2-1B-Instruct", "eagle3", "1x8", {}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "stage", "layout", "args"), VERIFIED)
def test_a_verified_layout_has_no_error(model: str, stage: str, layout: str, args: dict[str, str]) -> None:
    assert errors(facts(model, stage, layout, **args)) == set()


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_exported_from_one_rank(model: str) -> None:
    allowed = {"stage-unsupported"} if "export" in conf(model).unsupported else set()
    assert errors(facts(model, "export", "1x1")) == allowed


# --- the page -------------------------------------------------------------------------------

PAGE = (ROOT / "docs/rules.md").read_text()


def test_the_page_shows_the_table() -> None:
    assert rules.markdown() in PAGE, f"put this table into docs/rules.md:\n{rules.markdown()}"


def test_the_page_names_every_other_code() -> None:
    text = "".join((ROOT / f"mlmsub/{name}.py").read_text() for name in ("core/checks", "app/resolve", "app/container"))
    codes = re.findall(r"(?:error|warning|info|severity)\(\s*\"([a-z]+(?:-[a-z]+)+)\"", text)
    assert len(codes) > 10
    assert [code for code in codes if f"`{code}`" not in PAGE] == []


def test_the_page_has_no_code_that_is_not_there() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "mlmsub").rglob("*.py"))
    shown = re.findall(r"^\| ((?:`[a-z0-9-]+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    codes = [code for row in shown for code in re.findall(r"`([^`]+)`", row)]
    assert [code for code in codes if f'"{code}"' not in sources] == []


def test_codes_are_unique() -> None:
    assert len(rules.CODES) == len(rules.RULES)
