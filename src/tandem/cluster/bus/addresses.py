"""This machine's addresses, and a thread that notices when they change or when the machine slept.

A node that was started without network, or whose address changed, is never found again by zenoh unless its session is
opened anew, with the new addresses spelt out.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable

import psutil

INTERVAL = 1.0
"""Seconds between two looks."""
SLEPT = 5.0
"""Seconds that a look may come late before the machine, or this process, is taken to have been asleep."""


def addresses() -> frozenset[str]:
    """The addresses by which other machines reach this one; IPv6 only where there is no IPv4.

    IPv6 addresses made for privacy change daily and must not cost a reopening where they are not needed.
    """
    found = by_family()
    return found[socket.AF_INET] or found[socket.AF_INET6]


def by_family() -> dict[int, frozenset[str]]:
    """Addresses of both families, without those that mean something on one machine or one wire only."""
    found: dict[int, set[str]] = {socket.AF_INET: set(), socket.AF_INET6: set()}
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family not in found:
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if not (address.is_loopback or address.is_link_local or address.is_unspecified):
                found[entry.family].add(str(address))
    return {family: frozenset(members) for family, members in found.items()}


def continuous() -> float:
    """Seconds of a clock that goes on while the machine sleeps."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.time() if boot is None else time.clock_gettime(boot)


class Watch(threading.Thread):
    """Calls `changed(reason)`, on its own thread, when the session has to be opened anew.

    A thread and not a task: what it measures is whether the process ran, not whether its loop is busy.
    """

    def __init__(self, changed: Callable[[str], None], *, clock: Callable[[], float] = continuous) -> None:
        super().__init__(name="tandem-addresses", daemon=True)
        self._changed = changed
        self._clock = clock
        self._ending = threading.Event()
        self._known = addresses()

    def run(self) -> None:
        last = self._clock()
        while not self._ending.wait(INTERVAL):
            gap, last = self._clock() - last - INTERVAL, self._clock()
            now = addresses()
            if now != self._known:
                self._known = now
                # Without any address there is nothing to open for.
                if now:
                    self._changed(f"addresses are now {', '.join(sorted(now))}")
            elif gap > SLEPT:
                self._changed(f"nothing ran for {gap:.0f} s")

    def stop(self) -> None:
        """End the thread; returns when it has ended."""
        self._ending.set()
        if self.is_alive():
            self.join(timeout=5 * INTERVAL)
