"""Measures how fast other nodes are reached at each of their addresses: seldom, little, and never all at once."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tandem.cluster.nodeport.client import NodeClient
from tandem.cluster.scale import slower
from tandem.cluster.tasks import background
from tandem.errors import TandemError
from tandem.placement.addresses import Reach, usable, with_port
from tandem.placement.routing import base_model
from tandem.placement.world import World
from tandem.types.facts import LinkRate, NodeFacts

PROBE_BYTES = 8 << 20
ROUND_TRIPS = 3
"""Small questions whose quickest answer counts, after one that opens the connection."""
TRIP_SECONDS = 3.0
PROBE_SECONDS = 10.0
TICK_SECONDS = 2.0
SPREAD_SECONDS = 0.5
"""For each node of the cluster: within so long after it appeared, a link is measured at a moment drawn by lot."""
LEAST_SPREAD_SECONDS = 2.0
TRIP_AGE, BANDWIDTH_AGE = 600.0, 3600.0
"""Measurements are repeated when they are that old, give or take a fifth."""
RETRY_SECONDS, MOST_RETRY_SECONDS = 10.0, 600.0
logger = logging.getLogger("tandem.cluster")


@dataclass(slots=True)
class _Link:
    """One address of another node.

    Attributes:
        trip_due, bandwidth_due: when to measure, by the monotonic clock.
        failures: in a row.
    """

    node_id: str
    address: str
    trip_due: float
    bandwidth_due: float
    round_trip: float | None = None
    bandwidth: float | None = None
    failures: int = 0


class LinkRates:
    """Keeps the measured links of this node. One probe at a time, and none towards a node that this one is busy with.

    Round trips are measured to every node. Bandwidth only from nodes that run a model which this one runs too: those
    may send caches here.

    Args:
        client: for speaking to them.
        world: the cluster as it is known now.
        tell: called with all measured links when one has changed.
        chance: draws the moments.
        tick: seconds between two looks at what is due.
    """

    def __init__(
        self,
        node_id: str,
        client: NodeClient,
        world: Callable[[], World],
        tell: Callable[[Iterable[LinkRate]], None],
        *,
        chance: random.Random | None = None,
        tick: float = TICK_SECONDS,
    ) -> None:
        self._node_id = node_id
        self._client = client
        self._world = world
        self._tell = tell
        self._chance = chance or random.Random()
        self._tick = tick
        self._links: dict[tuple[str, str, str, str], _Link] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to measure."""
        self._task = background(self._run(), "link rates")

    async def stop(self) -> None:
        """Measure no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def rates(self) -> list[LinkRate]:
        """What is known now. Addresses that did not answer are not among it."""
        found = {
            (link.node_id, link.address): LinkRate(link.node_id, link.address, link.bandwidth, link.round_trip)
            for link in self._links.values()
            if link.round_trip is not None
        }
        return [found[key] for key in sorted(found)]

    async def _run(self) -> None:
        pause = self._tick
        while True:
            await asyncio.sleep(pause)
            world = self._world()
            # Each link waits longer among many anyway.
            pause = self._tick * slower(len(world.nodes))
            if self._keep_up(world):
                self._tell(self.rates())
            partners = partners_of(self._node_id, world)
            for link in self._due(partners):
                facts = world.nodes.get(link.node_id)
                if facts is None or facts.node_port is None or self._client.busy(link.node_id):
                    continue
                await self._measure(link, facts, link.node_id in partners)
                self._tell(self.rates())

    def _keep_up(self, world: World) -> bool:
        """Note addresses that came and went; whether a measured one went."""
        here = world.nodes.get(self._node_id)
        wanted = dict(_addresses(here, world)) if here is not None else {}
        gone = [key for key in self._links if key not in wanted]
        lost = any(self._links.pop(key).round_trip is not None for key in gone)
        spread = max(LEAST_SPREAD_SECONDS, SPREAD_SECONDS * len(world.nodes))
        for key, address in wanted.items():
            if key not in self._links:
                due = time.monotonic() + self._chance.uniform(0.0, spread)
                self._links[key] = _Link(key[0], address, due, due)
        return lost

    def _due(self, partners: frozenset[str]) -> list[_Link]:
        now = time.monotonic()
        due = [
            link
            for link in self._links.values()
            if link.trip_due <= now or (link.node_id in partners and link.bandwidth_due <= now)
        ]
        self._chance.shuffle(due)
        return due

    async def _measure(self, link: _Link, facts: NodeFacts, with_bandwidth: bool) -> None:
        assert facts.node_port is not None
        address = with_port(link.address, facts.node_port)
        try:
            trips = [
                await self._client.probe(link.node_id, address, 1, deadline=TRIP_SECONDS)
                for _ in range(ROUND_TRIPS + 1)
            ]
        except TandemError as error:
            logger.debug("node %s at %s: %s", link.node_id, address, error.message)
            link.round_trip = link.bandwidth = None
            link.trip_due = link.bandwidth_due = self._retry(link)
            return
        link.round_trip = min(trips[1:])
        link.trip_due = self._later(TRIP_AGE)
        if not with_bandwidth or link.bandwidth_due > time.monotonic() or self._client.busy(link.node_id):
            return
        try:
            seconds = await self._client.probe(link.node_id, address, PROBE_BYTES, deadline=PROBE_SECONDS)
        except TandemError as error:
            # Another node may be measuring its link to the same one.
            logger.debug("node %s at %s: %s", link.node_id, address, error.message)
            link.bandwidth_due = self._retry(link)
            return
        link.bandwidth = PROBE_BYTES / max(seconds - link.round_trip, 1e-6)
        link.bandwidth_due = self._later(BANDWIDTH_AGE)
        link.failures = 0

    def _retry(self, link: _Link) -> float:
        link.failures = min(link.failures + 1, 10)
        return self._later(min(RETRY_SECONDS * 2 ** (link.failures - 1), MOST_RETRY_SECONDS))

    def _later(self, seconds: float) -> float:
        return time.monotonic() + seconds * self._chance.uniform(0.8, 1.2)


def partners_of(node_id: str, world: World) -> frozenset[str]:
    """Nodes with an instance of a model that `node_id` has an instance of, too. Pure."""
    mine: set[str] = set()
    others: dict[str, set[str]] = {}
    for instance in world.instances.values():
        model = base_model(instance)
        for shard in instance.shards:
            if shard.node_id == node_id:
                mine.add(model)
            else:
                others.setdefault(shard.node_id, set()).add(model)
    return frozenset(other for other, models in others.items() if models & mine)


def _addresses(here: NodeFacts, world: World) -> Iterator[tuple[tuple[str, str, str, str], str]]:
    """What to measure: an address of each life of each node on another machine, by each life of its port."""
    me = Reach.of(here)
    for node_id, facts in world.nodes.items():
        if node_id == here.node_id or facts.node_port is None or me.same_machine(Reach.of(facts)):
            continue
        for interface in usable(facts):
            yield (node_id, interface.address, facts.life, str(facts.node_port)), interface.address
