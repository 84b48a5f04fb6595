"""A network of replicas within one process, which loses, repeats, reorders and cuts on demand."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path

from tandem.cluster.events import EventLog
from tandem.cluster.exchange import decode
from tandem.cluster.replica import Replica, ReplicaTiming
from tandem.cluster.snapshot import SnapshotStore
from tandem.cluster.state import ClusterState
from tandem.cluster.transport import Receiver
from tandem.errors import DeadlineError, StorageError, UnavailableError
from tandem.types.intents import Entry, InstanceIntent, LinkIntent, Shard, Stamp

DEADLINE = 20.0
DAY = 86_400_000


def instance(name: str, reference: str = "sim:") -> InstanceIntent:
    shards = (Shard("node", f"runner-{name}"),)
    return InstanceIntent(name, "model", reference, "Sim", "Pipeline", shards, {"layers": 2, "tags": ["a"]})


def link(name: str, prefill: Iterable[str], decode_side: Iterable[str]) -> LinkIntent:
    return LinkIntent(name, tuple(prefill), tuple(decode_side))


class Network:
    """Who reaches whom, and what goes wrong on the way."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.receivers: dict[str, Receiver] = {}
        self.cuts: set[frozenset[str]] = set()
        self.loss = 0.0
        self.lose_next = 0
        self.repeats = 0.0
        self.seen: Counter[str] = Counter()
        self._deliveries: set[asyncio.Task[None]] = set()

    def reaches(self, one: str, other: str) -> bool:
        return {one, other} <= set(self.receivers) and frozenset((one, other)) not in self.cuts

    def part(self, side: Iterable[str]) -> None:
        """Cut `side` off from the rest."""
        inside = set(side)
        self.cuts |= {frozenset(pair) for pair in combinations(self.receivers, 2) if len(inside & set(pair)) == 1}

    def heal(self) -> None:
        """Mend every cut; all nodes see one another appear."""
        self.cuts.clear()
        for one, other in combinations(list(self.receivers), 2):
            self.receivers[one].on_node(other)
            self.receivers[other].on_node(one)

    def join(self, node_id: str, receiver: Receiver) -> None:
        self.receivers[node_id] = receiver
        for other, there in self.receivers.items():
            if other != node_id and self.reaches(node_id, other):
                there.on_node(node_id)

    def leave(self, node_id: str) -> None:
        self.receivers.pop(node_id, None)

    def lost(self) -> bool:
        gone = self.lose_next > 0 or self.random.random() < self.loss
        self.lose_next = max(0, self.lose_next - 1)
        self.seen["lost"] += gone
        return gone

    def deliver(self, sender: str, message: bytes) -> None:
        for node_id in list(self.receivers):
            if node_id == sender or not self.reaches(sender, node_id) or self.lost():
                continue
            copies = 1 + (self.random.random() < self.repeats)
            self.seen["repeated"] += copies - 1
            for _ in range(copies):
                task = asyncio.create_task(self._bring(node_id, message))
                self._deliveries.add(task)
                task.add_done_callback(self._deliveries.discard)

    async def _bring(self, node_id: str, message: bytes) -> None:
        for _ in range(self.random.randrange(20)):
            await asyncio.sleep(0)
        if node_id in self.receivers:
            await self.receivers[node_id].on_changes(message)


class NetworkTransport:
    """One node's end of a `Network`."""

    def __init__(self, network: Network, node_id: str) -> None:
        self.network = network
        self.node_id = node_id

    def attach(self, receiver: Receiver) -> None:
        self.network.join(self.node_id, receiver)

    def nodes(self) -> Sequence[str]:
        return [name for name in self.network.receivers if name != self.node_id and self.reaches(name)]

    def reaches(self, node_id: str) -> bool:
        return self.network.reaches(self.node_id, node_id)

    async def publish(self, message: bytes, deadline: float) -> None:
        await asyncio.sleep(0)
        self.network.seen["published"] += 1
        self.network.deliver(self.node_id, message)

    async def ask(self, node_id: str, message: bytes, deadline: float) -> bytes:
        await asyncio.sleep(0)
        network = self.network
        network.seen[type(decode(message)).__name__] += 1
        if not self.reaches(node_id):
            raise UnavailableError(f"{node_id} is not there")
        if network.lost():
            raise DeadlineError(f"{node_id} heard nothing")
        answer = await network.receivers[node_id].on_ask(message)
        await asyncio.sleep(0)
        network.seen[type(decode(answer)).__name__] += 1
        network.seen["bytes"] += len(message) + len(answer)
        if network.lost() or not self.reaches(node_id):
            raise DeadlineError(f"{node_id} was not heard")
        return answer


class MortalStore(SnapshotStore):
    """Writes nothing any more once its process was killed. Made on the event loop; `written` follows each write."""

    dead = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.loop = asyncio.get_running_loop()
        self.written = asyncio.Event()

    def append(self, entries: Sequence[Entry], clock: Stamp) -> None:
        self._alive()
        super().append(entries, clock)
        self.loop.call_soon_threadsafe(self.written.set)

    def replace(self, entries: Iterable[Entry], clock: Stamp) -> None:
        self._alive()
        super().replace(entries, clock)
        self.loop.call_soon_threadsafe(self.written.set)

    def _alive(self) -> None:
        if self.dead:
            raise StorageError("killed")


class Machine:
    """A node of the network: its folder and its wall clock outlive its process."""

    def __init__(
        self, network: Network, node_id: str, folder: Path, wall: Callable[[], int], timing: ReplicaTiming | None = None
    ) -> None:
        self.network = network
        self.node_id = node_id
        self.folder = folder
        self.wall = wall
        self.timing = timing or ReplicaTiming(interval=1e6, first_retry=0.001)
        self.replica: Replica | None = None
        self.moved = asyncio.Event()

    async def start(self) -> Replica:
        assert self.replica is None
        self.store = MortalStore(self.folder)
        transport = NetworkTransport(self.network, self.node_id)
        self.replica = Replica(
            self.node_id, transport, self.store, changed=self._changed, timing=self.timing, wall=self.wall
        )
        self.events: EventLog | None = None
        await self.replica.start()
        self.events = EventLog(ClusterState(intents=self.replica.map.entries))
        return self.replica

    def _changed(self, entries: list[Entry]) -> None:
        if self.events is not None:
            self.events.append_intents(entries)
        self.moved.set()

    async def stop(self) -> None:
        assert self.replica is not None
        self.network.leave(self.node_id)
        await self.replica.stop()
        self.replica = None

    async def kill(self) -> None:
        """End as by `kill -9`: nothing more is written or sent."""
        assert self.replica is not None
        self.network.leave(self.node_id)
        self.store.dead = True
        # A write that the disk has begun is finished, as the kernel would.
        await asyncio.to_thread(self.store.close)
        await self.replica.stop()
        self.replica = None


async def equal(machines: Sequence[Machine]) -> None:
    """Wait until the copies of all running machines are equal."""
    running = [machine for machine in machines if machine.replica]
    async with asyncio.timeout(DEADLINE):
        while len({machine.replica.map.digest() for machine in running if machine.replica}) > 1:
            for machine in running:
                machine.moved.clear()
            waits = [asyncio.create_task(machine.moved.wait()) for machine in running]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()


async def settled(machines: Sequence[Machine]) -> None:
    """Wait until every comparison with a node that appeared has ended."""
    async with asyncio.timeout(DEADLINE):
        for machine in machines:
            if machine.replica:
                await asyncio.gather(*machine.replica._settling.values())
