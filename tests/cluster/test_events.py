"""The event log: order, gaps, endings, and the state it keeps."""

from __future__ import annotations

import asyncio
from functools import reduce

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.events import EventLog, Gap, Indexed, Subscription
from tandem.cluster.state import ClusterState, IntentChanged, NodeJoined, NodeLeft, apply
from tandem.types.facts import NodeFacts
from tandem.types.intents import Entry, Stamp
from tests.cluster.intent_network import DEADLINE, instance

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def joined(number: int) -> NodeJoined:
    return NodeJoined(NodeFacts(f"node-{number}", "life", 1))


async def take(subscription: Subscription, count: int) -> list[Indexed | Gap]:
    async with asyncio.timeout(DEADLINE):
        return [await anext(subscription) for _ in range(count)]


def entry(name: str, wall: int, alive: bool = True) -> Entry:
    return Entry(f"instance/{name}", instance(name) if alive else None, Stamp(wall, 0, "n"))


async def test_events_come_in_order_with_their_index_and_lead_to_the_state() -> None:
    log = EventLog()
    async with log.subscribe() as subscription:
        assert [log.append(joined(number)) for number in range(3)] == [0, 1, 2]
        assert await take(subscription, 3) == [Indexed(number, joined(number)) for number in range(3)]
    assert log.append(NodeLeft("node-1", "gone")) == 3
    assert set(log.state.nodes) == {"node-0", "node-2"}


async def test_what_changes_nothing_is_no_event() -> None:
    log = EventLog()
    log.append(joined(0))
    assert log.append(joined(0)) is None
    assert log.append(IntentChanged(entry("a", 5))) == 1
    assert log.append(IntentChanged(entry("a", 4))) is None
    assert log.next_index == 2


async def test_a_subscriber_can_go_on_where_it_was() -> None:
    log = EventLog()
    for number in range(5):
        log.append(joined(number))
    async with log.subscribe(3) as subscription:
        assert [item.index for item in await take(subscription, 2) if isinstance(item, Indexed)] == [3, 4]
        assert await subscription.next_within(0.001) is None
        log.append(joined(5))
        assert await subscription.next_within(DEADLINE) == Indexed(5, joined(5))


async def test_a_slow_subscriber_gets_a_gap_and_memory_stays() -> None:
    log = EventLog(capacity=4)
    async with log.subscribe() as slow, log.subscribe() as fast:
        for number in range(10):
            log.append(joined(number))
            assert await take(fast, 1) == [Indexed(number, joined(number))]
        assert len(log.held()) == 4
        assert await take(slow, 5) == [Gap(0, 6), *(Indexed(number, joined(number)) for number in range(6, 10))]


@pytest.mark.parametrize("start", range(11))
async def test_a_gap_names_exactly_what_is_missing(start: int) -> None:
    log = EventLog(capacity=4)
    for number in range(10):
        log.append(joined(number))
    held = [Indexed(number, joined(number)) for number in range(max(start, 6), 10)]
    async with log.subscribe(start) as subscription:
        items = await take(subscription, len(held) + (start < 6))
        assert items == [*([Gap(start, 6)] if start < 6 else []), *held]
        assert await subscription.next_within(0.001) is None


@pytest.mark.parametrize("start", [-3, 99])
async def test_an_index_of_another_life_is_a_gap_over_everything(start: int) -> None:
    log = EventLog()
    log.append(joined(0))
    async with log.subscribe(start) as subscription:
        assert await take(subscription, 1) == [Gap(0, 1)]
        log.append(joined(1))
        assert await take(subscription, 1) == [Indexed(1, joined(1))]
    assert log.life != EventLog().life


async def test_closing_the_log_delivers_what_is_held_and_ends() -> None:
    log = EventLog()
    waiting = log.subscribe()
    ended = asyncio.create_task(anext(waiting, None))
    behind = log.subscribe()
    await asyncio.sleep(0)
    log.append(joined(0))
    log.close()
    async with asyncio.timeout(DEADLINE):
        assert await ended == Indexed(0, joined(0))
        assert [item async for item in waiting] == []
        assert [item async for item in behind] == [Indexed(0, joined(0))]
        assert [item async for item in log.subscribe(0)] == []


async def test_closing_a_subscription_wakes_its_reader() -> None:
    log = EventLog()
    subscription = log.subscribe()
    reader = asyncio.create_task(anext(subscription, None))
    await asyncio.sleep(0)
    subscription.close()
    async with asyncio.timeout(DEADLINE):
        assert await reader is None


async def test_events_travel_as_json() -> None:
    item = Indexed(3, IntentChanged(entry("a", 5)))
    assert msgspec.json.decode(msgspec.json.encode(item), type=Indexed) == item


ENTRIES = st.lists(st.builds(entry, st.sampled_from("abcd"), st.integers(1, 6), st.booleans()), max_size=12)


@given(ENTRIES, ENTRIES)
def test_many_intents_at_once_are_the_same_as_one_by_one(before: list[Entry], entries: list[Entry]) -> None:
    start = reduce(apply, map(IntentChanged, before), ClusterState())
    together, single = EventLog(start), EventLog(start)
    assert together.append_intents(entries) == sum(single.append(IntentChanged(each)) is not None for each in entries)
    assert together.held() == single.held()
    assert together.state == single.state
