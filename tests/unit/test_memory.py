"""Parameter counts against known totals, and memory that grows and shrinks as it must."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from modelfacts import KIMI, LLAMA, MODELS, NANO, QWEN_MOE, conf, facts

from mlmsub.core import architecture, memory
from mlmsub.core.architecture import Architecture, parse_words
from mlmsub.core.layout import Layout, split
from mlmsub.core.memory import Work

# published totals (model cards, technical reports) or the sums of the checkpoints' tensors
TOTALS = {
    KIMI: 1.03e12, "deepseek-ai/DeepSeek-R1": 671e9, "deepseek-ai/DeepSeek-V2-Lite": 15.7e9, LLAMA: 8.03e9,
    "meta-llama/Llama-3.1-405B-Instruct": 405.85e9, "meta-llama/Llama-3.2-1B-Instruct": 1.236e9, QWEN_MOE: 30.5e9,
    "Qwen/Qwen3-235B-A22B": 235.1e9, "Qwen/Qwen3-8B": 8.19e9, "Qwen/Qwen3-0.6B": 596e6,
    "Qwen/Qwen2.5-0.5B-Instruct": 494e6, "Qwen/Qwen2.5-7B-Instruct": 7.62e9, "openai/gpt-oss-20b": 20.9e9,
    "openai/gpt-oss-120b": 116.8e9, NANO: 31.6e9, "meta-llama/Llama-4-Scout-17B-16E-Instruct": 107.8e9,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 400.7e9, "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": 120.7e9,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 8.89e9, "nvidia/Nemotron-H-8B-Base-8K": 8.1e9,
    "nvidia/Nemotron-Mini-4B-Instruct": 4.19e9,
}  # fmt: skip
ACTIVE = {
    KIMI: 32.9e9,
    "deepseek-ai/DeepSeek-R1": 37.5e9,
    QWEN_MOE: 3.35e9,
    "Qwen/Qwen3-235B-A22B": 22.2e9,
    NANO: 3.6e9,
}


def arch(model: str) -> Architecture:
    found = architecture.read(conf(model).megatron_args)
    assert found is not None
    return found


@pytest.mark.parametrize("model", [model for model in TOTALS if model in MODELS])
def test_the_parameters_are_the_published_number(model: str) -> None:
    assert arch(model).parameters == pytest.approx(TOTALS[model], rel=0.01)


@pytest.mark.parametrize("model", ACTIVE)
def test_the_active_parameters(model: str) -> None:
    assert arch(model).active_parameters == pytest.approx(ACTIVE[model], rel=0.01)


def test_smollm2_exactly() -> None:
    args = conf("HuggingFaceTB/SmolLM2-135M-Instruct").megatron_args
    found = architecture.read({**args, "padded-vocab-size": "49152"})
    assert found and found.parameters == 134_515_008


@pytest.mark.parametrize("model", MODELS)
def test_every_conf_can_be_read(model: str) -> None:
    assert arch(model).layers


# --- reading arguments ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--a 1 --b --c=x=y --a 2", {"a": "2", "b": "true", "c": "x=y"}),
        ("--window-size 127,0 --list 1 2 3", {"window-size": "127,0", "list": "1 2 3"}),
        ("stray -x --a -1", {"a": "-1"}),
        ("", {}),
    ],
)
def test_an_argument_line(line: str, found: dict[str, str]) -> None:
    assert parse_words(line.split()) == found


@pytest.mark.parametrize(
    ("text", "layers", "found"),
    [("[0]*1+[1]*3", 4, "deee"), ("([0,1])*2", 4, "dede"), ("2", 4, "eded"), ("1", 2, "ee"), ("[0, 1, 1]", 3, "dee")],
)
def test_which_layers_have_experts(text: str, layers: int, found: str) -> None:
    args = {"num-layers": str(layers), "num-experts": "8", "moe-layer-freq": text}
    assert architecture.layer_letters(args) == found


@pytest.mark.parametrize("text", ["[0]*3", "__import__('os')", "[0]*10**9", "[0]*99999999", "[1,", ""])
def test_a_pattern_that_cannot_be_read_gives_no_model(text: str) -> None:
    args = {
        "num-layers": "4",
        "hidden-size": "8",
        "num-attention-heads": "2",
        "num-experts": "8",
        "moe-layer-freq": text,
    }
    assert architecture.read(args) is None


def test_query_groups_count_only_with_their_flag() -> None:
    args = {"num-layers": "1", "hidden-size": "8", "num-attention-heads": "4", "num-query-groups": "2"}
    without, having = architecture.read(args), architecture.read({**args, "group-query-attention": "true"})
    assert without and having and (without.groups, having.groups) == (4, 2)


def test_a_hybrid_model_is_counted_by_letters() -> None:
    letters = arch(NANO).layers
    assert (len(letters), set(letters)) == (52, set("M*E"))


# --- memory ---------------------------------------------------------------------------------

LLAMA_TRAINING = Work("training", batch=1, length=4096, distributed_optimizer=True)


def total(model: str, layout: Layout, work: Work) -> float:
    found = arch(model)
    return memory.worst(memory.estimate(found, layout, split(len(found.layers), layout.pp), work)).total


def test_training_takes_18_bytes_a_parameter_without_sharding() -> None:
    one = memory.estimate(arch(LLAMA), Layout(), split(32, 1), replace(LLAMA_TRAINING, length=1))[0]
    assert (one.weights + one.gradients + one.optimizer) * memory.GIB / 8.03e9 == pytest.approx(18, rel=0.001)


def test_the_distributed_optimizer_shards_over_data_parallel_ranks() -> None:
    found = [
        memory.estimate(arch(LLAMA), Layout(nodes=n), split(32, 1), LLAMA_TRAINING)[0].optimizer for n in (1, 2, 8)
    ]
    assert found[0] == pytest.approx(2 * found[1]) == pytest.approx(8 * found[2])


def test_experts_are_sharded_by_their_own_groups() -> None:
    """EP x EDP and not DP: with TP=8 EP=64 on 64 GPUs one copy of each expert exists, and its state is not shared."""
    layout = Layout(tp=8, ep=64, etp=1, nodes=8, gpus_per_node=8)
    one = memory.estimate(arch(KIMI), layout, split(61, 1), LLAMA_TRAINING)[0]
    experts = arch(KIMI).part("experts").expert * 60 / 64
    assert one.optimizer * memory.GIB > 12 * experts


def test_stages_differ_by_embedding_and_head() -> None:
    stages = memory.estimate(arch(LLAMA), Layout(pp=4, nodes=4), split(32, 4), LLAMA_TRAINING)
    assert stages[0].weights == pytest.approx(stages[3].weights, rel=0.001)  # embedding and head, untied
    assert stages[0].weights > stages[1].weights == stages[2].weights
    assert stages[0].activations > stages[1].activations > stages[2].activations  # micro batches in flight


def test_export_works_in_main_memory() -> None:
    stages = memory.estimate(arch(KIMI), Layout(pp=16, nodes=16), split(61, 16, 3, 2), Work("host"))
    assert sum(stage.host for stage in stages) * memory.GIB == pytest.approx(2 * 1.0264e12, rel=0.001)
    assert memory.worst(stages).total < 2


def test_eagle3_holds_the_whole_vocabulary_on_each_rank() -> None:
    work = Work("eagle3", batch=1, length=4096)
    one, eight = (memory.estimate(arch(LLAMA), Layout(tp=tp, nodes=tp), split(32, 1), work)[0] for tp in (1, 8))
    assert eight.logits > 0.85 * one.logits
    assert eight.weights < one.weights / 7


@given(
    st.sampled_from([LLAMA, QWEN_MOE, KIMI, NANO]), st.sampled_from(["forward", "eagle3", "training"]),
    st.integers(1, 8), st.sampled_from([512, 4096, 16384]),
)  # fmt: skip
def test_more_tokens_never_take_less(model: str, kind: memory.Kind, batch: int, length: int) -> None:
    work = Work(kind, batch=batch, length=length)
    at = Layout(ep=8 if arch(model).experts else 1, nodes=8)
    assert total(model, at, work) <= total(model, at, replace(work, batch=batch + 1))
    assert total(model, at, work) <= total(model, at, replace(work, length=length * 2))


@given(st.sampled_from([LLAMA, QWEN_MOE, KIMI]), st.sampled_from(["forward", "training"]), st.sampled_from([2, 4, 8]))
def test_more_tensor_parallelism_never_takes_more(model: str, kind: memory.Kind, tp: int) -> None:
    work = Work(kind, batch=4, length=4096, sequence_parallel=True)
    less, more = (memory.estimate(arch(model), Layout(tp=t, nodes=t), split(len(arch(model).layers), 1), work)[0]
                  for t in (tp // 2, tp))  # fmt: skip
    assert more.allocated <= less.allocated


def test_recomputation_saves_activations() -> None:
    none, full = (
        memory.estimate(arch(LLAMA), Layout(), split(32, 1), replace(LLAMA_TRAINING, recompute=how))[0].activations
        for how in ("none", "full")
    )  # fmt: skip
    assert full < none / 5


@pytest.mark.parametrize(
    ("memory_gb", "kind", "gib"),
    [(0, "h100", 79.6), (0, "H200", 140.3), (0, "nvidia_h100_80gb", 79.6), (0, "gb200", 185.1), (96, "h100", 95.5),
     (0, "", None), (0, "v100", None)],
)  # fmt: skip
def test_the_memory_of_a_kind_of_gpu(memory_gb: int, kind: str, gib: float | None) -> None:
    found = memory.gpu_gib(memory_gb, kind)
    assert found == (pytest.approx(gib, abs=0.1) if gib else None)


def test_the_work_of_a_stage() -> None:
    args = {"seq-length": "8192", "micro-batch-size": "2", "recompute-activations": "true", "calib-batch-size": "64"}
    assert memory.work_of("train", args) == Work("training", 2, 8192, recompute="selective", dropout=True)
    quantize = memory.work_of("quantize", args)
    assert (quantize.batch, quantize.length, quantize.logits) == (64, 512, False)
    assert memory.work_of("quantize", {}).batch == 32
    assert facts(LLAMA, "export", "PP=2 1x8").work == Work("host", 1, 4096, dropout=False)
