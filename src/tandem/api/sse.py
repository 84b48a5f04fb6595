"""Server-sent events: a response that turns a generation's events into chunks, with keep-alives while it is silent."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.api.errors import envelope, error_body, error_response
from tandem.api.generation import Generation
from tandem.errors import TandemError
from tandem.types import Event

KEEP_ALIVE_SECONDS = 10.0
"""A comment is sent after this long a silence, so that clients and proxies do not take the connection for dead."""

HOLD_SECONDS = 1.0
"""The status line waits this long for the first event: a request that is refused at once gets a real HTTP status."""

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_log = logging.getLogger("tandem.api")


class EventWriter(Protocol):
    """One dialect's way to write events."""

    def write(self, number: int, events: list[Event]) -> bytes:
        """The chunks for `events` of answer `number`; empty when there is nothing to say."""

    def end(self) -> bytes:
        """What follows the last answer's last event, before `[DONE]`."""


class EventStream(Response):
    """The streaming response to one generation request.

    A failure before anything was sent becomes an HTTP error; a later one becomes an error event. `[DONE]` always ends
    the stream, except when the client is gone.
    """

    def __init__(self, generation: Generation, writer: EventWriter) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                "x-request-id": generation.request_id,
            }
        )
        self._generation = generation
        self._writer = writer
        self._started = False
        self._last_sent = 0.0
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keep_alive = asyncio.create_task(self._keep_alive(send))
        try:
            async with self._generation as generation:
                async for number, events in generation:
                    chunk = self._writer.write(number, events)
                    if chunk:
                        await self._send(send, chunk)
            await self._send(send, self._writer.end() + DONE, last=True)
        except TandemError as error:
            await self._fail(scope, receive, send, error)
        except Exception:
            if not self._started:
                raise
            _log.exception("A stream ended in an unexpected error.")
            await self._send(send, _event(envelope(500, "The server failed.", TandemError.code)) + DONE, last=True)
        finally:
            keep_alive.cancel()

    async def _fail(self, scope: Scope, receive: Receive, send: Send, error: TandemError) -> None:
        if self._started:
            await self._send(send, _event(error_body(error)) + DONE, last=True)
        else:
            await error_response(error)(scope, receive, send)

    async def _send(self, send: Send, body: bytes, last: bool = False) -> None:
        async with self._lock:
            if not self._started:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._started = True
                body = KEEP_ALIVE + body
            self._last_sent = time.monotonic()
            await send({"type": "http.response.body", "body": body, "more_body": not last})

    async def _keep_alive(self, send: Send) -> None:
        await asyncio.sleep(HOLD_SECONDS)
        if not self._started:
            await self._send(send, b"")
        while True:
            silent = time.monotonic() - self._last_sent
            if silent < KEEP_ALIVE_SECONDS:
                await asyncio.sleep(KEEP_ALIVE_SECONDS - silent)
            elif self._lock.locked():
                # A chunk waits for a slow reader: the connection is not silent.
                await asyncio.sleep(KEEP_ALIVE_SECONDS)
            else:
                await self._send(send, KEEP_ALIVE)


def _event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"
