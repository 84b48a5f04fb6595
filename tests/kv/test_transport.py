"""Receiving into buffers of all sizes, however the bytes are cut on the way."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import pytest

from tandem.errors import PeerLostError
from tandem.kv.control import Problem
from tandem.kv.frames import FrameReader, FrameWriter
from tandem.kv.transport import Patience, Transport
from tandem.kv.wire import HEADER_BYTES, FrameType, new_digest

PATIENCE = Patience(5.0)


@pytest.fixture
def pair() -> Iterator[tuple[Transport, socket.socket]]:
    ours, theirs = socket.socketpair()
    transport = Transport(ours)
    yield transport, theirs
    transport.close()
    theirs.close()


@pytest.mark.parametrize("seed", range(12))
def test_buffers_are_filled_in_order(pair: tuple[Transport, socket.socket], seed: int) -> None:
    transport, theirs = pair
    draw = random.Random(seed)
    largest = draw.choice((3, 5000, 700_000))
    sizes = [draw.choice((0, 1, draw.randrange(largest + 1))) for _ in range(draw.randrange(1, 40))]
    data = draw.randbytes(sum(sizes))

    def send() -> None:
        rest = memoryview(data)
        while rest:
            count = draw.randrange(1, 200_000)
            theirs.sendall(rest[:count])
            rest = rest[count:]

    thread = threading.Thread(target=send)
    thread.start()
    buffers, digest, whole = [bytearray(size) for size in sizes], new_digest(), new_digest()
    transport.receive([memoryview(buffer) for buffer in buffers], PATIENCE, digest=digest)
    thread.join(10)
    assert b"".join(buffers) == data
    whole.update(data)
    assert digest.intdigest() == whole.intdigest()
    assert transport.received == len(data)


def test_more_buffers_than_a_system_call_takes(pair: tuple[Transport, socket.socket]) -> None:
    transport, theirs = pair
    data = random.Random(1).randbytes(3000)
    theirs.sendall(data)
    buffers = [bytearray(1) for _ in data]
    transport.receive([memoryview(buffer) for buffer in buffers], PATIENCE)
    assert b"".join(buffers) == data


@pytest.mark.parametrize("follows", [0, 3, HEADER_BYTES, HEADER_BYTES + 5])
def test_what_comes_next_is_received_along(pair: tuple[Transport, socket.socket], follows: int) -> None:
    transport, theirs = pair
    data, after = random.Random(2).randbytes(1000), random.Random(3).randbytes(follows)
    theirs.sendall(data + after)
    buffers, ahead, digest, whole = (
        [bytearray(400), bytearray(600)],
        bytearray(HEADER_BYTES),
        new_digest(),
        new_digest(),
    )
    views = [memoryview(buffer) for buffer in buffers]
    early = transport.receive(views, PATIENCE, digest=digest, ahead=memoryview(ahead))
    assert b"".join(buffers) == data
    assert early == min(follows, HEADER_BYTES)
    assert ahead[:early] == after[:early]
    whole.update(data)
    assert digest.intdigest() == whole.intdigest(), "what is next is not of this payload"


def test_the_end_in_the_middle_is_an_error(pair: tuple[Transport, socket.socket]) -> None:
    transport, theirs = pair
    theirs.sendall(b"abc")
    theirs.close()
    buffers = [memoryview(bytearray(2)), memoryview(bytearray(2))]
    with pytest.raises(PeerLostError):
        transport.receive(buffers, PATIENCE)
    with pytest.raises(PeerLostError):
        transport.take(buffers[0])


@pytest.mark.parametrize("first", [1, HEADER_BYTES - 1, HEADER_BYTES])
def test_a_header_that_has_begun_is_not_lost(first: int) -> None:
    """`begun` takes what is there; the rest of the header follows whenever it comes."""
    wires = [socket.socketpair() for _ in range(2)]
    writing, reading = Transport(wires[0][0]), Transport(wires[1][0])
    recorded, sending = wires[0][1], wires[1][1]
    writer, reader = FrameWriter(writing), FrameReader(reading)
    problem = Problem("code", "message", None)
    writer.control(problem, 7, PATIENCE)
    frame = recorded.recv(1 << 16)
    assert not reader.begun()
    sending.sendall(frame[:first])
    assert reader.begun()
    assert reader.begun()
    sending.sendall(frame[first:])
    header = reader.header(PATIENCE)
    assert header.type == FrameType.ERROR
    assert reader.control(header, Problem, PATIENCE) == problem
    assert not reader.begun()
    for transport in (writing, reading):
        transport.close()
    for sock in (recorded, sending):
        sock.close()
