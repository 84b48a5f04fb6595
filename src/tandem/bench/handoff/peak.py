"""The resident memory of this process, and its peak since some moment."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from pathlib import Path
from typing import Literal

import psutil

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
SAMPLE_SECONDS = 0.001


def resident_bytes() -> int:
    """Resident memory now."""
    rss: int = psutil.Process().memory_info().rss
    return rss


def settle() -> None:
    """Give back what is free already: otherwise a later allocation might take it and cost nothing."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """Watches from its creation on.

    On Linux the kernel keeps the peak (`VmHWM`), which nothing can slip past; elsewhere, or where a process may not
    reset its own, the memory is sampled every millisecond.

    Attributes:
        baseline: bytes when it began.
        method: how the peak is found.
    """

    def __init__(self, *, sampled: bool = False) -> None:
        self.method: Literal["VmHWM", "sampled"] = "VmHWM" if not sampled and _reset() else "sampled"
        self.baseline = resident_bytes()
        self._sampled = self.baseline
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if self.method == "sampled":
            self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)
            self._thread.start()

    def peak(self) -> int:
        """The most bytes since then."""
        return max(self._sampled, resident_bytes()) if self.method == "sampled" else _high_water()

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self._sampled = max(self._sampled, resident_bytes())


def _reset() -> bool:
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _high_water() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("The kernel reports no VmHWM.")
