"""The models of this node, with exo's fields beside OpenAI's."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.api.context import Context, context_of
from tandem.api.openai.schema_responses import ModelList, ModelObject
from tandem.api.openapi import errors
from tandem.cluster.catalogue import custom_cards
from tandem.errors import NotFoundError

if TYPE_CHECKING:
    from tandem.cluster.node import Node
    from tandem.models.cards import ModelCard

router = APIRouter(tags=["models"])

_STARTED = int(time.time())
Status = Literal["ready", "downloaded"]


@router.get("/v1/models", summary="List models", response_model=ModelList, responses=errors(400, 401, 403))
async def list_models(request: Request, status: Status | None = None) -> Response:
    """Served models first, then those that are only on disk. `status` narrows it down to `ready` or `downloaded`."""
    models = await _models(context_of(request), status)
    return _json({"object": "list", "data": models})


@router.get("/models", summary="List models and cards", response_model=ModelList, responses=errors(400, 401, 403))
async def list_known_models(request: Request, status: Status | None = None) -> Response:
    """The same as `/v1/models`, followed by every model that has a card and could be fetched, in state `known`."""
    context = context_of(request)
    models = await _models(context, status)
    if status is None:
        listed = {model["id"].casefold() for model in models}
        custom = custom_cards(context.node.state)
        for card in (*custom.values(), *await asyncio.to_thread(context.node.store.cards.all)):
            if card.model_id.casefold() not in listed:
                listed.add(card.model_id.casefold())
                models.append(describe(card, "known", card.context_length))
    return _json({"object": "list", "data": models})


@router.get(
    "/v1/models/{model_id:path}",
    summary="Describe a model",
    response_model=ModelObject,
    responses=errors(401, 403, 404),
)
async def get_model(request: Request, model_id: str) -> Response:
    """One model by its id or an alias of it."""
    wanted = model_id.lower()
    models = await _models(context_of(request), None)
    for model in models:
        if wanted == model["id"].lower() or wanted in (alias.lower() for alias in model["aliases"]):
            return _json(model)
    known = ", ".join(model["id"] for model in models) or "none at all"
    raise NotFoundError(f"The model '{model_id}' is neither served nor on disk. Known models: {known}.", param="model")


async def _models(context: Context, status: Status | None) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    if status != "downloaded":
        for instance in context.node.instances():
            if status is None or instance.state == status:
                listed = found.get(instance.model_id)
                if listed is None or instance.state == "ready":
                    length = instance.info.context_length if instance.info else instance.card.context_length
                    found[instance.model_id] = describe(instance.card, instance.state, length, int(instance.created))
    if status != "ready":
        # Reading the disks takes milliseconds.
        for model in await asyncio.to_thread(context.node.store.list):
            card = model.card
            described = describe(card, "downloaded", card.context_length)
            found.setdefault(model.model_id, described | {"id": model.model_id})
        for model_id in _elsewhere(context.node):
            known = await asyncio.to_thread(context.node.store.cards.get, model_id) if model_id not in found else None
            if known is not None:
                found[model_id] = describe(known, "downloaded", known.context_length)
    return list(found.values())


def _elsewhere(node: Node) -> list[str]:
    """Models on the disks of other nodes."""
    return [
        download.model_id
        for node_id, facts in node.state.nodes.items()
        for download in facts.downloads
        if node_id != node.node_id and download.state == "completed"
    ]


def describe(card: ModelCard, state: str, context_length: int, created: int | None = None) -> dict[str, Any]:
    """A model with OpenAI's fields and exo's.

    Args:
        created: unix seconds; None takes this process's start.
    """
    return {
        "id": card.model_id,
        "object": "model",
        "created": _STARTED if created is None else created,
        "owned_by": "tandem",
        "hugging_face_id": card.model_id,
        "name": card.model_id.rsplit("/", 1)[-1],
        "description": "",
        "context_length": context_length,
        "tags": [],
        "storage_size_megabytes": card.storage_size // (1 << 20),
        "supports_tensor": card.supports_tensor,
        "tasks": list(card.tasks),
        "is_custom": card.is_custom,
        "family": card.family,
        "quantization": card.quantization,
        "base_model": card.base_model,
        "capabilities": list(card.capabilities),
        "reasoning_dialect": card.reasoning_dialect,
        "aliases": list(card.aliases),
        "state": state,
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
