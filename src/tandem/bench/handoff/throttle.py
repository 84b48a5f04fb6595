"""A slow link: a TCP proxy that lets bytes through at a set rate, a process of its own.

`python -m tandem.bench.handoff.throttle` forwards to the port in its settings. Each direction is a link of its own, as
on a full-duplex wire. Bytes are passed on once the link would have carried the last of them.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from typing import Any

from tandem.bench.handoff.children import answer_questions

HOST = "127.0.0.1"
BURST_SECONDS = 0.002
"""What a link that was idle, or a sleep that took too long, may catch up with: far less than a chunk of a prompt."""
PIECE_SECONDS = 0.001
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 2048, 64 << 10


class LinkClock:
    """When a link of some rate is done with its bytes: a token bucket that holds `burst` seconds' worth of them.

    Args:
        rate: bytes per second; 0 for no limit.
    """

    def __init__(self, rate: float, burst: float = BURST_SECONDS) -> None:
        self.rate = rate
        self._burst = burst
        self._free_at = float("-inf")

    @property
    def piece(self) -> int:
        """Bytes that are passed on together."""
        return min(MAX_PIECE_BYTES, max(MIN_PIECE_BYTES, int(self.rate * PIECE_SECONDS))) if self.rate else 1 << 20

    def carry(self, nbytes: int, now: float) -> float:
        """Take bytes on that are here at `now`. Returns the time at which the last of them is through."""
        if not self.rate:
            return now
        self._free_at = max(self._free_at, now - self._burst) + nbytes / self.rate
        return self._free_at


class ThrottlingProxy:
    """Forwards every connection to `target`.

    Args:
        target: port on loopback.
        rate: of links that are not told otherwise, bytes per second; 0 for no limit.

    Attributes:
        port: to connect to.
        carried: bytes that went from the target to its clients.
    """

    def __init__(self, target: int, rate: float = 0.0) -> None:
        self.carried = 0
        self._target = target
        self._rate = rate
        self._clocks: list[LinkClock] = []
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="throttle", daemon=True).start()

    def set_rate(self, rate: float) -> None:
        """Change the rate of all links, those of open connections included."""
        self._rate = rate
        for clock in self._clocks:
            clock.rate = rate

    def close(self) -> None:
        """Take no further connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((HOST, self._target))
            except OSError:
                # As a link to a machine that is not there: the client learns at once.
                client.close()
                continue
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink, down in ((client, server, False), (server, client, True)):
                clock = LinkClock(self._rate)
                self._clocks.append(clock)
                threading.Thread(target=self._forward, args=(source, sink, clock, down), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, clock: LinkClock, down: bool) -> None:
        # An end, in order or not, is passed on: either side closing ends the other.
        with contextlib.suppress(OSError):
            while piece := source.recv(clock.piece):
                wait = clock.carry(len(piece), time.monotonic()) - time.monotonic()
                if wait > 0:
                    time.sleep(wait)
                sink.sendall(piece)
                if down:
                    self.carried += len(piece)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def main() -> None:
    """Settings: `target`. Says its `port`; `{"rate": bytes_per_second}` sets the rate, the answer counts `carried`."""
    proxy = ThrottlingProxy(json.loads(sys.argv[1])["target"])

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if "rate" in question:
            proxy.set_rate(float(question["rate"]))
        return {"carried": proxy.carried}

    answer_questions({"port": proxy.port}, answer)


if __name__ == "__main__":
    main()
