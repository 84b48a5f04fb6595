from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tandem.api.server import HttpServer, serve
from tandem.config import Settings

from .double import DoubleNode


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"), port=0, max_body_bytes=1 << 20, max_batch=4)


@pytest.fixture(scope="module")
async def server(settings: Settings) -> AsyncIterator[HttpServer]:
    """One server for a module: starting and stopping one takes longer than most tests."""
    server = await serve(DoubleNode(settings), settings)  # type: ignore[arg-type]
    yield server
    await server.stop(deadline=0.1)


@pytest.fixture
async def node(server: HttpServer) -> AsyncIterator[DoubleNode]:
    node = server.context.node
    assert isinstance(node, DoubleNode)
    node.reset()
    yield node
    await node.stop()
    assert node.open == 0
    assert len(server.context.running) == 0


@pytest.fixture(scope="module")
async def shared_client(server: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture
async def client(shared_client: httpx.AsyncClient, node: DoubleNode) -> httpx.AsyncClient:
    return shared_client
