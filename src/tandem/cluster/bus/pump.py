"""From zenoh's channels to Python, on a thread of ours.

zenoh's own receiving threads must never wait for the interpreter: while they do, keep-alives stop and links break.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import zenoh

Item = TypeVar("Item")
CAPACITY = 65536
"""Messages that may wait in a channel for its pump."""
_log = logging.getLogger(__name__)


def pump(name: str, receive: Callable[[], Item], deliver: Callable[[Item], None]) -> threading.Thread:
    """A running thread that hands everything `receive` gives to `deliver`, until the channel is closed.

    `receive` is a handler's, not its subscriber's: that one could not be undeclared while a thread waits in it.
    """

    def run() -> None:
        while True:
            try:
                item = receive()
            except zenoh.ZError:
                return
            try:
                deliver(item)
            except RuntimeError as error:  # the loop that it was meant for is closed
                _log.debug("%s ends: %s", name, error)
                return

    thread = threading.Thread(target=run, name=f"tandem-{name}", daemon=True)
    thread.start()
    return thread
