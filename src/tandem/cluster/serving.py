"""One listening HTTP server inside the event loop that the node already runs in. uvicorn does the work."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Callable, Generator

import uvicorn
from starlette.types import ASGIApp

from tandem.errors import ConfigError

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


class AppServer:
    """Serves one ASGI application.

    Args:
        context: for TLS; None serves plain HTTP.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, *, context: ssl.SSLContext | None = None) -> None:
        self._app = app
        self._host = host
        self._wanted_port = port
        self._context = context
        self._port: int | None = None
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._port is not None, "start() has not been called"
        return self._port

    async def start(self) -> None:
        """Listen. Connections are accepted when this returns.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        listener = _listen(self._host, self._wanted_port)
        self._port = listener.getsockname()[1]
        context = self._context
        config = uvicorn.Config(
            self._app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_CONNECTION_SECONDS,
            ssl_context_factory=None if context is None else lambda config, default: context,
        )
        self._server = _Uvicorn(config)
        self._task = asyncio.create_task(self._server.serve([listener]), name=f"http server {self._port}")
        await self._server.listening.wait()

    async def wait(self) -> None:
        """Return when the server has stopped."""
        assert self._task is not None, "start() has not been called"
        await asyncio.shield(self._task)

    async def stop(self, deadline: float, on_late: Callable[[], None] = lambda: None) -> None:
        """Take no more requests, let the running ones finish, and call `on_late` if some have not after `deadline`
        seconds; a moment later their connections are closed."""
        if self._server is None or self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = math.ceil(deadline) + _LAST_WORDS_SECONDS
        self._server.should_exit = True
        finished, _ = await asyncio.wait({self._task}, timeout=deadline)
        if not finished:
            on_late()
        await self._task


def any_host() -> str:
    """The address that stands for all of this machine's: of both families where the kernel has both."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
    except OSError:
        return "0.0.0.0"
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. "
            "Choose another address with --host and --port.",
            param="port",
        ) from error
