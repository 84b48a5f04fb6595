"""Requests that enter at some nodes, and what becomes of each."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from tandem.bench.cluster.messages import Traffic
from tandem.cluster.node import Node
from tandem.errors import TandemError
from tandem.runner.stream import Stream
from tandem.types import Finished, GenerationRequest, TextDelta, TextPrompt

PAUSE = 0.05
"""Seconds after an error: who is refused does not ask again at once."""


class Load:
    """Asks again and again at every node until `seconds` are over, then waits for the answers under way.

    Args:
        streams: requests that each node has under way.
        deadline: seconds that one request may take before it counts as never ended.
    """

    def __init__(
        self, nodes: Sequence[Node], model: str, *, streams: int, tokens: int, seconds: float, deadline: float
    ) -> None:
        self._nodes = nodes
        self._model = model
        self._streams = streams
        self._tokens = tokens
        self._seconds = seconds
        self._deadline = deadline
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._longest = 0.0

    async def run(self) -> Traffic:
        """Send the requests."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for index, node in enumerate(self._nodes):
                for stream in range(self._streams):
                    group.create_task(self._ask(node, f"{index}-{stream}", began + self._seconds))
        counts = self._counts
        return Traffic(
            began=began,
            ended=time.monotonic(),
            answered=counts["answered"],
            tokens=counts["tokens"],
            retried=counts["retried"],
            failed_before=counts["failed_before"],
            failed_after=counts["failed_after"],
            never_ended=counts["never_ended"],
            short=counts["short"],
            errors=dict(self._errors),
            longest=self._longest,
        )

    async def _ask(self, node: Node, name: str, end: float) -> None:
        number = 0
        while (now := time.monotonic()) < end:
            number += 1
            request = GenerationRequest(TextPrompt(f"{name} {number}"), max_tokens=self._tokens)
            failed = await self._one(node, request)
            self._longest = max(self._longest, time.monotonic() - now)
            if failed:
                await asyncio.sleep(PAUSE)

    async def _one(self, node: Node, request: GenerationRequest) -> bool:
        begun = False
        try:
            async with asyncio.timeout(self._deadline):
                stream = node.generate(self._model, request)
                self._watch(stream)
                finished: Finished | None = None
                async for events in stream:
                    begun = begun or any(isinstance(event, TextDelta) for event in events)
                    if isinstance(events[-1], Finished):
                        finished = events[-1]
        except TimeoutError:
            self._counts["never_ended"] += 1
            return True
        except TandemError as error:
            self._counts["failed_after" if begun else "failed_before"] += 1
            self._errors[f"{type(error).__name__}: {_kind(error.message)}"] += 1
            return True
        tokens = finished.usage.completion_tokens if finished is not None else 0
        if tokens < self._tokens:
            self._counts["short"] += 1
            return True
        self._counts["answered"] += 1
        self._counts["tokens"] += tokens
        return False

    def _watch(self, stream: Stream) -> None:
        """Count what goes on elsewhere."""
        elsewhere = stream.elsewhere
        if elsewhere is None:
            return

        def counted(error: TandemError) -> Stream | None:
            successor = elsewhere(error)
            if successor is not None:
                self._counts["retried"] += 1
            return successor

        stream.elsewhere = counted


def _kind(message: str) -> str:
    """The message without ids, so that equal ones are counted together."""
    return " ".join("…" if len(word.strip(".,:;()'")) >= 24 else word for word in message.split())[:160]
