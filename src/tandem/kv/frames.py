"""Frames over a transport. A reader lets its caller see a header before any of the payload is received, and receives
the payload right into the memory that the caller names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tandem.errors import WireError
from tandem.kv.control import CONTROL_TYPES, Control, decode_control, encode_control
from tandem.kv.transport import Patience, Transport
from tandem.kv.wire import (
    EMPTY_CHECKSUM,
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    FrameType,
    Header,
    checksum,
    decode_header,
    encode_header,
    new_digest,
)

C = TypeVar("C")


class FrameWriter:
    """Sends frames and numbers them."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._sequence = 0

    def tensor(self, header: Header, views: Sequence[memoryview], patience: Patience) -> int:
        """Send a data or state frame; sequence, length and checksum are filled in. Returns its payload's bytes."""
        length = sum(map(len, views))
        self._send(header._replace(length=length, checksum=checksum(views)), views, patience)
        return length

    def control(self, message: Control, nonce: int, patience: Patience) -> None:
        """Send a control frame with a payload.

        Raises:
            WireError: the message is larger than a peer accepts.
        """
        payload = encode_control(message)
        kind = CONTROL_TYPES[type(message)]
        if len(payload) > MAX_CONTROL_BYTES and kind != FrameType.PREFILL:
            raise WireError(f"A {kind.name.lower()} frame of {len(payload)} bytes is over {MAX_CONTROL_BYTES}.")
        header = Header(int(kind), nonce=nonce, length=len(payload), checksum=checksum((payload,)))
        self._send(header, (payload,), patience)

    def signal(self, kind: FrameType, nonce: int, patience: Patience) -> None:
        """Send a frame without payload: keep-alive or cancel."""
        self._send(Header(int(kind), nonce=nonce, checksum=EMPTY_CHECKSUM), (), patience)

    def _send(self, header: Header, views: Sequence[memoryview | bytes], patience: Patience) -> None:
        head = encode_header(header._replace(sequence=self._sequence))
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        self._transport.send((head, *views), patience)


class FrameReader:
    """Receives frames: `header`, then exactly one of `tensor`, `control` and `nothing`.

    Args:
        max_request_bytes: largest prefill request that is accepted.
    """

    def __init__(self, transport: Transport, *, max_request_bytes: int = MAX_CONTROL_BYTES) -> None:
        self._transport = transport
        self._max_request_bytes = max_request_bytes
        self._sequence = 0
        self._buffer = memoryview(bytearray(HEADER_BYTES))
        self._begun = 0

    def begun(self) -> bool:
        """Whether the next header has begun to arrive; does not wait for it.

        Raises:
            PeerLostError: the connection ended.
        """
        if not self._begun:
            self._begun = self._transport.take(self._buffer)
        return self._begun > 0

    def header(self, patience: Patience) -> Header:
        """Receive the next frame's header.

        Raises:
            WireError: it is malformed, or not the next of this connection (one was lost, repeated or moved).
        """
        if self._begun < HEADER_BYTES:
            self._transport.receive((self._buffer[self._begun :],), patience)
        self._begun = 0
        header = decode_header(self._buffer, max_request_bytes=self._max_request_bytes)
        if header.sequence != self._sequence:
            raise WireError(
                f"Frame {header.sequence} came where {self._sequence} is next: frames were lost, repeated or moved. "
                "Check what sits between the peers."
            )
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        return header

    def tensor(
        self, header: Header, destinations: Callable[[Header], Sequence[memoryview]], patience: Patience
    ) -> None:
        """Receive a payload into the buffers that `destinations` names, and check it.

        Raises:
            WireError: `destinations` refused the frame, its buffers are not as long as the payload, or the checksum is
                wrong: then the buffers hold rubbish.
        """
        views = destinations(header)
        room = sum(map(len, views))
        if room != header.length:
            raise WireError(f"A {header.name} frame of {header.length} bytes came for entries of {room}. Same Tandem?")
        digest = new_digest()
        self._begun = self._transport.receive(views, patience, digest=digest, ahead=self._buffer)
        self._check(header, digest.intdigest())

    def control(self, header: Header, kind: type[C], patience: Patience) -> C:
        """Receive and decode the payload of a control frame.

        Raises:
            WireError: the frame is of another type, damaged, or malformed.
        """
        if header.type != CONTROL_TYPES[kind]:
            raise WireError(
                f"A {header.name} frame came where {CONTROL_TYPES[kind].name.lower()} belongs. The peer is broken."
            )
        payload = bytearray(header.length)
        self._transport.receive((memoryview(payload),), patience)
        self._check(header, checksum((payload,)))
        return decode_control(kind, payload)

    def nothing(self, header: Header) -> None:
        """Finish a frame that has no payload."""
        self._check(header, EMPTY_CHECKSUM)

    def _check(self, header: Header, found: Any) -> None:
        if found != header.checksum:
            raise WireError(
                f"The checksum of a {header.name} frame is wrong: it was damaged on the way. Check the link."
            )
