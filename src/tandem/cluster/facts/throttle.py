"""At most so often, and never losing the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Handle(Protocol):
    """A call that was scheduled."""

    def cancel(self) -> None:
        """Do not make it."""


class Clock(Protocol):
    """What of an event loop is needed here; every asyncio loop is one."""

    def time(self) -> float:
        """Seconds."""
        ...

    def call_later(self, delay: float, callback: Callable[[], Any], /) -> Handle:
        """Call back after `delay` seconds."""
        ...


class Throttle:
    """Calls a function at once when it was not called for `gap` seconds, else when those are over.

    However often it is asked in between, one call follows, and it follows the last request.

    Args:
        deliver: returns whether it really did something; only then the gap begins anew.
        clock: the event loop.

    Attributes:
        gap: seconds between two deliveries.
    """

    def __init__(self, deliver: Callable[[], bool], gap: float, clock: Clock) -> None:
        self._deliver = deliver
        self.gap = gap
        self._clock = clock
        self._free_at = float("-inf")
        self._handle: Handle | None = None
        self._closed = False

    def request(self) -> None:
        """Ask for a delivery."""
        if self._handle is not None or self._closed:
            return
        wait = self._free_at - self._clock.time()
        if wait > 0:
            self._handle = self._clock.call_later(wait, self._late)
        else:
            self._now()

    def close(self) -> None:
        """Deliver no more, whatever is asked."""
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _late(self) -> None:
        self._handle = None
        self._now()

    def _now(self) -> None:
        if self._deliver():
            self._free_at = self._clock.time() + self.gap
