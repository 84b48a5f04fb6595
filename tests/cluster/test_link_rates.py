"""When links are measured, among fifty nodes. `test_cluster_machines` measures real ones."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest

from tandem.cluster import link_rates
from tandem.cluster.link_rates import PROBE_BYTES, LinkRates, partners_of
from tandem.errors import NodeLostError, QueueFullError
from tandem.placement.world import World
from tandem.types.facts import Interface, LinkRate, NodeFacts
from tandem.types.intents import InstanceIntent, Shard

pytestmark = pytest.mark.anyio
NODES = 50
DEADLINE = 20.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rates, "SPREAD_SECONDS", 0.002)
    monkeypatch.setattr(link_rates, "LEAST_SPREAD_SECONDS", 0.002)
    monkeypatch.setattr(link_rates, "RETRY_SECONDS", 0.05)


def facts(number: int, port: int = 7000) -> NodeFacts:
    interfaces = (
        Interface("eth0", f"10.0.0.{number + 1}", "ethernet", 1_000_000_000),
        Interface("wlan0", f"10.0.1.{number + 1}", "wifi"),
    )
    return NodeFacts(f"n{number}", "life", 1, node_port=port, interfaces=interfaces)


def instance(number: int, model: str) -> InstanceIntent:
    shard = Shard(f"n{number}", f"r{number}-{model}")
    return InstanceIntent(f"i{number}-{model}", model, "sim", "Sim", "Pipeline", (shard,), {})


class Wires:
    """Stands for `NodeClient`: answers probes by what a test says of each address, and counts them."""

    def __init__(self) -> None:
        self.trips: Counter[str] = Counter()
        self.transfers: Counter[str] = Counter()
        self.dead: set[str] = set()
        self.taken: set[str] = set()
        self.busy_with: set[str] = set()
        self.at_once = 0
        self._now = 0

    def busy(self, node_id: str) -> bool:
        return node_id in self.busy_with

    async def probe(self, node_id: str, address: str, size: int, *, deadline: float) -> float:
        self._now += 1
        self.at_once = max(self.at_once, self._now)
        await asyncio.sleep(0)
        self._now -= 1
        (self.trips if size == 1 else self.transfers)[address] += 1
        if address in self.dead:
            raise NodeLostError("It is dead.")
        if size > 1 and address in self.taken:
            raise QueueFullError("Another node is measuring.")
        slow = address.startswith("10.0.1.")
        return 0.002 if size == 1 else PROBE_BYTES / (10e6 if slow else 100e6) + 0.002


class Measured:
    """What was told last."""

    def __init__(self, world: World, wires: Wires) -> None:
        self.world = world
        self.rates: list[LinkRate] = []
        self._told = asyncio.Event()
        self.links = LinkRates("n0", wires, lambda: self.world, self.tell, chance=random.Random(1), tick=0.01)  # type: ignore[arg-type]

    def tell(self, rates: object) -> None:
        self.rates = list(rates)  # type: ignore[call-overload]
        self._told.set()

    async def until(self, good: object) -> None:
        async with asyncio.timeout(DEADLINE):
            while not good():  # type: ignore[operator]
                self._told.clear()
                await self._told.wait()

    async def __aenter__(self) -> Measured:
        self.links.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.links.stop()


def cluster(partners: int) -> World:
    nodes = {f"n{number}": facts(number) for number in range(NODES)}
    models = [instance(number, "shared") for number in range(partners + 1)]
    models += [instance(number, "other") for number in range(partners + 1, NODES)]
    return World(nodes, {one.instance_id: one for one in models})


async def test_fifty_nodes() -> None:
    """One at a time; bandwidth from the three that run the same model; nothing more once it is known."""
    wires = Wires()
    async with Measured(cluster(3), wires) as measured:
        await measured.until(lambda: sum(rate.bandwidth is not None for rate in measured.rates) == 2 * 3)
        await measured.until(lambda: len(measured.rates) == 2 * (NODES - 1))
        assert wires.at_once == 1
        assert set(wires.transfers) == {f"10.0.{net}.{number + 1}:7000" for net in (0, 1) for number in (1, 2, 3)}
        assert set(wires.transfers.values()) == {1}
        fast = {rate.address: rate.bandwidth for rate in measured.rates if rate.bandwidth}
        assert fast["10.0.0.2"] == pytest.approx(100e6)
        assert fast["10.0.1.2"] == pytest.approx(10e6)
        assert all(rate.round_trip == 0.002 for rate in measured.rates)
        before = wires.trips.total()
        # A node is gone: its rates are, too. Many looks later nothing was measured again.
        rest = {key: one for key, one in measured.world.nodes.items() if key != "n1"}
        measured.world = World(rest, measured.world.instances)
        await measured.until(lambda: all(rate.node_id != "n1" for rate in measured.rates))
        assert wires.trips.total() == before


async def test_what_does_not_answer_is_left_out_and_tried_again() -> None:
    wires = Wires()
    wires.dead, wires.taken = {"10.0.1.2:7000"}, {"10.0.0.2:7000"}
    async with Measured(World({"n0": facts(0), "n1": facts(1)}, cluster(1).instances), wires) as measured:
        await measured.until(lambda: wires.trips["10.0.1.2:7000"] > 2 and wires.transfers["10.0.0.2:7000"] > 1)
        assert [(rate.address, rate.bandwidth) for rate in measured.rates] == [("10.0.0.2", None)]
        wires.dead.clear()
        wires.taken.clear()
        await measured.until(lambda: sum(rate.bandwidth is not None for rate in measured.rates) == 2)


async def test_a_node_that_is_busy_is_not_disturbed() -> None:
    wires = Wires()
    wires.busy_with = {"n1"}
    nodes = {f"n{number}": facts(number) for number in range(3)}
    async with Measured(World(nodes, cluster(2).instances), wires) as measured:
        await measured.until(lambda: sum(rate.bandwidth is not None for rate in measured.rates) == 2)
        assert {rate.node_id for rate in measured.rates} == {"n2"}
        wires.busy_with.clear()
        await measured.until(lambda: {rate.node_id for rate in measured.rates} == {"n1", "n2"})


async def test_a_node_that_started_anew_is_measured_anew() -> None:
    wires = Wires()
    async with Measured(World({"n0": facts(0), "n1": facts(1)}), wires) as measured:
        await measured.until(lambda: len(measured.rates) == 2)
        measured.world = World({"n0": facts(0), "n1": facts(1, port=7001)})
        await measured.until(lambda: wires.trips["10.0.0.2:7001"] > 0 and len(measured.rates) == 2)


def test_the_same_machine_needs_no_measuring() -> None:
    here, there = facts(0), facts(0)
    world = World({"n0": here, "n1": NodeFacts("n1", "life", 1, node_port=1, interfaces=there.interfaces)})
    assert list(link_rates._addresses(here, world)) == []


def test_partners() -> None:
    world = cluster(3)
    assert partners_of("n0", world) == {"n1", "n2", "n3"}
    assert partners_of("nobody", world) == frozenset()


def test_looking_at_fifty_nodes_costs_nothing() -> None:
    world = cluster(3)
    links = LinkRates("n0", Wires(), lambda: world, lambda rates: None)  # type: ignore[arg-type]
    links._keep_up(world)
    began = time.perf_counter()
    for _ in range(20):
        links._keep_up(world)
        links._due(partners_of("n0", world))
    each = (time.perf_counter() - began) / 20
    print(f"one look every {link_rates.TICK_SECONDS:g} s takes {each * 1000:.2f} ms")
    assert each < 0.01
