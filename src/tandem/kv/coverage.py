"""Which tokens of which heads are there. Heads that always come together, as they mostly do, share one set."""

from __future__ import annotations

import itertools

from tandem.kv.intervals import Intervals, Span


class Coverage:
    """Grows by rectangles of heads and tokens; no place can be added twice.

    Args:
        heads: the heads that there are.
    """

    __slots__ = ("_groups",)

    def __init__(self, heads: Span) -> None:
        self._groups: list[tuple[Span, Intervals]] = [(heads, Intervals())]

    def overlaps(self, heads: Span, tokens: Span) -> bool:
        """Whether any of these tokens of any of these heads is there."""
        return any(known.overlaps(*tokens) for known in self._of(heads))

    def covers(self, heads: Span, tokens: Span) -> bool:
        """Whether all of these tokens of all of these heads are there."""
        return all(known.covers(*tokens) for known in self._of(heads))

    def add(self, heads: Span, tokens: Span) -> None:
        """Add these tokens of these heads.

        Raises:
            ValueError: there are none, or some are there already. Nothing was added.
        """
        if len(self._groups) == 1 and heads == self._groups[0][0]:
            # The common case; the set refuses what it has already.
            self._groups[0][1].add(*tokens)
            return
        if self.overlaps(heads, tokens):
            raise ValueError(f"tokens {tokens} of heads {heads} overlap what is there")
        self._split(heads)
        for group, known in self._groups:
            if heads.start <= group.start < heads.end:
                known.add(*tokens)

    def end_of(self, start: int) -> int:
        """Up to where all tokens from `start` on are there in all heads."""
        return min(known.end_of(start) for _, known in self._groups)

    def ends(self) -> set[int]:
        """Where stretches of tokens end, in any head."""
        return {span.end for _, known in self._groups for span in known.spans()}

    def forget_from(self, token: int, heads: Span) -> None:
        """Drop `token` and everything after it in these heads."""
        self._split(heads)
        self._groups = [
            (group, known.clipped(0, token) if heads.start <= group.start < heads.end else known)
            for group, known in self._groups
        ]

    def reset(self, other: Coverage, heads: Span) -> None:
        """Make these heads equal to another coverage's."""
        self._split(heads)
        other._split(heads)
        rest = [one for one in self._groups if not heads.start <= one[0].start < heads.end]
        taken = [
            (group, Intervals(known.spans()))
            for group, known in other._groups
            if heads.start <= group.start < heads.end
        ]
        self._groups = sorted([*rest, *taken], key=lambda one: one[0])

    def _of(self, heads: Span) -> list[Intervals]:
        return [known for group, known in self._groups if group.start < heads.end and heads.start < group.end]

    def _split(self, heads: Span) -> None:
        """Make `heads` begin and end where groups do."""
        if len(self._groups) == 1 and heads == self._groups[0][0]:
            return
        groups: list[tuple[Span, Intervals]] = []
        for group, known in self._groups:
            cuts = sorted({group.start, group.end, *(cut for cut in heads if group.start < cut < group.end)})
            pieces = [Span(start, end) for start, end in itertools.pairwise(cuts)]
            groups.append((pieces[0], known))
            groups.extend((piece, Intervals(known.spans())) for piece in pieces[1:])
        self._groups = groups
