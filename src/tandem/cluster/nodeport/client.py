"""The client side of the node port: answers from, and commands to, other nodes."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from tandem.cluster.nodeport.messages import (
    MEDIA_TYPE,
    SILENCE_SECONDS,
    Command,
    FrameParser,
    Generate,
    encode,
    failure_decoder,
)
from tandem.errors import DeadlineError, NodeLostError, TandemError, UnavailableError, WireError
from tandem.runner.stream import Stream
from tandem.types import GenerationRequest

CONNECT_SECONDS = 1.5
"""For each address: those that lead nowhere must not hold a request up for long."""
KEPT_SECONDS = 30.0
"""How long an idle connection is kept."""
FILE_BUFFER = 1 << 20
"""Bytes of a file that may wait for the disk, and are then written together."""
FAILURES = (aiohttp.ClientError, OSError)
"""What a node that is gone, or its connection, ends in. Timeouts of the library are among them."""


class NodeClient:
    """Speaks to other nodes' ports.

    Args:
        context: mutual TLS of the cluster; None for plain HTTP.
    """

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._scheme = "http" if context is None else "https"
        self._context = context
        self._made: aiohttp.ClientSession | None = None
        self._ids = itertools.count(1)
        self._closed = False
        self._pumps: dict[str, set[asyncio.Task[None]]] = {}
        self._open_to: Counter[str] = Counter()

    async def close(self) -> None:
        """End every stream and connection."""
        self._closed = True
        for node_id in list(self._pumps):
            self.lost(node_id, "this node is stopping")
        if self._made is not None:
            await self._made.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        """Made at first use: it belongs to the event loop that it is made in."""
        if self._made is None:
            connector = aiohttp.TCPConnector(ssl=self._context or False, limit=0, keepalive_timeout=KEPT_SECONDS)
            self._made = aiohttp.ClientSession(
                connector=connector,
                headers={"user-agent": "tandem", "content-type": MEDIA_TYPE},
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._made

    def busy(self, node_id: str) -> bool:
        """Whether anything is being asked of a node now."""
        return self._open_to[node_id] > 0

    def lost(self, node_id: str, reason: str) -> None:
        """A node is gone: whatever it was asked ends now, instead of after its silence was noticed."""
        for task in self._pumps.pop(node_id, set()):
            task.cancel(reason)

    def generate(
        self,
        node_id: str,
        addresses: Sequence[str],
        instance_id: str,
        request: GenerationRequest,
        *,
        ended: Callable[[], None] = lambda: None,
    ) -> Stream:
        """Have another node answer. Its refusals, and the loss of the node, end the stream as errors.

        Args:
            addresses: `host:port`, the preferred one first.
            ended: called once, when nothing more comes, whatever the reason.

        Raises:
            UnavailableError: this node is stopping.
        """
        if self._closed:
            raise UnavailableError("This node is stopping. Send the request to another one.")
        name = f"{instance_id[:8]}@{node_id[:8]}-{next(self._ids)}"
        task: asyncio.Task[None] | None = None

        def closed(still_running: bool) -> None:
            if still_running and task is not None:
                task.cancel()

        stream = Stream(name, closed)
        body = encode(Generate(instance_id, request))
        task = asyncio.get_running_loop().create_task(self._pump(stream, node_id, addresses, body), name=name)
        self._pumps.setdefault(node_id, set()).add(task)

        def finish(done: asyncio.Task[None]) -> None:
            ended()
            self._pumps.get(node_id, set()).discard(done)
            # Cancelled before it began, or failed in a way that nobody thought of: the stream has to end.
            if not stream.finished:
                error = None if done.cancelled() else done.exception()
                stream.fail(NodeLostError(f"Node {node_id} was lost{f': {error}' if error else ''}.", retry_after=1.0))

        task.add_done_callback(finish)
        return stream

    async def _pump(self, stream: Stream, node_id: str, addresses: Sequence[str], body: bytes) -> None:
        parser = FrameParser()
        try:
            async with self._open("POST", node_id, addresses, "/generate", body=body) as response:
                # To the very end of the body: a connection that was left before it cannot be used again.
                async for data in response.content.iter_any():
                    for events in parser.feed(data):
                        if events:
                            stream.push(events)
            if not stream.finished:
                raise NodeLostError(f"Node {node_id} ended an answer in the middle. Send the request again.")
        except asyncio.CancelledError as cancelled:
            if not stream.finished:
                reason = cancelled.args[0] if cancelled.args else "it was told to stop"
                stream.fail(NodeLostError(f"Node {node_id} was lost while it answered: {reason}.", retry_after=1.0))
        except TandemError as error:
            stream.fail(error)
        except FAILURES as error:
            if not stream.finished:
                stream.fail(_lost(node_id, error))

    async def command(
        self, node_id: str, addresses: Sequence[str], name: str, arguments: dict[str, Any], *, deadline: float
    ) -> Any:
        """Have another node do something, and return what it answers.

        Raises:
            DeadlineError: no answer within `deadline` seconds.
            NodeLostError: it cannot be reached.
            TandemError: whatever it refuses with.
        """
        body = encode(Command(name, arguments))
        try:
            async with (
                asyncio.timeout(deadline),
                self._open("POST", node_id, addresses, "/command", body=body, read=deadline) as response,
            ):
                return msgspec.msgpack.decode(await response.read())
        except TimeoutError as error:
            raise DeadlineError(f"Node {node_id} did not answer '{name}' within {deadline:g} s.") from error
        except FAILURES as error:
            raise _lost(node_id, error) from error

    @asynccontextmanager
    async def file(
        self, node_id: str, addresses: Sequence[str], model_id: str, path: str, *, start: int = 0
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """A model's file from another node, from byte `start` on, in pieces.

        Raises:
            NodeLostError, NotFoundError: the node, or there the file, is not there.
        """
        target = f"/models/{quote(model_id)}/files/{quote(path)}"
        headers = {"range": f"bytes={start}-"} if start else {}
        try:
            async with self._open("GET", node_id, addresses, target, headers=headers, buffer=FILE_BUFFER) as response:
                yield response.content.iter_any()
        except FAILURES as error:
            raise _lost(node_id, error) from error

    async def probe(self, node_id: str, address: str, size: int, *, deadline: float) -> float:
        """Seconds that `size` bytes take from another node's address.

        Raises:
            NodeLostError: it cannot be reached there, or is too slow for `deadline` seconds.
        """
        began = time.monotonic()
        try:
            async with (
                asyncio.timeout(deadline),
                self._open("GET", node_id, [address], f"/probe?bytes={size}") as response,
            ):
                async for _ in response.content.iter_any():
                    pass
        except TimeoutError as error:
            raise NodeLostError(f"{address} did not send {size} bytes within {deadline:g} s.") from error
        except FAILURES as error:
            raise _lost(node_id, error) from error
        return time.monotonic() - began

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        node_id: str,
        addresses: Sequence[str],
        target: str,
        *,
        read: float = SILENCE_SECONDS,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        buffer: int = 1 << 16,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response whose status says success, from the first address that can be connected to."""
        self._open_to[node_id] += 1
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=read)
        failure: aiohttp.ClientError | None = None
        try:
            for address in addresses:
                url = URL(f"{self._scheme}://{address}{target}", encoded=True)
                try:
                    response = await self._session.request(
                        method, url, data=body, headers=headers, timeout=timeout, read_bufsize=buffer
                    )
                except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                    failure = error
                    continue
                async with response:
                    if not response.ok:
                        raise _refusal(await response.read())
                    yield response
                    return
        finally:
            self._open_to[node_id] -= 1
        if failure is None:
            raise NodeLostError(f"No address of node {node_id} is known. Is it in another network?")
        raise _lost(node_id, failure)


def _refusal(body: bytes) -> TandemError:
    try:
        return failure_decoder.decode(body).error()
    except msgspec.MsgspecError as error:
        raise WireError(f"Another node's refusal cannot be read: {error}. Install the same Tandem on both.") from error


def _lost(node_id: str, error: Exception) -> NodeLostError:
    if isinstance(error, aiohttp.ClientPayloadError):
        return NodeLostError(f"Node {node_id} was lost in the middle of its answer. Send the request again.")
    what = str(error) or type(error).__name__
    return NodeLostError(f"Node {node_id} cannot be reached ({what}). It may have just left.", retry_after=1.0)
