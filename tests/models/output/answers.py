"""What an answer's events say, put together; and texts cut into tokens in every way."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tandem.models.call_formats import CallFormat
from tandem.models.output.channels import TagChannels
from tandem.models.output.pieces import Kind, Piece
from tandem.models.text import ThinkingTags
from tandem.types import TextDelta, ToolCallDelta

THINK = ThinkingTags("<think>", "</think>")


class Answer(NamedTuple):
    """Reasoning, content, and the calls as (id, name, arguments)."""

    reasoning: str
    content: str
    calls: list[tuple[str, str, str]]

    @property
    def named(self) -> list[tuple[str, str]]:
        """The calls without their ids, which are random."""
        return [(name, arguments) for _, name, arguments in self.calls]


def put_together(events: Iterable[Any]) -> Answer:
    """The whole answer; checks that calls are introduced once, in order."""
    texts = {False: "", True: ""}
    calls: list[tuple[str, str, str]] = []
    for event in events:
        if isinstance(event, TextDelta):
            texts[event.reasoning] += event.text
        elif isinstance(event, ToolCallDelta):
            if event.name is not None:
                assert event.index == len(calls)
                assert event.id
                calls.append((event.id, event.name, event.arguments))
            else:
                assert event.id is None
                call_id, name, arguments = calls[event.index]
                calls[event.index] = (call_id, name, arguments + event.arguments)
    return Answer(texts[True], texts[False], calls)


def events_of(pieces: Sequence[Piece]) -> list[Any]:
    """Pieces as events, without log-probabilities."""
    events: list[Any] = []
    for piece in pieces:
        if piece.call is not None:
            events.append(piece.call)
        elif piece.kind in (Kind.CONTENT, Kind.REASONING):
            assert piece.text
            assert len(piece.text) == piece.length
            events.append(TextDelta(piece.text, piece.kind is Kind.REASONING))
        else:
            assert not piece.text
    return events


class Channels:
    """Chunks of text through `TagChannels`."""

    def __init__(self, call_format: CallFormat | None = None, tools: Sequence[Any] = (), **options: Any) -> None:
        described = [tool if isinstance(tool, dict) else offered(tool) for tool in tools]
        self._options = {"call_format": call_format, "tools": described, **options}

    def read(self, chunks: Iterable[str], cut: bool = False) -> tuple[Answer, int]:
        """The answer and how many calls are complete. Checks that pieces account for all of the text."""
        channels = TagChannels(**self._options)
        pieces: list[Piece] = []
        text = ""
        for chunk in chunks:
            text += chunk
            channels.push(chunk, pieces)
            assert sum(piece.length for piece in pieces) <= len(text)
        channels.finish(cut, pieces)
        if not channels.ended:
            assert sum(piece.length for piece in pieces) == len(text)
        return put_together(events_of(pieces)), channels.completed_calls


def offered(name: str, **properties: Any) -> dict[str, Any]:
    """A tool in OpenAI's form; `properties` are its parameters' schemas."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def every_cut(text: str, most: int = 2) -> Iterator[list[str]]:
    """`text` in one piece, cut at every one and at every pair of positions, and character by character."""
    yield list(text)
    positions = range(1, len(text))
    for count in range(most + 1):
        for cuts in itertools.combinations(positions, count):
            bounds = [0, *cuts, len(text)]
            yield [text[begin:end] for begin, end in itertools.pairwise(bounds)]
