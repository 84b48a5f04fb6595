"""Whole byte streams thrown at both ends of a connection: typed errors, bounded memory, no waiting past deadlines."""

from __future__ import annotations

import contextlib
import socket
import threading
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.errors import HandoffError, TandemError
from tandem.kv.control import CONTROL_TYPES, Hello, Progress, encode_control
from tandem.kv.frames import FrameReader, FrameWriter
from tandem.kv.handshake import greet_server
from tandem.kv.plan import Wanted
from tandem.kv.staging import Staging
from tandem.kv.transport import Patience, Transport
from tandem.kv.wire import FrameType, Header, checksum, encode_header
from tests.kv.layouts import LAYOUTS, fingerprint
from tests.kv.wire_examples import CONTROL_FRAMES, CONTROLS, frame

SOON = Patience(0.2)


def feed(data: bytes) -> Transport:
    """A transport at whose other end these bytes were written, and then the end."""
    ours, theirs = socket.socketpair()

    def write() -> None:
        with theirs, contextlib.suppress(OSError):
            theirs.sendall(data)

    thread = threading.Thread(target=write)
    thread.start()
    transport = Transport(ours)
    transport_close = transport.close

    def close() -> None:
        transport_close()
        thread.join()

    transport.close = close  # type: ignore[method-assign]
    return transport


def read_all(data: bytes) -> list[int]:
    """Read frames as a client does until an error; the types of those that were accepted."""
    transport = feed(data)
    reader, staging = FrameReader(transport), Staging(LAYOUTS["composite"], Wanted(0, 50))
    intake, types = staging.open(7), []
    kinds = {int(kind): control for control, kind in CONTROL_TYPES.items()}
    try:
        while True:
            header = reader.header(SOON)
            if header.type in (FrameType.DATA, FrameType.STATE):
                reader.tensor(header, intake.destinations, SOON)
                intake.commit(header)
            elif header.type in kinds:
                reader.control(header, kinds[header.type], SOON)
            else:
                reader.nothing(header)
            types.append(header.type)
    except HandoffError:
        return types
    finally:
        transport.close()


valid_frames = st.one_of(
    st.sampled_from(sorted(CONTROLS)).map(
        lambda name: (Header(int(CONTROL_FRAMES[name]), nonce=7), encode_control(CONTROLS[name]))
    ),
    st.just((Header(int(FrameType.KEEP_ALIVE), nonce=7), b"")),
    st.builds(
        lambda layer, part, start, count, size: (
            Header(
                int(FrameType.DATA),
                dtype=1,
                layer=layer,
                part=part,
                nonce=7,
                head_count=3,
                token_start=start,
                token_count=count,
            ),
            bytes(size),
        ),
        st.integers(0, 6),
        st.integers(0, 2),
        st.integers(0, 50),
        st.integers(1, 20),
        st.integers(1, 4000),
    ),
)


@given(st.lists(valid_frames, max_size=6), st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_streams_of_valid_frames_with_damage(frames: list[tuple[Header, bytes]], data: st.DataObject) -> None:
    stream = bytearray(b"".join(frame(header._replace(sequence=n), body) for n, (header, body) in enumerate(frames)))
    for _ in range(data.draw(st.integers(0, 2))):
        if stream:
            place = data.draw(st.integers(0, len(stream) - 1))
            stream[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    tracemalloc.start()
    types = read_all(bytes(stream))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(types) <= len(frames)
    assert peak < 8 << 20


@given(st.binary(max_size=400))
@settings(max_examples=50, deadline=None)
def test_random_streams(data: bytes) -> None:
    assert read_all(data) == []


@pytest.mark.parametrize("kind", [FrameType.DATA, FrameType.STATE, FrameType.DONE, FrameType.ERROR])
def test_announced_lengths_take_no_memory(kind: FrameType) -> None:
    """The largest length that a header may announce, for what nobody asked for, and then nothing."""
    tensor = kind in (FrameType.DATA, FrameType.STATE)
    header = Header(int(kind), nonce=7, length=(64 << 20) if tensor else (64 << 10), checksum=1)
    if tensor:
        header = header._replace(dtype=1, token_count=1, head_count=int(kind == FrameType.DATA))
    tracemalloc.start()
    assert read_all(encode_header(header)) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@given(st.binary(max_size=300))
@settings(max_examples=50, deadline=None)
def test_random_servers_in_the_handshake(data: bytes) -> None:
    transport = feed(data)
    hello = Hello(fingerprint(LAYOUTS["attention"]))
    try:
        with pytest.raises(TandemError):
            greet_server(transport, FrameReader(transport), FrameWriter(transport), hello, Patience.total(0.5))
    finally:
        transport.close()


def test_a_damaged_payload_is_received_and_not_counted() -> None:
    body = bytes(3 * 16 * 4)
    header = Header(int(FrameType.DATA), dtype=1, nonce=7, head_count=3, token_count=1, length=len(body))
    right = encode_header(header._replace(checksum=checksum((body,)))) + body
    wrong = encode_header(header._replace(checksum=checksum((body,)) ^ 1)) + body
    assert read_all(right) == [FrameType.DATA]
    assert read_all(wrong) == []
    damaged = bytearray(frame(Header(int(FrameType.PROGRESS), nonce=7), encode_control(Progress(1, 2))))
    damaged[-1] ^= 1
    assert read_all(bytes(damaged)) == []
