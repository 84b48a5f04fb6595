"""What the cluster's routes have in common: a view of the state, models by name, deadlines, and JSON answers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from tandem.api.context import Context
from tandem.api.exo_state import View
from tandem.cluster.catalogue import Known, custom_cards, find_model
from tandem.errors import DeadlineError
from tandem.models.cards import builtin_cards

COMMAND_SECONDS = 30.0
"""No command is answered later than this."""
RECEIVED = "Command received."

T = TypeVar("T")


def json_response(value: Any) -> Response:
    """`value` as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


async def within(seconds: float, what: str, work: Awaitable[T]) -> T:
    """Wait for `work`.

    Raises:
        DeadlineError: it took longer than `seconds`.
    """
    try:
        async with asyncio.timeout(seconds) as timeout:
            return await work
    except TimeoutError:
        if not timeout.expired():
            raise
        raise DeadlineError(f"{what} took longer than {seconds:g} s. GET /state tells whether it happened.") from None


def command_head() -> dict[str, Any]:
    """What exo answers every command with. The outcome follows in fields of its own."""
    return {"message": RECEIVED, "command_id": str(uuid.uuid4())}


def view_of(context: Context) -> View:
    """The cluster at this moment."""
    node = context.node
    now, clock = time.time(), time.monotonic()
    heard = {node_id: now - (clock - at) for node_id, at in node.control.membership.roster.heard().items()}
    return View(
        node.world(),
        custom_cards(node.state),
        {card.model_id: card for card in builtin_cards()},
        node.control.log.next_index - 1,
        {**heard, node.node_id: now},
    )


async def model_named(context: Context, name: str) -> Known:
    """The model called `name`; see `find_model`."""
    node = context.node
    found = asyncio.to_thread(find_model, name, node.store, node.state, node.node_id)
    return await within(COMMAND_SECONDS, "Looking for the model", found)
