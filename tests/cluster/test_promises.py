"""Memory that is decided and not yet taken: a node of little memory promises it once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem.cluster.facts.gather import Sources
from tandem.cluster.facts.resources import SystemReading
from tandem.cluster.node import Node
from tandem.config import Settings
from tandem.engines.sim.profile import parse_sim_reference
from tandem.errors import PlacementError
from tandem.placement.plan import PlacementRequest
from tandem.types.intents import InstanceIntent

pytestmark = pytest.mark.anyio

DEADLINE = 30.0
MIB = 1 << 20
REFERENCE = "sim:layers=8,kv_heads=8,head_dim=64,load_seconds=600"
"""Takes some 600 MiB, most of it cache, and loads for as long as the test runs."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """Has 1 GiB for runners, and 0.5 GiB for the system."""
    reading = SystemReading(4096 * MIB, 1536 * MIB, 0, 0, 0.1, None)
    node = Node(Settings(home=tmp_path), Sources(system=lambda: reading))
    await node.start()
    yield node
    await node.stop()


def wish() -> PlacementRequest:
    return PlacementRequest(parse_sim_reference(REFERENCE).card(), REFERENCE)


async def test_of_two_that_are_asked_for_at_once_one_fits(node: Node) -> None:
    outcomes = await asyncio.gather(*(node.commands.place(wish()) for _ in range(2)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {InstanceIntent, PlacementError}
    assert len(node.state.instances) == 1


async def test_one_that_loads_keeps_what_it_was_promised(node: Node) -> None:
    placed = await node.commands.place(wish())
    async with asyncio.timeout(DEADLINE), node.control.log.subscribe() as events:
        while not any(runner.state == "loading" for runner in node.state.nodes[node.node_id].runners):
            await anext(events)
    with pytest.raises(PlacementError, match="needs"):
        await node.commands.place(wish())
    await node.commands.remove(placed.instance_id)
    async with asyncio.timeout(DEADLINE), node.control.log.subscribe() as events:
        while node.state.nodes[node.node_id].runners:
            await anext(events)
    await node.commands.place(wish())
