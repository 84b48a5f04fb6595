"""What a loaded model's cache looks like, layer by layer.

A layer here is one *leaf cache*: a composite cache contributes its leaves in order. There are three kinds:

- `tokens`: one entry per token, all kept (full attention, MLA latent, quantised triples).
- `window`: one entry per token, of which the first `sinks` and the last `window - sinks` are kept.
- `state`: arrays that stand for the whole past (recurrent and convolution states).

Layouts travel in the handshake as msgpack; `docs/wire.md` describes the form.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
import xxhash

from tandem.errors import InvalidRequestError
from tandem.kv.dtypes import DTYPES, DTypeName
from tandem.kv.intervals import Span, merge

Kind: TypeAlias = Literal["tokens", "window", "state"]

MAX_LAYERS = 4096
MAX_PARTS = 64
MAX_TOKENS = 1 << 24
"""No position on the wire reaches this; it bounds every product of sizes far below 2**63."""

_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Dims = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=8)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Part(msgspec.Struct, frozen=True):
    """A tensor with one entry per token, `[heads, tokens, dim]`: keys, values, scales, ..."""

    name: _Name
    heads: Annotated[int, msgspec.Meta(ge=1, le=1 << 15)]
    dim: _Size
    dtype: DTypeName

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's entry in one head."""
        return self.dim * DTYPES[self.dtype].itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's entry in all heads."""
        return self.heads * self.row_bytes


class StateArray(msgspec.Struct, frozen=True):
    """An array that stands for all tokens so far. Its shape does not depend on how many those are."""

    name: _Name
    shape: _Dims
    dtype: DTypeName

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        size = DTYPES[self.dtype].itemsize
        for length in self.shape:
            size *= length
        return size


class Layer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One leaf cache.

    Attributes:
        parts: of a `tokens` or `window` layer.
        states: of a `state` layer.
        window: entries that a `window` layer keeps, sinks included.
        sinks: leading tokens that a `window` layer never drops.
        group_size, bits: how a quantised cache packs its entries; 0 if it is not quantised.
    """

    kind: Kind
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=MAX_PARTS)] = ()
    states: Annotated[tuple[StateArray, ...], msgspec.Meta(max_length=MAX_PARTS)] = ()
    window: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TOKENS)] = 0
    sinks: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TOKENS)] = 0
    group_size: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    bits: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0

    def __post_init__(self) -> None:
        # A ValueError, so that msgspec reports it as invalid input where a layout comes from a peer.
        if (self.kind == "state") != bool(self.states) or (self.kind == "state") == bool(self.parts):
            raise ValueError(f"a {self.kind!r} layer has {'states and no parts' if self.kind == 'state' else 'parts'}")
        if (self.kind == "window") != bool(self.window):
            raise ValueError(f"a {self.kind!r} layer has {'a' if self.kind == 'window' else 'no'} window")
        if self.sinks and self.sinks >= self.window:
            raise ValueError(f"{self.sinks} sinks leave nothing of a window of {self.window}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's entries; 0 for a state."""
        return sum(part.bytes_per_token for part in self.parts)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state; 0 for other kinds."""
        return sum(state.nbytes for state in self.states)

    def held(self, seen: int) -> tuple[Span, ...]:
        """Which tokens have entries after `seen` tokens. A state has none."""
        if self.kind == "state" or seen <= 0:
            return ()
        if self.kind == "tokens" or seen <= self.window:
            return (Span(0, seen),)
        return merge([Span(0, self.sinks), Span(seen - (self.window - self.sinks), seen)])

    def needed(self, start: int, end: int) -> tuple[Span, ...]:
        """Which entries of the tokens `[start, end)` a cache that has seen `end` tokens holds."""
        return merge([Span(max(start, span.start), span.end) for span in self.held(end)])


class Layout(msgspec.Struct, frozen=True):
    """All leaf caches of a model, in order."""

    layers: Annotated[tuple[Layer, ...], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]

    @property
    def bytes_per_token(self) -> int:
        """Bytes by which the cache grows with a token for ever: that of the `tokens` layers."""
        return sum(layer.bytes_per_token for layer in self.layers if layer.kind == "tokens")

    @property
    def window_bytes_per_token(self) -> int:
        """Bytes by which the `window` layers grow with a token until their windows are full."""
        return sum(layer.bytes_per_token for layer in self.layers if layer.kind == "window")

    @property
    def state_bytes(self) -> int:
        """Bytes of all states."""
        return sum(layer.state_bytes for layer in self.layers)

    def bytes_between(self, start: int, end: int) -> int:
        """Bytes that a hand-off of the tokens `[start, end)` moves, uncompressed: entries, windows cut, and states."""
        entries = sum(
            layer.bytes_per_token * sum(span.length for span in layer.needed(start, end)) for layer in self.layers
        )
        return entries + self.state_bytes

    def encode(self) -> bytes:
        """As msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        """From `encode`'s result.

        Raises:
            InvalidRequestError: it is not a layout.
        """
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequestError(f"This is not a cache layout: {error}. Check the sender's version.") from error

    def digest(self) -> str:
        """16 hexadecimal digits; equal layouts have equal digests, in every version and process."""
        return xxhash.xxh3_64_hexdigest(self.encode())
