"""A set of token positions, kept as disjoint half-open intervals."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple


class Span(NamedTuple):
    """The positions `[start, end)`."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """How many positions."""
        return self.end - self.start


def merge(spans: list[Span]) -> tuple[Span, ...]:
    """The union, sorted, touching spans joined, empty ones dropped."""
    merged: list[Span] = []
    for span in sorted(spans):
        if span.length <= 0:
            continue
        if merged and span.start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return tuple(merged)


class Intervals:
    """Grows by disjoint spans; a position can be added only once."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, spans: tuple[Span, ...] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for span in spans:
            self.add(span.start, span.end)

    def spans(self) -> tuple[Span, ...]:
        """The intervals, in order, no two of them touching."""
        return tuple(Span(start, end) for start, end in zip(self._starts, self._ends, strict=True))

    @property
    def count(self) -> int:
        """How many positions there are."""
        return sum(self._ends) - sum(self._starts)

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any position of `[start, end)` is in the set."""
        before = bisect_right(self._starts, start) - 1
        if before >= 0 and self._ends[before] > start and start < end:
            return True
        return before + 1 < len(self._starts) and self._starts[before + 1] < end

    def covers(self, start: int, end: int) -> bool:
        """Whether all positions of `[start, end)` are in the set."""
        before = bisect_right(self._starts, start) - 1
        return start >= end or (before >= 0 and self._ends[before] >= end)

    def end_of(self, start: int) -> int:
        """Up to where all positions from `start` on are in the set; `start` itself if it is not."""
        before = bisect_right(self._starts, start) - 1
        return max(start, self._ends[before]) if before >= 0 else start

    def add(self, start: int, end: int) -> None:
        """Add `[start, end)`.

        Raises:
            ValueError: it is empty, or part of it is there already.
        """
        if start >= end or self.overlaps(start, end):
            raise ValueError(f"[{start}, {end}) is empty or overlaps what is there")
        index = bisect_right(self._starts, start)
        joins_left = index > 0 and self._ends[index - 1] == start
        joins_right = index < len(self._starts) and self._starts[index] == end
        if joins_left and joins_right:
            self._ends[index - 1] = self._ends.pop(index)
            del self._starts[index]
        elif joins_left:
            self._ends[index - 1] = end
        elif joins_right:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)

    def clipped(self, start: int, end: int) -> Intervals:
        """What of it lies in `[start, end)`."""
        cut = (Span(max(start, span.start), min(end, span.end)) for span in self.spans())
        return Intervals(tuple(span for span in cut if span.length > 0))
