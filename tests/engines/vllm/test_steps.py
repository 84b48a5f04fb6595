"""Which tokens a step reads, whatever vLLM's scheduler does. Needs no vllm."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engines.vllm.exchange import Registry, close_registry, find_registry, open_registry
from tandem.engines.vllm.steps import Ledger, held_spans
from tandem.errors import EngineError
from tandem.kv.intervals import Intervals, Span

TAP: Any = object()
INTERNAL = "one-0a1b2c3d"


def tables(request: str) -> tuple[list[int], ...]:
    return ([1, 2, 3],)


@given(
    prompt=st.integers(1, 200),
    start=st.integers(0, 200),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 64), st.integers(1, 64)), max_size=12),
)
def test_each_token_once(prompt: int, start: int, steps: list[tuple[bool, int, int]]) -> None:
    """With steps of any size, and preemptions after which vLLM still has some of the tokens, or more than before."""
    registry = Registry("test")
    registry.tap("one", TAP, start)
    ledger = Ledger(registry)
    ledger.added(INTERNAL, prompt)
    seen, position, furthest = Intervals(), 0, 0
    for preempted, kept, count in [*steps, (False, 0, 400)]:
        if preempted:
            position = kept
        before, position = position, position + count
        furthest = max(furthest, position)
        for read in ledger.step({INTERNAL: (before, position)}, tables).reads:
            seen.add(read.start, read.end)
            assert read.end <= position
        assert seen.covers(start, min(prompt, furthest))
    assert seen.count == max(0, prompt - start)


def test_others_are_left_alone() -> None:
    registry = Registry("test")
    ledger = Ledger(registry)
    ledger.added(INTERNAL, 10)
    work = ledger.step({INTERNAL: (0, 10)}, tables)
    assert not work.reads
    assert not work.loads
    assert ledger.empty


def test_a_tap_that_is_dropped_gets_no_more() -> None:
    registry = Registry("test")
    registry.tap("one", TAP, 0)
    ledger = Ledger(registry)
    ledger.added(INTERNAL, 100)
    assert len(ledger.step({INTERNAL: (0, 50)}, tables).reads) == 1
    registry.drop("one")
    assert not ledger.step({INTERNAL: (50, 100)}, tables).reads
    assert ledger.empty


def test_cached_is_that_of_the_first_step() -> None:
    registry = Registry("test")
    registry.tap("one", TAP, 0)
    ledger = Ledger(registry)
    ledger.added(INTERNAL, 100)
    first = ledger.step({INTERNAL: (32, 64)}, tables).reads[0]
    assert (first.start, first.end, first.cached) == (0, 64, 32)
    assert ledger.step({INTERNAL: (64, 100)}, tables).reads[0].cached == 32


@pytest.mark.parametrize(
    ("table", "spans", "held"),
    [
        ([1, 2, 3], [(0, 24)], [(0, 24)]),
        ([0, 2, 3], [(0, 24)], [(8, 24)]),
        ([0, 2, 3], [(10, 20)], [(10, 20)]),
        ([1, 0, 3], [(4, 20)], [(4, 8), (16, 20)]),
        ([0, 0, 3], [(0, 12)], []),
        ([1], [(0, 12)], [(0, 8)]),
        ([1, 2], [(1, 3), (5, 9)], [(1, 3), (5, 9)]),
        ([1, 2], [], []),
    ],
)
def test_held_spans(table: list[int], spans: list[tuple[int, int]], held: list[tuple[int, int]]) -> None:
    assert held_spans(table, 8, [Span(*span) for span in spans]) == [Span(*span) for span in held]


def test_registries_are_found_by_their_key() -> None:
    one, other = open_registry(), open_registry()
    assert one.key != other.key
    assert find_registry(one.key) is one
    close_registry(one)
    with pytest.raises(EngineError, match="VLLM_ENABLE_V1_MULTIPROCESSING"):
        find_registry(one.key)
    close_registry(other)
