"""float32 arrays from and to the element types that a cache has. bfloat16 is a 2-byte pattern in `uint16`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.kv.dtypes import Array, DTypeName

Float32: Any = npt.NDArray[np.float32]

_LARGEST: dict[str, float] = {
    "float32": float(np.finfo(np.float32).max),
    "float16": 65504.0,
    "bfloat16": float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0]),
}


def to_float32(array: Array, dtype: DTypeName) -> npt.NDArray[np.float32]:
    """The values of a float array, exactly."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def from_float32(values: npt.NDArray[np.float32], out: Array, dtype: DTypeName) -> None:
    """Write values into `out`, rounded to nearest, and to the largest finite number where they are beyond it."""
    largest = np.float32(_LARGEST[dtype])
    np.clip(values, -largest, largest, out=values)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        out[...] = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    else:
        out[...] = values


def bfloat16_above(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The smallest bfloat16 not below each (finite, not negative) value."""
    rounded: npt.NDArray[np.uint16] = ((values.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)
    return rounded


def bfloat16_nearest(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Each finite value rounded to a finite bfloat16."""
    out = np.empty(values.shape, np.uint16)
    from_float32(values.copy(), out, "bfloat16")
    return out
