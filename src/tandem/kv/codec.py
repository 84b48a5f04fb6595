"""How entries are made smaller on the wire: `raw`, `int8` and `int4`.

Entries are encoded frame by frame and are whole numbers of the model's own dtype again on arrival. Only float entries
are encoded; states, packed entries of quantised caches and frames with an infinity or NaN always travel raw.

- `int8`: a row (one token, one head) becomes a bfloat16 scale and 8 bits a value for every 64 values. At dim 64 it is
  1.94 times smaller than bfloat16, 3.88 times than float32; no value is off by more than 0.4 % of its group's largest.
- `int4`: the largest two of 64 values are set apart as bfloat16, the rest is a scale and 4 bits a value for every 32.
  3.05 and 6.1 times smaller; no value is off by more than 7.3 % of the largest that remains in its group.

Scales are rounded up to bfloat16 before values are divided by them, so the rounding costs range and never clips.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.errors import WireError
from tandem.kv.dtypes import DTYPES, Array, DTypeName
from tandem.kv.floats import bfloat16_above, bfloat16_nearest, from_float32, to_float32
from tandem.kv.layout import Part
from tandem.kv.wire import CodecId


class Codec(ABC):
    """Encodes `[heads, tokens, dim]` entries of one frame."""

    id: CodecId
    name: str

    def applies_to(self, part: Part) -> bool:
        """Whether entries of this part can be encoded at all."""
        return DTYPES[part.dtype].is_float

    @abstractmethod
    def row_bytes(self, dim: int) -> int:
        """Bytes that one token's entry in one head becomes; the same whatever the values are."""

    def ratio(self, part: Part) -> float:
        """How many times smaller a part's entries become."""
        return part.row_bytes / self.row_bytes(part.dim) if self.applies_to(part) else 1.0

    @abstractmethod
    def encode(self, entries: Array, dtype: DTypeName) -> list[Array] | None:
        """The payload, as contiguous arrays to be sent one after the other. None: send these entries raw."""

    @abstractmethod
    def decode(self, payload: memoryview, out: Array, dtype: DTypeName) -> None:
        """Fill `out`, `[heads, tokens, dim]` of `dtype`, from a payload of the right length.

        Raises:
            WireError: the payload cannot come from `encode`.
        """


class Int8(Codec):
    """8 bits a value, symmetric, with a scale for each group of a row.

    Payload: scales `[heads, tokens, groups]` bfloat16, then values `[heads, tokens, dim]` int8.
    """

    id = CodecId.INT8
    name = "int8"

    def row_bytes(self, dim: int) -> int:
        return 2 * (dim // group_size(dim, 64)) + dim

    def encode(self, entries: Array, dtype: DTypeName) -> list[Array] | None:
        grouped = _grouped(to_float32(entries, dtype), 64)
        quantised = _quantise(grouped, 127)
        return None if quantised is None else [quantised[0], quantised[1]]

    def decode(self, payload: memoryview, out: Array, dtype: DTypeName) -> None:
        heads, tokens, dim = out.shape
        size = group_size(dim, 64)
        scales, rest = _split(payload, np.dtype("<u2"), (heads, tokens, dim // size))
        values = np.frombuffer(rest, np.int8).reshape(heads, tokens, dim // size, size)
        decoded, largest = _dequantise(scales, values, 127)
        from_float32(decoded.reshape(out.shape), out, dtype, largest=largest)


class Int4(Codec):
    """4 bits a value, symmetric, with the largest values of a row set apart.

    Payload: scales `[heads, tokens, groups]` bfloat16; outliers `[heads, tokens, count]` bfloat16; their indices into
    the row, same shape, uint8 (uint16 if dim > 256); pairs of values `[heads, tokens, dim / 2]`, the even one in the
    low four bits, each plus 8. An outlier's own four bits hold 0 (plus 8).
    """

    id = CodecId.INT4
    name = "int4"

    def applies_to(self, part: Part) -> bool:
        return super().applies_to(part) and part.dim % 2 == 0

    def row_bytes(self, dim: int) -> int:
        index_bytes = 1 if dim <= 256 else 2
        return 2 * (dim // group_size(dim, 32)) + _outliers(dim) * (2 + index_bytes) + dim // 2

    def encode(self, entries: Array, dtype: DTypeName) -> list[Array] | None:
        values = to_float32(entries, dtype)
        dim = values.shape[-1]
        count = _outliers(dim)
        magnitude = np.abs(values)
        indices = np.empty((*values.shape[:-1], count), np.intp)
        for rank in range(count):
            largest = magnitude.argmax(axis=-1, keepdims=True)
            indices[..., rank : rank + 1] = largest
            np.put_along_axis(magnitude, largest, -1.0, axis=-1)
        outliers = np.take_along_axis(values, indices, axis=-1)
        if not np.isfinite(outliers).all():
            return None
        np.put_along_axis(values, indices, 0.0, axis=-1)
        quantised = _quantise(_grouped(values, 32), 7)
        if quantised is None:
            return None
        scales, levels = quantised
        shifted = (levels.reshape(*values.shape) + np.int8(8)).astype(np.uint8)
        packed = shifted[..., 0::2] | (shifted[..., 1::2] << np.uint8(4))
        return [scales, bfloat16_nearest(outliers), indices.astype(_index_type(dim)), np.ascontiguousarray(packed)]

    def decode(self, payload: memoryview, out: Array, dtype: DTypeName) -> None:
        heads, tokens, dim = out.shape
        size, count = group_size(dim, 32), _outliers(dim)
        scales, rest = _split(payload, np.dtype("<u2"), (heads, tokens, dim // size))
        outliers, rest = _split(rest, np.dtype("<u2"), (heads, tokens, count))
        indices, rest = _split(rest, _index_type(dim), (heads, tokens, count))
        packed = np.frombuffer(rest, np.uint8).reshape(heads, tokens, dim // 2)
        if indices.size and int(indices.max()) >= dim:
            raise WireError(f"An int4 outlier is outside its row of {dim} values. Use the codec raw on this link.")
        levels = np.empty(out.shape, np.int8)
        levels[..., 0::2] = (packed & np.uint8(15)).astype(np.int8) - np.int8(8)
        levels[..., 1::2] = (packed >> np.uint8(4)).astype(np.int8) - np.int8(8)
        grouped, _ = _dequantise(scales, levels.reshape(heads, tokens, dim // size, size), 8)
        values = grouped.reshape(out.shape)
        np.put_along_axis(values, indices.astype(np.intp), _finite(to_float32(outliers, "bfloat16")), axis=-1)
        from_float32(values, out, dtype)


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Int8(), Int4())}
CODEC_IDS: dict[int, Codec] = {int(codec.id): codec for codec in CODECS.values()}
RAW = "raw"
CODEC_NAMES = (RAW, *CODECS)


def negotiate(offered: Sequence[str], known: Sequence[str] = CODEC_NAMES) -> str:
    """The first offered codec that is known; `raw` if none is."""
    return next((name for name in offered if name in known), RAW)


def group_size(dim: int, largest: int) -> int:
    """Values that share a scale: the largest divisor of `dim` from 16 to `largest`; all of the row if it has none."""
    return next((size for size in range(min(dim, largest), 15, -1) if dim % size == 0), dim)


def _outliers(dim: int) -> int:
    return max(1, dim // 32)


def _index_type(dim: int) -> np.dtype[Any]:
    return np.dtype("u1") if dim <= 256 else np.dtype("<u2")


def _grouped(values: npt.NDArray[np.float32], largest: int) -> npt.NDArray[np.float32]:
    size = group_size(values.shape[-1], largest)
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)


def _quantise(
    grouped: npt.NDArray[np.float32], levels: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int8]] | None:
    # Bit patterns without their sign are in the order of magnitudes, infinities and NaN last, and faster to compare.
    magnitudes = np.bitwise_and(grouped.view(np.uint32), np.uint32(0x7FFFFFFF)).max(axis=-1)
    if magnitudes.max(initial=0) >= 0x7F800000:
        return None
    largest = magnitudes.view(np.float32)
    scales = bfloat16_above(largest / np.float32(levels))
    divisor = to_float32(scales, "bfloat16")[..., None]
    if not np.isfinite(divisor).all():
        return None
    divisor[divisor == 0] = 1
    # The scale was rounded up, so that nothing is beyond the last level by as much as would round to the next.
    scaled = np.divide(grouped, divisor, out=grouped)
    np.rint(scaled, out=scaled)
    return scales, scaled.astype(np.int8)


def _dequantise(scales: Array, levels: npt.NDArray[np.int8], most: int) -> tuple[npt.NDArray[np.float32], float]:
    """Values of groups, and how large they can be."""
    factors = _finite(to_float32(scales, "bfloat16"))
    with np.errstate(over="ignore"):
        values = np.multiply(levels, factors[..., None], dtype=np.float32)
    return values, float(np.abs(factors).max(initial=0.0)) * most


def _finite(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if not np.isfinite(values).all():
        raise WireError("An encoded frame has an infinite scale or value. Use the codec raw on this link.")
    return values


def _split(payload: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Array, memoryview]:
    size = dtype.itemsize * int(np.prod(shape))
    return np.frombuffer(payload[:size], dtype).reshape(shape), payload[size:]
