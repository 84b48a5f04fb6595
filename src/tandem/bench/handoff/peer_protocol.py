"""exo's prefill protocol, rebuilt from its format so that the KV plane can be measured beside it.

Both directions carry `[u32 big-endian length][msgpack map]`. A request is answered by a header, then one `kv_chunk`
(or `arrays_state`) a layer, then `done`. Keys and values travel as `[tokens, heads, dim]`, little-endian.

What each side does per byte follows the original: the sender turns a layer's entries into token order, makes bytes of
them and encodes those, with a flush after each frame; the receiver reads a frame through a buffered stream into a
growing array, makes bytes of that, decodes, joins a layer's chunks, and copies them back into head order. It checks
nothing, as the original does not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import BinaryIO, TypeAlias

import msgspec
import numpy as np

from tandem.errors import WireError
from tandem.kv.dtypes import DTYPES, Array

_LENGTH = struct.Struct(">I")
SEND_BUFFER_BYTES = 4 << 20


class Request(msgspec.Struct):
    """What a client asks for."""

    request_id: str = ""
    model_id: str = ""
    token_ids: list[int] = []
    start_pos: int = 0


class Start(msgspec.Struct):
    """The answer's first frame."""

    request_id: str = ""
    model_id: str = ""
    num_layers: int = 0
    dtype: str = "float32"
    start_pos: int = 0


class KvChunk(msgspec.Struct, tag_field="type", tag="kv_chunk"):
    """Some tokens' keys and values in one layer."""

    layer_idx: int
    num_tokens: int
    n_heads: int
    head_dim: int
    dtype: str
    keys: bytes
    values: bytes


class StateArray(msgspec.Struct):
    """One array of a state."""

    dtype: str
    shape: list[int]
    data: bytes


class ArraysState(msgspec.Struct, tag_field="type", tag="arrays_state"):
    """A layer's state."""

    layer_idx: int
    arrays: list[StateArray]


class Done(msgspec.Struct, tag_field="type", tag="done"):
    """The answer's last frame."""

    total_tokens: int


class Problem(msgspec.Struct, tag_field="type", tag="error"):
    """The answer's last frame when something went wrong."""

    code: int
    message: str


Message: TypeAlias = KvChunk | ArraysState | Done | Problem
_decode_message = msgspec.msgpack.Decoder(Message).decode
_encode = msgspec.msgpack.Encoder().encode


def encode_frame(message: Request | Start | Message) -> bytes:
    """A whole frame."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


def write_frame(stream: BinaryIO, message: Request | Start | Message) -> None:
    """Send a frame."""
    stream.write(encode_frame(message))
    stream.flush()


def read_body(stream: BinaryIO) -> bytes:
    """Receive a frame's body.

    Raises:
        WireError: the stream ended.
    """
    (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
    return _read(stream, length)


def _read(stream: BinaryIO, length: int) -> bytes:
    body = bytearray()
    while len(body) < length:
        piece = stream.read(length - len(body))
        if not piece:
            raise WireError("The peer closed the connection in the middle. Is it still up?")
        body.extend(piece)
    return bytes(body)


def serve_one(stream: BinaryIO, layers: Iterable[tuple[Array, Array]], dtype: str, total: int) -> None:
    """Answer one request with each layer's keys and values, `[heads, tokens, dim]`.

    Args:
        total: number of layers.
    """
    request = msgspec.msgpack.decode(read_body(stream), type=Request)
    write_frame(stream, Start(request.request_id, request.model_id, total, dtype, request.start_pos))
    tokens = 0
    for index, (keys, values) in enumerate(layers):
        heads, tokens, dim = keys.shape
        write_frame(stream, KvChunk(index, tokens, heads, dim, dtype, _token_order(keys), _token_order(values)))
    write_frame(stream, Done(tokens))


def _token_order(entries: Array) -> bytes:
    return np.ascontiguousarray(entries.transpose(1, 0, 2)).tobytes()


def fetch(stream: BinaryIO, tokens: list[int], model_id: str = "") -> list[tuple[Array, Array]]:
    """Ask for a prompt's entries.

    Returns:
        Each layer's keys and values, `[heads, tokens, dim]`, in memory of their own.

    Raises:
        WireError: the stream ended early, or in an error.
    """
    write_frame(stream, Request("bench", model_id, tokens, 0))
    start = msgspec.msgpack.decode(read_body(stream), type=Start)
    chunks: dict[int, list[KvChunk]] = {}
    while not isinstance(message := _decode_message(read_body(stream)), Done):
        if isinstance(message, Problem):
            raise WireError(f"The peer could not prefill ({message.code}): {message.message}")
        if isinstance(message, KvChunk):
            chunks.setdefault(message.layer_idx, []).append(message)
    return [
        (
            _head_order(chunks[index], [chunk.keys for chunk in chunks[index]], start.dtype),
            _head_order(chunks[index], [chunk.values for chunk in chunks[index]], start.dtype),
        )
        for index in sorted(chunks)
    ]


def _head_order(chunks: list[KvChunk], pieces: list[bytes], dtype: str) -> Array:
    kind = DTYPES[dtype].array
    arrays = [
        np.frombuffer(piece, kind).reshape(chunk.num_tokens, chunk.n_heads, chunk.head_dim)
        for chunk, piece in zip(chunks, pieces, strict=True)
    ]
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return joined.transpose(1, 0, 2).copy()
