"""One answer as a picture made of characters: who did what, when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.cli.output import human_bytes

if TYPE_CHECKING:
    from tandem.types import Statistics

WIDTH = 44
"""Characters that stand for the whole answer."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time, in seconds from the request on, drawn with one character."""

    start: float
    end: float
    mark: str


@dataclass(frozen=True, slots=True)
class Row:
    """What one party did."""

    label: str
    spans: tuple[Span, ...]
    text: str


def rows(statistics: Statistics, reader: str, writer: str) -> list[Row]:
    """Reading, moving and writing, from a finished answer's figures.

    The figures are those of the writer's clock, except for queueing and computing at the reader: these are durations,
    and drawn as if what is left of the time to the first token had passed before and after them.

    Args:
        reader, writer: names of the node that was asked to prefill and of the one that decoded.
    """
    handoff = statistics.handoff
    first = statistics.ttft_seconds
    end = first + statistics.decode_seconds
    writing = Row(
        f"{writer} writes",
        (Span(first, end, "█"),),
        f"{statistics.generation_tokens} tokens, {statistics.generation_tps:.1f} tokens/s",
    )
    if handoff.prefill == "local":
        own = Span(max(0.0, first - statistics.prefill_seconds), first, "▓")
        return [
            Row(f"{writer} reads", (own,), f"{handoff.local_tokens} tokens, {seconds(own.end - own.start)}"),
            writing,
        ]
    begin = max(0.0, first - statistics.prefill_seconds)
    computing = begin + handoff.queued_seconds
    computed = min(first, computing + handoff.computing_seconds)
    arrived = min(first, computed + handoff.exposed_seconds)
    reading = Row(
        f"{reader} reads",
        (Span(begin, computing, "░"), Span(computing, computed, "▓")),
        f"{handoff.remote_tokens} tokens, {seconds(handoff.computing_seconds)}",
    )
    moving = Row(
        "cache travels",
        (Span(computing, computed, "·"), Span(computed, arrived, "▒")),
        f"{human_bytes(handoff.bytes)}, {seconds(handoff.exposed_seconds)} exposed",
    )
    return [reading, moving, writing]


def seconds(value: float) -> str:
    """A duration for people: milliseconds where that matters."""
    return f"{value:.3f} s" if value < 0.1 else f"{value:.2f} s"


def draw(drawn: list[Row], end: float, width: int = WIDTH) -> list[str]:
    """One line for each row: its name, its spans to scale (`end` seconds are `width` characters), its figures.

    A span that is not empty takes one character at least.
    """
    names = max(len(row.label) for row in drawn)
    return [f"{row.label:<{names}}  {_bar(row.spans, end, width)}  {row.text}" for row in drawn]


def _bar(spans: tuple[Span, ...], end: float, width: int) -> str:
    cells = [" "] * width
    for span in spans:
        if span.end <= span.start or end <= 0:
            continue
        first = min(width - 1, int(span.start / end * width))
        last = max(first + 1, round(span.end / end * width))
        cells[first : min(last, width)] = span.mark * (min(last, width) - first)
    return "".join(cells)


def scale(statistics: Statistics, width: int = WIDTH) -> str:
    """The line below: the beginning, the first token, the end."""
    first = statistics.ttft_seconds
    end = first + statistics.decode_seconds
    place = min(width - 1, int(first / end * width)) if end else 0
    text = f"first token {seconds(first)}"
    tail = seconds(end)
    line = ["─"] * width
    line[place] = "┴"
    begin = max(0, min(place - len(text) // 2, width - len(text) - len(tail) - 2))
    below = f"{' ' * begin}{text}"
    return f"{''.join(line)}\n{below}{tail:>{max(1, width - len(below))}}"
