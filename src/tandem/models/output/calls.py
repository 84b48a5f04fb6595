"""What all tool-call parsers share: numbering, ids, the shape of a report, and the parser's contract."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Any, Protocol

from tandem.models.output.pieces import Kind, Piece
from tandem.types import ToolCallDelta


class CallLog:
    """The calls of one answer.

    Attributes:
        known: names of the offered tools.
        completed: calls that are whole.
        limit: no more than so many are wanted; None for any number.
    """

    __slots__ = ("_next_index", "completed", "known", "limit")

    def __init__(self, known: Iterable[str], parallel: bool) -> None:
        self.known = frozenset(known)
        self.limit = None if parallel else 1
        self.completed = 0
        self._next_index = 0

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.completed >= self.limit

    def begin(self) -> int:
        """The index of a new call."""
        index = self._next_index
        self._next_index += 1
        return index


class CallReader(Protocol):
    """Reads one marked section of calls. Created when the opening marker has been read."""

    def push(self, text: str, out: list[Piece]) -> str | None:
        """Take more text and append what it decides. Returns None while the section goes on, else the text that no
        longer belongs to it."""

    def finish(self, cut: bool, out: list[Piece]) -> None:
        """The answer is over, `cut` off or not."""


def new_call_id() -> str:
    """`call_` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


def call_piece(length: int, index: int, arguments: str, name: str | None = None, call_id: str | None = None) -> Piece:
    """A piece that reports something of a call; `name` only the first time."""
    return Piece(Kind.CALL, length, "", ToolCallDelta(index, call_id, name, arguments))


def arguments_text(arguments: Any) -> str | None:
    """Arguments as JSON text, or None if they are no object that JSON can hold."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        return "{}"
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        # Half a surrogate pair travels only as an escape.
        return json.dumps(arguments)
    except (ValueError, TypeError, RecursionError):
        return None
    return text
