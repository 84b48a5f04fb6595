"""exo's protocol as the bench rebuilds it: frames to the byte, and entries that come back as they were sent."""

from __future__ import annotations

import socket
import threading
from typing import BinaryIO, cast

import numpy as np
import pytest

from tandem.bench.handoff.peer_protocol import (
    ArraysState,
    Done,
    KvChunk,
    Problem,
    Request,
    Start,
    StateArray,
    encode_frame,
    fetch,
    read_body,
    serve_one,
    write_frame,
)
from tandem.errors import WireError

GOLDEN = {
    "request": (
        Request("r", "m", [1, 2, 70000], 0),
        "0000003684aa726571756573745f6964a172a86d6f64656c5f6964a16da9746f6b656e5f696473930102ce00011170"
        "a973746172745f706f7300",
    ),
    "start": (
        Start("r", "m", 2, "bfloat16", 0),
        "0000003f85aa726571756573745f6964a172a86d6f64656c5f6964a16daa6e756d5f6c617965727302a56474797065"
        "a862666c6f61743136a973746172745f706f7300",
    ),
    "kv_chunk": (
        KvChunk(0, 1, 1, 2, "float16", bytes([1, 2, 3, 4]), bytes([5, 6, 7, 8])),
        "0000005f88a474797065a86b765f6368756e6ba96c617965725f69647800aa6e756d5f746f6b656e7301a76e5f6865616473"
        "01a8686561645f64696d02a56474797065a7666c6f61743136a46b657973c40401020304a676616c756573c40405060708",
    ),
    "arrays_state": (
        ArraysState(1, [StateArray("float32", [1, 1], np.float32(1).tobytes())]),
        "0000004983a474797065ac6172726179735f7374617465a96c617965725f69647801a66172726179739183a56474797065"
        "a7666c6f61743332a57368617065920101a464617461c4040000803f",
    ),
    "done": (Done(3), "0000001982a474797065a4646f6e65ac746f74616c5f746f6b656e7303"),
    "error": (Problem(503, "x"), "0000001e83a474797065a56572726f72a4636f6465cd01f7a76d657373616765a178"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_frames_have_the_originals_bytes(name: str) -> None:
    message, expected = GOLDEN[name]
    assert encode_frame(message).hex() == expected


def pair() -> tuple[BinaryIO, BinaryIO]:
    one, other = socket.socketpair()
    streams = tuple(cast(BinaryIO, sock.makefile("rwb")) for sock in (one, other))
    one.close()
    other.close()
    return streams[0], streams[1]


@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 1, 1), (3, 70, 16), (8, 2000, 4)])
def test_entries_come_back(heads: int, tokens: int, dim: int) -> None:
    draw = np.random.default_rng(heads)
    layers = [
        tuple(draw.integers(0, 1 << 16, (heads, tokens, dim)).astype(np.uint16) for _ in range(2)) for _ in range(3)
    ]
    client, server = pair()
    thread = threading.Thread(target=serve_one, args=(server, layers, "bfloat16", 3))
    thread.start()
    found = fetch(client, list(range(tokens)), "m")
    thread.join(10)
    assert len(found) == 3
    for received, sent in zip(found, layers, strict=True):
        for one, other in zip(received, sent, strict=True):
            assert one.flags.c_contiguous
            np.testing.assert_array_equal(one, other)


def test_several_chunks_a_layer_are_joined() -> None:
    client, server = pair()
    entries = np.arange(2 * 5 * 4, dtype=np.uint16).reshape(2, 5, 4)

    def serve() -> None:
        read_body(server)
        write_frame(server, Start("", "", 1, "float16", 0))
        for first, last in ((0, 3), (3, 5)):
            part = entries[:, first:last].transpose(1, 0, 2).tobytes()
            write_frame(server, KvChunk(0, last - first, 2, 4, "float16", part, part))
        write_frame(server, Done(5))

    thread = threading.Thread(target=serve)
    thread.start()
    ((keys, values),) = fetch(client, [1, 2, 3, 4, 5])
    thread.join(10)
    np.testing.assert_array_equal(keys.view(np.uint16), entries)
    np.testing.assert_array_equal(values.view(np.uint16), entries)


@pytest.mark.parametrize("last", [None, Problem(500, "no memory")])
def test_a_broken_stream_is_an_error(last: Problem | None) -> None:
    client, server = pair()

    def serve() -> None:
        read_body(server)
        write_frame(server, Start("", "", 1, "float16", 0))
        if last is not None:
            write_frame(server, last)
        server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(WireError, match="closed" if last is None else "no memory"):
        fetch(client, [1])
    thread.join(10)
