"""The cluster's changes in their order, for whoever wants to follow them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from types import TracebackType

import msgspec

from tandem.cluster.state import ClusterState, IntentChanged, StateEvent, apply
from tandem.types.intents import Entry


class Indexed(msgspec.Struct, frozen=True, tag="Event"):
    """One change and its place in the order."""

    index: int
    event: StateEvent


class Gap(msgspec.Struct, frozen=True, tag="Gap"):
    """The events `[first, end)` are not held any more: read the state anew, then go on."""

    first: int
    end: int


class EventLog:
    """The newest events, and the state they lead to. For one event loop.

    Memory is bounded by `capacity`: subscribers hold a place in the log and no events, so a slow one gets a `Gap`.

    Args:
        state: what the first event changes.
        capacity: events that are held.

    Attributes:
        life: random for each log. Indices of another life say nothing about this one.
    """

    def __init__(self, state: ClusterState | None = None, *, capacity: int = 10_000) -> None:
        if capacity < 1:
            raise ValueError("an event log holds one event at least")
        self.life = secrets.token_hex(8)
        self._state = state or ClusterState()
        self._ring: list[Indexed | None] = [None] * capacity
        self._next = 0
        self._subscriptions: set[Subscription] = set()
        self._closed = False

    @property
    def state(self) -> ClusterState:
        """The state after the newest event."""
        return self._state

    @property
    def next_index(self) -> int:
        """Index of the event to come."""
        return self._next

    @property
    def first_index(self) -> int:
        """Index of the oldest event held."""
        return max(0, self._next - len(self._ring))

    def append(self, event: StateEvent) -> int | None:
        """Apply an event; its index, or None if it changes nothing and is left out."""
        state = apply(self._state, event)
        if state is self._state:
            return None
        self._state = state
        self._push([event])
        return self._next - 1

    def append_intents(self, entries: Sequence[Entry]) -> int:
        """Apply many changed intents at once; how many changed something.

        The same as one after the other, but `apply` copies all intents each time, which a late joiner with thousands of
        them would notice: here it sees only those concerned.
        """
        keys = {entry.key for entry in entries}
        small = ClusterState(intents={key: known for key in keys if (known := self._state.intents.get(key))})
        changed: list[StateEvent] = []
        for event in map(IntentChanged, entries):
            after = apply(small, event)
            if after is not small:
                changed.append(event)
            small = after
        if changed:
            self._state = msgspec.structs.replace(self._state, intents={**self._state.intents, **small.intents})
            self._push(changed)
        return len(changed)

    def held(self) -> list[Indexed]:
        """Every event held, oldest first."""
        return [self._at(index) for index in range(self.first_index, self._next)]

    def subscribe(self, start: int | None = None) -> Subscription:
        """Follow the events from index `start` on, or from the next one.

        If `start` is not held, the first item is a `Gap`; so it is if `start` is yet to come, which only the index of
        another life can be. Read `state` in the same step of the event loop to miss nothing between the two.
        """
        if start is not None and not 0 <= start <= self._next:
            start = -1
        subscription = Subscription(self, self._next if start is None else start)
        if self._closed:
            subscription.close()
        else:
            self._subscriptions.add(subscription)
        return subscription

    def close(self) -> None:
        """End all subscriptions, once they have delivered what is held."""
        self._closed = True
        for subscription in list(self._subscriptions):
            subscription.end()

    def _push(self, events: Iterable[StateEvent]) -> None:
        for event in events:
            self._ring[self._next % len(self._ring)] = Indexed(self._next, event)
            self._next += 1
        for subscription in self._subscriptions:
            subscription.wake()

    def _at(self, index: int) -> Indexed:
        found = self._ring[index % len(self._ring)]
        assert found is not None
        assert found.index == index
        return found

    def _read(self, place: int) -> Indexed | Gap | None:
        """What a subscriber at `place` gets next; None if it has everything. A negative place is a foreign index."""
        if place < 0:
            return Gap(0, self._next)
        if place < self.first_index:
            return Gap(place, self.first_index)
        return self._at(place) if place < self._next else None

    def _forget(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)


class Subscription:
    """An async iterator of events and gaps; ends when it or the log is closed. Use it in an `async with` block."""

    def __init__(self, log: EventLog, place: int) -> None:
        self._log = log
        self._place = place
        self._wake = asyncio.Event()
        self._ended = False
        self._closed = False

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Indexed | Gap:
        while not self._closed:
            item = self._log._read(self._place)
            if item is not None:
                self._place = item.end if isinstance(item, Gap) else item.index + 1
                return item
            if self._ended:
                self.close()
                break
            self._wake.clear()
            await self._wake.wait()
        raise StopAsyncIteration

    async def next_within(self, seconds: float) -> Indexed | Gap | None:
        """The next item, or None if none came in time, for those who write a sign of life then.

        Raises:
            StopAsyncIteration: it is closed.
        """
        try:
            async with asyncio.timeout(seconds):
                return await anext(self)
        except TimeoutError:
            return None

    @property
    def behind(self) -> bool:
        """Whether an item is there already."""
        return not self._closed and self._place < self._log.next_index

    def wake(self) -> None:
        """There is something new."""
        self._wake.set()

    def end(self) -> None:
        """Deliver what is held, then stop."""
        self._ended = True
        self._wake.set()

    def close(self) -> None:
        """Stop at once."""
        self._closed = True
        self._wake.set()
        self._log._forget(self)

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
