"""Sets of token positions, against Python's own sets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kv.coverage import Coverage
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


rectangles = st.tuples(spans.map(lambda span: Span(span.start % 6, span.end % 7)), spans)


@given(st.lists(st.tuples(st.booleans(), rectangles), max_size=10), rectangles)
def test_coverage_behaves_like_a_set_of_places(
    steps: list[tuple[bool, tuple[Span, Span]]], probe: tuple[Span, Span]
) -> None:
    heads = Span(0, 6)
    coverage, places = Coverage(heads), set[tuple[int, int]]()

    def of(rectangle: tuple[Span, Span]) -> set[tuple[int, int]]:
        return {(head, token) for head in range(*rectangle[0]) for token in range(*rectangle[1])}

    for adds, rectangle in steps:
        if rectangle[0].length <= 0 or rectangle[1].length <= 0:
            continue
        if not adds:
            coverage.forget_from(rectangle[1].start, rectangle[0])
            places -= {place for place in places if place[0] in range(*rectangle[0]) and place[1] >= rectangle[1].start}
        elif of(rectangle) & places:
            with pytest.raises(ValueError, match="overlap"):
                coverage.add(*rectangle)
        else:
            coverage.add(*rectangle)
            places |= of(rectangle)
    if probe[0].length > 0:
        assert coverage.covers(*probe) == (of(probe) <= places)
        assert coverage.overlaps(*probe) == bool(of(probe) & places)
        copy = Coverage(heads)
        copy.reset(coverage, probe[0])
        assert copy.covers(*probe) == coverage.covers(*probe)
        assert copy.ends() <= coverage.ends()
    end = coverage.end_of(probe[1].start)
    assert all((head, token) in places for head in range(6) for token in range(probe[1].start, end))
    assert any((head, end) not in places for head in range(6))
