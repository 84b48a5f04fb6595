"""Keeps this node's copy of the intents equal to the others'.

A local change is sent to everybody at once. Whatever that misses is made good by comparing copies: with each node that
appears, until it worked once, and from time to time with one drawn by lot, so that nodes which cannot reach one another
learn through those between them. Nothing here needs messages to arrive, to arrive once, or in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from tandem.cluster.clock import HybridClock, wall_milliseconds
from tandem.cluster.exchange import (
    Changes,
    Compare,
    Differs,
    Message,
    Refused,
    Same,
    Trade,
    Traded,
    decode,
    encode,
    fill,
    messages_of,
    unpack,
)
from tandem.cluster.intents import IntentMap
from tandem.cluster.keeping import Keeper
from tandem.cluster.snapshot import SnapshotStore
from tandem.cluster.tasks import background
from tandem.cluster.transport import Transport
from tandem.errors import TandemError, UnavailableError, WireError
from tandem.types.intents import Entry, Intent

log = logging.getLogger(__name__)

_STEP = 64
"""Entries merged before other work of the event loop has its turn."""


@dataclass(frozen=True, slots=True)
class ReplicaTiming:
    """Seconds.

    Attributes:
        interval: between two comparisons with a node drawn by lot; each pause is between half of it and one and a half.
        first_retry: pause after a first comparison failed; it doubles up to `interval`.
        ask: longest wait for an answer.
        publish: longest wait for a change to get out.
        disk: longest wait of a command for the disk.
        disk_retry: pause before a failed write is tried again.
    """

    interval: float = 15.0
    first_retry: float = 0.25
    ask: float = 3.0
    publish: float = 3.0
    disk: float = 5.0
    disk_retry: float = 30.0


class Replica:
    """This node's copy of the intents.

    Args:
        changed: called on the event loop with entries that changed something, the local ones too, before anybody else
            hears of them. Not with those that `start` restores: see `map`.
        wall: unix milliseconds.

    Attributes:
        map: the copy; read it, and change it through `put` and `remove` only. There from `start` on.
        unreadable: entries of others that could not be read, as a newer version made them.
    """

    map: IntentMap

    def __init__(
        self,
        node_id: str,
        transport: Transport,
        store: SnapshotStore,
        *,
        changed: Callable[[list[Entry]], None],
        timing: ReplicaTiming | None = None,
        wall: Callable[[], int] = wall_milliseconds,
    ) -> None:
        self.node_id = node_id
        self.unreadable = 0
        self._transport = transport
        self._store = store
        self._changed = changed
        self._timing = timing or ReplicaTiming()
        self._wall = wall
        self._keeper: Keeper | None = None
        self._due: set[str] = set()
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._outbox: dict[str, Entry] = {}
        self._outgoing = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []

    @property
    def degraded(self) -> str | None:
        """Why changes do not survive this process here, in words for people; None if they do."""
        return self._keeper.degraded if self._keeper else self._store.degraded

    async def start(self) -> None:
        """Restore the copy from disk, and begin to talk to others.

        Raises:
            NewerFormatError: a later version of Tandem wrote what is on disk.
            StorageError: it cannot be read.
        """
        recovered = await asyncio.to_thread(self._store.load)
        for damage in recovered.damage:
            log.warning("%s. What could be read is used; other nodes send the rest.", damage)
        clock = HybridClock(self.node_id, recovered.clock, wall=self._wall)
        self.map = IntentMap(clock, recovered.entries)
        timing = self._timing
        self._keeper = Keeper(self.map, self._store, deadline=timing.disk, retry=timing.disk_retry)
        self._keeper.start()
        self._loops = [
            background(self._publish_changes(), "intents to others"),
            background(self._compare_at_random(), "intents compared"),
        ]
        self._transport.attach(self)
        for node_id in self._transport.nodes():
            self.on_node(node_id)

    async def stop(self) -> None:
        """End, with everything on disk if the disk answers in time. What was not sent, others ask for later."""
        tasks = [*self._loops, *self._settling.values()]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._keeper is not None:
            await self._keeper.stop()

    async def put(self, intent: Intent) -> Entry:
        """Add or replace an intent here, on disk, and at every node that can be reached.

        Returns once it is on disk; if the disk fails, or takes longer than its deadline, it returns nevertheless, and
        `degraded` says why.

        Raises:
            InvalidRequestError, PayloadTooLargeError: the intent cannot travel.
        """
        return await self._commit(self.map.put(intent))

    async def remove(self, key: str) -> Entry:
        """Remove an intent, as `put` adds one.

        Raises:
            NotFoundError: there is none under this key.
        """
        return await self._commit(self.map.remove(key))

    async def reconcile(self, node_id: str) -> int:
        """Compare copies with one node, and make both equal but for what changes meanwhile.

        Returns:
            How many entries changed here.

        Raises:
            TandemError: the node could not be asked, or its answers not be read.
        """
        answer = await self._ask(node_id, Compare(self.map.digest()))
        if isinstance(answer, Same):
            return 0
        if not isinstance(answer, Differs):
            raise WireError(f"Node {node_id} answered a comparison with '{type(answer).__name__}'.")
        pending = self.map.differing(answer.buckets)
        changed = 0
        # Each answer takes one bucket off at least.
        while pending:
            offer = fill(self.map, pending)
            traded = await self._ask(node_id, offer)
            done = set(traded.buckets) if isinstance(traded, Traded) else set()
            if not isinstance(traded, Traded) or not done & set(offer.buckets):
                raise WireError(f"Node {node_id} answered an exchange of intents with '{type(traded).__name__}'.")
            changed += await self._absorb(traded.entries)
            pending = [index for index in pending if index not in done]
        return changed

    async def on_changes(self, message: bytes) -> None:
        """See `transport.Receiver`."""
        try:
            changes = decode(message)
        except WireError as error:
            log.warning("%s", error.message)
            return
        if isinstance(changes, Changes):
            await self._absorb(changes.entries)

    async def on_ask(self, message: bytes) -> bytes:
        """See `transport.Receiver`."""
        try:
            question = decode(message)
        except WireError as error:
            return encode(Refused(error.message))
        if isinstance(question, Compare):
            equal = question.digest == self.map.digest()
            return encode(Same() if equal else Differs(self.map.bucket_digests()))
        if isinstance(question, Trade):
            await self._absorb(question.entries)
            reply = fill(self.map, question.buckets, without=frozenset(map(bytes, question.entries)))
            return encode(Traded(reply.buckets, reply.entries))
        return encode(Refused(f"'{type(question).__name__}' is no question."))

    def on_node(self, node_id: str) -> None:
        """See `transport.Receiver`."""
        if node_id == self.node_id:
            return
        self._due.add(node_id)
        if node_id not in self._settling:
            self._settling[node_id] = background(self._settle(node_id), f"intents with {node_id}")

    async def _commit(self, entry: Entry) -> Entry:
        assert self._keeper is not None
        written = self._keeper.keep([entry])
        self._outbox[entry.key] = entry
        self._outgoing.set()
        self._changed([entry])
        await self._keeper.kept(written)
        return entry

    async def _absorb(self, packed: Iterable[msgspec.Raw]) -> int:
        assert self._keeper is not None
        raws, count = list(packed), 0
        for start in range(0, len(raws), _STEP):
            entries, unreadable = unpack(raws[start : start + _STEP])
            self.unreadable += unreadable
            changed = self.map.merge(entries)
            if changed:
                count += len(changed)
                self._keeper.keep(changed)
                self._changed(changed)
            await asyncio.sleep(0)
        return count

    async def _ask(self, node_id: str, question: Compare | Trade) -> Message:
        answer = decode(await self._transport.ask(node_id, encode(question), self._timing.ask))
        if isinstance(answer, Refused):
            raise UnavailableError(f"Node {node_id} refuses to compare intents: {answer.reason}")
        return answer

    async def _settle(self, node_id: str) -> None:
        """Compare with a node that appeared until it worked, or the node is gone."""
        pause = self._timing.first_retry
        try:
            while node_id in self._due:
                # Before asking: a node that comes back meanwhile is due again.
                self._due.discard(node_id)
                try:
                    await self.reconcile(node_id)
                except TandemError as error:
                    if node_id not in self._transport.nodes():
                        return
                    log.info("Intents could not be compared with node %s yet: %s", node_id, error.message)
                    self._due.add(node_id)
                    await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                    pause = min(2 * pause, self._timing.interval)
        finally:
            del self._settling[node_id]

    async def _compare_at_random(self) -> None:
        while True:
            await asyncio.sleep(self._timing.interval * random.uniform(0.5, 1.5))
            others = [node_id for node_id in self._transport.nodes() if node_id != self.node_id]
            if not others:
                continue
            try:
                await self.reconcile(random.choice(others))
            except TandemError as error:
                log.debug("Intents could not be compared: %s", error.message)

    async def _publish_changes(self) -> None:
        while True:
            await self._outgoing.wait()
            self._outgoing.clear()
            entries, self._outbox = list(self._outbox.values()), {}
            for message in messages_of(entries):
                try:
                    await self._transport.publish(encode(message), self._timing.publish)
                except TandemError as error:
                    log.info("A change of intents did not get out, other nodes will ask for it: %s", error.message)
