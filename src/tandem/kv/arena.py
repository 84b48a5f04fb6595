"""One stretch of memory for all buffers of a staging.

Entries arrive in memory that nothing has touched, and making its pages present costs as much as receiving into them:
half of that where the kernel can use huge pages, which it does for one large mapping and not for many of some
megabytes. Pages of buffers that are no longer needed go back one by one all the same.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from tandem.kv.dtypes import Array

_ALIGNMENT = 64


class Arena:
    """Hands out arrays until its bytes are used up.

    Args:
        nbytes: what the arrays will take, without padding.
        count: how many arrays there will be.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self._size = max(1, nbytes + count * _ALIGNMENT)
        self._memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._base = self._bytes.ctypes.data
        self._used = 0

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array of zeros that are not present yet."""
        nbytes = int(np.prod(shape)) * dtype.itemsize
        start = self._used
        self._used = -(-(start + nbytes) // _ALIGNMENT) * _ALIGNMENT
        return self._bytes[start : start + nbytes].view(dtype).reshape(shape)

    def owns(self, array: Array) -> bool:
        """Whether an array is one of this arena's."""
        return self._base <= array.ctypes.data < self._base + self._size

    def give_back(self, array: Array) -> None:
        """Return the pages that lie within one of this arena's arrays to the system. Its contents are lost."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = array.ctypes.data - self._base
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
