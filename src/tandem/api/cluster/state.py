"""The cluster's state and its changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from tandem import __version__
from tandem.api.cluster.answers import json_response, view_of
from tandem.api.cluster.schema import Capabilities, FeatureFlags
from tandem.api.context import Context, context_of
from tandem.api.exo_events import event_json
from tandem.api.exo_state import state_at, state_json
from tandem.api.openapi import errors, stream_content
from tandem.api.sse import KEEP_ALIVE, KEEP_ALIVE_SECONDS
from tandem.cluster.events import Gap, Indexed
from tandem.placement.preview import METAS, SHARDINGS

router = APIRouter(tags=["cluster"])

MOST_EVENTS = 10_000
USUAL_EVENTS = 1_000
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@router.get("/state", summary="The whole cluster", response_model=dict[str, Any], responses=errors(401, 403))
async def state(request: Request) -> Response:
    """Facts and intents with exo's fields. `docs/api.md` lists the sections."""
    view = view_of(context_of(request))
    # Some milliseconds with fifty nodes; the view is a value, so a thread may read it.
    return json_response(await asyncio.to_thread(state_json, view))


@router.get(
    "/state/{path:path}", summary="A part of the state", response_model=Any, responses=errors(400, 401, 403, 404)
)
async def state_path(request: Request, path: str) -> Response:
    """What is at `path`: keys and list indices between slashes, such as `instances/<id>`."""
    view = view_of(context_of(request))
    return json_response(await asyncio.to_thread(state_at, view, path))


@router.get(
    "/events",
    summary="What changed",
    response_model=list[dict[str, Any]],
    responses=errors(400, 401, 403) | stream_content("Events, oldest first"),
)
async def events(
    request: Request,
    follow: bool = False,
    since: Annotated[int | None, Query(ge=0, description="Index of the first event wanted.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_EVENTS, description="The newest so many, not followed.")] = USUAL_EVENTS,
) -> Response:
    """The newest events that the log holds, oldest first. With `follow`, or `Accept: text/event-stream`, a stream.

    The stream begins with `since`, with the event after `Last-Event-ID`, or with the next one. An event `gap` says
    which events are not held any more: read `/state` anew.
    """
    context = context_of(request)
    log = context.node.control.log
    if follow or "text/event-stream" in request.headers.get("accept", ""):
        start = _start(request.headers.get("last-event-id"), log.life) if since is None else since
        return StreamingResponse(_stream(context, start), headers=STREAM_HEADERS, media_type="text/event-stream")
    wanted = [item for item in log.held() if since is None or item.index >= since]
    chosen = wanted[-limit:] if since is None else wanted[:limit]
    return Response(await asyncio.to_thread(_encode, chosen, log.life), media_type="application/json")


def _encode(items: list[Indexed], life: str) -> bytes:
    return msgspec.json.encode([event_json(item, life) for item in items])


def _start(last: str | None, life: str) -> int | None:
    """Where a client that was here before goes on; -1, which no log holds, if it was another life's."""
    if not last:
        return None
    known, _, index = last.rpartition("-")
    return int(index) + 1 if known == life and index.isdecimal() else -1


async def _stream(context: Context, start: int | None) -> AsyncIterator[bytes]:
    life = context.node.control.log.life
    async with context.follow(start) as followed:
        yield KEEP_ALIVE
        while True:
            try:
                item = await followed.next_within(KEEP_ALIVE_SECONDS)
            except StopAsyncIteration:
                return
            if item is None:
                yield KEEP_ALIVE
            elif isinstance(item, Gap):
                yield event_frame({"first": item.first, "end": item.end}, "gap", f"{life}-{item.end - 1}")
            else:
                yield event_frame(event_json(item, life), None, f"{life}-{item.index}")


def event_frame(data: Any, event: str | None = None, event_id: str | None = None) -> bytes:
    """One server-sent event."""
    head = (f"event: {event}\n" if event else "") + (f"id: {event_id}\n" if event_id else "")
    return head.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


@router.get("/v1/feature-flags", summary="exo's feature flags", response_model=FeatureFlags, responses=errors(401, 403))
async def feature_flags(request: Request) -> Response:
    """`disaggregation` is always on."""
    return json_response({"disaggregation": True})


@router.get(
    "/capabilities", summary="What this cluster can do", response_model=Capabilities, responses=errors(401, 403)
)
async def capabilities(request: Request) -> Response:
    """Features of this version, and the engines of each node."""
    node = context_of(request).node
    found = {engine.backend for facts in node.state.nodes.values() for engine in facts.engines if engine.available}
    return json_response(
        {
            "node_id": node.node_id,
            "version": __version__,
            "features": {
                "disaggregation": True,
                "automatic_links": node.settings.automatic_links,
                "downloads": not node.settings.offline,
                "sharded_instances": False,
                "images": False,
            },
            "vllm_available": "Vllm" in found,
            "mlx_available": bool(found - {"Vllm"}),
            "instance_metas": [*METAS, "Sim"],
            "shardings": SHARDINGS,
            "backends": {
                node_id: [engine.backend for engine in facts.engines if engine.available]
                for node_id, facts in node.state.nodes.items()
            },
            "engines": {
                node_id: [msgspec.to_builtins(engine) for engine in facts.engines]
                for node_id, facts in node.state.nodes.items()
            },
        }
    )
