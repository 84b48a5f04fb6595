"""What one node asks another, and how a stream of events is framed.

A frame is a 4-byte big-endian length and a msgpack list of events; an empty list says that the sender lives.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from tandem.errors import WireError
from tandem.types import Event, Failure, GenerationRequest

MEDIA_TYPE = "application/vnd.tandem"
HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 64 << 20
KEEP_ALIVE_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""A stream without a single frame for this long has lost its sender."""


class Generate(msgspec.Struct, frozen=True):
    """Answer this with that instance."""

    instance_id: str
    request: GenerationRequest


class Command(msgspec.Struct, frozen=True):
    """Do something on your machine; `arguments` are the command's own."""

    name: str
    arguments: dict[str, Any] = {}


_events = msgspec.msgpack.Decoder(list[Event])
_encoder = msgspec.msgpack.Encoder()
generate_decoder = msgspec.msgpack.Decoder(Generate)
command_decoder = msgspec.msgpack.Decoder(Command)
failure_decoder = msgspec.msgpack.Decoder(Failure)


def encode(message: Any) -> bytes:
    """A body."""
    return _encoder.encode(message)


def frame(events: list[Event]) -> bytes:
    """Some events as one frame."""
    body = _encoder.encode(events)
    return HEADER.pack(len(body)) + body


class FrameParser:
    """Cuts a byte stream into lists of events."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending(self) -> bool:
        """Whether an incomplete frame waits for its rest."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[list[Event]]:
        """The frames that `data` completes.

        Raises:
            WireError: a frame is longer than any may be, or holds something else than events.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"A frame of {length} bytes came from another node. Install the same Tandem on both.")
            if len(self._buffer) < HEADER.size + length:
                return
            body = bytes(self._buffer[HEADER.size : HEADER.size + length])
            del self._buffer[: HEADER.size + length]
            try:
                yield _events.decode(body)
            except msgspec.MsgspecError as error:
                raise WireError(f"Another node's events cannot be read ({error}). Install the same Tandem.") from error
