"""Which tokens made which text: log-probabilities travel with it, and reasoning tokens are counted."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from tandem.models.output.pieces import Kind, Piece
from tandem.types import TokenLogprob

Attribution: TypeAlias = tuple[Kind, TokenLogprob]

_VISIBLE = frozenset({Kind.CONTENT, Kind.REASONING})
_THINKING = frozenset({Kind.REASONING, Kind.THINKING_MARKUP})


class Ledger:
    """Tokens whose text is not decided yet, oldest first, each with the offset at which its text ends.

    A token is settled when a piece covers the last of its characters. Its log-probability goes with the first text
    that shows some of it; tokens that are markup throughout have none to go with and are not reported. It counts as
    reasoning if its first character is reasoning, or a marker around it.
    """

    __slots__ = ("_added", "_decided", "_first", "_open", "_shown", "_start", "_waiting", "reasoning", "settled")

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, TokenLogprob | None]] = deque()
        # Tokens that end in the middle of a character, whose end is therefore not known yet.
        self._open: list[TokenLogprob | None] = []
        self._added = 0
        self._decided = 0
        self._start = 0
        self._first: Kind | None = None
        self._shown: Kind | None = None
        #: Tokens settled so far, and how many of them are reasoning.
        self.settled = 0
        self.reasoning = 0

    def add(self, length: int, pending: bool, logprob: TokenLogprob | None) -> None:
        """A token made `length` characters certain; `pending`: it also ends in the middle of one."""
        self._added += length
        if length or not pending:
            for earlier in self._open:
                self._waiting.append((self._added, earlier))
            self._open.clear()
        if pending:
            self._open.append(logprob)
        else:
            self._waiting.append((self._added, logprob))

    def end(self, length: int) -> None:
        """The answer is over; `length` characters stand for the bytes of a last, unfinished one."""
        self._added += length
        for logprob in self._open:
            self._waiting.append((self._added, logprob))
        self._open.clear()

    def settle(self, piece: Piece) -> list[Attribution]:
        """The log-probabilities that this piece decides on, with the kind of text that each belongs to."""
        result: list[Attribution] = []
        kind = piece.kind
        begin, end = self._decided, self._decided + piece.length
        self._decided = end
        visible = kind in _VISIBLE
        while self._waiting:
            token_end, logprob = self._waiting[0]
            empty = token_end == self._start
            if self._first is None and (self._start < end or empty):
                self._first = kind
            if visible and self._shown is None and (empty or (self._start < end and token_end > begin)):
                self._shown = kind
            if token_end > end:
                break
            self._waiting.popleft()
            self._close(logprob, token_end, result)
        return result

    def rest(self) -> list[Attribution]:
        """What is left at the end of an answer: tokens without text. Tokens that were cut away stay unreported."""
        result: list[Attribution] = []
        while self._waiting and self._waiting[0][0] <= self._decided:
            token_end, logprob = self._waiting.popleft()
            self._shown = self._shown or Kind.CONTENT
            self._close(logprob, token_end, result)
        return result

    def _close(self, logprob: TokenLogprob | None, token_end: int, result: list[Attribution]) -> None:
        self.settled += 1
        if self._first in _THINKING:
            self.reasoning += 1
        if logprob is not None and self._shown is not None:
            result.append((self._shown, logprob))
        self._start = token_end
        self._first = self._shown = None
