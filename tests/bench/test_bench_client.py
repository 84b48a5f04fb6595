"""The client against servers that send what the two real ones send, and what a broken one might."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

import pytest

from tandem.bench.client import Answer, ask
from tandem.errors import DeadlineError, EngineError, UnavailableError

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\nContent-type: text/event-stream\r\n\r\n"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chat(text: str | None, finish: str | None = None) -> bytes:
    delta = {"role": "assistant"} if text is None else {"content": text}
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def completion(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(cached: int | None = None) -> bytes:
    counts: dict[str, object] = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"choices": [], "usage": counts})


DONE = b"data: [DONE]\n\n"


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


async def answer_of(*parts: bytes, deadline: float = 10.0) -> Answer:
    """What the client makes of a server that sends `parts`, each when the one before has left, and closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    return await _asked(handle, deadline)


async def _asked(handle: Handler, deadline: float) -> Answer:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await ask("127.0.0.1", port, "/v1/completions", {"prompt": "p"}, deadline)


def run(*parts: bytes, deadline: float = 10.0) -> Answer:
    return asyncio.run(answer_of(*parts, deadline=deadline))


def test_a_chat_over_chunked_transfer() -> None:
    body = [
        b": keep-alive\n\n",
        chat(None),
        chat("Hé"),
        chat("llo"),
        chat("", "length"),
        usage(5),
        b": stats\n\n",
        DONE,
    ]
    answer = run(CHUNKED, *(chunked(part) for part in body), b"0\r\n\r\n")
    assert answer.text == "Héllo"
    assert answer.chunks == 2
    assert answer.finish_reason == "length"
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (7, 3, 5)
    assert answer.started <= answer.first_text <= answer.last_text <= answer.ended
    assert answer.ttft >= 0


def test_a_completion_that_ends_with_the_connection() -> None:
    answer = run(UNTIL_CLOSED, completion("a"), completion("b", "stop"), usage(), DONE)
    assert (answer.text, answer.finish_reason, answer.cached_tokens) == ("ab", "stop", 0)


def test_events_may_be_cut_anywhere() -> None:
    whole = UNTIL_CLOSED + completion("ä") + completion("b", "stop") + usage() + DONE
    assert run(*(whole[index : index + 1] for index in range(len(whole)))).text == "äb"
    assert run(whole).text == "äb"


def test_the_request_asks_for_a_stream_with_usage() -> None:
    seen: dict[str, object] = {}

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")
        )
        seen.update(json.loads(await reader.readexactly(length)))
        writer.write(UNTIL_CLOSED + completion("a", "stop") + usage() + DONE)
        writer.close()

    asyncio.run(_asked(handle, 10.0))
    assert seen == {"prompt": "p", "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((b'HTTP/1.1 400 Bad Request\r\ncontent-length: 14\r\n\r\n{"error":"no"}',), 'status 400.*"no"'),
        ((UNTIL_CLOSED, completion("a")), "closed before"),
        ((UNTIL_CLOSED, completion("a"), event({"error": {"message": "died"}}), DONE), "died"),
        ((UNTIL_CLOSED, completion("a", "stop"), DONE), "without text, finish reason or usage"),
        ((UNTIL_CLOSED, completion("a"), usage(), DONE), "without text, finish reason or usage"),
        ((UNTIL_CLOSED, usage(), DONE), "without text, finish reason or usage"),
        ((UNTIL_CLOSED, b"data: {broken\n\n"), "no event stream"),
        ((b"SSH-2.0-hello\r\n\r\n",), "no event stream"),
        ((), "closed before"),
    ],
)
def test_half_an_answer_is_none(parts: tuple[bytes, ...], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        run(*parts)


def test_a_server_that_stops_talking_is_given_up() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UNTIL_CLOSED + completion("a"))
        await reader.readuntil(b"\r\n\r\n")
        await writer.drain()
        # The client leaves by resetting the connection.
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()

    async def ask_in_vain() -> None:
        try:
            await _asked(handle, 0.2)
        finally:
            await left.wait()

    left = asyncio.Event()
    with pytest.raises(DeadlineError, match="did not finish"):
        asyncio.run(ask_in_vain())


def test_nobody_listens() -> None:
    with pytest.raises(UnavailableError, match="Nothing answers"):
        asyncio.run(ask("127.0.0.1", 1, "/v1/completions", {}))
