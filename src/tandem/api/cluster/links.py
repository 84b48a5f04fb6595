"""Links between instances that prefill and instances that decode."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.api.body import parse_body
from tandem.api.cluster.answers import COMMAND_SECONDS, command_head, json_response, within
from tandem.api.cluster.schema import LinkBody, LinkChanged, LinkObject
from tandem.api.context import Context, context_of
from tandem.api.exo_instance import IDENTIFIER
from tandem.api.exo_names import camel
from tandem.api.exo_state import link_json
from tandem.api.openapi import body_of, command_errors, errors
from tandem.errors import InvalidRequestError
from tandem.types.intents import LinkIntent

router = APIRouter(tags=["cluster"], prefix="/v1/instance-links")


@router.get("", summary="All links", response_model=list[LinkObject], responses=errors(401, 403))
async def list_links(request: Request) -> Response:
    """Links in effect: those that the cluster made by itself, then those that people made, the newest last."""
    context = context_of(request)
    intents = context.node.state.intents

    def order(link: LinkIntent) -> tuple[Any, ...]:
        entry = intents.get(f"link/{link.link_id}")
        return (not link.automatic, entry.stamp.wall if entry else 0, entry.stamp.counter if entry else 0)

    links = sorted(context.node.world().links.values(), key=order)
    return json_response([camel(link_json(link)) for link in links])


@router.post(
    "",
    summary="Link instances",
    openapi_extra=body_of(LinkBody),
    response_model=LinkChanged,
    responses=command_errors(),
)
async def create_link(request: Request) -> Response:
    """Let instances prefill for others. Refused with the reason if they cannot."""
    return await _link(request, None)


@router.put(
    "/{link_id}",
    summary="Replace a link",
    openapi_extra=body_of(LinkBody),
    response_model=LinkChanged,
    responses=command_errors(),
)
async def replace_link(request: Request, link_id: str) -> Response:
    """The same under an id of the client's choosing, replacing what has it."""
    if not IDENTIFIER.fullmatch(link_id):
        raise InvalidRequestError(
            "A link's id has up to 128 letters, digits, '.', '_' and '-', and begins with a letter or digit.",
            param="link_id",
        )
    return await _link(request, link_id)


async def _link(request: Request, link_id: str | None) -> Response:
    context = context_of(request)
    body, _ = await parse_body(request, context.settings.max_body_bytes, LinkBody, lambda body: None)
    work = context.node.commands.link(
        body.prefill_instances, body.decode_instances, link_id=link_id, allow_quantisation=body.allow_quantisation
    )
    return await _changed(context, "Linking", work)


@router.delete(
    "/{link_id}",
    summary="Remove a link",
    response_model=LinkChanged,
    responses=errors(400, 401, 403, 404, 503, 504),
)
async def delete_link(request: Request, link_id: str) -> Response:
    """The link as it was. One that the cluster made by itself is refused: it would make it again."""
    context = context_of(request)
    return await _changed(context, "Removing the link", context.node.commands.unlink(link_id))


async def _changed(context: Context, what: str, work: Any) -> Response:
    link = await within(COMMAND_SECONDS, what, work)
    head = command_head()
    both = {"commandId": head["command_id"], "link_id": link.link_id}
    return json_response({**head, **both, **camel(link_json(link))})
