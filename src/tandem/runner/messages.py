"""What a supervisor and its runner subprocess say to each other, and how it is framed.

A frame is a 4-byte big-endian length and a msgpack body. Both ends are the same build on the same machine, joined by
an anonymous socket pair, so there is no version to negotiate; the length is bounded all the same.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

from tandem.engines.base import EngineOptions, PrefillPort
from tandem.types import EngineLoad, Event, Failure, GenerationRequest, ModelInfo

MAX_FRAME_BYTES = 256 << 20
HEADER = struct.Struct(">I")


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First message to a runner: which engine, which model."""

    options: EngineOptions


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A new request."""

    request_id: str
    request: GenerationRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for this request any more."""

    request_id: str


class NamePeers(msgspec.Struct, frozen=True, tag="name_peers"):
    """From now on these KV ports may prefill for this instance."""

    peers: tuple[PrefillPort, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Finish nothing, release everything, exit."""


ToRunner: TypeAlias = Start | Submit | Cancel | NamePeers | Stop


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """`done` of `total` layers are loaded."""

    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The weights are in memory; warm-up begins."""

    info: ModelInfo


class CacheIdentity(msgspec.Struct, frozen=True):
    """Digests of what hand-off partners have to agree on: all of it, the tokenizer, the cache layout. Empty where the
    engine cannot prefill for others."""

    model: str = ""
    tokenizer: str = ""
    layout: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Requests are welcome.

    Attributes:
        kv_address: host and port of the runner's KV port, if it has one.
    """

    kv_address: tuple[str, int] | None = None
    identity: CacheIdentity = CacheIdentity()


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The runner could not start, or its engine failed as a whole; it exits after this."""

    failure: Failure


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent every second from a thread of its own. `load.steps` tells whether the engine thread still moves."""

    load: EngineLoad


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Events by request, all that one engine step brought."""

    outputs: list[tuple[str, list[Event]]]


FromRunner: TypeAlias = Loading | Loaded | Ready | Broken | Heartbeat | Outputs

to_runner_decoder: msgspec.msgpack.Decoder[ToRunner] = msgspec.msgpack.Decoder(ToRunner)
from_runner_decoder: msgspec.msgpack.Decoder[FromRunner] = msgspec.msgpack.Decoder(FromRunner)
_encoder = msgspec.msgpack.Encoder()


def frame(message: ToRunner | FromRunner) -> bytes:
    """Encode one message with its length."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body
