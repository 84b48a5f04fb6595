"""Machines and nodes for the tests of whole clusters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.cluster import netns
from tests.cluster.up_nodes import UpNode, UpNodes, meet


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where machines cannot be made."""
    if reason := netns.missing():
        pytest.skip(reason)


@dataclass(frozen=True)
class Cluster:
    """Three nodes on one switch that know one another."""

    network: netns.Network
    up: UpNodes
    nodes: list[UpNode]


@pytest.fixture(scope="module")
def cluster(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Every test leaves it as it was: whole, without instances and cards."""
    with netns.Network() as network, UpNodes(tmp_path_factory.mktemp("cluster")) as up:
        nodes = [up.node(network.machine(name)) for name in ("n1", "n2", "n3")]
        for node in nodes:
            node.start()
        for node in nodes:
            node.ready()
        meet(nodes)
        yield Cluster(network, up, nodes)
