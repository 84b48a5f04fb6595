"""The one error shape of the HTTP surface: OpenAI's `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from tandem.errors import ContextTooLongError, InvalidRequestError, TandemError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    499: "cancelled_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ErrorDetail(BaseModel):
    """What went wrong. `param` names the request field at fault; `code` is stable and machine-readable."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


def error_body(error: TandemError) -> bytes:
    """`error` as JSON text in OpenAI's shape."""
    message = error.message
    if isinstance(error, ContextTooLongError):
        # Agents and routers that shorten a conversation, or choose another model, look for these words.
        message = f"The prompt is too long. {message}"
    return envelope(error.status, message, error.code, error.param)


def envelope(
    status: int, message: str, code: str, param: str | None = None, more: dict[str, Any] | None = None
) -> bytes:
    """An error object as JSON text; `more` adds members beside `error`."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": param, "code": code}, **(more or {})}
    )


def error_response(error: TandemError) -> Response:
    """`error` as an HTTP response with its own status, and `Retry-After` where the error says when."""
    headers = retry_headers(error)
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), error.status, headers, "application/json")


def retry_headers(error: TandemError) -> dict[str, str]:
    """`Retry-After` in whole seconds, for errors that pass by themselves."""
    if error.retry_after is not None:
        return {"retry-after": str(max(1, math.ceil(error.retry_after)))}
    return {"retry-after": "1"} if error.status == HTTPStatus.SERVICE_UNAVAILABLE else {}


def status_response(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    """A bare HTTP status (404 for an unknown route, 405, ...) in the error shape."""
    phrase = HTTPStatus(status).phrase
    code = phrase.lower().replace(" ", "_").replace("-", "_")
    return Response(envelope(status, detail or phrase, code), status, headers, "application/json")


def from_validation(error: ValidationError) -> InvalidRequestError:
    """The first problem that pydantic found, as a 400 that names the field.

    Malformed JSON arrives here too: `model_validate_json` reports it as a problem of the whole body.
    """
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        return InvalidRequestError(
            f"The request body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}."
        )
    # A union reports every member's complaint. The one that came furthest into the value was the one that was meant.
    field = first["loc"][:1]
    depth = max(len(problem["loc"]) for problem in problems if problem["loc"][:1] == field)
    closest = [problem for problem in problems if problem["loc"][:1] == field and len(problem["loc"]) == depth]
    path = _path(closest[0]["loc"])
    messages = dict.fromkeys(problem["msg"].removeprefix("Value error, ").rstrip(".") for problem in closest)
    others = len({problem["loc"][:1] for problem in problems}) - 1
    more = f" ({others} more of the request's fields are wrong.)" if others else ""
    where = f"`{path}`: " if path else ""
    return InvalidRequestError(f"{where}{'; or: '.join(messages)}.{more}", param=path or None)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content", "str")` as `messages[0].content`; the names of union members are left out."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not part.isidentifier() or part in _UNION_MEMBERS:
            continue
        else:
            text += f".{part}" if text else part
    return text[:_LONGEST_PATH]


_LONGEST_PATH = 200
_UNION_MEMBERS = frozenset({"str", "int", "float", "bool", "ContentPart", "list", "NamedToolChoice", "literal"})
