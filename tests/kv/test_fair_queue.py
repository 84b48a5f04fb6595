"""The queue of prefills: bounded, fair, and able to forget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import PrefillBusyError
from tandem.kv.fair_queue import FairQueue


def test_clients_take_turns() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.put(item[0], item)
    assert queue.in_order() == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert [queue.get() for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_priorities_come_first() -> None:
    queue: FairQueue[str] = FairQueue(10)
    queue.put("a", "low", priority=-1)
    queue.put("a", "usual")
    queue.put("b", "high", priority=5)
    assert [queue.get() for _ in range(3)] == ["high", "usual", "low"]


def test_it_is_bounded() -> None:
    queue: FairQueue[int] = FairQueue(2)
    queue.put("a", 1)
    queue.put("b", 2)
    with pytest.raises(PrefillBusyError) as caught:
        queue.put("c", 3, wait=4.5)
    assert caught.value.retry_after == 4.5
    assert len(queue) == 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1)), max_size=15), st.data())
def test_nothing_is_lost_and_the_order_is_the_announced_one(puts: list[tuple[str, int]], data: st.DataObject) -> None:
    queue: FairQueue[int] = FairQueue(100)
    for number, (client, priority) in enumerate(puts):
        queue.put(client, number, priority=priority)
    removed = set(data.draw(st.lists(st.integers(0, 14), max_size=5)))
    for number in removed:
        assert queue.remove(number) == (number < len(puts))
    expected = queue.in_order()
    assert sorted(expected) == [number for number in range(len(puts)) if number not in removed]
    taken = []
    while len(queue):
        assert queue.in_order()[0] == expected[len(taken)]
        taken.append(queue.get())
    assert taken == expected
    with pytest.raises(IndexError):
        queue.get()
