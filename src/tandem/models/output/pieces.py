"""The answer's text cut into pieces, each with what it is. The stages of the output side hand these on.

The pieces of an answer cover its decoded text exactly and in order: `length` counts the characters of that text a
piece stands for, whether they are shown (text), turned into something else (calls) or dropped (markup).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

from tandem.types import ToolCallDelta


class Kind(IntEnum):
    """What a piece is."""

    CONTENT = 0
    REASONING = 1
    CALL = 2
    MARKUP = 3
    THINKING_MARKUP = 4


class Piece(NamedTuple):
    """Some of the answer.

    Attributes:
        kind: what it is.
        length: characters of the decoded text that it stands for.
        text: what to show; empty for calls and markup.
        call: what to report of a tool call.
    """

    kind: Kind
    length: int
    text: str = ""
    call: ToolCallDelta | None = None


class Channels(Protocol):
    """Cuts text into pieces. One object an answer; text of which the meaning is not yet clear is kept back."""

    @property
    def completed_calls(self) -> int:
        """Tool calls that are whole."""

    @property
    def ended(self) -> bool:
        """No more of the answer is wanted: its one allowed tool call is complete."""

    def push(self, text: str, out: list[Piece]) -> None:
        """Append the pieces that `text` decides."""

    def finish(self, cut: bool, out: list[Piece]) -> None:
        """Append everything kept back. `cut`: the answer was cut off, the model did not end it."""


class PlainChannels:
    """An answer that is nothing but text."""

    completed_calls = 0
    ended = False

    def push(self, text: str, out: list[Piece]) -> None:
        if text:
            out.append(Piece(Kind.CONTENT, len(text), text))

    def finish(self, cut: bool, out: list[Piece]) -> None:
        """Nothing is ever kept back."""
