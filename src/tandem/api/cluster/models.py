"""Custom model cards, and looking for models."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from tandem.api.body import parse_body
from tandem.api.cluster.answers import COMMAND_SECONDS, json_response, model_named, within
from tandem.api.cluster.schema import AddModel, FoundModel, ModelRemoved
from tandem.api.context import Context, context_of
from tandem.api.openai.models import describe
from tandem.api.openai.schema_responses import ModelObject
from tandem.api.openapi import body_of, command_errors, errors
from tandem.cluster.catalogue import custom_cards
from tandem.errors import DownloadError, InvalidRequestError, ModelError, NotFoundError, UnplaceableError
from tandem.models.cards import ModelCard

router = APIRouter(tags=["cluster"])

SEARCH_SECONDS = 15.0


@router.post(
    "/models/add",
    summary="Make a model known",
    openapi_extra=body_of(AddModel),
    response_model=ModelObject,
    responses=command_errors(),
)
async def add_model(request: Request) -> Response:
    """Make a custom card for a model of the hub, or of this machine, known to the whole cluster.

    A model that has a card already is answered as it is.
    """
    context = context_of(request)
    body, _ = await parse_body(request, context.settings.max_body_bytes, AddModel, lambda body: None)
    card = await within(COMMAND_SECONDS, "Adding the model", _add(context, body.model_id))
    return json_response(describe(card, "known", card.context_length))


async def _add(context: Context, model_id: str) -> ModelCard:
    try:
        return (await model_named(context, model_id)).card
    except NotFoundError:
        if model_id.count("/") != 1:
            raise
    from tandem.models.hub_cards import hub_card  # loads an HTTP client

    try:
        card = await asyncio.to_thread(hub_card, model_id, offline=context.settings.offline)
    except DownloadError as error:
        raise InvalidRequestError(error.message, param="model_id", retry_after=error.retry_after) from error
    except ModelError as error:
        raise UnplaceableError(error.message, param="model_id") from error
    card = card.model_copy(update={"is_custom": True})
    await context.node.commands.add_card(card)
    return card


@router.delete(
    "/models/custom/{model_id:path}",
    summary="Forget a custom card",
    response_model=ModelRemoved,
    responses=errors(401, 403, 404, 503, 504),
)
async def remove_model(request: Request, model_id: str) -> Response:
    """Remove a custom card everywhere. Files and instances of the model stay."""
    context = context_of(request)
    wanted = model_id.casefold()
    known = next((name for name in context.node.state.cards if name.casefold() == wanted), model_id)
    await within(COMMAND_SECONDS, "Removing the card", context.node.commands.remove_card(known))
    return json_response({"message": "Model card deleted.", "model_id": known})


@router.get(
    "/models/search",
    summary="Look for models",
    response_model=list[FoundModel],
    responses=errors(400, 401, 403, 503, 504),
)
async def search_models(
    request: Request,
    query: Annotated[str, Query(max_length=300)] = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """Models of this machine and known cards first, then the hub's, unless the node is offline.

    Where the hub cannot be asked, the header `X-Tandem-Hub` says why.
    """
    context = context_of(request)
    found = await asyncio.to_thread(_local, context, query.casefold())
    headers = {"x-tandem-hub": "offline"}
    if not context.settings.offline and len(found) < limit:
        from tandem.models.hub_cards import search_hub  # loads an HTTP client

        try:
            work = asyncio.to_thread(search_hub, query, limit, offline=False)
            more = await within(SEARCH_SECONDS, "Searching the hub", work)
            headers = {"x-tandem-hub": "asked"}
            for model in more:
                found.setdefault(model.id.casefold(), msgspec.to_builtins(model))
        except DownloadError as error:
            headers = {"x-tandem-hub": error.message.encode("ascii", "replace").decode().replace("\n", " ")}
    answer = json_response(list(found.values())[:limit])
    answer.headers.update(headers)
    return answer


def _local(context: Context, query: str) -> dict[str, dict[str, Any]]:
    node = context.node
    on_disk = {model.model_id: model.card for model in node.store.list()}
    known = {card.model_id: card for card in node.store.cards.all()}
    found: dict[str, dict[str, Any]] = {}
    for tag, cards in (("downloaded", on_disk), ("custom", custom_cards(node.state)), ("known", known)):
        for model_id, card in cards.items():
            names = (model_id, card.base_model, card.family, *card.aliases)
            if any(query in name.casefold() for name in names):
                found.setdefault(model_id.casefold(), _match(model_id, [tag, *card.capabilities]))
    return found


def _match(model_id: str, tags: list[str]) -> dict[str, Any]:
    author = model_id.partition("/")[0] if "/" in model_id else ""
    return {"id": model_id, "author": author, "downloads": 0, "likes": 0, "last_modified": "", "tags": tags}
