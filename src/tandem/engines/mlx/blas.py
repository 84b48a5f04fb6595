"""Give MLX's Linux CPU build a fast BLAS.

The wheel links a reference BLAS (1.5 to 3 GFLOP/s). Its symbols can be interposed: when OpenBLAS is loaded into the
global symbol namespace before `mlx.core`, float32 matrix products run there instead, about 30 times faster.
This module must therefore be imported, and `load()` called, before anything imports `mlx.core`.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Literal, NamedTuple

CANDIDATES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so")
INSTALL_HINT = "sudo apt-get install -y libopenblas0-pthread"


class BlasStatus(NamedTuple):
    """What MLX multiplies matrices with on this machine.

    Attributes:
        state: `fast` (OpenBLAS is loaded), `slow` (Linux without it), `late` (mlx was imported before us) or
            `platform` (macOS: MLX brings its own).
        library: the loaded library's name.
    """

    state: Literal["fast", "slow", "late", "platform"]
    library: str | None = None


_status: BlasStatus | None = None


def load() -> BlasStatus:
    """Load OpenBLAS once per process; later calls return the first call's outcome."""
    global _status
    if _status is None:
        _status = _load()
    return _status


def _load() -> BlasStatus:
    if sys.platform != "linux":
        return BlasStatus("platform")
    late = "mlx.core" in sys.modules
    for name in CANDIDATES:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return BlasStatus("late" if late else "fast", name)
    return BlasStatus("slow")
