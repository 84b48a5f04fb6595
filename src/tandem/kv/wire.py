"""The frame header of wire version 1: 64 bytes in front of every payload.

Pure functions over bytes; `frames.py` moves them over sockets, `control.py` has the payloads of control frames.
`docs/wire.md` specifies everything here with golden bytes, and a test compares the two.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash

from tandem.errors import WireError
from tandem.kv.dtypes import DTYPE_CODES
from tandem.kv.intervals import Span
from tandem.kv.layout import MAX_LAYERS, MAX_PARTS, MAX_TOKENS

MAGIC = b"TdKV"
VERSION = 1
HEADER_BYTES = 64
MAX_DATA_BYTES = 64 << 20
"""Largest payload of a data or state frame."""
MAX_CONTROL_BYTES = 64 << 10
"""Largest payload of any other frame, but for the request with its token ids."""

Buffer: TypeAlias = "bytes | bytearray | memoryview"


class FrameType(IntEnum):
    """What a frame is. Numbers are never reused."""

    HELLO = 1
    WELCOME = 2
    PREFILL = 3
    ACCEPTED = 4
    BUSY = 5
    PROGRESS = 6
    KEEP_ALIVE = 7
    DATA = 8
    STATE = 9
    DONE = 10
    ERROR = 11
    CANCEL = 12


class CodecId(IntEnum):
    """How a data frame's payload is encoded. Numbers are never reused."""

    RAW = 0
    INT8 = 1
    INT4 = 2


class Header(NamedTuple):
    """A frame header, without magic, version and its own checksum.

    Attributes:
        type: a `FrameType`.
        flags: none are defined in version 1; always 0.
        codec: a `CodecId`; 0 unless this is a data frame.
        dtype: number of the element type (`dtypes.py`) before encoding; 0 unless this is a data or state frame.
        part: index into the layer's parts (data) or states (state).
        layer: index of the leaf cache.
        nonce: the request that this frame belongs to; 0 in the handshake.
        sequence: number of the frame on this connection and in this direction, from 0.
        head_start, head_count: heads of a data frame.
        token_start, token_count: tokens of a data frame. A state frame has 0 and the number of tokens it stands for.
        length: bytes of the payload.
        checksum: xxh3-64 of the payload.
    """

    type: int
    flags: int = 0
    codec: int = 0
    dtype: int = 0
    part: int = 0
    layer: int = 0
    nonce: int = 0
    sequence: int = 0
    head_start: int = 0
    head_count: int = 0
    token_start: int = 0
    token_count: int = 0
    length: int = 0
    checksum: int = 0

    @property
    def token_end(self) -> int:
        """First token after a data frame's; the tokens that a state stands for."""
        return self.token_start + self.token_count

    @property
    def heads(self) -> Span:
        """Heads of a data frame."""
        return Span(self.head_start, self.head_start + self.head_count)

    @property
    def tokens(self) -> Span:
        """Tokens of a data frame."""
        return Span(self.token_start, self.token_start + self.token_count)

    @property
    def name(self) -> str:
        """The frame type's name, for messages."""
        return FrameType(self.type).name.lower()


_FIELDS = struct.Struct("<4sBBBBBxHIQIHHIIQQ")
_CHECKSUM = struct.Struct("<Q")
assert _FIELDS.size + _CHECKSUM.size == HEADER_BYTES

_EMPTY = frozenset((FrameType.KEEP_ALIVE, FrameType.CANCEL))
_TENSORS = frozenset((FrameType.DATA, FrameType.STATE))


def new_digest() -> xxhash.xxh3_64:
    """A running checksum of a payload: `update` it, then take its `intdigest`."""
    return xxhash.xxh3_64()


def checksum(views: Iterable[Any]) -> int:
    """xxh3-64 (seed 0) of the bytes of all buffers, one after the other."""
    digest = new_digest()
    for view in views:
        digest.update(view)
    return digest.intdigest()


EMPTY_CHECKSUM = checksum(())


def encode_header(header: Header) -> bytes:
    """The header's 64 bytes."""
    h = header
    fields = _FIELDS.pack(
        MAGIC, VERSION, h.type, h.flags, h.codec, h.dtype, h.part, h.layer, h.nonce, h.sequence,
        h.head_start, h.head_count, h.token_start, h.token_count, h.length, h.checksum,
    )  # fmt: skip
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def decode_header(data: Buffer, *, max_request_bytes: int = MAX_CONTROL_BYTES) -> Header:
    """Read a header and check everything that can be checked without knowing the request.

    Args:
        data: 64 bytes.
        max_request_bytes: largest accepted payload of a prefill request.

    Raises:
        WireError: not a frame, another version, a damaged header, an unknown type, flag, dtype or codec, a position or
            length out of bounds.
    """
    if len(data) != HEADER_BYTES:
        raise WireError(f"A frame header has {HEADER_BYTES} bytes, not {len(data)}. Frame the stream again.")
    magic, version, *values = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"{bytes(magic)!r} begins no frame. Point the link at the peer's KV port.")
    if version != VERSION:
        raise WireError(f"The peer speaks wire version {version}, we speak {VERSION}. Install the same Tandem on both.")
    if _CHECKSUM.unpack_from(data, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(data[: _FIELDS.size]):
        raise WireError("A frame header's checksum is wrong: it was damaged on the way. Check the link.")
    header = Header(*values)
    if data[9]:
        raise WireError(f"The reserved byte of a header is {data[9]}, not 0. The peer is not of version {VERSION}.")
    if header.type not in _KNOWN_TYPES:
        raise WireError(f"Frame type {header.type} is unknown in version {VERSION}. Install the same Tandem on both.")
    _check_fields(header)
    _check_length(header, max_request_bytes)
    return header


_KNOWN_TYPES = frozenset(int(one) for one in FrameType)
_KNOWN_CODECS = frozenset(int(one) for one in CodecId)


def _check_fields(header: Header) -> None:
    if header.flags:
        raise WireError(f"Flags {header.flags:#x} are unknown in version {VERSION}. Install the same Tandem on both.")
    if header.codec not in _KNOWN_CODECS:
        raise WireError(f"Codec {header.codec} is unknown in version {VERSION}. Install the same Tandem on both.")
    tensor = header.type in _TENSORS
    if header.dtype not in DTYPE_CODES if tensor else header.dtype:
        raise WireError(f"Dtype {header.dtype} is unknown in a {header.name} frame. Install the same Tandem on both.")
    if header.type != FrameType.DATA and (header.codec or header.head_start or header.head_count or header.token_start):
        raise WireError(f"A {header.name} frame has a codec, heads or tokens, which only data has. The peer is broken.")
    if not tensor and (header.part or header.layer or header.token_count):
        raise WireError(f"A {header.name} frame names a layer, which only data and states do. The peer is broken.")
    if header.layer >= MAX_LAYERS or header.part >= MAX_PARTS:
        raise WireError(f"Layer {header.layer}, part {header.part} cannot exist. The peer is broken.")
    if tensor and not 0 < header.token_count <= header.token_end < MAX_TOKENS:
        raise WireError(f"Tokens [{header.token_start}, {header.token_end}) cannot exist. The peer is broken.")
    if header.type == FrameType.DATA and not header.head_count:
        raise WireError("A data frame has no heads. The peer is broken.")


def _check_length(header: Header, max_request_bytes: int) -> None:
    if header.type in _EMPTY:
        limit = 0
    elif header.type in _TENSORS:
        limit = MAX_DATA_BYTES
    else:
        limit = max_request_bytes if header.type == FrameType.PREFILL else MAX_CONTROL_BYTES
    if header.length > limit:
        raise WireError(
            f"A {header.name} frame of {header.length} bytes is over the limit of {limit}. Split it, or shorten it."
        )
    if not header.length and header.type not in _EMPTY:
        raise WireError(f"A {header.name} frame has no payload. The peer is broken.")


def as_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of a C-contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8).data
