"""The sending side of the throughput measurement, a process of its own: `python -m tandem.bench.handoff.sender`.

Each kind waits for a request on a connection that stands already, then sends the same bytes from the same memory:

- `plane`: the KV plane's server, entries emitted as fast as it takes them;
- `socket`: a plain socket;
- `peer`: exo's protocol.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO, cast

from tandem.bench.handoff.children import answer_questions
from tandem.bench.handoff.peer_protocol import SEND_BUFFER_BYTES, serve_one
from tandem.bench.handoff.shape import Shape
from tandem.errors import CancelledError, WireError
from tandem.kv.dtypes import Array
from tandem.kv.job import Admission, PrefillJob, Producer
from tandem.kv.server import PrefillServer
from tandem.kv.tls import Authority, Identity
from tandem.kv.wire import as_bytes

SECRET = "both sides of a measurement"
"""Protects nothing: both processes are ours, on loopback."""
PIECE_BYTES = 1 << 20
HOST = "127.0.0.1"


def bench_identity() -> Identity:
    """A certificate under the bench's own authority."""
    return Authority(SECRET).issue("bench")


class InstantProducer(Producer):
    """Emits the same entries for every layer, chunk by chunk, as fast as they can be taken."""

    def __init__(self, shape: Shape, entries: Array) -> None:
        self._shape = shape
        self._entries = entries

    def submit(self, job: PrefillJob) -> Admission:
        threading.Thread(target=self._emit, args=(job,), daemon=True).start()
        return Admission()

    def cancel(self, job: PrefillJob) -> None:
        pass

    def _emit(self, job: PrefillJob) -> None:
        shape = self._shape
        with contextlib.suppress(CancelledError):
            for first in range(0, shape.tokens, shape.chunk):
                for layer in range(shape.layers):
                    for part in (0, 1):
                        job.emit(layer, part, first, self._entries[:, first : first + shape.chunk])
            job.finish()


def send_plain(sock: socket.socket, entries: Array, total: int) -> None:
    """Wait for a byte, then send `total` bytes; again and again until the other side is gone."""
    source = as_bytes(entries)
    while sock.recv(1):
        sent = 0
        while sent < total:
            first = sent % len(source)
            piece = source[first : first + min(PIECE_BYTES, total - sent)]
            sock.sendall(piece)
            sent += len(piece)


def send_peer_protocol(sock: socket.socket, entries: Array, layers: int) -> None:
    """Answer requests in exo's protocol until the other side is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    stream = cast(BinaryIO, sock.makefile("rwb"))
    with stream, contextlib.suppress(WireError):
        while True:
            serve_one(stream, ((entries, entries) for _ in range(layers)), "bfloat16", layers)


def listen(serve: Callable[[socket.socket], None], context: ssl.SSLContext | None) -> int:
    """Serve connections, each in a thread. Returns the port."""
    listener = socket.create_server((HOST, 0))

    def welcome(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with context.wrap_socket(sock, server_side=True) if context else sock as connection:
            serve(connection)

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=welcome, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def main() -> None:
    """Settings: `kind`, `tls`, `shape`. Says its `port`."""
    settings = json.loads(sys.argv[1])
    shape = Shape.of(settings["shape"])
    entries = shape.entries()
    identity = bench_identity() if settings["tls"] else None
    if settings["kind"] == "plane":
        producer = InstantProducer(shape, entries)
        with PrefillServer(producer, shape.layout, shape.fingerprint, identity=identity) as server:
            answer_questions({"port": server.address[1]}, lambda _: {})
        return
    context = identity.server_context() if identity else None
    if settings["kind"] == "socket":
        port = listen(lambda sock: send_plain(sock, entries, shape.nbytes), context)
    else:
        port = listen(lambda sock: send_peer_protocol(sock, entries, shape.layers), context)
    answer_questions({"port": port}, lambda _: {})


if __name__ == "__main__":
    main()
