"""One request's events on the server's side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from tandem.errors import CancelledError, TandemError
from tandem.types import Accepted, Event, Failure, Finished, PrefillProgress


class Stream:
    """Async iterator over lists of events: each list is whatever has arrived since the last one.

    Ends after `Finished`; a `Failure` is raised as the error it stands for. Closing it early cancels the request.

    Attributes:
        elsewhere: asked when the stream fails before anything of an answer was read; it may return a stream of the same
            request that goes on in this one's place.

    Args:
        request_id: unique in this process.
        on_close: called once, with True when the request still ran.
    """

    def __init__(self, request_id: str, on_close: Callable[[bool], None]) -> None:
        self.request_id = request_id
        self._on_close = on_close
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._closed = False
        self._error: TandemError | None = None
        self._answered = False
        self._successor: Stream | None = None
        self.elsewhere: Callable[[TandemError], Stream | None] | None = None

    @property
    def finished(self) -> bool:
        """Whether the last event has arrived (not necessarily been read)."""
        return self._ended

    def push(self, events: list[Event]) -> None:
        """Append events; called by the supervisor."""
        if self._ended or self._closed:
            return
        last = events[-1]
        if isinstance(last, Failure):
            self._error = last.error()
            events = events[:-1]
        self._events.extend(events)
        if self._error is not None or isinstance(last, Finished):
            self._ended = True
            self._on_close(False)
        self._wake()

    def fail(self, error: TandemError) -> None:
        """End the stream with `error`, after the events that came before it."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._on_close(False)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[list[Event]]:
        return self

    async def __anext__(self) -> list[Event]:
        if self._successor is not None:
            return await anext(self._successor)
        while not self._events:
            if self._closed:
                raise CancelledError("The request was cancelled.")
            if self._ended:
                if self._error is None:
                    raise StopAsyncIteration
                self._successor = self._find_successor(self._error)
                if self._successor is None:
                    raise self._error
                return await anext(self._successor)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        if self.elsewhere is not None and not self._answered:
            self._answered = not all(isinstance(event, Accepted | PrefillProgress) for event in events)
        return events

    def _find_successor(self, error: TandemError) -> Stream | None:
        if self._answered or self.elsewhere is None:
            return None
        return self.elsewhere(error)

    async def aclose(self) -> None:
        """Cancel the request if it still runs. Idempotent."""
        if self._successor is not None:
            await self._successor.aclose()
        if not self._closed:
            self._closed = True
            self._events = []
            if not self._ended:
                self._ended = True
                self._error = CancelledError("The request was cancelled.")
                self._on_close(True)
            self._wake()
