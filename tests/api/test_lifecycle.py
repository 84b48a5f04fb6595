"""What happens to a request that does not simply succeed: A1 to A3, A8 and A14 of exo's faults are among these."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.api import sse as sse_module
from tandem.api.server import HttpServer, serve
from tandem.config import Settings
from tandem.errors import ConfigError, EngineError, RunnerDiedError
from tandem.types import Accepted, GenerationRequest, TextDelta

from .double import DoubleNode, Step, finished
from .helpers import error_of, parse_sse, stream

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}


def endless(request: GenerationRequest) -> list[Step]:
    """One word, then silence for ever."""
    return [Accepted(5, 0), TextDelta("word"), asyncio.Event()]


async def until_first_word(pieces: AsyncIterator[str]) -> str:
    read = ""
    async for piece in pieces:
        read += piece
        if "word" in read:
            return read
    raise AssertionError(read)


async def rest(pieces: AsyncIterator[str]) -> str:
    return "".join([piece async for piece in pieces])


async def test_a_streaming_client_that_leaves_cancels(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = endless
    async with client.stream("POST", CHAT, json=STREAM) as response:
        await until_first_word(response.aiter_text())
        assert node.open == 1
    await asyncio.wait_for(node.was_cancelled.wait(), 5)
    assert node.open == 0


@pytest.mark.parametrize("body", [BODY, STREAM, {**BODY, "n": 3}, {**STREAM, "n": 3}])
async def test_a_client_that_leaves_early_cancels(server: HttpServer, node: DoubleNode, body: dict[str, Any]) -> None:
    node.play = lambda request: [asyncio.Event()]
    async with httpx.AsyncClient(base_url=server.url) as leaving:
        task = asyncio.create_task(leaving.post(CHAT, json=body))
        await asyncio.wait_for(node.was_started.wait(), 5)
        assert node.open == body.get("n", 1)
        task.cancel()
        await asyncio.wait({task})
    await asyncio.wait_for(node.was_cancelled.wait(), 5)
    assert node.open == 0
    assert len(node.cancelled) == body.get("n", 1)


async def test_a_failure_in_the_middle_is_told(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = lambda request: [TextDelta("so far"), EngineError("It broke. Send it again.")]
    response = await client.post(CHAT, json=STREAM)
    assert response.status_code == 200
    sse = parse_sse(response.text)
    assert sse.done
    assert sse.text() == "so far"
    assert sse.events[-1] == {
        "error": {
            "message": "It broke. Send it again.",
            "type": "server_error",
            "param": None,
            "code": "engine_error",
        }
    }
    assert all(choice["finish_reason"] is None for event in sse.events[:-1] for choice in event["choices"])


async def test_a_failure_of_one_of_several_answers_ends_all(client: httpx.AsyncClient, node: DoubleNode) -> None:
    def play(request: GenerationRequest) -> list[Step]:
        if request.sampling.seed == 2:
            return [TextDelta("so far"), EngineError("It broke.")]
        return [TextDelta("word"), asyncio.Event()]

    node.play = play
    sse = parse_sse((await client.post(CHAT, json={**STREAM, "n": 3, "seed": 0})).text)
    assert sse.done
    assert sse.events[-1]["error"]["code"] == "engine_error"
    assert node.open == 0
    assert len(node.cancelled) == 2


async def test_a_failure_before_a_whole_answer_is_an_http_error(client: httpx.AsyncClient, node: DoubleNode) -> None:
    """A2: exo had sent its 200 by then."""
    node.play = lambda request: [TextDelta("so far"), RunnerDiedError("The runner ended.", retry_after=2)]
    response = await client.post(CHAT, json=BODY)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert error_of(response)["code"] == "runner_died"


async def test_a_model_that_cannot_answer_is_refused_at_once(client: httpx.AsyncClient, node: DoubleNode) -> None:
    """A1: exo's client waited for ever."""
    node.runner_state, node.error = "failed", "no memory"
    for body in (BODY, STREAM):
        response = await asyncio.wait_for(client.post(CHAT, json=body), 5)
        assert response.status_code == 503
        assert error_of(response)["code"] == "instance_not_ready"


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_nothing_that_comes_at_once_is_lost(
    client: httpx.AsyncClient, node: DoubleNode, body: dict[str, Any]
) -> None:
    """A8: exo dropped what came before its response had begun."""
    node.play = lambda request: [[Accepted(1, 0), *(TextDelta(f"{number} ") for number in range(100)), finished()]]
    response = await client.post(CHAT, json=body)
    expected = "".join(f"{number} " for number in range(100))
    if body is STREAM:
        assert parse_sse(response.text).text() == expected
    else:
        assert response.json()["choices"][0]["message"]["content"] == expected


async def test_what_must_not_be_ignored_arrives(client: httpx.AsyncClient, node: DoubleNode) -> None:
    """A14: exo ignored `tool_choice` and `response_format`."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    await client.post(CHAT, json={**BODY, "tools": tools, "tool_choice": "none"})
    prompt = node.requests[-1].prompt
    assert prompt.tool_choice.mode == "none"  # type: ignore[union-attr]
    await client.post(CHAT, json={**BODY, "response_format": {"type": "json_object"}})
    assert node.requests[-1].constraint is not None


async def test_cancel_ends_a_stream_with_a_reason(client: httpx.AsyncClient, node: DoubleNode) -> None:
    """A3: exo's stream ended without a word."""
    node.play = endless
    async with client.stream("POST", CHAT, json=STREAM) as response:
        pieces = response.aiter_text()
        read = await until_first_word(pieces)
        command = response.headers["x-request-id"]
        assert f'"id":"{command}"' in read
        cancelled = await client.post(f"/v1/cancel/{command}")
        assert cancelled.status_code == 200
        assert cancelled.json() == {"message": "Command cancelled.", "command_id": command}
        sse = parse_sse(read + await rest(pieces))
    assert sse.done
    assert sse.events[-1]["error"]["code"] == "cancelled"
    assert node.open == 0
    assert len(node.cancelled) == 1
    again = await client.post(f"/v1/cancel/{command}")
    assert again.status_code == 404
    assert error_of(again)["message"] == "Command not found or already completed"


async def test_cancel_ends_a_whole_answer(client: httpx.AsyncClient, node: DoubleNode, server: HttpServer) -> None:
    node.play = endless
    task = asyncio.create_task(client.post(CHAT, json=BODY))
    await node.was_started.wait()
    [command] = list(server.context.running._generations)
    assert (await client.post(f"/v1/cancel/{command}")).status_code == 200
    response = await task
    assert response.status_code == 499
    assert error_of(response)["code"] == "cancelled"


async def test_cancel_of_something_unknown(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/cancel/nothing")).status_code == 404


async def test_keep_alives(client: httpx.AsyncClient, node: DoubleNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse_module, "KEEP_ALIVE_SECONDS", 0.02)
    monkeypatch.setattr(sse_module, "HOLD_SECONDS", 0.01)
    gate = asyncio.Event()
    node.play = lambda request: [gate, TextDelta("word"), finished()]
    async with client.stream("POST", CHAT, json=STREAM) as response:
        read = ""
        async for piece in response.aiter_text():
            read += piece
            if read.count(": keep-alive\n\n") >= 3:
                gate.set()
    sse = parse_sse(read)
    assert sse.comments[:3] == ["keep-alive"] * 3
    assert sse.done
    assert sse.text() == "word"


async def test_a_failure_after_the_first_keep_alive_is_an_event(
    client: httpx.AsyncClient, node: DoubleNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse_module, "HOLD_SECONDS", 0.0)
    gate = asyncio.Event()
    node.play = lambda request: [gate, EngineError("It broke.")]
    async with client.stream("POST", CHAT, json=STREAM) as response:
        assert response.status_code == 200
        read = ""
        async for piece in response.aiter_text():
            read += piece
            gate.set()
    sse = parse_sse(read)
    assert sse.done
    assert [event["error"]["code"] for event in sse.events] == ["engine_error"]


async def test_a_slow_reader_gets_everything(server: HttpServer, node: DoubleNode) -> None:
    """And keeps nobody else waiting."""
    pieces = [TextDelta(f"{number:06d}" + "x" * 1000) for number in range(5_000)]

    def play(request: GenerationRequest) -> list[Step]:
        return [*pieces, finished()]

    node.play = play
    payload = json.dumps(STREAM).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 16)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    await reader.readuntil(b"\r\n\r\n")
    assert (await asyncio.wait_for(httpx_get(server, "/health"), 5)).status_code == 200
    pieces_read = []
    while piece := await reader.read(1 << 16):
        pieces_read.append(piece)
    writer.close()
    received = b"".join(pieces_read)
    for number in (0, 2_500, 4_999):
        assert b"%06dxxx" % number in received
    assert b"data: [DONE]" in received


async def test_a_reader_that_stops_and_leaves_cancels(server: HttpServer, node: DoubleNode) -> None:
    node.play = lambda request: [*(TextDelta("x" * 10_000) for _ in range(5_000)), asyncio.Event()]
    payload = json.dumps(STREAM).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 12)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()
    await asyncio.wait_for(node.was_cancelled.wait(), 5)


async def httpx_get(server: HttpServer, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url) as client:
        return await client.get(path)


async def test_two_requests_on_one_connection(server: HttpServer, node: DoubleNode) -> None:
    """The watcher for the first one's end must not end the second."""
    async with httpx.AsyncClient(base_url=server.url, limits=httpx.Limits(max_connections=1)) as client:
        for _ in range(3):
            assert (await stream(client, CHAT, BODY)).done
            assert (await client.post(CHAT, json=BODY)).status_code == 200
    assert not node.cancelled


async def test_a_hundred_cancelled_requests_leave_nothing(server: HttpServer, node: DoubleNode) -> None:
    before = asyncio.all_tasks()
    node.play = lambda request: [TextDelta("word"), asyncio.Event()]

    async def start_and_leave(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", CHAT, json=STREAM) as response:
            await until_first_word(response.aiter_text())

    async with httpx.AsyncClient(base_url=server.url) as client:
        await asyncio.gather(*(start_and_leave(client) for _ in range(100)))
    while len(node.cancelled) < 100:
        node.was_cancelled.clear()
        await asyncio.wait_for(node.was_cancelled.wait(), 5)
    await node.stop()
    if left := asyncio.all_tasks() - before:
        _, pending = await asyncio.wait(left, timeout=5)
        assert not pending
    assert len(server.context.running) == 0


async def own_server(tmp_path: Path) -> tuple[DoubleNode, HttpServer]:
    settings = Settings(home=tmp_path, port=0)
    node = DoubleNode(settings)
    return node, await serve(node, settings)  # type: ignore[arg-type]


async def test_stop_lets_running_answers_finish(tmp_path: Path) -> None:
    node, server = await own_server(tmp_path)
    gate = asyncio.Event()
    node.play = lambda request: [TextDelta("word"), gate, finished()]
    async with (
        httpx.AsyncClient(base_url=server.url) as client,
        client.stream("POST", CHAT, json=STREAM) as response,
    ):
        pieces = response.aiter_text()
        read = await until_first_word(pieces)
        stopping = asyncio.create_task(server.stop(deadline=10))
        await asyncio.sleep(0)
        gate.set()
        sse = parse_sse(read + await rest(pieces))
        assert sse.done
        assert "error" not in sse.events[-1]
    await stopping
    with pytest.raises(httpx.ConnectError):
        await httpx_get(server, "/health")


async def test_stop_tells_answers_that_do_not_finish(tmp_path: Path) -> None:
    node, server = await own_server(tmp_path)
    node.play = endless
    async with (
        httpx.AsyncClient(base_url=server.url) as client,
        client.stream("POST", CHAT, json=STREAM) as response,
    ):
        pieces = response.aiter_text()
        read = await until_first_word(pieces)
        stopping = asyncio.create_task(server.stop(deadline=0.05))
        sse = parse_sse(read + await rest(pieces))
    await stopping
    assert sse.done
    assert sse.events[-1]["error"]["code"] == "unavailable"
    assert node.open == 0
    await node.stop()


async def test_a_taken_port_is_explained(server: HttpServer, node: DoubleNode, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, port=server.port)
    with pytest.raises(ConfigError, match="--port") as caught:
        await serve(node, settings)  # type: ignore[arg-type]
    assert caught.value.param == "port"
