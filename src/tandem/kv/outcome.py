"""What came of a hand-off."""

from __future__ import annotations

from typing import NamedTuple

from tandem.errors import TandemError


class Outcome(NamedTuple):
    """What came of a hand-off, whole or not.

    Attributes:
        complete: `Staging.complete_through()`: everything before this token can be committed.
        error: why it broke off; None if everything that was asked for arrived.
        peer: the server's name, else its address.
        codec: the one that was agreed on.
        tokens: asked for.
        cached: tokens of the context that the server's prefix cache supplied.
        payload_bytes: received entries and states, as sent. `wire_bytes` adds headers and control frames.
        queued: seconds in the server's queue.
        computing: seconds of the server's prefill.
        transferring: seconds beyond those two: transfer that computing did not hide, and round trips.
        seconds: in all.
        reused: over a connection that stood already.
        mixed: the server's weights are the same in another quantisation, as the link permits.
    """

    complete: int
    error: TandemError | None
    peer: str
    codec: str
    tokens: int
    cached: int
    payload_bytes: int
    wire_bytes: int
    queued: float
    computing: float
    transferring: float
    seconds: float
    reused: bool
    mixed: bool
