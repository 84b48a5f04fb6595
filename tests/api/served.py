"""A served model on an event loop of its own, for clients that block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.api.server import HttpServer, serve
from tandem.cluster.node import Node
from tandem.config import Settings


@dataclass(frozen=True)
class Served:
    """Where the server listens, and where its model lies (None for `sim`)."""

    url: str
    path: Path | None


@contextlib.contextmanager
def served(settings: Settings, reference: str) -> Iterator[Served]:
    """Serve one model until the block is left."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[Node, HttpServer, Path | None]:
        node = Node(settings)
        await node.start()
        model = await node.models.obtain(reference)
        await node.wait_ready(await node.launch(model), 120)
        return node, await serve(node, settings), None if isinstance(model, str) else model.path

    async def stop(node: Node, server: HttpServer) -> None:
        await server.stop(deadline=0.1)
        await node.stop()

    try:
        node, server, path = asyncio.run_coroutine_threadsafe(start(), loop).result(180)
        try:
            yield Served(server.url, path)
        finally:
            asyncio.run_coroutine_threadsafe(stop(node, server), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
