"""What every route needs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from tandem.api.generation import Running
from tandem.config import Settings
from tandem.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from tandem.cluster.events import Subscription
    from tandem.cluster.node import Node


@dataclass(frozen=True, slots=True)
class Context:
    """One server's parts."""

    node: Node
    settings: Settings
    metrics: Metrics = field(default_factory=Metrics)
    running: Running = field(default_factory=Running)
    followers: set[Subscription] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def follow(self, start: int | None = None) -> AsyncIterator[Subscription]:
        """The cluster's events from `start` on, or from the next one, until this server stops."""
        async with self.node.control.log.subscribe(start) as events:
            self.followers.add(events)
            try:
                yield events
            finally:
                self.followers.discard(events)

    def end_followers(self) -> None:
        """End every stream of events: they would have no end of their own."""
        for events in list(self.followers):
            events.end()


def context_of(request: Request) -> Context:
    """The context that `create_app` stored."""
    context: Context = request.app.state.context
    return context
