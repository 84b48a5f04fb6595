"""What other nodes computed of a prompt, as vLLM's connector loads it."""

from __future__ import annotations

import logging

from tandem.engines.handoff.remote import RemotePrefill
from tandem.kv.dtypes import Array

logger = logging.getLogger("tandem.vllm")


class Received:
    """Entries in a staging, complete and checked: a source (`exchange.Source`).

    Args:
        complete: tokens after which everything that a cache needs is there.

    Attributes:
        used: tokens of it that vLLM need not compute; None while vLLM has not begun.
    """

    def __init__(self, request_id: str, remote: RemotePrefill, complete: int) -> None:
        self._request_id = request_id
        self._staging = remote.staging
        self._start = remote.start
        self._complete = complete
        self.outcomes = remote.outcomes
        self.used: int | None = None

    @property
    def start(self) -> int:
        """See `exchange.Source`."""
        return self._start

    @property
    def length(self) -> int:
        """See `exchange.Source`."""
        return self._complete

    def entries(self, layer: int, part: int, start: int, end: int) -> Array:
        """See `exchange.Source`."""
        return self._staging.entries(layer, part, start, end)

    def state(self, layer: int, number: int, tokens: int) -> Array:
        """See `exchange.Source`."""
        return self._staging.state(layer, number, tokens)

    def loaded(self, start: int, end: int) -> None:
        """See `exchange.Source`."""
        # What vLLM found in its own cache since it was asked was received, too.
        self.used = end - self._start

    def refused(self, reason: str) -> None:
        """See `exchange.Source`."""
        logger.warning("received entries of request %s are not used: %s", self._request_id, reason)
        self.used = 0
