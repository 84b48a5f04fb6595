"""The garbage collector of processes that run for long."""

from __future__ import annotations

import gc


def settle() -> None:
    """Call once everything is imported: what is there now is never looked at again, and what comes is looked at less
    often. A server makes thousands of objects a request and nearly no cycles; looking for them took a twentieth of the
    time of a busy node."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)
