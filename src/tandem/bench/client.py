"""A streaming client that costs little: what it spends on the same cores would be taken from the server it measures.

One connection a request, HTTP/1.1 with `Connection: close` (mlx-lm's server speaks HTTP/1.0), server-sent events with
OpenAI's chunks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec

from tandem.errors import DeadlineError, EngineError, UnavailableError


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. Times from `time.perf_counter()`.

    Attributes:
        started: before the connection was opened.
        first_text: when the first text arrived.
        last_text: when the last text arrived.
        ended: when `[DONE]` arrived.
        chunks: pieces of text.
        cached_tokens: prompt tokens that the server says it need not process.
        statistics: what Tandem says of the answer's making, in its `: generation_stats` comment; else empty.
    """

    started: float
    first_text: float
    last_text: float
    ended: float
    text: str
    chunks: int
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    statistics: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.first_text - self.started


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Chunk).decode
_STATISTICS = b": generation_stats "


class _Connection(asyncio.Protocol):
    """Sends one request and collects its answer in `answer`."""

    def __init__(
        self,
        request: bytes,
        started: float,
        answer: asyncio.Future[Answer],
        on_text: Callable[[float], None] | None,
    ) -> None:
        self._request = request
        self._started = started
        self._answer = answer
        self._on_text = on_text
        self._parser = httptools.HttpResponseParser(self)
        self._pending = b""
        self._now = 0.0
        self._first_text = 0.0
        self._last_text = 0.0
        self._pieces: list[str] = []
        self._finish_reason = ""
        self._usage: _Usage | None = None
        self._statistics: dict[str, Any] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            self._fail(f"The server sent something that is no event stream: {error}")

    def on_body(self, body: bytes) -> None:
        """A part of the body, without the transfer encoding."""
        if self._parser.get_status_code() != 200:
            self._pending += body
            return
        *events, self._pending = (self._pending + body).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                self._end()
            elif event.startswith(b"data: "):
                self._event(_decode(event[6:]))
            elif event.startswith(_STATISTICS):
                self._statistics = msgspec.json.decode(event[len(_STATISTICS) :])

    def _event(self, chunk: _Chunk) -> None:
        if bytes(chunk.error) not in (b"", b"null"):
            self._fail(f"The stream ended in an error: {bytes(chunk.error).decode('utf-8', 'replace')}")
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            text = choice.text if choice.delta is None else choice.delta.content
            if text:
                self._first_text = self._first_text or self._now
                self._last_text = self._now
                self._pieces.append(text)
                if self._on_text is not None:
                    self._on_text(self._now)
            self._finish_reason = choice.finish_reason or self._finish_reason

    def _end(self) -> None:
        usage = self._usage
        if usage is None or not self._pieces or not self._finish_reason:
            self._fail("The stream ended without text, finish reason or usage.")
            return
        details = usage.prompt_tokens_details
        answer = Answer(
            started=self._started,
            first_text=self._first_text,
            last_text=self._last_text,
            ended=self._now,
            text="".join(self._pieces),
            chunks=len(self._pieces),
            finish_reason=self._finish_reason,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            statistics=self._statistics,
        )
        if not self._answer.done():
            self._answer.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        status = self._parser.get_status_code()
        said = f": {self._pending.decode('utf-8', 'replace')[:500]}" if self._pending else "."
        self._fail(f"The connection closed before the answer was complete (status {status}){said}")

    def _fail(self, message: str) -> None:
        if not self._answer.done():
            self._answer.set_exception(EngineError(message))


async def ask(
    host: str,
    port: int,
    path: str,
    body: dict[str, Any],
    deadline: float = 300.0,
    *,
    on_text: Callable[[float], None] | None = None,
    api_key: str = "",
) -> Answer:
    """Send `body` with `stream` switched on and read the answer to its end.

    Args:
        path: `/v1/completions` or `/v1/chat/completions`.
        deadline: seconds for the whole answer.
        on_text: called with the time of every text that arrives.
        api_key: that the server asks for; empty for none.

    Raises:
        UnavailableError: nothing listens there.
        EngineError: the server refused the request, or its answer was broken or incomplete.
        DeadlineError: it took too long.
    """
    payload = msgspec.json.encode(body | {"stream": True, "stream_options": {"include_usage": True}})
    authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"{authorization}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Answer] = loop.create_future()
    started = time.perf_counter()
    try:
        async with asyncio.timeout(deadline):
            transport, _ = await loop.create_connection(
                lambda: _Connection(head.encode() + payload, started, answer, on_text), host, port
            )
            try:
                return await answer
            finally:
                transport.abort()
    except TimeoutError as error:
        raise DeadlineError(f"{host}:{port} did not finish an answer within {deadline:.0f} s.") from error
    except OSError as error:  # of which TimeoutError is one
        raise UnavailableError(f"Nothing answers at {host}:{port}: {error}") from error
