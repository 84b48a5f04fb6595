"""Who is in the cluster: tokens and heartbeats on the bus, and dialling of those whom only others can see."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
import zenoh

from tandem.cluster.bus.addresses import addresses
from tandem.cluster.bus.bus import Bus
from tandem.cluster.bus.messages import Message
from tandem.cluster.bus.probe import answers
from tandem.cluster.bus.pump import CAPACITY, pump
from tandem.cluster.bus.roster import Heard, Heartbeat, Joined, Key, Known, Left, MemberEvent, Roster
from tandem.errors import QueueFullError, UnavailableError

BEAT = 1.0
"""Seconds between two heartbeats, in clusters of up to `MANY` nodes; in larger ones up to twice that."""
MANY = 25
GREETING = 0.01
"""Seconds between two heartbeats that greet newcomers, for each node that is there."""
STALL = 1.5
"""Seconds that this side's loop may be late before it mistrusts its own view of others' silence."""
DISAGREED = 3.0
"""Seconds for which nodes see different others before they tell each other whom, and between two such lists."""
APART = 7.0
"""Seconds that others may say that they see a node before this one dials it: with the above, longer than discovery
takes by itself."""
APART_LONGEST = 160.0
MOST_KNOWN = 256
TOPIC = "heartbeat"
_log = logging.getLogger(__name__)


class Membership:
    """Keeps the roster of one bus. Used as an async context manager, inside the bus's own, after whatever is served
    and subscribed to: the others may speak to this node as soon as it has joined.

    Args:
        describe: gives the payload of the next heartbeat, some hundred bytes at most.
        on_event: called on the loop, in order.
    """

    def __init__(self, bus: Bus, *, describe: Callable[[], bytes], on_event: Callable[[MemberEvent], None]) -> None:
        self._bus = bus
        self._describe = describe
        self._on_event = on_event
        self.roster = Roster(bus.options.node_id, bus.options.life, time.monotonic())
        self._changed = asyncio.Event()
        self._greet = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._apart: dict[Key, float] = {}
        self._patience = APART
        self._agreed = self._listed = float("-inf")
        self._reopening: set[asyncio.Task[None]] = set()

    @property
    def alive(self) -> dict[str, Heartbeat]:
        """The other nodes that are there, by node id, with their last heartbeats."""
        return self.roster.beats()

    def beat_of(self, node_id: str) -> Heartbeat | None:
        """The last heartbeat of a node that is there."""
        return self.roster.beat_of(node_id)

    async def start(self) -> None:
        """Announce this node and begin to listen."""
        loop = asyncio.get_running_loop()
        self._bus.on_reopened.append(self._reopened)
        beats = await self._bus.subscribe(TOPIC)

        def token(sample: zenoh.Sample) -> None:
            loop.call_soon_threadsafe(self._token, str(sample.key_expr), sample.kind == zenoh.SampleKind.PUT)

        def watch(session: zenoh.Session) -> Any:
            channel: zenoh.handlers.FifoChannel[zenoh.Sample] = zenoh.handlers.FifoChannel(CAPACITY)
            subscriber = session.liveliness().declare_subscriber("alive/*/*", channel, history=True)
            pump("alive", subscriber.handler.recv, token)
            return subscriber

        await self._bus.session.declare(watch)
        # Last: whoever sees the token may rely on everything else being declared.
        key = f"alive/{self._bus.options.node_id}/{self._bus.options.life}"
        await self._bus.session.declare(lambda session: session.liveliness().declare_token(key))
        self._tasks = [
            loop.create_task(self._listen(beats)),
            loop.create_task(self._beat()),
            loop.create_task(self._step()),
        ]
        for task in self._tasks:
            task.add_done_callback(_ended)

    async def close(self) -> None:
        """Say goodbye and stop listening."""
        tasks = [*self._tasks, *self._reopening]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        if self._tasks:
            self._tasks = []
            self._publish(leaving=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def __aenter__(self) -> Membership:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _reopened(self, reason: str) -> None:
        self.roster.reopened(time.monotonic())
        self._changed.set()
        self._greet.set()

    def _token(self, key: str, up: bool) -> None:
        _, node_id, life = key.split("/")
        self.roster.token(node_id, life, up, time.monotonic())
        self._changed.set()
        if up:
            # Newcomers should not have to wait for the next second.
            self._greet.set()

    async def _listen(self, beats: Any) -> None:
        message: Message
        async for message in beats:
            try:
                beat = msgspec.msgpack.decode(message.payload, type=Heartbeat)
            except msgspec.DecodeError as error:
                _log.warning("node %s sends heartbeats of another version: %s", message.node_id, error)
                continue
            events = self.roster.beat(beat, time.monotonic())
            self._emit(events)
            # That a node is still there changes nobody's place; with fifty nodes that is fifty times a second.
            if not (events and isinstance(events[0], Heard)):
                self._changed.set()

    async def _beat(self) -> None:
        while True:
            self._greet.clear()
            self._publish()
            try:
                await asyncio.wait_for(self._greet.wait(), BEAT * min(2.0, max(1.0, len(self.roster.joined) / MANY)))
            except TimeoutError:
                continue
            # Several newcomers at once cost one beat. The pause grows with the cluster, so that what each node hears
            # of everybody's greetings does not: a hundred a second.
            await asyncio.sleep(GREETING * (1 + len(self.roster.joined)))

    def _publish(self, *, leaving: bool = False) -> None:
        options, session = self._bus.options, self._bus.session
        hosts = ["127.0.0.1"] if options.loopback_only else sorted(addresses())
        endpoints = tuple(
            f"{options.scheme}/{f'[{host}]' if ':' in host else host}:{options.port}" for host in hosts[:16]
        )
        now = time.monotonic()
        age = now - self.roster.began
        beat = Heartbeat(
            options.node_id,
            options.life,
            age,
            session.zid,
            endpoints,
            leaving,
            self._known(now),
            self._describe(),
            self.roster.digest,
        )
        try:
            self._bus.publish(TOPIC, msgspec.msgpack.encode(beat), urgent=True)
        except (QueueFullError, UnavailableError) as error:
            _log.warning("a heartbeat was not sent: %s", error)

    def _known(self, now: float) -> tuple[Known, ...]:
        """Whom this node sees, if others have seen different ones for a while."""
        if not self.roster.disagrees():
            self._agreed = now
        if now - max(self._agreed, self._listed) < DISAGREED:
            return ()
        self._listed = now
        known = (Known(beat.node_id, beat.life, beat.endpoints) for beat in self.alive.values())
        return tuple(itertools.islice(known, MOST_KNOWN))

    async def _step(self) -> None:
        while True:
            wait, before = self.roster.due(time.monotonic()), time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(wait, BEAT))
            self._changed.clear()
            now = time.monotonic()
            if now - before > min(wait, BEAT) + STALL:
                self.roster.stalled(now)
            self._emit(self.roster.step(now))
            self._look_for_missing(now)

    def _emit(self, events: list[MemberEvent]) -> None:
        for event in events:
            if isinstance(event, Joined):
                self._bus.lives[event.node_id] = event.life
                _log.info("node %s joined", event.node_id)
            elif isinstance(event, Left):
                self._bus.lives.pop(event.node_id, None)
                _log.info("node %s left: %s", event.node_id, event.reason)
            # Through the loop, so that a listener's fault is the listener's.
            asyncio.get_running_loop().call_soon(self._on_event, event)

    def _look_for_missing(self, now: float) -> None:
        missing = self.roster.unlinked(now)
        self._apart = {key: self._apart.get(key, now) for key in missing}
        if not missing:
            self._patience = APART
            return
        # One side is enough, so the other waits longer. Whoever misses several is likely to be the one that several
        # miss: each of them would drop its links to all others to reach one.
        late = [
            key
            for key, since in self._apart.items()
            if now - since
            > self._patience * (1 if len(missing) > 1 else 2 if self._bus.options.node_id < key[0] else 3)
        ]
        if late and not self._reopening:
            self._patience = min(2 * self._patience, APART_LONGEST)
            task = asyncio.get_running_loop().create_task(self._dial({key: missing[key] for key in late}))
            self._reopening.add(task)
            task.add_done_callback(self._reopening.discard)

    async def _dial(self, missing: dict[Key, tuple[str, ...]]) -> None:
        """Opening anew disturbs everybody for a moment, so only for those who would answer."""
        endpoints = [endpoint for found in missing.values() for endpoint in found[:16]][:64]
        reached = await asyncio.gather(*(answers(endpoint, deadline=1.0) for endpoint in endpoints))
        self._apart = {}
        found = tuple(endpoint for endpoint, good in zip(endpoints, reached, strict=True) if good)
        if found:
            names = ", ".join(sorted(node_id for node_id, _ in missing))
            await self._bus.reopen(f"others see {names}, which this node does not", found)


def _ended(task: asyncio.Task[None]) -> None:
    """Nothing awaits these tasks until the end, and without one of them this node is cut off."""
    if not task.cancelled() and task.exception() is not None:
        task.get_loop().call_exception_handler({"message": "the membership stopped", "exception": task.exception()})
