from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .nodes import Served, pair


@pytest.fixture(scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Served, Served]]:
    """Two nodes that know each other. Tests remove what they create."""
    async with pair(tmp_path_factory.mktemp("two")) as nodes:
        yield nodes


@pytest.fixture
async def left(two: tuple[Served, Served]) -> AsyncIterator[Served]:
    """The first of two nodes, without instances before and after the test."""
    yield two[0]
    for instance_id in list(two[0].node.state.instances):
        await two[0].node.commands.remove(instance_id)
    await two[0].until(lambda: not any(facts.runners for facts in two[0].node.world().nodes.values()))


@pytest.fixture
def right(two: tuple[Served, Served]) -> Served:
    return two[1]
