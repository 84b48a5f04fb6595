"""`tandem up`, with a door for tests: JSON lines over a UNIX socket, which leads across network namespaces.

Times are of the system's monotonic clock, which all processes of a machine share. `TANDEM_TEST_CLOCK` puts the wall
clock of the intents' stamps forward by so many seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tandem.cluster import replica
from tandem.cluster.clock import wall_milliseconds
from tandem.cluster.node import Node
from tandem.cluster.reconciler import instance_here
from tandem.errors import TandemError
from tandem.models.cards import ModelCard
from tandem.types.facts import NodeFacts


class Door:
    """What a test may ask of the node in this process."""

    def __init__(self, node: Node) -> None:
        self.node = node

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One question a line."""
        async for line in reader:
            question = json.loads(line)
            try:
                answer = await getattr(self, question.pop("do"))(**question)
                reply = {"answer": msgspec.to_builtins(answer), "at": time.monotonic()}
            except (TandemError, TimeoutError) as error:
                reply = {"error": type(error).__name__, "message": str(error), "at": time.monotonic()}
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()

    async def identity(self) -> str:
        return self.node.node_id

    async def create(self, node_id: str, instance_id: str, reference: str) -> str:
        intent = instance_here(node_id, reference, instance_id)
        return (await self.node.commands.create(intent)).instance_id

    async def remove(self, instance_id: str) -> str:
        return (await self.node.commands.remove(instance_id)).instance_id

    async def card(self, model_id: str, layers: int) -> str:
        card = ModelCard(model_id=model_id, storage_size=1, n_layers=layers, hidden_size=8, supports_tensor=False)
        return (await self.node.commands.add_card(card)).model_id

    async def remove_card(self, model_id: str) -> str:
        return (await self.node.commands.remove_card(model_id)).model_id

    async def state(self) -> dict[str, Any]:
        state = self.node.state
        return {
            "nodes": sorted(state.nodes),
            "instances": sorted(state.instances),
            "cards": {card.model_id: card.card["n_layers"] for card in state.cards.values()},
            "runners": self._runners(),
        }

    async def downloads(self) -> dict[str, list[dict[str, Any]]]:
        return {key: [msgspec.to_builtins(one) for one in facts.downloads] for key, facts in self._nodes().items()}

    async def links(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(one) for one in self._nodes()[self.node.node_id].links]

    async def download(self, node_id: str, model_id: str) -> Any:
        return await self.node.downloads.start(node_id, model_id)

    async def wait_nodes(self, nodes: list[str], deadline: float) -> float:
        return await self._until(lambda: sorted(self.node.state.nodes) == sorted(nodes), deadline)

    async def wait_intents(self, instances: list[str], cards: dict[str, int], deadline: float) -> float:
        def same() -> bool:
            state = self.node.state
            known = {card.model_id: card.card["n_layers"] for card in state.cards.values()}
            return sorted(state.instances) == sorted(instances) and known == cards

        return await self._until(same, deadline)

    async def wait_ready(self, instance_id: str, deadline: float) -> float:
        return await self._until(lambda: self._runners().get(instance_id) == "ready", deadline)

    async def wait_engine(self, backend: str, deadline: float) -> float:
        """Until all nodes have said that they have this engine."""

        def there() -> bool:
            engines = [[one.backend for one in facts.engines if one.available] for facts in self._nodes().values()]
            return all(backend in one for one in engines)

        return await self._until(there, deadline)

    async def wait_peers(self, instance_id: str, deadline: float) -> float:
        """Until an instance of this node has somebody who may prefill for it."""
        return await self._until(lambda: bool(self.node.prefill_peers(instance_id)), deadline)

    async def wait_download(self, node_id: str, model_id: str, state: str, deadline: float) -> float:
        def there() -> bool:
            facts = self._nodes().get(node_id)
            return facts is not None and any((one.model_id, one.state) == (model_id, state) for one in facts.downloads)

        return await self._until(there, deadline)

    async def wait_links(self, count: int, deadline: float) -> float:
        def measured() -> bool:
            links = self._nodes()[self.node.node_id].links
            return len([link for link in links if link.bandwidth is not None]) >= count

        return await self._until(measured, deadline)

    async def wait_running(self, model_id: str, deadline: float) -> float:
        def runs() -> bool:
            runners = [runner for facts in self._nodes().values() for runner in facts.runners]
            return any(runner.model_id == model_id and runner.running for runner in runners)

        return await self._until(runs, deadline)

    async def wait_arriving(self, model_id: str, least: int, deadline: float) -> float:
        def some() -> bool:
            facts = self._nodes()[self.node.node_id]
            return any(one.model_id == model_id and one.done >= least for one in facts.downloads)

        return await self._until(some, deadline)

    async def sender(self) -> str:
        """The node that this one is asking something of."""
        [found] = [node_id for node_id in self._nodes() if self.node.client.busy(node_id)]
        return found

    def _nodes(self) -> dict[str, NodeFacts]:
        return self.node.state.nodes

    def _runners(self) -> dict[str, str]:
        return {runner.instance_id: runner.state for facts in self._nodes().values() for runner in facts.runners}

    async def _until(self, good: Callable[[], bool], deadline: float) -> float:
        async with asyncio.timeout(deadline), self.node.control.log.subscribe() as events:
            while not good():
                await anext(events)
        return time.monotonic()


def open_door() -> None:
    """Have every node of this process open one."""
    path, offset = os.environ["TANDEM_TEST_DOOR"], float(os.environ.get("TANDEM_TEST_CLOCK", "0"))
    start = Node.start
    opened: list[asyncio.Server] = []  # one that nobody holds is closed

    async def start_with_door(self: Node, *arguments: Any) -> None:
        await start(self, *arguments)
        opened.append(await asyncio.start_unix_server(Door(self).serve, path))

    Node.start = start_with_door  # type: ignore[method-assign]
    if offset:
        made = replica.Replica.__init__

        def init(self: replica.Replica, *arguments: Any, **more: Any) -> None:
            made(self, *arguments, wall=lambda: wall_milliseconds() + int(offset * 1000), **more)

        replica.Replica.__init__ = init  # type: ignore[method-assign]


if __name__ == "__main__":
    from tandem.cli.main import main

    open_door()
    main()
