"""The receiving side of the throughput measurement: seconds from the request to the last byte in fresh memory."""

from __future__ import annotations

import socket
import time
from typing import BinaryIO, Protocol, cast

import numpy as np

from tandem.bench.handoff.peer_protocol import fetch
from tandem.bench.handoff.sender import HOST, PIECE_BYTES
from tandem.bench.handoff.shape import Shape
from tandem.errors import EngineError
from tandem.kv.client import Handoff
from tandem.kv.dtypes import Array
from tandem.kv.plan import Wanted
from tandem.kv.staging import Staging
from tandem.kv.tls import Identity
from tandem.kv.wire import as_bytes


class Receiver(Protocol):
    """Asks one sender for all bytes, as often as wanted, over one connection."""

    def receive(self) -> float:
        """Seconds that it took.

        Raises:
            TandemError: something else arrived than was sent.
        """

    def close(self) -> None:
        """Close the connection."""


class PlaneReceiver:
    """The KV plane's client: checksums, staging, everything but the commit into an engine's cache."""

    def __init__(self, port: int, shape: Shape, expected: Array, identity: Identity | None) -> None:
        self._shape, self._expected = shape, expected
        self._handoff = Handoff((HOST, port), shape.fingerprint, identity=identity)
        self._handoff.connect()

    def receive(self) -> float:
        shape = self._shape
        began = time.perf_counter()
        staging = Staging(shape.layout, Wanted(0, shape.tokens))
        outcome = self._handoff.transfer(range(shape.tokens), staging).run()
        seconds = time.perf_counter() - began
        if outcome.error is not None:
            raise outcome.error
        for layer in {0, shape.layers - 1}:
            _compare(staging.entries(layer, 1, 0, shape.tokens), self._expected)
        return seconds

    def close(self) -> None:
        self._handoff.close()


class SocketReceiver:
    """A plain socket (or plain TLS): the yardstick."""

    def __init__(self, port: int, shape: Shape, expected: Array, identity: Identity | None) -> None:
        self._shape, self._expected = shape, expected
        sock = _connect(port)
        self._socket = identity.client_context().wrap_socket(sock) if identity else sock

    def receive(self) -> float:
        total, received = self._shape.nbytes, 0
        began = time.perf_counter()
        memory = np.empty(total, np.uint8).data
        self._socket.sendall(b"\0")
        while received < total:
            count = self._socket.recv_into(memory[received : received + PIECE_BYTES])
            if not count:
                raise EngineError("The plain sender closed the connection. Run the bench again.")
            received += count
        seconds = time.perf_counter() - began
        source = np.asarray(as_bytes(self._expected))
        _compare(np.asarray(memory)[-len(source) :], source)
        return seconds

    def close(self) -> None:
        self._socket.close()


class PeerReceiver:
    """The client of exo's protocol."""

    def __init__(self, port: int, shape: Shape, expected: Array) -> None:
        self._shape, self._expected = shape, expected
        self._socket = _connect(port)
        self._stream = cast(BinaryIO, self._socket.makefile("rwb"))

    def receive(self) -> float:
        shape = self._shape
        began = time.perf_counter()
        layers = fetch(self._stream, list(range(shape.tokens)))
        seconds = time.perf_counter() - began
        if len(layers) != shape.layers:
            raise EngineError(f"{len(layers)} layers came, not {shape.layers}. Run the bench again.")
        _compare(layers[-1][1], self._expected)
        return seconds

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


def _connect(port: int) -> socket.socket:
    sock = socket.create_connection((HOST, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _compare(found: Array, expected: Array) -> None:
    if not np.array_equal(found, expected):
        raise EngineError("Other bytes arrived than were sent. Report this: no figure of this run means anything.")
