"""Reading request bodies: counted while they arrive, parsed off the event loop when they are large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from tandem.api.errors import from_validation
from tandem.errors import CancelledError, InvalidRequestError, PayloadTooLargeError

THREAD_BYTES = 16 * 1024
"""Bodies from this size on are parsed in a worker thread: below it, parsing takes well under a millisecond."""

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises:
        PayloadTooLargeError: more than `limit` bytes were announced, or came.
        CancelledError: the client went away before the end.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            pieces.append(piece)
    except ClientDisconnect:
        raise CancelledError("The client went away while it sent the request.") from None
    return b"".join(pieces)


async def parse_body(request: Request, limit: int, model: type[M], convert: Callable[[M], R]) -> tuple[M, R]:
    """Read the body, validate it as `model`, and apply `convert`.

    Returns:
        The validated body and what `convert` made of it.

    Raises:
        InvalidRequestError: not JSON, or not what `model` describes, or refused by `convert`.
        PayloadTooLargeError, CancelledError: as `read_body`.
    """
    raw = await read_body(request, limit)
    if len(raw) >= THREAD_BYTES:
        return await asyncio.to_thread(_parse, raw, model, convert)
    return _parse(raw, model, convert)


def _parse(raw: bytes, model: type[M], convert: Callable[[M], R]) -> tuple[M, R]:
    if b"NaN" in raw or b"Infinity" in raw:
        _require_strict_json(raw)
    try:
        body = model.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from None
    return body, convert(body)


def _require_strict_json(raw: bytes) -> None:
    # pydantic's parser takes the bare words NaN and Infinity for numbers; JSON has neither.
    try:
        msgspec.json.decode(raw, type=Any)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.") from None


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"The request body is larger than {limit} bytes. The setting max_body_bytes raises the limit."
    )
