"""Groups of ranks, and layers on pipeline stages."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlmsub.core import layout
from mlmsub.core.layout import Layout, Pipeline, SplitError, divisors, split, split_pattern, split_string

SIZES = st.integers(1, 16)
LAYOUTS = st.builds(
    Layout, tp=SIZES, pp=SIZES, cp=st.integers(1, 4), ep=SIZES, etp=st.none() | SIZES,
    nodes=st.integers(1, 64), gpus_per_node=st.sampled_from([1, 4, 8]),
)  # fmt: skip


@given(LAYOUTS)
def test_both_kinds_of_groups_multiply_to_the_world(one: Layout) -> None:
    groups = one.groups()
    if one.fits:
        assert prod(groups[name] for name in ("TP", "CP", "DP", "PP")) == one.world
        assert prod(groups[name] for name in ("ETP", "EP", "EDP", "PP")) == one.world
    else:
        assert 0 in (one.dp, one.edp)


@given(LAYOUTS)
def test_a_layout_is_written_and_read_back(one: Layout) -> None:
    assert Layout.parse(one.render()) == one


@given(LAYOUTS, st.integers(1, 5))
def test_the_multiple_is_what_the_world_must_be(one: Layout, times: int) -> None:
    assert Layout(one.tp, one.pp, one.cp, one.ep, one.etp, nodes=one.multiple * times).fits


def test_etp_unset_is_tp() -> None:
    assert Layout(tp=8, ep=64, nodes=64, gpus_per_node=8).expert_tp == 8
    assert Layout(tp=8, ep=64, etp=1, nodes=8, gpus_per_node=8).edp == 1


@pytest.mark.parametrize("text", ["TP=0 1x1", "TP=8 TP=4", "8", "tp=8", "TP=8 2x8 2x8", "DP=2"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Layout.parse(text)


@pytest.mark.parametrize("text", ["8x", "-1", "0", "1.5", "٣"])
def test_a_variable_that_is_no_number_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"^PP must be a number"):
        Layout.of_variables({"TP": "2", "PP": text}, 1, 8)


def test_the_layout_of_variables() -> None:
    found = Layout.of_variables({"TP": " 8 ", "EP": "64", "ETP": "", "X": "y"}, 8, 8)
    assert found == Layout(tp=8, ep=64, nodes=8, gpus_per_node=8)


# --- pipeline stages ------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(1, 64), st.none() | st.integers(0, 20), st.none() | st.integers(0, 20))
def test_a_split_loses_no_layer(layers: int, pp: int, first: int | None, last: int | None) -> None:
    try:
        found = split(layers, pp, first, last)
    except SplitError as error:
        assert error.fix
        return
    assert (found.layers, len(found.counts)) == (layers, pp)
    assert first is None or found.counts[0] == first
    assert last is None or found.counts[-1] == last
    middle = found.counts[(first is not None) : pp - (last is not None)]
    assert len(set(middle)) <= 1


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40))
def test_a_pipeline_is_written_and_read_back(counts: list[int]) -> None:
    one = Pipeline(tuple(counts))
    assert Pipeline.parse(one.render()) == one
    assert [one.starts[i] + one.counts[i] for i in range(len(counts) - 1)] == list(one.starts[1:])


@given(st.integers(3, 200), st.integers(3, 32))
def test_the_counts_that_a_fix_names_do_fit(layers: int, pp: int) -> None:
    found = layout.ends(layers, pp)
    if found:
        assert split(layers, pp, *found).layers == layers


def test_the_references_export_of_kimi() -> None:
    assert split(61, 16, 3, 2).render() == "3+14x4+2"
    assert layout.ends(61, 16) == (3, 2)


def test_61_layers_over_8() -> None:
    with pytest.raises(SplitError, match="61 layers do not divide over PP=8") as even:
        split(61, 8)
    assert "PP may be 1, 61" in even.value.fix
    assert "7+6x8+6" in even.value.fix
    with pytest.raises(SplitError, match=r"leave 56, which do not divide over 6 other stages \(PP=8\)"):
        split(61, 8, 3, 2)


@pytest.mark.parametrize(
    ("layers", "pp", "first", "last"),
    [(30, 4, None, None), (8, 1, 4, None), (8, 2, 4, 3), (8, 2, 9, None), (4, 4, 3, 3)],
)
def test_what_megatron_would_refuse(layers: int, pp: int, first: int | None, last: int | None) -> None:
    with pytest.raises(SplitError):
        split(layers, pp, first, last)


def test_a_hybrid_pattern_with_borders() -> None:
    assert split_pattern("M-M-|M*|M-", 3).counts == (4, 2, 2)
    assert split_pattern("MM|M*|M-|M", 2).counts == (4, 3)  # two segments a stage, interleaved
    with pytest.raises(SplitError, match="3 segments"):
        split_pattern("M|M|M", 2)


@pytest.mark.parametrize(
    ("text", "pp", "counts"),
    [("Et|tt|tL", 3, (1, 2, 1)), ("Et*3|(tt|)*2,L", 4, (3, 2, 2, 0)), ("Ett|tt|tt|ttL", 2, (4, 4))],
)
def test_a_pipeline_layout_string(text: str, pp: int, counts: tuple[int, ...]) -> None:
    assert split_string(text, pp, sum(counts)).counts == counts


@pytest.mark.parametrize(("text", "pp", "layers"), [("Et|tL", 3, 2), ("Et|tL", 2, 3), ("E[t]", 1, 1)])
def test_a_pipeline_layout_string_that_does_not_fit(text: str, pp: int, layers: int) -> None:
    with pytest.raises(SplitError):
        split_string(text, pp, layers)


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
