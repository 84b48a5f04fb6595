"""float32 arrays from and to the element types that a cache has. bfloat16 is a 2-byte pattern in `uint16`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tandem.kv.dtypes import Array, DTypeName

_LARGEST: dict[str, float] = {
    "float32": float(np.finfo(np.float32).max),
    "float16": 65504.0,
    "bfloat16": float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0]),
}

_LARGEST_BFLOAT16 = np.uint32(0x7F7F0000)
_INFINITY = np.uint32(0x7F800000)


def to_float32(array: Array, dtype: DTypeName) -> npt.NDArray[np.float32]:
    """The values of a float array, exactly."""
    if dtype == "bfloat16":
        return np.left_shift(array, 16, dtype=np.uint32).view(np.float32)
    return array.astype(np.float32)


def from_float32(values: npt.NDArray[np.float32], out: Array, dtype: DTypeName, *, largest: float = np.inf) -> None:
    """Write finite values into `out`, rounded to nearest, and to the largest finite number where they are beyond it.

    Args:
        values: are overwritten.
        largest: no value is further from 0; saves looking for those that are beyond what `dtype` holds.
    """
    limit = _LARGEST[dtype]
    if largest > limit:
        np.clip(values, -np.float32(limit), np.float32(limit), out=values)
    if dtype == "bfloat16":
        # Halves go away from zero: whether they do or go to even is all the same after a codec.
        bits = values.view(np.uint32)
        np.add(bits, np.uint32(0x8000), out=bits)
        np.right_shift(bits, np.uint32(16), out=bits)
    out[...] = values.view(np.uint32) if dtype == "bfloat16" else values


def bfloat16_above(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The smallest bfloat16 not below each (finite, not negative) value."""
    rounded: npt.NDArray[np.uint16] = ((values.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)
    return rounded


def bfloat16_nearest(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Each finite value rounded to a finite bfloat16."""
    out = np.empty(values.shape, np.uint16)
    from_float32(values.copy(), out, "bfloat16")
    return out


def bfloat16_rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The nearest bfloat16 of each, halves to even. Finite values stay finite, infinities and NaN what they are."""
    bits = values.view(np.uint32)
    rounded = (bits + ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    if magnitude.max(initial=0) > _LARGEST_BFLOAT16:
        sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
        rounded = np.where(magnitude > _LARGEST_BFLOAT16, sign | np.uint32(0x7F7F), rounded)
        rounded = np.where(magnitude == _INFINITY, sign | np.uint32(0x7F80), rounded)
        rounded = np.where(magnitude > _INFINITY, sign | np.uint32(0x7FC0), rounded)
    return rounded.astype(np.uint16)


def float16_rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """The nearest float16 of each, halves to even. Finite values stay finite, infinities and NaN what they are."""
    limit = np.float32(_LARGEST["float16"])
    beyond = (np.abs(values) > limit) & np.isfinite(values)
    if beyond.any():
        values = np.where(beyond, np.copysign(limit, values), values)
    return values.astype(np.float16)
