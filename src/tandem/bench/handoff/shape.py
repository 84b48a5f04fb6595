"""The cache whose entries the throughput is measured with: as large as that of a common 8B model, without the model."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from tandem.kv.dtypes import Array
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.layout import Layer, Layout, Part


class Shape(msgspec.Struct, frozen=True):
    """A prompt of `tokens` tokens, computed in chunks as by the engine of a machine with a GPU, in a cache of `layers`
    layers of bfloat16 keys and values."""

    tokens: int = 4096
    chunk: int = 2048
    layers: int = 32
    heads: int = 8
    dim: int = 128

    @property
    def layout(self) -> Layout:
        """As the KV plane sees it."""
        parts = tuple(Part(name, self.heads, self.dim, "bfloat16") for name in ("keys", "values"))
        return Layout((Layer("tokens", parts),) * self.layers)

    @property
    def fingerprint(self) -> Fingerprint:
        """Of no model; both sides of the bench have it."""
        return Fingerprint.of(
            self.layout, architecture="bench", tokenizer="none", rope="", quantisation="none", weights="none"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self.layout.bytes_between(0, self.tokens)

    def entries(self) -> Array:
        """What every layer's keys and values hold, `[heads, tokens, dim]`: random, so that nothing can be left out."""
        drawn = np.random.default_rng(0).integers(0, 1 << 15, (self.heads, self.tokens, self.dim))
        return drawn.astype(np.uint16)

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Shape:
        """From `msgspec.to_builtins`' result."""
        return msgspec.convert(settings, cls)
