"""What every route needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from tandem.api.generation import Running
from tandem.config import Settings
from tandem.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from tandem.cluster.node import Node


@dataclass(frozen=True, slots=True)
class Context:
    """One server's parts."""

    node: Node
    settings: Settings
    metrics: Metrics = field(default_factory=Metrics)
    running: Running = field(default_factory=Running)


def context_of(request: Request) -> Context:
    """The context that `create_app` stored."""
    context: Context = request.app.state.context
    return context
