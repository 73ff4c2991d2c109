"""Packing, sampling and the draft vocabulary, as properties of what they return."""

from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlmsub.runtime.data.packing import Order, draft_vocabulary, pack, shares, split_bounds
from mlmsub.runtime.errors import StageError

CAPACITY = 50
LENGTHS = st.lists(st.integers(1, CAPACITY))


def rows_of(lengths: list[int], open_rows: int) -> list[list[int]]:
    order, offsets = pack(lengths, CAPACITY, open_rows)
    return [order[first:last] for first, last in pairwise(offsets)]


@given(LENGTHS, st.integers(1, 5))
def test_every_document_is_in_one_row_that_holds_it(lengths: list[int], open_rows: int) -> None:
    rows = rows_of(lengths, open_rows)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    for row in rows:
        assert row == sorted(row) and 0 < sum(lengths[document] for document in row) <= CAPACITY


@given(LENGTHS)
def test_no_two_rows_would_have_fitted_into_one(lengths: list[int]) -> None:
    """With all rows open; so at most one row is less than half full."""
    used = sorted(sum(lengths[document] for document in row) for row in rows_of(lengths, len(lengths) + 1))
    assert len(used) < 2 or used[0] + used[1] > CAPACITY


def test_the_fullest_row_with_room_is_taken() -> None:
    assert pack([30, 40, 10, 20], 50) == ([0, 3, 1, 2], [0, 2, 4])


def test_the_fullest_row_is_closed_when_too_many_are_open() -> None:
    lengths = [30, 40, 45, 10]  # the third closes the row of 40, which the last would have filled
    assert pack(lengths, 50, open_rows=3) == ([0, 1, 3, 2], [0, 1, 3, 4])
    assert pack(lengths, 50, open_rows=2) == ([0, 3, 1, 2], [0, 2, 3, 4])


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="document 1 has 51 tokens"):
        pack([1, 51], 50)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=3).filter(any), st.integers(0, 10**6))
def test_splits_are_all_documents_by_their_shares(parts: list[int], documents: int) -> None:
    bounds = split_bounds(",".join(map(str, parts)), documents)
    assert list(bounds) == ["train", "valid", "test"]
    ends = [end for bound in bounds.values() for end in bound]
    assert ends == sorted(ends) and ends[0] == 0 and ends[-1] == documents
    assert ends[1::2][:-1] == ends[2::2]
    for part, (first, last) in zip(parts, bounds.values(), strict=False):
        assert abs((last - first) - documents * part / sum(parts)) <= 1
        assert part or first == last


@pytest.mark.parametrize("split", ["", "0,0", "1,2,3,4", "a", "-1,2", "nan", "inf,1"])
def test_a_split_that_is_none(split: str) -> None:
    with pytest.raises(StageError, match="--split"):
        split_bounds(split, 10)


@given(st.integers(1, 40), st.integers(0, 2**31), st.integers(0, 5))
def test_an_epoch_has_every_row_once(rows: int, seed: int, epoch: int) -> None:
    pytest.importorskip("numpy")
    order = Order(rows, seed)
    first = [order[sample] for sample in range(epoch * rows, (epoch + 1) * rows)]
    assert sorted(first) == list(range(rows))
    again = Order(rows, seed)
    assert [again[sample] for sample in reversed(range(epoch * rows, (epoch + 1) * rows))] == first[::-1]


def test_the_order_is_another_in_each_epoch_and_for_each_seed() -> None:
    pytest.importorskip("numpy")
    order, other = Order(50, 1), Order(50, 2)
    epochs = [[order[epoch * 50 + sample] for sample in range(50)] for epoch in range(2)]
    assert epochs[0] != epochs[1] and epochs[0] != [other[sample] for sample in range(50)]
    # a checkpoint of today is resumed by the versions of tomorrow
    assert epochs[0][:5] == [23, 43, 11, 48, 8]
    assert [Order(50, None)[sample] for sample in (0, 7, 57)] == [0, 7, 7]


@given(st.integers(0, 99), st.sampled_from([(1, 8), (2, 4), (4, 2), (4, 1), (8, 1)]), st.integers(1, 4))
def test_a_step_has_the_same_samples_in_every_layout(consumed: int, layout: tuple[int, int], steps: int) -> None:
    """Global batches of 8, from sample ``consumed`` on."""
    micro_batch, ranks = layout
    found = []
    for rank in range(ranks):
        count = steps * 8 // (micro_batch * ranks)
        found += [sample for some in islice(shares(consumed, micro_batch, rank, ranks), count) for sample in some]
    assert sorted(found) == list(range(consumed, consumed + 8 * steps))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 5), st.data())
def test_the_draft_vocabulary_is_the_most_frequent_tokens(counts: list[int], more: int, data: st.DataObject) -> None:
    np = pytest.importorskip("numpy")
    rows = len(counts) + more
    size = data.draw(st.integers(1, rows))
    d2t, t2d, coverage = draft_vocabulary(np.array(counts), size, rows)
    known = [draft + int(offset) for draft, offset in enumerate(d2t)]
    assert known == sorted(set(known)) and len(known) == size
    assert [token for token in range(rows) if t2d[token]] == known
    padded = counts + [0] * more
    assert sorted((padded[token] for token in known), reverse=True) == sorted(padded, reverse=True)[:size]
    assert coverage == pytest.approx(sum(padded[token] for token in known) / max(sum(counts), 1))


def test_a_draft_vocabulary_cannot_be_larger_than_the_targets() -> None:
    np = pytest.importorskip("numpy")
    with pytest.raises(StageError, match="draft vocabulary: 5 tokens of 4"):
        draft_vocabulary(np.ones(4, int), 5)
