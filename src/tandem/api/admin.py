"""Health, metrics, identity and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.api.context import context_of
from tandem.api.errors import envelope
from tandem.api.openai.schema_responses import Cancelled, Health
from tandem.api.openapi import errors
from tandem.errors import UnavailableError
from tandem.telemetry.metrics import CONTENT_TYPE, InstanceSample

if TYPE_CHECKING:
    from tandem.cluster.node import InstanceStatus

router = APIRouter(tags=["node"])


@router.get(
    "/health",
    summary="Can this node answer?",
    response_model=Health,
    responses=errors(401, 403) | {503: {"model": Health, "description": "No engine can serve"}},
)
async def health(request: Request) -> Response:
    """200 while at least one instance is ready; 503 with the reason while none is."""
    node = context_of(request).node
    statuses = node.instances()
    ready = sum(status.state == "ready" for status in statuses)
    colour = "red" if not ready else ("green" if ready == len(statuses) else "yellow")
    instances = [
        {
            "instance_id": status.instance_id,
            "model": status.model_id,
            "state": status.state,
            "error": status.error,
            "restarts": status.restarts,
        }
        for status in statuses
    ]
    if ready:
        return _json(msgspec.json.encode({"status": colour, "instances": instances, "error": None}))
    more = {"status": colour, "instances": instances}
    body = envelope(503, _reason(statuses, node.models.expected), UnavailableError.code, more=more)
    return Response(body, 503, {"retry-after": "1"}, "application/json")


def _reason(statuses: list[InstanceStatus], expected: Sequence[str]) -> str:
    if not statuses and expected:
        return f"{', '.join(expected)} is being fetched or converted."
    if not statuses:
        return "No model is being served. Start one with `tandem up MODEL`."
    return " ".join(
        f"{status.model_id} is {status.state}{f': {status.error}' if status.error else '.'}" for status in statuses
    )


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    responses=errors(401, 403) | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    response_class=Response,
)
async def metrics(request: Request) -> Response:
    """Every metric in Prometheus' text format; `docs/metrics.md` describes them."""
    context = context_of(request)
    samples = [
        InstanceSample(status.instance_id, status.model_id, status.state, status.restarts, status.load)
        for status in context.node.instances()
    ]
    # Some hundred lines of text take over a millisecond.
    return Response(await asyncio.to_thread(context.metrics.render, samples), headers={"content-type": CONTENT_TYPE})


@router.get("/node_id", summary="This node's id", response_model=str, responses=errors(401, 403))
async def node_id(request: Request) -> Response:
    """The id as a JSON string. It stays the same over restarts."""
    return _json(msgspec.json.encode(context_of(request).node.node_id))


@router.post(
    "/v1/cancel/{command_id}", summary="Cancel a request", response_model=Cancelled, responses=errors(401, 403, 404)
)
async def cancel(request: Request, command_id: str) -> Response:
    """End a running request. `command_id` is the `id` of its chunks, which `X-Request-Id` carries, too."""
    context_of(request).running.cancel(command_id)
    return _json(msgspec.json.encode({"message": "Command cancelled.", "command_id": command_id}))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
