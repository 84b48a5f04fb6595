"""Payloads of the control frames: msgpack maps with the field names below.

Unknown keys are ignored, so a later minor version can add some; a missing or wrongly typed one is an error. Every
text and list has a bound that is checked before memory is taken for it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from tandem.errors import WireError
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.layout import MAX_LAYERS, MAX_TOKENS
from tandem.kv.wire import FrameType

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Name = Annotated[str, msgspec.Meta(max_length=128)]
Message = Annotated[str, msgspec.Meta(max_length=4096)]
CodecNames = Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)]


class Hello(msgspec.Struct, frozen=True):
    """The client's half of the handshake.

    Attributes:
        fingerprint: of the client's model.
        node: the client's name; with TLS the certificate's common name is believed instead.
        allow_quantisation: the link permits weights of the same model in another quantisation.
    """

    fingerprint: Fingerprint
    node: Name = ""
    allow_quantisation: bool = False


class Welcome(msgspec.Struct, frozen=True):
    """The server's half of the handshake.

    Attributes:
        codecs: those that it can encode.
        max_tokens: the longest prompt that it takes.
        keep_alive: a frame comes at least this often while a request is under way, in seconds.
        checkpoints: whether requests may have a `checkpoint`.
    """

    fingerprint: Fingerprint
    codecs: CodecNames
    max_tokens: Count
    keep_alive: Seconds
    node: Name = ""
    checkpoints: bool = True


class PrefillRequest(msgspec.Struct, frozen=True):
    """Compute the context `[0, end)` and send the entries of `[start, end)`.

    Attributes:
        tokens: `end` token ids, each 4 bytes little-endian.
        layer_start, layer_end: range of layers; both 0 for all.
        head_start, head_end: range of heads; both 0 for all.
        codecs: those that the client can decode, the preferred one first. `raw` always is one.
        checkpoint: see `plan.Wanted`.
        priority: larger is more urgent.
    """

    tokens: bytes
    start: Count
    end: Count
    layer_start: Count = 0
    layer_end: Count = 0
    head_start: Count = 0
    head_end: Count = 0
    codecs: CodecNames = ()
    checkpoint: Count = 0
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0


class Accepted(msgspec.Struct, frozen=True):
    """The request is queued: `position` others are before it, which take `seconds` by the server's estimate."""

    position: Count
    seconds: Seconds
    codec: Name


class Busy(msgspec.Struct, frozen=True):
    """The queue is full. There may be room after `seconds`."""

    seconds: Seconds


class Progress(msgspec.Struct, frozen=True):
    """Where a request stands: `position` others before it (0: its turn), or `processed` of `total` tokens computed.

    `cached` of the processed tokens came out of the server's prefix cache.
    """

    processed: Count
    total: Count
    position: Count = 0
    computing: bool = False
    cached: Count = 0


class Done(msgspec.Struct, frozen=True):
    """Everything was sent.

    Attributes:
        counts: for each requested layer, in order, how many tokens (of each part) or states were sent.
        end: the number of tokens that the context had.
        payload_bytes: of all data and state frames, as sent.
        queued, computing: seconds by the server's clock, from acceptance to its turn and from there to the last chunk.
        cached: tokens that the server's prefix cache supplied.
    """

    counts: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    end: Count
    payload_bytes: Bytes
    queued: Seconds = 0.0
    computing: Seconds = 0.0
    cached: Count = 0


class Problem(msgspec.Struct, frozen=True):
    """The request, or the handshake, ended in an error. `code` is one of `tandem.errors`.

    `fingerprint` is the server's, where that is what the two do not agree on.
    """

    code: Name
    message: Message
    retry_after: Seconds | None = None
    fingerprint: Fingerprint | None = None


Control: TypeAlias = Hello | Welcome | PrefillRequest | Accepted | Busy | Progress | Done | Problem

CONTROL_TYPES: dict[type[Any], FrameType] = {
    Hello: FrameType.HELLO,
    Welcome: FrameType.WELCOME,
    PrefillRequest: FrameType.PREFILL,
    Accepted: FrameType.ACCEPTED,
    Busy: FrameType.BUSY,
    Progress: FrameType.PROGRESS,
    Done: FrameType.DONE,
    Problem: FrameType.ERROR,
}
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in CONTROL_TYPES
}
C = TypeVar("C")


def encode_control(message: Control) -> bytes:
    """The payload of a control frame."""
    return _encoder.encode(message)


def decode_control(kind: type[C], payload: bytes | bytearray | memoryview) -> C:
    """Read the payload of a control frame.

    Raises:
        WireError: it is not what this frame carries.
    """
    try:
        message: C = _decoders[kind].decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        name = CONTROL_TYPES[kind].name.lower()
        raise WireError(
            f"The payload of a {name} frame is malformed: {error}. Install the same Tandem on both."
        ) from error
    return message
