"""The slow link: what it lets through in a time, and that it changes no byte of it."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest

from tandem.bench.handoff.throttle import HOST, MAX_PIECE_BYTES, LinkClock, ThrottlingProxy


@pytest.mark.parametrize("rate", [1e4, 3e6, 2e9])
def test_no_stretch_of_time_carries_more_than_the_rate(rate: float) -> None:
    burst = 0.002
    clock, draw = LinkClock(rate, burst), random.Random(1)
    now, through = 100.0, []
    for _ in range(2000):
        nbytes = draw.randrange(1, clock.piece + 1)
        # Mostly more is waiting; at times the link is idle for a while, or its user slept too long.
        now = max(now, clock.carry(nbytes, now)) + draw.choice((0, 0, 0, 0.0005, 0.01))
        through.append((now, nbytes))
    for first in range(0, len(through), 37):
        began, total = through[first][0], 0
        for at, nbytes in through[first + 1 :]:
            total += nbytes
            assert total <= rate * (at - began + burst) * (1 + 1e-6) + 1
    assert clock.piece <= MAX_PIECE_BYTES


def test_a_busy_link_carries_its_rate_exactly() -> None:
    clock, now = LinkClock(1e6), 5.0
    for _ in range(1000):
        now = clock.carry(1000, now)
    assert now == pytest.approx(5.0 + 1.0, abs=0.003)


def test_without_a_rate_nothing_waits() -> None:
    clock = LinkClock(0)
    assert clock.carry(1 << 40, 7.0) == 7.0


def serve_bytes(data: bytes) -> socket.socket:
    """Sends `data` to whoever connects and says a byte, then closes."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            assert sock.recv(1) == b"!"
            sock.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    return listener


@pytest.mark.parametrize("rate", [0.0, 4e6])
def test_bytes_arrive_as_they_were_sent(rate: float) -> None:
    data = random.Random(2).randbytes(1_000_000)
    with serve_bytes(data) as server:
        proxy = ThrottlingProxy(server.getsockname()[1])
        proxy.set_rate(rate)
        received = bytearray()
        with socket.create_connection((HOST, proxy.port), 10) as client:
            began = time.monotonic()
            client.sendall(b"!")
            while piece := client.recv(1 << 16):
                received += piece
                if rate:
                    # However slow this machine is: never ahead of the link.
                    assert len(received) <= rate * (time.monotonic() - began + 0.004) + MAX_PIECE_BYTES
        assert bytes(received) == data
        assert proxy.carried == len(data)
        proxy.close()


def test_a_client_that_goes_away_ends_the_servers_connection() -> None:
    listener = socket.create_server((HOST, 0))
    proxy = ThrottlingProxy(listener.getsockname()[1])
    client = socket.create_connection((HOST, proxy.port), 10)
    server, _ = listener.accept()
    server.settimeout(10)
    client.close()
    assert server.recv(1) == b""
    server.close()
    listener.close()
    proxy.close()


def test_nobody_there_ends_the_connection() -> None:
    with socket.create_server((HOST, 0)) as unused:
        port = unused.getsockname()[1]
    proxy = ThrottlingProxy(port)
    for _ in range(2):
        with socket.create_connection((HOST, proxy.port), 10) as client:
            assert client.recv(1) == b""
    proxy.close()
