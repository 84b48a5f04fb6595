"""Models fetched, deleted and no longer fetched, on any node."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from tandem.api.body import parse_body
from tandem.api.cluster.answers import command_head, json_response, model_named, within
from tandem.api.cluster.schema import CancelDownload, DownloadCommanded, StartDownload
from tandem.api.context import Context, context_of
from tandem.api.errors import from_validation
from tandem.api.exo_instance import ShardBody, read_card
from tandem.api.openapi import body_of, command_errors, errors
from tandem.errors import (
    DownloadError,
    InvalidRequestError,
    ModelError,
    NotFoundError,
    UnavailableError,
    UnplaceableError,
)
from tandem.types.facts import DownloadFact

if TYPE_CHECKING:
    from tandem.cluster.downloads import Downloads

router = APIRouter(tags=["cluster"])

DOWNLOAD_SECONDS = 90.0
"""Longer than another node may take to answer."""


@router.post(
    "/download/start",
    summary="Fetch a model to a node",
    openapi_extra=body_of(StartDownload),
    response_model=DownloadCommanded,
    responses=command_errors(500, 507),
)
async def start_download(request: Request) -> Response:
    """Begin to fetch a model; `/state/downloads/<node>` shows how far it is."""
    context = context_of(request)
    body, model_id = await parse_body(request, context.settings.max_body_bytes, StartDownload, _model_id)
    downloads = _downloads(context, body.target_node_id)
    if await _simulated(context, model_id):
        return _answered(DownloadFact(model_id, "completed", 1, 1))
    return await _answer("Starting the download", downloads.start(body.target_node_id, model_id))


@router.post(
    "/download/cancel",
    summary="Stop fetching a model",
    openapi_extra=body_of(CancelDownload),
    response_model=DownloadCommanded,
    responses=command_errors(500),
)
async def cancel_download(request: Request) -> Response:
    """Stop fetching a model. What has arrived is kept."""
    context = context_of(request)
    body, _ = await parse_body(request, context.settings.max_body_bytes, CancelDownload, lambda body: None)
    work = _downloads(context, body.target_node_id).cancel(body.target_node_id, body.model_id)
    return await _answer("Cancelling the download", work)


@router.delete(
    "/download/{node_id}/{model_id:path}",
    summary="Delete a model from a node",
    response_model=DownloadCommanded,
    responses=errors(400, 401, 403, 404, 409, 422, 500, 503, 504),
)
async def delete_download(request: Request, node_id: str, model_id: str) -> Response:
    """Remove a model from a node's disk."""
    context = context_of(request)
    return await _answer("Deleting the model", _downloads(context, node_id).delete(node_id, model_id))


def _model_id(body: StartDownload) -> str:
    if body.model_id:
        return body.model_id
    if not body.shard_metadata:
        raise InvalidRequestError("Name the model by `modelId` or `shardMetadata`.", param="modelId")
    try:
        return read_card(ShardBody.model_validate(body.shard_metadata).model_card).model_id
    except ValidationError as error:
        raise from_validation(error) from None


def _downloads(context: Context, node_id: str) -> Downloads:
    if node_id not in context.node.state.nodes:
        raise NotFoundError(f"There is no node {node_id}. GET /state lists the nodes.", param="targetNodeId")
    return context.node.downloads


async def _simulated(context: Context, model_id: str) -> bool:
    """Whether every node has it: exo's benches fetch whatever they are about to measure."""
    try:
        return (await model_named(context, model_id)).card.family == "sim"
    except (NotFoundError, UnplaceableError):
        return False


async def _answer(what: str, work: Awaitable[Any]) -> Response:
    try:
        return _answered(await within(DOWNLOAD_SECONDS, what, work))
    except DownloadError as error:
        raise UnavailableError(error.message, retry_after=error.retry_after) from error
    except ModelError as error:
        raise UnplaceableError(error.message, param="model_id") from error


def _answered(outcome: Any) -> Response:
    head = command_head()
    return json_response({**head, "commandId": head["command_id"], "outcome": msgspec.to_builtins(outcome)})
