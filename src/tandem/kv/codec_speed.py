"""How fast a codec is on this machine. Whether it is worth that on a link is `placement/handoff.py`'s to say."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from tandem.kv.codec import CODECS
from tandem.kv.dtypes import DTYPES
from tandem.kv.floats import from_float32
from tandem.kv.layout import Part
from tandem.kv.wire import as_bytes


class CodecSpeed(NamedTuple):
    """What a codec does to entries of some part.

    Attributes:
        ratio: raw bytes / encoded bytes.
        encode, decode: raw bytes per second.
    """

    ratio: float
    encode: float
    decode: float


def measure(name: str, part: Part, *, tokens: int = 512) -> CodecSpeed:
    """A codec's speed on this machine, measured on random entries of a part. Takes some milliseconds."""
    codec = CODECS[name]
    values = np.random.default_rng(0).standard_normal((part.heads, tokens, part.dim)).astype(np.float32)
    entries = np.empty(values.shape, DTYPES[part.dtype].array)
    from_float32(values, entries, part.dtype)
    seconds_encoding, seconds_decoding = [], []
    for _ in range(3):
        began = time.perf_counter()
        arrays = codec.encode(entries, part.dtype)
        encoded = time.perf_counter()
        assert arrays is not None  # the entries are finite
        payload = b"".join(as_bytes(array) for array in arrays)
        joined = time.perf_counter()
        codec.decode(memoryview(payload), entries, part.dtype)
        seconds_encoding.append(encoded - began)
        seconds_decoding.append(time.perf_counter() - joined)
    return CodecSpeed(codec.ratio(part), entries.nbytes / min(seconds_encoding), entries.nbytes / min(seconds_decoding))
