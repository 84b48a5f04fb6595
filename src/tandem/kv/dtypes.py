"""Element types of cache arrays, by their name in a layout and their number on the wire.

numpy has no bfloat16: such arrays hold the 2-byte pattern as `uint16`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
DTypeName: TypeAlias = Literal[
    "float32", "float16", "bfloat16", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"
]


class DType(NamedTuple):
    """One element type. `array` is the little-endian numpy type that holds it; `code` its number on the wire."""

    name: DTypeName
    code: int
    array: np.dtype[Any]
    is_float: bool

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.array.itemsize


_ALL = (
    DType("float32", 1, np.dtype("<f4"), True),
    DType("float16", 2, np.dtype("<f2"), True),
    DType("bfloat16", 3, np.dtype("<u2"), True),
    DType("uint8", 4, np.dtype("u1"), False),
    DType("int8", 5, np.dtype("i1"), False),
    DType("uint16", 6, np.dtype("<u2"), False),
    DType("int16", 7, np.dtype("<i2"), False),
    DType("uint32", 8, np.dtype("<u4"), False),
    DType("int32", 9, np.dtype("<i4"), False),
    DType("uint64", 10, np.dtype("<u8"), False),
    DType("int64", 11, np.dtype("<i8"), False),
)
DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _ALL}
DTYPE_CODES: dict[int, DType] = {dtype.code: dtype for dtype in _ALL}
