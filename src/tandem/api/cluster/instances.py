"""Instances: created, placed, looked at, removed."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from tandem.api.body import parse_body
from tandem.api.cluster.answers import COMMAND_SECONDS, command_head, json_response, model_named, within
from tandem.api.cluster.schema import CreateInstance, InstanceCreated, InstanceRemoved, PlaceInstance, Previews
from tandem.api.context import Context, context_of
from tandem.api.exo_instance import card_json, instance_json, read_instance
from tandem.api.exo_names import camel
from tandem.api.openapi import body_of, command_errors, errors
from tandem.cluster.catalogue import Known
from tandem.errors import InvalidRequestError, NotFoundError, UnplaceableError
from tandem.models.cards import ModelCard
from tandem.placement.plan import PlacementRequest, over_several, place
from tandem.placement.preview import Preview
from tandem.types.intents import InstanceIntent, InstanceMeta, Sharding

router = APIRouter(tags=["cluster"])

SIM = "sim:"


@router.post(
    "/instance",
    summary="Create an instance",
    openapi_extra=body_of(CreateInstance),
    response_model=InstanceCreated,
    responses=command_errors(),
)
async def create_instance(request: Request) -> Response:
    """Run this instance. It is checked like a placement on its nodes: engine, memory, number of nodes."""
    context = context_of(request)
    body, (intent, card) = await parse_body(
        request, context.settings.max_body_bytes, CreateInstance, lambda body: read_instance(body.instance)
    )
    work = _create(context, intent, card, body.instance.reference, body.override_memory)
    return _created(*await within(COMMAND_SECONDS, "Creating the instance", work))


async def _create(
    context: Context, intent: InstanceIntent, card: ModelCard, reference: str | None, override: bool
) -> tuple[InstanceIntent, ModelCard]:
    node = context.node
    if len(intent.shards) > 1:
        raise UnplaceableError(
            f"The instance has {len(intent.shards)} shards; {over_several(intent.meta)}. Choose a preview on one node.",
            param="instance",
        )
    [shard] = intent.shards
    taken = {one.runner_id for other in node.state.instances.values() for one in other.shards}
    if intent.instance_id in node.state.instances or shard.runner_id in taken:
        raise InvalidRequestError(
            f"There is an instance {intent.instance_id}, or a runner {shard.runner_id}, already. Take a new id: every "
            "preview has one.",
            param="instance",
        )
    if shard.node_id not in node.state.nodes:
        raise NotFoundError(f"There is no node {shard.node_id}. GET /state lists the nodes.", param="instance")
    # What we know of a model counts for more than what a client says of it, paths above all.
    known = await _known(context, intent, card, reference)
    _check_files(known, [shard.node_id], "instance")
    wish = PlacementRequest(
        known.card,
        known.reference,
        intent.sharding,
        intent.meta,
        node_ids=(shard.node_id,),
        exact=True,
        context_length=intent.options.get("context_length", 0),
        cache_bytes=intent.options.get("cache_bytes", 0),
        override_memory=override,
    )
    created = await node.commands.place(wish, instance_id=intent.instance_id, runner_id=shard.runner_id)
    return created, known.card


def _check_files(known: Known, node_ids: list[str], param: str) -> None:
    """Raises:
    UnplaceableError: a node is wanted that has not got the model's files.
    """
    if known.node_ids and not set(node_ids) <= set(known.node_ids):
        raise UnplaceableError(
            f"The files of {known.card.model_id} lie in a folder of node {known.node_ids[0]}, which others cannot "
            "read. Choose that node, or ask the other one if it has such a folder, too.",
            param=param,
        )


async def _known(context: Context, intent: InstanceIntent, card: ModelCard, reference: str | None) -> Known:
    name = reference if reference is not None and reference.startswith(SIM) else intent.model_id
    try:
        known = await model_named(context, name)
    except NotFoundError:
        return Known(card, intent.model_id)
    if known.card.model_id != intent.model_id:
        raise InvalidRequestError(
            f"`reference` names {known.card.model_id}, and the card {intent.model_id}.", param="instance"
        )
    return known


@router.post(
    "/place_instance",
    summary="Place an instance",
    openapi_extra=body_of(PlaceInstance),
    response_model=InstanceCreated,
    responses=command_errors(),
)
async def place_instance(request: Request) -> Response:
    """Run a model where it fits best. The answer has the instance, or the reason why there is none."""
    context = context_of(request)
    body, _ = await parse_body(request, context.settings.max_body_bytes, PlaceInstance, lambda body: None)

    async def work() -> tuple[InstanceIntent, ModelCard]:
        known = await model_named(context, body.model_id)
        wish = _wish(known, body.sharding, body.instance_meta, body.min_nodes, body.node_ids, body.context_length)
        wish = replace(wish, override_memory=body.override_memory, cache_bytes=body.cache_bytes)
        return await context.node.commands.place(wish), known.card

    return _created(*await within(COMMAND_SECONDS, "Placing the instance", work()))


def _created(intent: InstanceIntent, card: ModelCard) -> Response:
    outcome = {
        "instance_id": intent.instance_id,
        "instance": camel(instance_json(intent)),
        "model_card": camel(card_json(card)),
    }
    return json_response({**command_head(), **outcome})


def _wish(
    known: Known, sharding: Sharding, meta: InstanceMeta, min_nodes: int, node_ids: list[str], context_length: int
) -> PlacementRequest:
    _check_files(known, node_ids, "node_ids")
    named = tuple(dict.fromkeys([*node_ids, *known.node_ids]))
    return PlacementRequest(
        known.card,
        known.reference,
        sharding,
        meta,
        min_nodes=min_nodes,
        node_ids=named,
        exact=bool(known.node_ids),
        context_length=context_length,
    )


@router.get(
    "/instance/placement",
    summary="Where an instance would go",
    response_model=dict[str, Any],
    responses=errors(400, 401, 403, 404, 409, 422, 503, 504),
)
async def placement(
    request: Request,
    model_id: str,
    sharding: Sharding = "Pipeline",
    instance_meta: InstanceMeta = "MlxRing",
    min_nodes: Annotated[int, Query(ge=1)] = 1,
    node_ids: Annotated[list[str] | None, Query()] = None,
    context_length: Annotated[int, Query(ge=0, le=1 << 31)] = 0,
) -> Response:
    """The instance that `POST /place_instance` would create, or its refusal."""
    context = context_of(request)

    async def work() -> InstanceIntent:
        known = await model_named(context, model_id)
        wish = _wish(known, sharding, instance_meta, min_nodes, node_ids or [], context_length)
        return await asyncio.to_thread(place, wish, context.node.world(), str(uuid.uuid4()), created=time.time())

    return json_response(camel(instance_json(await within(COMMAND_SECONDS, "Planning", work()))))


@router.get(
    "/instance/previews",
    summary="Every way to place a model",
    response_model=Previews,
    responses=errors(400, 401, 403, 404, 422, 503, 504),
)
async def preview_instances(
    request: Request, model_id: str, node_ids: Annotated[list[str] | None, Query()] = None
) -> Response:
    """Plans for every kind and number of nodes, and what is in the way of the others. Send one back to create it.

    For each node there is one on that node alone, so that clients can choose.
    """
    context = context_of(request)

    async def work() -> list[Preview]:
        known = await model_named(context, model_id)
        return await asyncio.to_thread(_previews, context, known, tuple(node_ids or ()))

    found = await within(COMMAND_SECONDS, "Planning", work())
    return json_response({"previews": [_preview_json(preview) for preview in found]})


def _previews(context: Context, known: Known, node_ids: tuple[str, ...]) -> list[Preview]:
    commands, nodes = context.node.commands, context.node.state.nodes
    required = (*node_ids, *known.node_ids)
    found = commands.previews(known.card, dict.fromkeys(required), reference=known.reference)
    if required:
        return found
    seen = {(preview.meta, *_nodes(preview)) for preview in found}
    for node_id in nodes:
        for preview in commands.previews(known.card, (node_id,), reference=known.reference):
            place_key = (preview.meta, *_nodes(preview))
            if preview.nodes == 1 and preview.instance is not None and place_key not in seen:
                seen.add(place_key)
                found.append(preview)
    return found


def _nodes(preview: Preview) -> list[str]:
    return [shard.node_id for shard in preview.instance.shards] if preview.instance is not None else []


def _preview_json(preview: Preview) -> dict[str, Any]:
    """exo's fields, with `nodes`, and `plan` where an instance is worked out and cannot be created in this version."""
    plan = None if preview.instance is None else camel(instance_json(preview.instance))
    error = preview.error
    if preview.instance is not None and len(preview.instance.shards) > 1:
        error = (
            f"It would fit on {preview.nodes} nodes, but {over_several(preview.meta)}. Choose a preview on one node."
        )
    return {
        "model_id": preview.model_id,
        "sharding": preview.sharding,
        "instance_meta": preview.meta,
        "instance": plan if error is None else None,
        "memory_delta_by_node": preview.memory_delta_by_node if error is None else None,
        "error": error,
        "nodes": _nodes(preview),
        "plan": plan if error is not None else None,
    }


@router.get(
    "/instance/{instance_id}",
    summary="One instance",
    response_model=dict[str, Any],
    responses=errors(401, 403, 404),
)
async def get_instance(request: Request, instance_id: str) -> Response:
    """The instance, tagged with its kind."""
    intent = context_of(request).node.state.instances.get(instance_id)
    if intent is None:
        raise NotFoundError("Instance not found", param="instance_id")
    return json_response(camel(instance_json(intent)))


@router.delete(
    "/instance/{instance_id}",
    summary="Remove an instance",
    response_model=InstanceRemoved,
    responses=errors(401, 403, 404, 503, 504),
)
async def delete_instance(request: Request, instance_id: str) -> Response:
    """Stop an instance, wherever it runs. Its streams end with an error."""
    node = context_of(request).node
    if instance_id not in node.state.instances:
        raise NotFoundError("Instance not found", param="instance_id")
    await within(COMMAND_SECONDS, "Removing the instance", node.commands.remove(instance_id))
    return json_response({**command_head(), "instance_id": instance_id})
