"""Which nodes may prefill for an instance."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from tandem.api.body import parse_body
from tandem.api.context import context_of
from tandem.api.openapi import body_of, errors

router = APIRouter(tags=["node"], prefix="/instance/{instance_id}/prefill_peers")


class PrefillPeers(BaseModel):
    """KV ports, `host:port`, that may prefill for an instance. None of them: it reads all prompts by itself."""

    model_config = ConfigDict(extra="forbid")

    prefill_peers: list[str] = Field(max_length=64)


@router.get("", summary="Who may prefill for an instance", response_model=PrefillPeers, responses=errors(401, 403, 404))
async def read_peers(request: Request, instance_id: str) -> Response:
    """The KV ports that may prefill for this instance."""
    return _json(context_of(request).node.prefill_peers(instance_id))


@router.put(
    "",
    summary="Name who may prefill for an instance",
    openapi_extra=body_of(PrefillPeers),
    response_model=PrefillPeers,
    responses=errors(400, 401, 403, 404, 413, 499),
)
async def name_peers(request: Request, instance_id: str) -> Response:
    """Replace the KV ports that may prefill for this instance, from its next prompt on."""
    context = context_of(request)
    body, _ = await parse_body(request, context.settings.max_body_bytes, PrefillPeers, lambda body: None)
    return _json(context.node.name_peers(instance_id, body.prefill_peers))


def _json(peers: tuple[str, ...]) -> Response:
    return Response(msgspec.json.encode({"prefill_peers": peers}), media_type="application/json")
