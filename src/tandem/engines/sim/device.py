"""The one device that a simulated engine has: it is busy for as long as the slower real one would be."""

from __future__ import annotations

import threading
import time

from tandem.placement.rates import RateTable

SMALLEST_MEASURED = 64
"""Shorter work says more about the clock than about the device."""


class Device:
    """Spends the time of prefills, own and others', and measures it.

    Args:
        prefill_tps: tokens per second; 0 for as fast as possible.

    Attributes:
        rates: measured; written by the engine thread alone.
    """

    def __init__(self, prefill_tps: float) -> None:
        self._prefill_tps = prefill_tps
        self.rates = RateTable()
        self._lock = threading.Lock()

    def prefilled(self, tokens: int, begun: float) -> None:
        """Sleep for what is left of the time that so many tokens take, of which some passed since `begun`."""
        if self._prefill_tps:
            time.sleep(max(0.0, begun + tokens / self._prefill_tps - time.monotonic()))
        if tokens >= SMALLEST_MEASURED:
            with self._lock:
                self.rates.observe(tokens, time.monotonic() - begun)

    def seconds(self, tokens: int) -> float:
        """Predicted for so many tokens; 0 while nothing was measured. Callable from any thread."""
        with self._lock:
            return self.rates.seconds(tokens) if self.rates.known else 0.0
