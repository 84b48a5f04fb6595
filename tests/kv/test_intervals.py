"""Sets of token positions, against Python's own sets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kv.intervals import Intervals, Span, merge

spans = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda ends: Span(min(ends), max(ends)))


@given(st.lists(spans, max_size=12), spans)
def test_behaves_like_a_set(added: list[Span], probe: Span) -> None:
    intervals, positions = Intervals(), set[int]()
    for span in added:
        new = set(range(*span))
        if new and not new & positions:
            intervals.add(*span)
            positions |= new
        else:
            with pytest.raises(ValueError, match="overlaps"):
                intervals.add(*span)
    assert {position for span in intervals.spans() for position in range(*span)} == positions
    assert intervals.count == len(positions)
    assert intervals.overlaps(*probe) == bool(set(range(*probe)) & positions)
    assert intervals.covers(*probe) == (set(range(*probe)) <= positions)
    clipped = intervals.clipped(*probe)
    assert {position for span in clipped.spans() for position in range(*span)} == positions & set(range(*probe))
    end = intervals.end_of(probe.start)
    assert set(range(probe.start, end)) <= positions
    assert end not in positions
    assert all(left.end < right.start for left, right in zip(intervals.spans(), intervals.spans()[1:], strict=False))


@given(st.lists(spans, max_size=12))
def test_merge_is_the_union(given_spans: list[Span]) -> None:
    merged = merge(given_spans)
    assert {p for span in merged for p in range(*span)} == {p for span in given_spans for p in range(*span)}
    assert all(left.end < right.start for left, right in itertools.pairwise(merged))
