"""The HTTP server: uvicorn inside the event loop that the node already runs in."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Generator
from typing import TYPE_CHECKING

import uvicorn

from tandem.api.app import create_app
from tandem.api.context import Context
from tandem.config import Settings
from tandem.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from tandem.cluster.node import Node

_BACKLOG = 2048
# Longer than clients keep unused connections, or a client might send a request just when we hang up.
_KEEP_CONNECTION_SECONDS = 75
_LAST_WORDS_SECONDS = 2


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        # Signals belong to whoever owns the process: the command line, or a test.
        yield


class HttpServer:
    """One listening server.

    Args:
        node: what it serves.
        settings: `host`, `port` (0 takes a free one), limits and the API key.
    """

    def __init__(self, node: Node, settings: Settings) -> None:
        self._settings = settings
        self.app = create_app(node, settings)
        self._port: int | None = None
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def context(self) -> Context:
        """The application's parts."""
        context: Context = self.app.state.context
        return context

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._port is not None, "start() has not been called"
        return self._port

    @property
    def url(self) -> str:
        """Where clients on this machine reach it, without a trailing slash."""
        host = self._settings.host
        if host in ("0.0.0.0", ""):
            host = "127.0.0.1"
        elif host == "::":
            host = "::1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def start(self) -> None:
        """Listen. Connections are accepted when this returns.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        listener = _listen(self._settings.host, self._settings.port)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self.app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_CONNECTION_SECONDS,
        )
        self._server = _Uvicorn(config)
        self._task = asyncio.create_task(self._server.serve([listener]), name="http server")
        await self._server.listening.wait()

    async def wait(self) -> None:
        """Return when the server has stopped."""
        assert self._task is not None, "start() has not been called"
        await asyncio.shield(self._task)

    async def stop(self, deadline: float = 10.0) -> None:
        """Take no more requests, let the running ones finish, and end those that have not after `deadline` seconds.

        Streams that are ended so get an error event that says why.
        """
        if self._server is None or self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = math.ceil(deadline) + _LAST_WORDS_SECONDS
        self._server.should_exit = True
        finished, _ = await asyncio.wait({self._task}, timeout=deadline)
        if not finished:
            error = UnavailableError("The server is shutting down: send the request again later.")
            self.context.running.abort_all(error)
        await self._task


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. "
            "Choose another address with --host and --port.",
            param="port",
        ) from error


async def serve(node: Node, settings: Settings) -> HttpServer:
    """Start a server for `node` and return it. `stop` ends it.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    server = HttpServer(node, settings)
    await server.start()
    return server
