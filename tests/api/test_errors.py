"""Every refusal has OpenAI's shape and the right status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tandem.api.server import serve
from tandem.config import Settings
from tandem.errors import (
    ContextTooLongError,
    DeadlineError,
    EngineError,
    RunnerDiedError,
    TandemError,
)

from .double import DoubleNode
from .helpers import error_of

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def with_content(value: str) -> bytes:
    """A chat body with `value` spliced in as JSON text."""
    return b'{"model":"tiny","messages":[{"role":"user","content":%b}]}' % value.encode()


def with_field(name: str, value: str) -> bytes:
    return b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"%b":%b}' % (name.encode(), value.encode())


DEEP = "[" * 100_000 + "]" * 100_000
DEEP_OBJECT = '{"a":' * 100 + "1" + "}" * 100


def tool_with(parameters: str) -> bytes:
    return with_field("tools", f'[{{"type":"function","function":{{"name":"f","parameters":{parameters}}}}}]')


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model":"tiny"}',
        b'{"messages":[{"role":"user","content":"x"}]}',
        with_content('"\\ud800"'),
        with_content('"\\udc00\\ud800"'),
        with_content('"\xed\xa0\x80"') + b"\xed\xa0\x80",
        with_content("NaN"),
        with_content(DEEP),
        DEEP.encode(),
        with_field("temperature", "NaN"),
        with_field("temperature", "Infinity"),
        with_field("temperature", "1e999"),
        with_field("temperature", "-Infinity"),
        with_field("seed", "1" * 5000),
        with_field("max_tokens", "1e3"),
        with_field("x", "NaN"),
        with_field("logit_bias", '{"1":NaN}'),
        with_field("logit_bias", '{"-1":1}'),
        with_field("logit_bias", '{"1.5":1}'),
        with_field("logit_bias", '{"99999999999999999999":1}'),
        tool_with(DEEP_OBJECT),
        tool_with('{"maximum":1e999}'),
        tool_with('{"maximum":NaN}'),
        tool_with('{"maximum":' + "9" * 30 + "}"),
        tool_with("[]"),
        with_field("chat_template_kwargs", DEEP_OBJECT),
        with_field("response_format", '{"type":"json_schema","json_schema":{"schema":' + DEEP_OBJECT + "}}"),
    ],
)
async def test_unusable_bodies(client: httpx.AsyncClient, node: DoubleNode, raw: bytes) -> None:
    response = await client.post(CHAT, content=raw)
    assert response.status_code == 400, response.text
    assert error_of(response)["type"] == "invalid_request_error"
    assert not node.requests


@pytest.mark.parametrize(
    "raw",
    [
        with_content('"NaN and Infinity are words"'),
        with_content('"\\ud83e\\udda9"'),
        with_content('"\\u0000"'),
        tool_with('{"type":"object","properties":{"a":{"const":9007199254740993}}}'),
        b" \n\t" + with_content('"x"') + b"\n ",
    ],
)
async def test_odd_but_usable_bodies(client: httpx.AsyncClient, raw: bytes) -> None:
    assert (await client.post(CHAT, content=raw)).status_code == 200


async def test_the_content_type_does_not_matter(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, content=with_content('"x"'), headers={"content-type": "text/plain"})
    assert response.status_code == 200


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    for stream in (False, True):
        response = await client.post(CHAT, json={**GOOD, "model": "nobody/knows", "stream": stream})
        assert response.status_code == 404
        error = error_of(response)
        assert error["param"] == "model"
        assert "test/model" in error["message"]


async def test_unknown_route_and_method(client: httpx.AsyncClient) -> None:
    response = await client.get("/v2/nothing")
    assert response.status_code == 404
    assert error_of(response)["code"] == "not_found"
    response = await client.get(CHAT)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert error_of(response)["code"] == "method_not_allowed"


async def test_bad_query_parameter(client: httpx.AsyncClient) -> None:
    response = await client.get("/models?status=gone")
    assert response.status_code == 400
    assert error_of(response)["param"] == "status"


async def test_full_queue(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.full_after = 0
    for stream in (False, True):
        response = await client.post(CHAT, json={**GOOD, "stream": stream})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "3"
        assert error_of(response)["code"] == "queue_full"


async def test_model_not_ready(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.runner_state = "loading"
    response = await client.post(CHAT, json=GOOD)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert error_of(response)["code"] == "instance_not_ready"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ContextTooLongError("Too long.", param="messages"), 400),
        (EngineError("Broken."), 500),
        (RunnerDiedError("Gone.", retry_after=1), 503),
        (DeadlineError("Late."), 504),
    ],
)
async def test_early_failures_are_http_errors(
    client: httpx.AsyncClient, node: DoubleNode, error: TandemError, status: int
) -> None:
    node.play = lambda request: [error]
    for stream in (False, True):
        response = await client.post(CHAT, json={**GOOD, "stream": stream})
        assert response.status_code == status
        found = error_of(response)
        assert (found["code"], found["param"]) == (error.code, error.param)
        assert found["message"].endswith(error.message)
        known_words = "prompt is too long" in found["message"]
        assert known_words == isinstance(error, ContextTooLongError), "what litellm and others look for"


async def test_announced_body_too_large(client: httpx.AsyncClient, node: DoubleNode) -> None:
    response = await client.post(CHAT, content=b" " * ((1 << 20) + 1))
    assert response.status_code == 413
    assert error_of(response)["code"] == "payload_too_large"
    assert (await client.post(CHAT, json=GOOD)).status_code == 200, "the connection should still be usable"


async def test_streamed_body_too_large(client: httpx.AsyncClient, node: DoubleNode) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(33):
            yield b" " * (1 << 15)

    response = await client.post(CHAT, content=pieces())
    assert response.status_code == 413
    assert error_of(response)["code"] == "payload_too_large"


async def test_a_lying_content_length(client: httpx.AsyncClient, server: object) -> None:
    url = client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    writer.write(request + b"Content-Length: 99999999999999999999\r\n\r\n")
    head = await reader.readuntil(b"\r\n")
    assert head.split()[1] in (b"400", b"413")
    writer.close()


async def test_a_body_of_just_the_limit(client: httpx.AsyncClient) -> None:
    raw = with_content('"x"')
    response = await client.post(CHAT, content=raw + b" " * ((1 << 20) - len(raw)))
    assert response.status_code == 200


async def test_large_bodies_are_parsed_in_a_thread(client: httpx.AsyncClient, node: DoubleNode) -> None:
    text = "x" * 900_000
    response = await client.post(CHAT, json={**GOOD, "messages": [{"role": "user", "content": text}]})
    assert response.status_code == 200
    response = await client.post(CHAT, content=with_content('"' + text + '"') + b"!")
    assert response.status_code == 400


async def test_unexpected_failures_have_the_shape_too(
    server: object, node: DoubleNode, client: httpx.AsyncClient
) -> None:
    def broken() -> list[object]:
        raise RuntimeError("secret detail")

    node.on_disk = broken  # type: ignore[assignment,method-assign]
    try:
        response = await client.get("/v1/models")
    finally:
        del node.on_disk  # type: ignore[method-assign]
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(home=tmp_path, port=0, api_key="sesame")
    server = await serve(DoubleNode(settings), settings)  # type: ignore[arg-type]
    async with httpx.AsyncClient(base_url=server.url) as client:
        yield client
    await server.stop(deadline=0.1)


@pytest.mark.parametrize("header", [None, "sesame", "Bearer", "Bearer wrong", "Basic sesame", "Bearer sésame"])
async def test_without_the_key(guarded: httpx.AsyncClient, header: str | None) -> None:
    headers = {"authorization": header.encode()} if header is not None else {}
    for path in ("/v1/models", "/health", "/nothing", "/openapi.json"):
        response = await guarded.get(path, headers=headers)  # type: ignore[arg-type]
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert error_of(response)["code"] == "invalid_api_key"


async def test_with_the_key(guarded: httpx.AsyncClient) -> None:
    response = await guarded.post(CHAT, json=GOOD, headers={"authorization": "bearer sesame"})
    assert response.status_code == 200
