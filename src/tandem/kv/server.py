"""The KV port: listens, bounds who may wait in the handshake, gives every connection a thread."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import select
import socket
import threading
from typing import Annotated

import msgspec

from tandem.errors import ConfigError
from tandem.kv.codec import CODEC_NAMES
from tandem.kv.connection import Connection
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.job import Producer
from tandem.kv.layout import MAX_TOKENS, Layout
from tandem.kv.tls import Identity
from tandem.kv.transport import Transport

logger = logging.getLogger(__name__)


class ServerOptions(msgspec.Struct, frozen=True):
    """Bounds and deadlines; times in seconds.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        open: listen beyond loopback without a cluster secret.
        node: the name that clients are told.
        max_connections: connections at a time; further ones are closed at once.
        max_handshakes: of those, how many may be in the handshake.
        handshake_seconds: for the whole handshake.
        idle_seconds: a connection without a request for this long is closed.
        send_seconds: a client that takes not a byte for this long is given up.
        keep_alive: a request's client hears something at least this often.
        max_tokens: longest prompt.
        backlog_bytes: computed entries of one request that may wait to be sent before its producer has to.
        frame_bytes: about the size of a data frame before encoding.
        codecs: that this server encodes.
    """

    host: str = "127.0.0.1"
    port: int = 0
    open: bool = False
    node: str = ""
    max_connections: int = 64
    max_handshakes: int = 64
    handshake_seconds: float = 5.0
    idle_seconds: float = 300.0
    send_seconds: float = 30.0
    keep_alive: float = 1.0
    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=MAX_TOKENS)] = 1 << 20
    backlog_bytes: int = 256 << 20
    frame_bytes: int = 2 << 20
    codecs: tuple[str, ...] = CODEC_NAMES


class PrefillServer:
    """Serves prefills of one model. Listens as soon as it exists; `close` ends it.

    Args:
        producer: does the work.
        layout, fingerprint: of its model.
        identity: certificate of this node; with one, only TLS peers of the same authority are let in.
        checkpoints: whether the producer has windows and states of points before a prompt's end.

    Raises:
        ConfigError: the address cannot be listened on, or is not loopback while there is no secret.

    Attributes:
        address: (host, port) that clients connect to.
    """

    def __init__(
        self,
        producer: Producer,
        layout: Layout,
        fingerprint: Fingerprint,
        *,
        identity: Identity | None = None,
        options: ServerOptions | None = None,
        checkpoints: bool = True,
    ) -> None:
        self.checkpoints = checkpoints
        self.producer = producer
        self.layout = layout
        self.fingerprint = fingerprint
        self.options = options or ServerOptions()
        require_secret(self.options.host, identity, open_to_all=self.options.open)
        self._context = identity.server_context() if identity else None
        self._listener = _listen(self.options.host, self.options.port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, Connection] = {}
        self._handshakes = 0
        self._closing = False
        self._woken, self._waker = os.pipe()
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    @property
    def connections(self) -> int:
        """Open connections now."""
        with self._lock:
            return len(self._threads)

    def close(self) -> None:
        """Stop listening, cancel what is under way, end all threads. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            running = dict(self._threads)
        os.write(self._waker, b"\0")
        self._acceptor.join()
        self._listener.close()
        for connection in running.values():
            connection.transport.abort()
        for thread in running:
            thread.join()
        os.close(self._waker)
        os.close(self._woken)

    def __enter__(self) -> PrefillServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        pause = threading.Event()
        while not self._closing:
            poll.poll()
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                # Mostly: no file descriptor left. The connection stays in the backlog.
                logger.warning("The KV port could not accept a connection: %s", error)
                pause.wait(0.1)
                continue
            self._welcome(sock, f"{address[0]}:{address[1]}")

    def _welcome(self, sock: socket.socket, address: str) -> None:
        with self._lock:
            full = len(self._threads) >= self.options.max_connections
            if self._closing or full or self._handshakes >= self.options.max_handshakes:
                sock.close()
                return
            try:
                if self._context is not None:
                    sock = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                connection = Connection(self, Transport(sock), address)
            except OSError as error:
                logger.info("Connection of %s ended before it began: %s", address, error)
                sock.close()
                return
            self._handshakes += 1
            thread = threading.Thread(target=self._serve, args=(connection,), name=f"kv-{address}", daemon=True)
            self._threads[thread] = connection
            # With the lock held, so that the thread cannot take itself off the list before it is on it.
            thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            connection.run(self._shaken)
        finally:
            with self._lock:
                self._threads.pop(threading.current_thread(), None)

    def _shaken(self) -> None:
        with self._lock:
            self._handshakes -= 1


def require_secret(host: str, identity: Identity | None, *, open_to_all: bool) -> None:
    """Refuse to talk to other machines without a cluster secret.

    Raises:
        ConfigError: there is no identity, `host` is not loopback, and nobody said that this is meant.
    """
    if identity is not None or open_to_all or host == "localhost":
        return
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    raise ConfigError(
        f"Cache entries would travel to or from {host} unencrypted and unproven. Set a cluster secret on all nodes, "
        "use 127.0.0.1, or, on a network that you trust wholly, set TANDEM_CLUSTER_OPEN=1.",
        param="host",
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"The KV port cannot listen on {host}:{port}: {error}. Choose another.") from error
    return listener
