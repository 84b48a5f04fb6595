"""Web pages and foreign host names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tandem.api.server import serve
from tandem.config import Settings

from .double import DoubleNode

pytestmark = pytest.mark.anyio

CHAT = {"model": "double", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(params=["", "https://chat.example", "*"])
async def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    settings = Settings(home=tmp_path, port=0, allowed_origins=request.param)
    node = DoubleNode(settings)
    server = await serve(node, settings)  # type: ignore[arg-type]
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        yield client, request.param
    await server.stop(deadline=0.1)
    await node.stop()


async def test_programs_notice_nothing(guarded: tuple[httpx.AsyncClient, str]) -> None:
    client, _ = guarded
    response = await client.get("/node_id")
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1:8080", "http://[::1]:1", "http://a.localhost"]
)
async def test_pages_of_this_machine_are_welcome(guarded: tuple[httpx.AsyncClient, str], origin: str) -> None:
    client, _ = guarded
    response = await client.get("/node_id", headers={"origin": origin})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin
    preflight = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    response = await client.options("/v1/chat/completions", headers=preflight)
    assert response.status_code == 200
    assert "POST" in response.headers["access-control-allow-methods"]


@pytest.mark.parametrize(
    "origin",
    ["https://chat.example", "https://evil.example", "null", "http://localhost.evil.example", "file://x", "http://["],
)
async def test_pages_from_elsewhere_need_permission(guarded: tuple[httpx.AsyncClient, str], origin: str) -> None:
    client, allowed = guarded
    for method, path in (("GET", "/node_id"), ("POST", "/v1/chat/completions"), ("OPTIONS", "/v1/chat/completions")):
        headers = {"origin": origin, "access-control-request-method": "POST"}
        response = await client.request(method, path, headers=headers, json=CHAT if method == "POST" else None)
        if allowed in (origin, "*"):
            assert response.status_code != 403
        else:
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "forbidden_origin"
            assert "TANDEM_ALLOWED_ORIGINS" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "welcome"),
    [
        ("localhost", True),
        ("localhost:52415", True),
        ("127.0.0.1:1", True),
        ("192.168.1.9:52415", True),
        ("[::1]:52415", True),
        ("evil.example", False),
        ("localhost.evil.example:52415", False),
        ("", False),
    ],
)
async def test_rebound_names_are_refused(guarded: tuple[httpx.AsyncClient, str], host: str, welcome: bool) -> None:
    client, _ = guarded
    response = await client.get("/node_id", headers={"host": host})
    assert response.status_code == (200 if welcome else 403)


async def test_with_a_key_any_name_will_do(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, port=0, api_key="secret")
    node = DoubleNode(settings)
    server = await serve(node, settings)  # type: ignore[arg-type]
    async with httpx.AsyncClient(base_url=server.url, headers={"host": "proxy.example"}) as client:
        assert (await client.get("/node_id")).status_code == 401
        assert (await client.get("/node_id", headers={"authorization": "Bearer secret"})).status_code == 200
    await server.stop(deadline=0.1)
    await node.stop()
