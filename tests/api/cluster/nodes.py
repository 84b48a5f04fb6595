"""Real nodes that find each other on loopback: in this process with its HTTP surface, or in one that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import tandem
from tandem.api.server import HttpServer, serve
from tandem.cluster.bus.config import free_port
from tandem.cluster.node import Node
from tandem.config import Settings

DEADLINE = 30.0
PROGRAM = Path(__file__).with_name("program.py")


@dataclass
class Served:
    """One node, its HTTP surface and a client of it."""

    node: Node
    server: HttpServer
    http: httpx.AsyncClient

    async def until(self, good: Callable[[], bool], deadline: float = DEADLINE) -> None:
        """Until what this node knows is as it should be. Looks after every event."""
        async with asyncio.timeout(deadline), self.node.control.log.subscribe() as events:
            while not good():
                await anext(events)

    async def meets(self, node_id: str) -> None:
        """Until another node is known, and can be told things."""
        await self.until(lambda: node_id in self.node.state.nodes and bool(self.node.state.nodes[node_id].node_port))

    async def ready(self, instance_id: str) -> None:
        """Until an instance answers."""
        await self.node.wait_ready(instance_id, DEADLINE)

    async def place(self, **body: Any) -> dict[str, Any]:
        """Place an instance, which has to work."""
        answer = await self.http.post("/place_instance", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def settings_for(home: Path, port: int, *peers: int, **more: Any) -> Settings:
    """Of a node that listens at `port` for nodes and dials `peers`."""
    return Settings(
        home=home,
        port=0,
        offline=True,
        cluster_port=port,
        cluster_peers=",".join(f"127.0.0.1:{peer}" for peer in peers),
        max_body_bytes=1 << 20,
        **{"node_name": home.name, **more},
    )


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Served]:
    """A node in this process."""
    node = Node(settings)
    await node.start()
    try:
        server = await serve(node, settings)
        node.serves_at(server.port)
        try:
            async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE) as client:
                yield Served(node, server, client)
        finally:
            await server.stop(deadline=0.1)
    finally:
        await node.stop()


@contextlib.asynccontextmanager
async def pair(folder: Path, **more: Any) -> AsyncIterator[tuple[Served, Served]]:
    """Two nodes in this process that know each other, named `left` and `right`."""
    ports = [free_port("tcp"), free_port("tcp")]
    left = settings_for(folder / "left", ports[0], ports[1], **more)
    right = settings_for(folder / "right", ports[1], ports[0], **more)
    async with serving(left) as one, serving(right) as other:
        await one.meets(other.node.node_id)
        await other.meets(one.node.node_id)
        yield one, other


@dataclass
class Killable:
    """A node in a process of its own."""

    process: asyncio.subprocess.Process
    node_id: str

    def kill(self) -> None:
        """As a power cut does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def killable(folder: Path, port: int, *peers: int) -> AsyncIterator[Killable]:
    """A node that `kill` ends. It serves no HTTP."""
    settings = settings_for(folder, port, *peers)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TANDEM_CLUSTER_P")},
        "PYTHONPATH": str(Path(tandem.__file__).parents[1]),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROGRAM),
        settings.model_dump_json(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), DEADLINE)
        yield Killable(process, json.loads(line)["node_id"])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
