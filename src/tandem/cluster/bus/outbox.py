"""One thread that sends, in order. A frozen peer holds it up, and never the event loop."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import zenoh

from tandem.cluster.bus.session import Session
from tandem.errors import QueueFullError

MOST = 8192
"""Messages that may wait."""
MOST_BYTES = 64 << 20
"""Payload bytes that may wait."""
_REOPENING = 5.0
_log = logging.getLogger(__name__)


class _Item(NamedTuple):
    send: Callable[[zenoh.Session], None]
    size: int


class Outbox(threading.Thread):
    """Sends what `post` is given, one after another. What meets a closed session is dropped and counted in `lost`."""

    def __init__(self, session: Session) -> None:
        super().__init__(name="tandem-outbox", daemon=True)
        self._session = session
        self._items: queue.Queue[_Item | None] = queue.Queue(MOST + 1)
        self._waiting = 0
        self._guard = threading.Lock()
        self._stopping = False
        self.lost = 0

    def post(self, send: Callable[[zenoh.Session], None], size: int) -> None:
        """Have `send` called. `size`: bytes that it holds.

        Raises:
            QueueFullError: too much waits already.
        """
        with self._guard:
            if self._items.qsize() >= MOST or self._waiting + size > MOST_BYTES:
                raise QueueFullError(
                    f"{self._items.qsize()} messages ({self._waiting >> 20} MiB) already wait to be sent to the "
                    "cluster; try again when its links are better.",
                    retry_after=1.0,
                )
            self._waiting += size
            self._items.put_nowait(_Item(send, size))

    def run(self) -> None:
        while (item := self._items.get()) is not None:
            with self._guard:
                self._waiting -= item.size
            session = None if self._stopping else self._session.wait_open(_REOPENING)
            try:
                if session is None:
                    self.lost += 1
                else:
                    item.send(session)
            except zenoh.ZError as error:
                self.lost += 1
                _log.info("a message was not sent: %s", error)

    def stop(self, deadline: float) -> None:
        """Send what waits, for `deadline` seconds at most, and end. Blocks."""
        try:
            self._items.put(None, timeout=deadline)
        except queue.Full:
            _log.warning("%d messages are given up", self._items.qsize())
        self.join(timeout=deadline)
        self._stopping = True
