"""Which of a request's tokens are read in a vLLM step, and which are loaded before it. Knows no tensor and no vllm.

Everything a request's block table holds after a step can be read from it: what the step computed, and what vLLM found
in its prefix cache. So a request that is tapped needs one number, the position up to which its entries are handed over:
each step hands over from there to where the step ends. A preemption changes nothing in that: tokens computed again lie
before the position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from tandem.engines.vllm.exchange import Registry, Tap
from tandem.engines.vllm.loading import Prepared
from tandem.kv.intervals import Span

Tables: TypeAlias = tuple[Sequence[int], ...]
"""A request's block ids, one table per cache group. 0 stands for a block that is gone."""

NO_BLOCK = 0


class StepRead(NamedTuple):
    """Tokens `[start, end)` of a request that are in its blocks after the step.

    Attributes:
        request: vLLM's id.
        cached: tokens of the prompt that came from vLLM's prefix cache when it was first started.
    """

    request: str
    tap: Tap
    start: int
    end: int
    cached: int
    tables: Tables


class StepLoad(NamedTuple):
    """Entries that go into a request's blocks before the step, which then computes from `prepared.end` to `end`."""

    request: str
    prepared: Prepared
    end: int
    tables: Tables


@dataclass
class StepWork:
    """What the connector does in one step."""

    reads: list[StepRead] = field(default_factory=list)
    loads: list[StepLoad] = field(default_factory=list)


@dataclass
class _Tapped:
    position: int
    end: int
    cached: int | None = None


class Ledger:
    """Follows the requests of one engine through vLLM's scheduler."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._tapped: dict[str, _Tapped] = {}
        self._loading: dict[str, Prepared] = {}

    def added(self, request: str, prompt: int) -> None:
        """A request of `prompt` tokens begins."""
        found = self._registry.tap_of(request)
        if found is not None:
            self._tapped[request] = _Tapped(found[1], prompt)

    def will_load(self, request: str, prepared: Prepared) -> None:
        """vLLM has given the request blocks for what a source has."""
        self._loading[request] = prepared

    def finished(self, request: str) -> None:
        """vLLM is done with a request, whatever the reason."""
        self._tapped.pop(request, None)
        self._loading.pop(request, None)

    def step(self, scheduled: dict[str, tuple[int, int]], tables: Callable[[str], Tables]) -> StepWork:
        """The work of a step.

        Args:
            scheduled: of each request in the step, how many tokens it has before, and after.
            tables: a request's block ids as they are in this step.
        """
        work = StepWork()
        for request, (before, after) in scheduled.items():
            prepared = self._loading.pop(request, None)
            if prepared is not None:
                work.loads.append(StepLoad(request, prepared, after, tables(request)))
            read = self._read(request, before, after, tables)
            if read is not None:
                work.reads.append(read)
        return work

    def _read(self, request: str, before: int, after: int, tables: Callable[[str], Tables]) -> StepRead | None:
        tapped = self._tapped.get(request)
        if tapped is None:
            return None
        found = self._registry.tap_of(request)
        if found is None:
            del self._tapped[request]
            return None
        if tapped.cached is None:
            tapped.cached = before
        start, end = tapped.position, min(after, tapped.end)
        if end <= start:
            return None
        tapped.position = end
        return StepRead(request, found[0], start, end, tapped.cached, tables(request))

    @property
    def empty(self) -> bool:
        """Whether no request is followed."""
        return not self._tapped and not self._loading


def held_spans(table: Sequence[int], block_tokens: int, spans: Sequence[Span]) -> list[Span]:
    """Those tokens of `spans` whose blocks a table still has. Ascending; not touching if `spans` are not."""
    held: list[Span] = []
    for span in spans:
        position = span.start
        while position < span.end:
            number = position // block_tokens
            edge = min(span.end, (number + 1) * block_tokens)
            if number < len(table) and table[number] != NO_BLOCK:
                if held and held[-1].end == position and position > span.start:
                    held[-1] = Span(held[-1].start, edge)
                else:
                    held.append(Span(position, edge))
            position = edge
    return held
