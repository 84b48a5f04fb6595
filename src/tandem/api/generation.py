"""The answers to one HTTP request: started together, merged, abortable, and always cleaned up."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from starlette.types import Receive

from tandem.errors import CancelledError, NotFoundError, QueueFullError, TandemError
from tandem.types import Event, Finished, GenerationRequest, TextDelta, ToolCallDelta

if TYPE_CHECKING:
    from tandem.api.context import Context
    from tandem.cluster.node import Node, Stream

_MERGE_DEPTH = 64


class Running:
    """Every request that this server is answering, by the id that its client sees."""

    def __init__(self) -> None:
        self._generations: dict[str, Generation] = {}

    def __len__(self) -> int:
        return len(self._generations)

    def cancel(self, request_id: str) -> None:
        """End one request with a `CancelledError`.

        Raises:
            NotFoundError: no such request is running.
        """
        generation = self._generations.get(request_id)
        if generation is None:
            raise NotFoundError("Command not found or already completed", param="command_id")
        generation.abort(CancelledError("The request was cancelled by a call to /v1/cancel."))

    def abort_all(self, error: TandemError) -> None:
        """End every request with `error`."""
        for generation in list(self._generations.values()):
            generation.abort(error)

    def add(self, generation: Generation) -> None:
        """Make `generation` known."""
        self._generations[generation.request_id] = generation

    def remove(self, generation: Generation) -> None:
        """Forget `generation`."""
        self._generations.pop(generation.request_id, None)


def resolve(node: Node, model: str) -> str | None:
    """The id of the served model that `model` names; None where nothing serves it."""
    wanted = model.casefold()
    statuses = node.instances()
    for status in statuses:
        if wanted in status.card.names:
            return status.model_id
    if wanted == "default" and statuses:
        return statuses[0].model_id
    return None


class Generation:
    """Async context manager that runs requests and iterates over `(number, events)` of all of them.

    As many run at a time as one engine batch holds; the others follow as these end. Whatever ends the block (an error,
    `abort`, the client going away), all streams are closed when it is left. Iteration ends after the last `Finished`.

    Args:
        receive: the request's ASGI receive, body already read: watched for the client's going away.
        model: as the client names it.
    """

    def __init__(
        self, context: Context, receive: Receive, request_id: str, model: str, requests: Sequence[GenerationRequest]
    ) -> None:
        self.request_id = request_id
        resolved = resolve(context.node, model)
        self.model_id = resolved or model
        # Not the client's own words: anyone could make up a million of them, and each would become a time series.
        self._label = resolved or "unknown"
        self._context = context
        self._receive = receive
        self._model = model
        self._waiting = deque(enumerate(requests))
        self._streams: dict[int, Stream] = {}
        self._began: dict[int, float] = {}
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._helpers: set[asyncio.Task[None]] = set()
        self._error: TandemError | None = None

    async def __aenter__(self) -> Generation:
        try:
            self._start_some()
        except BaseException as error:
            await self._close(error)
            raise
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task else 0
        self._helpers.add(asyncio.create_task(self._watch()))
        self._context.running.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        self._context.running.remove(self)
        aborted = self._error is not None and kind is asyncio.CancelledError
        await self._close(self._error if aborted else value)
        if self._error is not None and task is not None and task.uncancel() <= self._cancelling and aborted:
            raise self._error from None

    def abort(self, error: TandemError) -> None:
        """End the block with `error`, at whatever it awaits. Call it from another task; later calls do nothing."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def __aiter__(self) -> AsyncIterator[tuple[int, list[Event]]]:
        return self._one() if not self._waiting and len(self._streams) == 1 else self._many()

    async def _one(self) -> AsyncIterator[tuple[int, list[Event]]]:
        [(number, stream)] = self._streams.items()
        async for events in stream:
            self._observe(number, events)
            yield number, events

    async def _many(self) -> AsyncIterator[tuple[int, list[Event]]]:
        merged: asyncio.Queue[tuple[int, list[Event] | TandemError | None]] = asyncio.Queue(_MERGE_DEPTH)
        fed: set[int] = set()

        def feed_new() -> None:
            for number in self._streams.keys() - fed:
                fed.add(number)
                task = asyncio.create_task(self._feed(number, merged))
                self._helpers.add(task)
                task.add_done_callback(self._helpers.discard)

        feed_new()
        while self._streams:
            number, item = await merged.get()
            if isinstance(item, TandemError):
                raise item
            if item is None:
                await self._streams.pop(number).aclose()
                self._start_some()
                feed_new()
            else:
                self._observe(number, item)
                yield number, item

    async def _feed(self, number: int, merged: asyncio.Queue[tuple[int, list[Event] | TandemError | None]]) -> None:
        try:
            async for events in self._streams[number]:
                await merged.put((number, events))
        except TandemError as error:
            await merged.put((number, error))
        else:
            await merged.put((number, None))

    def _start_some(self) -> None:
        while self._waiting and len(self._streams) < self._context.settings.max_batch:
            number, request = self._waiting[0]
            try:
                stream = self._context.node.generate(self._model, request)
            except QueueFullError:
                # Our own answers will make room: the rest starts when one of them ends.
                if self._streams:
                    return
                raise
            self._waiting.popleft()
            self._streams[number] = stream
            self._began[number] = time.monotonic()

    def _observe(self, number: int, events: list[Event]) -> None:
        if number in self._began and any(isinstance(event, TextDelta | ToolCallDelta) for event in events):
            waited = time.monotonic() - self._began.pop(number)
            self._context.metrics.first_token.labels(self._label).observe(waited)
        last = events[-1]
        if isinstance(last, Finished):
            self._context.metrics.finished(self._label, last.reason, last.usage, last.statistics)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.abort(CancelledError("The client went away."))

    async def _close(self, error: BaseException | None) -> None:
        for helper in self._helpers:
            helper.cancel()
        for stream in self._streams.values():
            await stream.aclose()
        if error is not None:
            self._context.metrics.failed(self._label, _outcome(error))


def _outcome(error: BaseException) -> str:
    if isinstance(error, TandemError):
        return error.code
    return CancelledError.code if isinstance(error, asyncio.CancelledError) else TandemError.code
