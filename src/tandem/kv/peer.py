"""Connections to one prefill server, kept for reuse between hand-offs."""

from __future__ import annotations

import socket
import ssl
import threading
from typing import Annotated

import msgspec

from tandem.errors import HandoffError, IncompatiblePeerError, PeerLostError
from tandem.kv.control import Hello, Welcome
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.frames import FrameReader, FrameWriter
from tandem.kv.handshake import greet_server
from tandem.kv.server import require_secret
from tandem.kv.tls import Identity
from tandem.kv.transport import Patience, Transport

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ClientOptions(msgspec.Struct, frozen=True):
    """Deadlines, in seconds. None of them bounds a prefill that makes progress.

    Attributes:
        open: connect beyond loopback without a cluster secret.
        node: the name that servers are told.
        connect: until a connection stands.
        handshake: for the whole handshake.
        silence: without a single byte, keep-alives included.
        stall: without more entries or more tokens computed, once the request's turn has come.
        queue: from acceptance to the request's turn.
        drain: for the server to stop after a cancel; after that the connection is closed.
        max_idle_connections: kept for reuse.
    """

    open: bool = False
    node: str = ""
    connect: Seconds = 3.0
    handshake: Seconds = 5.0
    silence: Seconds = 10.0
    stall: Seconds = 120.0
    queue: Seconds = 600.0
    drain: Seconds = 1.0
    max_idle_connections: int = 4


class Link:
    """One open connection after its handshake.

    Attributes:
        welcome: what the server said of itself.
        name: of the server.
        mixed: its weights are ours in another quantisation.
        requests: so far.
    """

    def __init__(self, transport: Transport, hello: Hello, patience: Patience) -> None:
        self.transport = transport
        self.reader = FrameReader(transport)
        self.writer = FrameWriter(transport)
        self.welcome: Welcome = greet_server(transport, self.reader, self.writer, hello, patience)
        self.name = transport.peer_name() or self.welcome.node
        self.mixed = not self.welcome.fingerprint.same_weights(hello.fingerprint)
        self.requests = 0


class Peer:
    """Opens connections to one server, and keeps those that are idle.

    Raises:
        ConfigError: the address is not loopback while there is no secret.
    """

    def __init__(
        self,
        address: tuple[str, int],
        fingerprint: Fingerprint,
        *,
        identity: Identity | None = None,
        allow_quantisation: bool = False,
        options: ClientOptions | None = None,
    ) -> None:
        self.address = address
        self.options = options or ClientOptions()
        require_secret(address[0], identity, open_to_all=self.options.open)
        self._context = identity.client_context() if identity else None
        self._hello = Hello(fingerprint, self.options.node, allow_quantisation)
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._closed = False

    def take(self, *, fresh: bool = False) -> Link:
        """An idle connection, or a new one.

        Raises:
            HandoffError: the peer cannot be reached, does not answer in time, or has another secret or model.
        """
        while not fresh:
            with self._lock:
                link = self._idle.pop() if self._idle else None
            if link is None:
                break
            if not link.transport.readable():
                return link
            # The server closed it, or sent something that nobody asked for.
            link.transport.close()
        return self._connect()

    def give_back(self, link: Link) -> None:
        """Keep a connection whose last request came to a clean end."""
        with self._lock:
            if not self._closed and len(self._idle) < self.options.max_idle_connections:
                self._idle.append(link)
                return
        link.transport.close()

    def close(self) -> None:
        """Close all idle connections, and those that come back later."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.transport.close()

    def _connect(self) -> Link:
        host, port = self.address
        patience = Patience.total(self.options.handshake)
        try:
            sock: socket.socket = socket.create_connection(self.address, self.options.connect)
        except OSError as error:
            raise PeerLostError(f"{host}:{port} cannot be reached ({error}). Is the prefill node up?") from error
        try:
            if self._context is not None:
                sock = self._context.wrap_socket(sock, do_handshake_on_connect=False)
            transport = Transport(sock)
        except OSError as error:
            sock.close()
            raise PeerLostError(f"{host}:{port} closed the connection ({error}). Is the prefill node up?") from error
        try:
            transport.handshake(patience)
            return Link(transport, self._hello, patience)
        except ssl.SSLError as error:
            transport.close()
            raise self._other_secret(error) from error
        except HandoffError as error:
            transport.close()
            # In TLS 1.3 a client learns only after its own handshake that its certificate was refused.
            cause = error.__cause__
            if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                raise self._other_secret(cause) from error
            raise

    def _other_secret(self, error: ssl.SSLError) -> IncompatiblePeerError:
        return IncompatiblePeerError(
            f"{self.address[0]}:{self.address[1]} did not pass the TLS handshake ({error.reason or error}). "
            "Set the same cluster secret on both nodes."
        )
