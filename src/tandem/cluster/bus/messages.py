"""Published messages as a subscriber gets them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

MOST = 16384
"""Messages that may wait for a subscriber."""
MOST_BYTES = 64 << 20
"""Payload bytes that may wait for a subscriber."""


class Message(NamedTuple):
    """What another node published, and which life of it."""

    topic: str
    node_id: str
    life: str
    payload: bytes


class Subscription:
    """An async iterator over one topic's messages from other nodes, in each sender's order.

    A subscriber that is too slow loses messages, the newest first, instead of memory: `lost` counts them, and whoever
    needs all of them compares it and asks for what is missing.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Message] = deque()
        self._bytes = 0
        self._guard = threading.Lock()
        self._wake = asyncio.Event()
        self._closed = False
        self._withdraw: Callable[[], Awaitable[None]] | None = None
        self.lost = 0

    def deliver(self, message: Message) -> None:
        """Called on the pump's thread."""
        with self._guard:
            if len(self._waiting) >= MOST or self._bytes + len(message.payload) > MOST_BYTES:
                self.lost += 1
                return
            first = not self._waiting
            self._waiting.append(message)
            self._bytes += len(message.payload)
        if first:
            self._loop.call_soon_threadsafe(self._wake.set)

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Message:
        while True:
            with self._guard:
                if self._waiting:
                    message = self._waiting.popleft()
                    self._bytes -= len(message.payload)
                    return message
                self._wake.clear()
            if self._closed:
                raise StopAsyncIteration
            await self._wake.wait()

    def attach(self, withdraw: Callable[[], Awaitable[None]]) -> None:
        """How to end what feeds this subscription."""
        self._withdraw = withdraw

    def end(self) -> None:
        """No more messages; whoever iterates gets what waits, and then the end."""
        self._closed = True
        self._wake.set()

    async def close(self) -> None:
        """End it, and what feeds it."""
        if not self._closed:
            self.end()
            if self._withdraw is not None:
                await self._withdraw()
