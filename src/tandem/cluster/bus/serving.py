"""The answering side of `Bus.ask`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeAlias

import msgspec
import zenoh

from tandem.cluster.bus.config import MAX_MESSAGE
from tandem.cluster.bus.outbox import Outbox
from tandem.errors import DeadlineError, PayloadTooLargeError, QueueFullError, TandemError, UnavailableError
from tandem.types import Failure

MOST = 256
"""Questions of one topic that may be worked on at a time."""
_log = logging.getLogger(__name__)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What travels beside a question. `deadline`: seconds that the asker will wait."""

    node_id: str
    life: str
    deadline: float


class Question(NamedTuple):
    """What another node asks. `deadline`: seconds that it will wait from now."""

    topic: str
    node_id: str
    life: str
    payload: bytes
    deadline: float


Handler: TypeAlias = Callable[[Question], Awaitable[bytes]]
"""Answers a question, or raises a `TandemError` that the asker will see raised. Cancelled at the deadline."""


class Service:
    """One topic's handler at work: each question is a task on the loop, and every one is answered."""

    def __init__(self, topic: str, handler: Handler, outbox: Outbox, loop: asyncio.AbstractEventLoop) -> None:
        self._topic = topic
        self._handler = handler
        self._outbox = outbox
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = 0
        self._guard = threading.Lock()

    def accept(self, query: zenoh.Query) -> None:
        """Called on the pump's thread."""
        with self._guard:
            busy = self._running >= MOST
            self._running += not busy
        if busy:
            text = f"{MOST} questions about '{self._topic}' are being answered here already; try again in a moment."
            _refuse(query, QueueFullError(text, retry_after=1.0))
            return
        try:
            attachment = query.attachment
            envelope = msgspec.msgpack.decode(attachment.to_bytes() if attachment else b"", type=Envelope)
        except msgspec.DecodeError:
            # Nobody of this cluster and version asks like this.
            _log.warning("a question about %s without a readable envelope was dropped", self._topic)
            self._done()
            query.drop()
            return
        payload = query.payload.to_bytes() if query.payload else b""
        question = Question(self._topic, envelope.node_id, envelope.life, payload, envelope.deadline)
        self._loop.call_soon_threadsafe(self._start, query, question)

    def cancel(self) -> None:
        """Answer everything that is still worked on with an error."""
        for task in self._tasks:
            task.cancel()

    def _start(self, query: zenoh.Query, question: Question) -> None:
        task = self._loop.create_task(self._answer(query, question))
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._done()

    def _done(self) -> None:
        with self._guard:
            self._running -= 1

    async def _answer(self, query: zenoh.Query, question: Question) -> None:
        try:
            async with asyncio.timeout(question.deadline):
                answer = await self._handler(question)
            if len(answer) > MAX_MESSAGE:
                raise PayloadTooLargeError(
                    f"The answer about '{self._topic}' has {len(answer)} bytes; the bus carries {MAX_MESSAGE}."
                )
        except TandemError as error:
            self._post(query, error)
        except TimeoutError:
            self._post(query, DeadlineError(f"'{self._topic}' was not answered within {question.deadline:.3g} s."))
        except asyncio.CancelledError:
            self._post(query, UnavailableError("The node is stopping; ask another one."))
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the asker must not wait for its deadline
            _log.exception("answering '%s' failed", self._topic)
            self._post(query, error)
        else:
            self._post(query, answer)

    def _post(self, query: zenoh.Query, answer: bytes | BaseException) -> None:
        def send(_: zenoh.Session) -> None:
            if isinstance(answer, bytes):
                with query:
                    query.reply(query.key_expr, answer)
            else:
                _refuse(query, answer)

        try:
            self._outbox.post(send, len(answer) if isinstance(answer, bytes) else 0)
        except QueueFullError:
            query.drop()


def _refuse(query: zenoh.Query, error: BaseException) -> None:
    with query:
        query.reply_err(msgspec.msgpack.encode(Failure.of(error)))
