"""A TCP proxy between a client and a server that does one bad thing to one frame."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias, get_args

from tandem.kv.handshake import PREAMBLE
from tandem.kv.wire import HEADER_BYTES

Kind: TypeAlias = Literal[
    "cut", "reset", "stall", "flip", "drop", "duplicate", "swap", "truncate", "insert", "replace", "replay the rest"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
_TLS_HEADER = 5


class Fault(NamedTuple):
    """What happens to unit number `unit` (a frame, or a TLS record) of one direction.

    Attributes:
        inside: 0 to 1: where in the unit, for kinds that have a place: 0 is its first byte, 1 right behind its last.
    """

    kind: Kind
    to_client: bool
    unit: int
    inside: float


class Proxy:
    """Listens for one connection and forwards it to `target` with one fault.

    Args:
        recorded: units of an earlier connection in both directions, (to the client, to the server): what "replace",
            "insert" and "replay the rest" send.

    Attributes:
        fired: the fault's unit came by.
        units: everything that went by, before the fault, per direction.
    """

    def __init__(
        self,
        target: tuple[str, int],
        fault: Fault | None,
        *,
        tls: bool = False,
        recorded: tuple[list[bytes], list[bytes]],
    ) -> None:
        self.fired = False
        self.units: tuple[list[bytes], list[bytes]] = ([], [])
        self._target = target
        self._fault = fault
        self._tls = tls
        self._recorded = recorded
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(10)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._thread.start()

    def close(self) -> None:
        """End everything and wait for it."""
        self._over.set()
        with contextlib.suppress(OSError):
            # Wakes an accept for which no client ever came.
            socket.create_connection(self.address, 1).close()
        self._thread.join()

    def _run(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            with client, socket.create_connection(self._target) as server:
                ways = [
                    threading.Thread(target=self._forward, args=(server, client, True)),
                    threading.Thread(target=self._forward, args=(client, server, False)),
                ]
                for way in ways:
                    way.start()
                self._over.wait()
                for end in (client, server):
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
                for way in ways:
                    way.join()

    def _forward(self, source: socket.socket, sink: socket.socket, to_client: bool) -> None:
        fault = self._fault if self._fault and self._fault.to_client == to_client else None
        seen, recorded = self.units[not to_client], self._recorded[not to_client]
        held = b""
        try:
            for number, unit in enumerate(self._units(source)):
                seen.append(unit)
                if fault is None or number != fault.unit:
                    sink.sendall(unit + held)
                    held = b""
                    continue
                self.fired = True
                place = min(len(unit), round(fault.inside * len(unit)))
                if fault.kind in ("cut", "reset", "stall"):
                    sink.sendall(unit[:place])
                    if fault.kind != "stall":
                        if fault.kind == "reset":
                            # Wakes the other direction's thread, which would read from it for ever.
                            sink.shutdown(socket.SHUT_RD)
                            sink.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                            sink.close()
                        return
                    self._over.wait()
                elif fault.kind == "flip":
                    bit = min(8 * len(unit) - 1, int(fault.inside * 8 * len(unit)))
                    damaged = bytearray(unit)
                    damaged[bit // 8] ^= 1 << bit % 8
                    sink.sendall(damaged)
                elif fault.kind == "duplicate":
                    sink.sendall(unit + unit)
                elif fault.kind == "swap":
                    held = unit
                elif fault.kind == "truncate":
                    sink.sendall(unit[: min(place, len(unit) - 1)])
                elif fault.kind == "insert":
                    sink.sendall((recorded[number] if number < len(recorded) else seen[0]) + unit)
                elif fault.kind == "replace":
                    sink.sendall(recorded[number] if number < len(recorded) else seen[0])
                elif fault.kind == "replay the rest":
                    sink.sendall(b"".join(recorded[number:]))
                    self._over.wait()
        except OSError:
            pass
        finally:
            self._end(sink)

    def _end(self, sink: socket.socket) -> None:
        # The end of one direction is passed on; the other goes on by itself.
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _units(self, source: socket.socket) -> Iterator[bytes]:
        if not self._tls:
            yield _exactly(source, PREAMBLE.size)
        while True:
            if self._tls:
                head = _exactly(source, _TLS_HEADER)
                length = int.from_bytes(head[3:5], "big")
            else:
                head = _exactly(source, HEADER_BYTES)
                length = int.from_bytes(head[40:48], "little")
            yield head + _exactly(source, length)


def _exactly(source: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            raise ConnectionError("the stream ended")
        data += more
    return bytes(data)


def draw_fault(draw: random.Random, units: tuple[int, int]) -> Fault:
    """Any fault at any unit, at its edges or inside.

    Args:
        units: how many a clean connection has, to the client and to the server.
    """
    to_client = draw.random() < 0.85
    inside = draw.choice([0.0, 1.0, draw.random(), draw.random()])
    return Fault(draw.choice(KINDS), to_client, draw.randrange(units[0 if to_client else 1]), inside)
