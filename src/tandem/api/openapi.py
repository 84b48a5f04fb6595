"""What `/openapi.json` says: every body, every status, every content type that a client can meet."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tandem import __version__
from tandem.api.errors import ErrorBody

_REFERENCE = "#/components/schemas/{model}"
_requests: set[type[BaseModel]] = set()
"""Bodies that routes read by themselves."""

_MEANINGS = {
    400: "The request is wrong: `error.message` says what to change",
    401: "The API key is missing or wrong",
    403: "A web page, or a host name, that is not welcome here",
    404: "No such model, instance, node, link, route or request",
    409: "The cluster as it is now cannot do this",
    413: "The body is too large",
    422: "No cluster can do this: the request has to change",
    499: "The request was cancelled",
    500: "The engine failed",
    503: "Busy, loading or restarting: try again after `Retry-After` seconds",
    504: "A deadline passed",
    507: "The disk is full",
}
_GENERATION = (400, 401, 403, 404, 409, 413, 499, 500, 503, 504)
_COMMAND = (400, 401, 403, 404, 409, 413, 422, 499, 503, 504)

_EVENT = {
    "title": "ServerSentEvent",
    "description": "One of the server-sent events that a streamed answer consists of.",
    "type": "object",
    "properties": {
        "data": {"type": "string", "description": "A chunk or an error as JSON text; `[DONE]` at the end."},
        "event": {"type": "string"},
        "id": {"type": "string"},
    },
    "required": ["data"],
    "additionalProperties": False,
}

Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int) -> Responses:
    """Declares error responses."""
    return {status: {"model": ErrorBody, "description": _MEANINGS[status]} for status in statuses}


def generation_responses(model: type[BaseModel]) -> Responses:
    """Declares what a generation route can answer."""
    success = {"model": model, "description": "The answer", "content": {"text/event-stream": {"schema": _EVENT}}}
    return {200: success, **errors(*_GENERATION)}


def command_errors(*more: int) -> Responses:
    """Declares how commands to the cluster can be refused."""
    return errors(*_COMMAND, *more)


def stream_content(description: str) -> Responses:
    """Declares that a 200 may come as server-sent events."""
    return {200: {"description": description, "content": {"text/event-stream": {"schema": _EVENT}}}}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Declares a JSON request body. The routes read bodies themselves, so FastAPI cannot know."""
    _requests.add(model)
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_openapi(app: FastAPI) -> None:
    """Make `app` serve our description."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _describe(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(
        title="Tandem",
        version=__version__,
        description="One language model across the machines you own.",
        routes=app.routes,
    )
    _, requests = models_json_schema(
        [(model, "validation") for model in sorted(_requests, key=lambda model: model.__name__)],
        ref_template=_REFERENCE,
    )
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    components.update(requests["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    for path in schema["paths"].values():
        for operation in path.values():
            # FastAPI promises its own 422; our validation errors are 400.
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
    return schema
