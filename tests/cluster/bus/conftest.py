"""Nodes and networks for the bus's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import netns
from tests.cluster.bus.nodes import Nodes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(tmp_path) as found:
        yield found


@pytest.fixture
def network(namespaces: None) -> Iterator[netns.Network]:
    with netns.Network() as found:
        yield found
