"""How layers are split."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tandem.placement.layers import pipeline_room, ranges, split_layers, split_pipeline, tensor_fault
from tandem.placement.memory import footprint

from .worlds import BIG, GB, card


@pytest.mark.parametrize(
    ("layers", "weights", "room", "counts"),
    [
        (32, [1, 1], [32, 32], (16, 16)),
        (32, [3, 1], [32, 32], (24, 8)),
        (33, [1, 1], [33, 33], (17, 16)),
        (10, [1, 1, 1], [9, 9, 9], (4, 3, 3)),
        (32, [1000, 1], [32, 32], (31, 1)),
        (32, [3, 1], [10, 32], (10, 22)),
        (12, [10, 1, 1], [4, 12, 12], (4, 4, 4)),
        (4, [100, 1, 1], [3, 9, 9], (2, 1, 1)),
        (3, [1, 1, 1], [1, 1, 1], (1, 1, 1)),
        (1, [5], [1], (1,)),
        (8, [1, 1], [3, 4], None),
        (8, [1, 1], [0, 9], None),
        (2, [1, 1, 1], [9, 9, 9], None),
        (2, [], [], None),
    ],
)
def test_splits(layers: int, weights: list[float], room: list[int], counts: tuple[int, ...] | None) -> None:
    assert split_layers(layers, weights, room) == counts


@given(
    st.integers(1, 128),
    st.lists(st.tuples(st.floats(1e-6, 1e12), st.integers(0, 130)), min_size=1, max_size=50),
)
def test_every_layer_has_one_place_and_nobody_too_many(layers: int, nodes: list[tuple[float, int]]) -> None:
    weights, room = [weight for weight, _ in nodes], [limit for _, limit in nodes]
    counts = split_layers(layers, weights, room)
    possible = len(nodes) <= layers <= sum(room) and min(room) >= 1
    assert (counts is not None) == possible
    if counts is None:
        return
    assert all(1 <= count <= limit for count, limit in zip(counts, room, strict=True))
    spans = ranges(counts)
    assert [layer for start, end in spans for layer in range(start, end)] == list(range(layers))
    assert counts == split_layers(layers, weights, room)


@given(st.integers(2, 100), st.lists(st.floats(0.5, 4), min_size=2, max_size=12))
def test_without_limits_a_split_is_proportional(layers: int, weights: list[float]) -> None:
    share = [layers * weight / sum(weights) for weight in weights]
    assume(min(share) >= 1)
    counts = split_layers(layers, weights, [layers] * len(weights))
    assert counts is not None
    assert all(abs(count - exact) < 1 + 1e-6 for count, exact in zip(counts, share, strict=True))


@given(st.lists(st.integers(0, 80 * GB), min_size=2, max_size=8), st.lists(st.floats(1, 100), min_size=8, max_size=8))
def test_a_pipeline_never_exceeds_memory(free: list[int], speeds: list[float]) -> None:
    needs = footprint(BIG, "MlxMetal", 0)
    counts = split_pipeline(needs, free, speeds[: len(free)])
    if counts is None:
        assert sum(pipeline_room(needs, free)) < needs.layers or min(pipeline_room(needs, free)) < 1
        return
    last = len(free) - 1
    for rank, (count, available) in enumerate(zip(counts, free, strict=True)):
        assert needs.pipeline(count, first=rank == 0, last=rank == last) <= available


def test_the_ends_hold_the_tables() -> None:
    needs = footprint(BIG, "MlxMetal", 0)
    room = pipeline_room(needs, [20 * GB] * 3)
    assert room[0] < room[1]
    assert room[2] < room[1]


def test_a_fast_node_gets_more_layers() -> None:
    needs = footprint(BIG, "MlxMetal", 0)
    slow, fast = split_pipeline(needs, [60 * GB, 60 * GB], [100.0, 300.0]) or (0, 0)
    assert fast == 3 * slow
    assert split_pipeline(needs, [60 * GB, 60 * GB], [None, 300.0]) == (40, 40)


def test_memory_can_be_ignored() -> None:
    needs = footprint(BIG, "MlxMetal", 0)
    assert split_pipeline(needs, [GB], [None]) is None
    assert split_pipeline(needs, [GB], [None], ignore_memory=True) == (80,)
    assert split_pipeline(needs, [GB, 3 * GB], [None, None], ignore_memory=True) == (20, 60)


def test_tensors_divide_or_say_why() -> None:
    assert tensor_fault(card(), 4) is None
    assert "KV heads (8)" in (tensor_fault(card(), 3) or "")
    assert "hidden size (4100)" in (tensor_fault(card(hidden_size=4100), 8) or "")
    assert "Choose Pipeline" in (tensor_fault(card(supports_tensor=False), 2) or "")
    assert "num_key_value_heads" in (tensor_fault(card(num_key_value_heads=None), 2) or "")
