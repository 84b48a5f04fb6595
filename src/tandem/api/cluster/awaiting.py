"""Waiting for a model's instance, and for its runners."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from tandem.api.cluster.state import STREAM_HEADERS, event_frame
from tandem.api.context import Context, context_of
from tandem.api.exo_instance import instance_json
from tandem.api.openapi import errors, stream_content
from tandem.api.sse import KEEP_ALIVE, KEEP_ALIVE_SECONDS
from tandem.placement.roles import health, trouble
from tandem.placement.world import card_of
from tandem.types.intents import InstanceIntent

router = APIRouter(tags=["cluster"])

LONGEST_WAIT = 3600.0
"""What 0 stands for: for ever, with an end."""
LOOK_AGAIN_SECONDS = 1.0
"""While nodes may be met: no event says that they were not."""


@router.get(
    "/instance/await",
    summary="Wait for an instance",
    response_class=StreamingResponse,
    responses=errors(400, 401, 403) | stream_content("`ready`, `runners_ready`, `failed`, `removed` or `timeout`"),
)
async def await_instance(
    request: Request, model_id: str, timeout_seconds: Annotated[float, Query(ge=0, le=300)] = 300.0
) -> Response:
    """Events about the first instance of a model. 0 seconds wait for an hour.

    `ready`: the instance exists. `runners_ready`: it answers requests. `failed`: every instance of the model is dead,
    with the reason. `removed`: the one that was announced is gone. The stream ends after `runners_ready`, `failed`
    and `timeout`.
    """
    found = _events(context_of(request), model_id, timeout_seconds or LONGEST_WAIT)
    return StreamingResponse(found, headers=STREAM_HEADERS, media_type="text/event-stream")


async def _events(context: Context, model_id: str, seconds: float) -> AsyncIterator[bytes]:
    node = context.node
    deadline = time.monotonic() + seconds
    told: str | None = None
    async with context.follow() as changes:
        yield KEEP_ALIVE
        quiet = time.monotonic()
        while True:
            world = node.world()
            found = [intent for intent in world.instances.values() if _serves(intent, model_id)]
            if told is not None and told not in world.instances:
                yield event_frame({"type": "removed", "instance_id": told})
                told = None
            if told is None and found:
                told = found[0].instance_id
                yield event_frame({"type": "ready", "instance": instance_json(found[0])})
            state = {intent.instance_id: health(intent, world) for intent in found}
            for intent in found:
                if state[intent.instance_id] == "ready":
                    yield event_frame({"type": "runners_ready", **_named(intent)})
                    return
            if found and set(state.values()) == {"dead"}:
                reason = f"{found[0].model_id} cannot answer: {trouble(found[0], world)}."
                yield event_frame({"type": "failed", **_named(found[0]), "message": reason})
                return
            left = deadline - time.monotonic()
            if left <= 0:
                what = "does not answer yet" if found else "has no instance"
                yield event_frame({"type": "timeout", "message": f"{model_id} {what} after {seconds:g} s."})
                return
            try:
                silence = max(0.0, quiet + KEEP_ALIVE_SECONDS - time.monotonic())
                soon = LOOK_AGAIN_SECONDS if world.unmet else left
                item = await changes.next_within(min(left, silence, soon))
            except StopAsyncIteration:
                yield event_frame({"type": "failed", "message": "The server is shutting down."})
                return
            if item is None and time.monotonic() - quiet >= KEEP_ALIVE_SECONDS:
                yield KEEP_ALIVE
                quiet = time.monotonic()


def _serves(intent: InstanceIntent, model_id: str) -> bool:
    card = card_of(intent)
    names = card.names if card is not None else frozenset()
    return model_id.casefold() in names | {intent.model_id.casefold()}


def _named(intent: InstanceIntent) -> dict[str, Any]:
    return {"instance_id": intent.instance_id, "model_id": intent.model_id}
