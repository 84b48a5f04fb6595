"""Stamps grow, whatever the wall clock does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.clock import LARGEST, HybridClock, well_formed
from tandem.errors import StorageError
from tandem.types.intents import Stamp

DAY = 86_400_000
NOW = 1_800_000_000_000
STAMPS = st.builds(
    Stamp, st.integers(NOW - 2 * DAY, NOW + 2 * DAY), st.integers(0, 2**40), st.sampled_from(["a", "b", "c"])
)
STEPS = st.lists(st.one_of(st.integers(NOW - DAY, NOW + DAY), STAMPS, st.none()), max_size=40)


@given(STEPS, st.integers(0, 2**32 - 1))
def test_every_stamp_is_greater_than_all_made_or_seen(steps: list[int | Stamp | None], salt: int) -> None:
    """Integers set the wall clock, stamps are observed, None restarts the process from what it wrote down."""
    wall, seen = NOW, [Stamp(0, 0, "a")]

    def read() -> int:
        return wall

    clock = HybridClock("a", wall=read, salt=salt)
    for step in steps:
        if isinstance(step, Stamp):
            clock.observe(step)
            seen.append(step)
        elif step is None:
            clock = HybridClock("a", clock.last, wall=read, salt=salt)
        else:
            wall = step
        made = clock.now()
        assert made > max(seen)
        assert made.node_id == "a"
        assert well_formed(made)
        assert clock.last == made
        seen.append(made)


def test_it_follows_a_wall_clock_that_moves_forward() -> None:
    wall = NOW
    clock = HybridClock("a", wall=lambda: wall, salt=5)
    assert clock.now() == Stamp(NOW, 5, "a")
    assert clock.now() == Stamp(NOW, 6, "a")
    wall += 1
    assert clock.now() == Stamp(NOW + 1, 5, "a")


def test_a_stamp_of_the_future_drags_the_clock_until_time_catches_up() -> None:
    wall = NOW
    clock = HybridClock("a", wall=lambda: wall, salt=0)
    clock.observe(Stamp(NOW + DAY, 7, "b"))
    assert clock.now() == Stamp(NOW + DAY, 8, "a")
    wall += DAY // 2
    assert clock.now() == Stamp(NOW + DAY, 9, "a")
    wall += DAY
    assert clock.now() == Stamp(wall, 0, "a")


def test_a_life_never_repeats_the_stamps_that_an_earlier_one_did_not_write_down() -> None:
    """Both lives know the same last stamp, and their wall clock stands still."""
    stamps: set[Stamp] = set()
    for _ in range(50):
        clock = HybridClock("a", Stamp(NOW, 3, "b"), wall=lambda: NOW)
        made = [clock.now() for _ in range(5)]
        clock.observe(Stamp(NOW, 2**34, "b"))
        made += [clock.now() for _ in range(5)]
        assert not stamps & set(made)
        stamps.update(made)


@pytest.mark.parametrize("wall", [-5, 0, LARGEST, 2**70])
def test_absurd_wall_clocks_still_give_stamps_that_travel(wall: int) -> None:
    clock = HybridClock("a", wall=lambda: wall)
    first, second = clock.now(), clock.now()
    assert well_formed(first)
    assert first < second


def test_a_full_counter_carries_over() -> None:
    clock = HybridClock("a", Stamp(NOW, 2**52, "b"), wall=lambda: NOW, salt=9)
    assert clock.now() == Stamp(NOW + 1, 9, "a")


def test_the_end_of_the_clock_is_an_error_and_not_a_wrong_order() -> None:
    clock = HybridClock("a", Stamp(LARGEST, LARGEST, "b"), wall=lambda: NOW)
    with pytest.raises(StorageError, match="Stop all nodes"):
        clock.now()


@pytest.mark.parametrize(
    "stamp", [Stamp(-1, 0, "a"), Stamp(0, -1, "a"), Stamp(2**53, 0, "a"), Stamp(0, 2**53, "a"), Stamp(0, 0, "")]
)
def test_stamps_that_no_clock_makes(stamp: Stamp) -> None:
    assert not well_formed(stamp)
