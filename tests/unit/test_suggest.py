"""Suggested layouts: legal, fitting, best first, the reference's among them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from modelfacts import KIMI, LLAMA, MODELS, NANO, QWEN_MOE, conf, facts

from mlmsub.core import rules
from mlmsub.core.layout import Layout
from mlmsub.core.suggest import COMFORT, Suggestion, suggest


def layouts(found: list[Suggestion]) -> list[tuple[int, int, int, int]]:
    return [(one.layout.tp, one.layout.pp, one.layout.ep, one.layout.expert_tp) for one in found]


def test_the_references_eagle3_of_kimi_is_among_them() -> None:
    assert (8, 1, 64, 1) in layouts(suggest(facts(KIMI, "eagle3", "8x8"), [8]))


def test_the_references_export_of_kimi_is_the_first() -> None:
    best = suggest(facts(KIMI, "export", "2x8"), [2])[0]
    assert (best.layout, best.pipeline.render()) == (Layout(pp=16, nodes=2, gpus_per_node=8), "3+14x4+2")
    assert best.variables() == {
        "PP": "16",
        "MLM_EXTRA_ARGS": "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2",
    }


@given(
    st.sampled_from(MODELS), st.sampled_from(["quantize", "eagle3", "finetune", "export"]), st.sampled_from([1, 2, 8]),
    st.sampled_from(["h100", "h200"]),
)  # fmt: skip
def test_what_is_suggested_is_legal_and_fits(model: str, stage: str, nodes: int, gpu: str) -> None:
    if stage in conf(model).unsupported:
        return
    asked = facts(model, stage, f"{nodes}x8", gpu)
    for one in suggest(asked, [nodes]):
        args = {name.replace("-", "_"): value for name, value in one.arguments.items()}
        again = facts(model, stage, one.layout.render(), gpu, **args)
        assert not [issue for issue in rules.check(again) if issue.severity == "error" or issue.code == "memory"]
        assert one.reason


def test_comfortable_comes_before_tight_and_simple_before_split() -> None:
    found = suggest(facts(LLAMA, "quantize", "1x8"), [1])
    assert layouts(found)[0] == (1, 1, 1, 1)
    asked = facts(KIMI, "eagle3", "8x8")
    shares = [one.memory.total / (asked.gpu_gib or 1) > COMFORT for one in suggest(asked, [8])]
    assert shares == sorted(shares)


def test_a_free_number_of_nodes_is_the_smallest_that_works() -> None:
    found = suggest(facts(KIMI, "quantize", "1x8"))
    assert {one.layout.nodes for one in found} == {4} or {one.layout.nodes for one in found} == {8}
    assert not suggest(facts(KIMI, "quantize", "1x8"), [1, 2])


def test_training_gets_the_arguments_that_it_needs() -> None:
    for one in suggest(facts(QWEN_MOE, "finetune", "2x8", sequence_parallel="false"), [2]):
        assert one.arguments["use-distributed-optimizer"] == "true"
        assert one.layout.tp == 1 or one.arguments["sequence-parallel"] == "true"


@pytest.mark.parametrize("model", [KIMI, NANO])
def test_quantizing_experts_keeps_tp_or_ep_at_one(model: str) -> None:
    assert all(1 in (one.layout.tp, one.layout.ep) for one in suggest(facts(model, "quantize", "16x8"), [16]))


def test_nothing_for_a_model_that_is_too_large() -> None:
    assert suggest(facts(KIMI, "finetune", "1x8"), [1]) == []
