"""The HTTP surface of a node, listening."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.api.app import create_app
from tandem.api.context import Context
from tandem.cluster.serving import AppServer
from tandem.config import Settings
from tandem.errors import UnavailableError

if TYPE_CHECKING:
    from tandem.cluster.node import Node


class HttpServer:
    """One listening server.

    Args:
        node: what it serves.
        settings: `host`, `port` (0 takes a free one), limits and the API key.
    """

    def __init__(self, node: Node, settings: Settings) -> None:
        self._settings = settings
        self.app = create_app(node, settings)
        self._server = AppServer(self.app, settings.host, settings.port)

    @property
    def context(self) -> Context:
        """The application's parts."""
        context: Context = self.app.state.context
        return context

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.port

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
        await self._server.start()

    async def wait(self) -> None:
        """Return when the server has stopped."""
        await self._server.wait()

    async def stop(self, deadline: float = 10.0) -> None:
        """Take no more requests, let the running ones finish, and end those that have not after `deadline` seconds.

        Streams that are ended so get an error event that says why.
        """
        self.context.end_followers()
        error = UnavailableError("The server is shutting down: send the request again later.")
        await self._server.stop(deadline, lambda: self.context.running.abort_all(error))


async def serve(node: Node, settings: Settings) -> HttpServer:
    """Start a server for `node` and return it. `stop` ends it.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    server = HttpServer(node, settings)
    await server.start()
    return server
