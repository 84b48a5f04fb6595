"""The server side of the node port: streams, commands, model files and probes for the cluster's other nodes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from tandem.cluster.nodeport.messages import (
    KEEP_ALIVE_SECONDS,
    MEDIA_TYPE,
    command_decoder,
    encode,
    frame,
    generate_decoder,
)
from tandem.cluster.nodeport.response import FrameResponse
from tandem.cluster.serving import AppServer
from tandem.errors import (
    ForbiddenError,
    InstanceNotReadyError,
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
    QueueFullError,
    TandemError,
    UnavailableError,
)
from tandem.runner.stream import Stream
from tandem.types import Failure, GenerationRequest

MAX_BODY_BYTES = 64 << 20
MAX_PROBE_BYTES = 256 << 20
PROBE_PIECE = bytes(256 << 10)

Handler = Callable[[dict[str, Any]], Awaitable[Any]]


class Instances(Protocol):
    """What the node port needs of the local instances."""

    def submit(self, instance_id: str, request: GenerationRequest) -> Stream:
        """Start an answer on this instance."""


class ModelFiles(Protocol):
    """What the node port needs of the local models."""

    def file_of(self, model_id: str, path: str) -> Path:
        """One file of a complete model."""


class NodePort:
    """Listens for other nodes.

    Args:
        node_id: of this node.
        commands: what other nodes may have done here, by name.
        context: mutual TLS; None where only loopback, or a network that was said to be open, can reach it.
    """

    def __init__(
        self,
        node_id: str,
        instances: Instances,
        files: ModelFiles,
        commands: Mapping[str, Handler],
        host: str,
        port: int,
        context: ssl.SSLContext | None,
    ) -> None:
        self._node_id = node_id
        self._instances = instances
        self._files = files
        self._commands = commands
        self._probed = False
        self._answers: set[Stream] = set()
        self._finishing = False
        self._finished = asyncio.Event()
        routes = [
            Route("/identity", self._identity),
            Route("/generate", self._generate, methods=["POST"]),
            Route("/command", self._command, methods=["POST"]),
            Route("/probe", self._probe),
            Route("/models/{model_id:path}/files/{path:path}", self._file),
        ]
        app = Starlette(
            routes=routes, exception_handlers={TandemError: _failure, HTTPException: _unknown, Exception: _failure}
        )
        self._server = AppServer(app, host, port, context=context)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        await self._server.start()

    @property
    def answering(self) -> int:
        """Answers for other nodes that are under way."""
        return len(self._answers)

    async def finish(self, deadline: float) -> None:
        """Begin no more answers, let those that are under way finish, and end those that have not after `deadline`
        seconds with an error. Everything else is done as before."""
        self._finishing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                while self._answers:
                    self._finished.clear()
                    await self._finished.wait()
        for stream in list(self._answers):
            stream.fail(self._stopping())

    def _stopping(self) -> UnavailableError:
        return UnavailableError(f"Node {self._node_id} is stopping. Send the request again.", retry_after=1.0)

    async def stop(self) -> None:
        """Close every connection."""
        await self._server.stop(0.0)

    async def _identity(self, request: Request) -> Response:
        return _answer({"node_id": self._node_id})

    async def _generate(self, request: Request) -> Response:
        message = _decode(generate_decoder, await _body(request))
        if self._finishing:
            raise self._stopping()
        try:
            stream = self._instances.submit(message.instance_id, message.request)
        except NotFoundError as error:
            # It was here a moment ago. Whoever asks should look for another one, not tell a client that there is none.
            raise InstanceNotReadyError(error.message, retry_after=1.0) from error
        return FrameResponse(self._frames(stream))

    async def _frames(self, stream: Stream) -> AsyncGenerator[bytes, None]:
        """A stream as frames, with a sign of life whenever it is silent."""
        self._answers.add(stream)
        try:
            while True:
                try:
                    # Waiting for a stream can be given up and taken up again: nothing is lost.
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        events = await anext(stream, None)
                except TimeoutError:
                    yield frame([])
                    continue
                if events is None:
                    return
                yield frame(events)
        except TandemError as error:
            yield frame([Failure.of(error)])
        finally:
            self._answers.discard(stream)
            self._finished.set()
            await stream.aclose()

    async def _command(self, request: Request) -> Response:
        message = _decode(command_decoder, await _body(request))
        handler = self._commands.get(message.name)
        if handler is None:
            raise NotFoundError(f"This node knows no command '{message.name}'. Install the same Tandem on both nodes.")
        return _answer(await handler(message.arguments))

    async def _probe(self, request: Request) -> Response:
        size = request.query_params.get("bytes", "0")
        if not size.isdecimal() or len(size) > 12 or int(size) > MAX_PROBE_BYTES:
            raise InvalidRequestError(f"bytes={size[:20]} is no number up to {MAX_PROBE_BYTES}.", param="bytes")
        if int(size) <= len(PROBE_PIECE):
            return Response(PROBE_PIECE[: int(size)], media_type=MEDIA_TYPE)
        if self._probed:
            raise QueueFullError("Another node is measuring its link to this one.", retry_after=1.0)
        return StreamingResponse(self._zeros(int(size)), media_type=MEDIA_TYPE)

    async def _zeros(self, size: int) -> AsyncIterator[bytes]:
        self._probed = True
        try:
            for start in range(0, size, len(PROBE_PIECE)):
                yield PROBE_PIECE[: size - start]
        finally:
            self._probed = False

    async def _file(self, request: Request) -> Response:
        model_id, path = request.path_params["model_id"], request.path_params["path"]
        return FileResponse(await asyncio.to_thread(self._files.file_of, model_id, path), media_type=MEDIA_TYPE)


async def _body(request: Request) -> bytes:
    # A web page on this machine can send text, and its browser adds where it comes from. Nodes do neither.
    if "origin" in request.headers or request.headers.get("content-type") != MEDIA_TYPE:
        raise ForbiddenError("This port is for other nodes. Use the HTTP API.")
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise PayloadTooLargeError(f"The request is larger than {MAX_BODY_BYTES} bytes.")
        pieces.append(piece)
    return b"".join(pieces)


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(
            f"Another node's request cannot be read: {error}. Install the same Tandem."
        ) from error


def _answer(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type=MEDIA_TYPE)


async def _failure(request: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, TandemError) else 500
    return _answer(Failure.of(error), status)


async def _unknown(request: Request, error: Exception) -> Response:
    what = f"{request.method} {request.url.path}"
    return await _failure(request, NotFoundError(f"This node knows no {what}. Install the same Tandem on both nodes."))
