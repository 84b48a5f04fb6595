"""One node of the bench's cluster, and when it learnt of each of the others."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tandem.cluster.facts.engines import EngineProber
from tandem.cluster.node import Node
from tandem.cluster.state import NodeJoined, NodeLeft
from tandem.types.facts import EngineFact


class Known(EngineProber):
    """Engines that were probed already: fifty nodes of one machine need not import each engine fifty times."""

    def __init__(self, engines: tuple[EngineFact, ...]) -> None:
        super().__init__()
        self._engines = engines

    async def engines(self) -> tuple[EngineFact, ...]:
        return self._engines


class Hosted:
    """Writes down times of the machine's monotonic clock: they can be compared among processes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._joined: dict[str, float] = {}
        self._left: dict[str, float] = {}
        self._departures: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def sees(self) -> int:
        """Nodes whose facts are known here, this one among them."""
        return len(self._joined)

    async def start(self) -> None:
        """Start the node."""
        await self.node.start()
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Stop the node."""
        if self._task is not None:
            self._task.cancel()
        await self.node.stop()

    async def joined(self, ids: Sequence[str]) -> float:
        """When the last of `ids` was seen here; waits for it."""
        await self._until(lambda: all(node_id in self._joined for node_id in ids))
        return max(self._joined[node_id] for node_id in ids)

    async def left(self, ids: Sequence[str]) -> float:
        """When the facts of the last of `ids` were dropped here; waits for it."""
        await self._until(lambda: not any(node_id in self._joined for node_id in ids))
        return max(self._left[node_id] for node_id in ids)

    def departures(self, ids: Sequence[str]) -> int:
        """How often others than `ids` were taken for gone."""
        return sum(count for node_id, count in self._departures.items() if node_id not in ids)

    async def ready(self, model_id: str, count: int) -> None:
        """Wait until so many ready instances of a model are known here."""

        def enough() -> bool:
            runners = [runner for facts in self.node.state.nodes.values() for runner in facts.runners]
            ready = {one.instance_id for one in runners if one.model_id == model_id and one.state == "ready"}
            return len(ready & self.node.state.instances.keys()) >= count

        await self._until(enough)

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._changed.clear()
            await self._changed.wait()

    async def _follow(self) -> None:
        async with self.node.control.log.subscribe(0) as events:
            async for item in events:
                now = time.monotonic()
                event = getattr(item, "event", None)
                if isinstance(event, NodeJoined):
                    self._joined[event.facts.node_id] = now
                elif isinstance(event, NodeLeft):
                    self._joined.pop(event.node_id, None)
                    self._left[event.node_id] = now
                    self._departures[event.node_id] += 1
                self._changed.set()
