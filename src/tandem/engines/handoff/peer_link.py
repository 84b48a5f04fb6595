"""A peer that prefills for this node, and what is known of its speed, its link and its queue."""

from __future__ import annotations

import time

from tandem.engines.base import PrefillPort
from tandem.errors import PrefillBusyError
from tandem.kv.client import Handoff
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.outcome import Outcome
from tandem.kv.peer import ClientOptions
from tandem.kv.tls import Identity
from tandem.placement.handoff import CodecCost, Peer
from tandem.placement.rates import RateTable

FIRST_BANDWIDTH = 100e6
"""Bytes per second that a link is taken for before anything was measured: a gigabit's worth."""
RETRY_SECONDS = 5.0
"""How long a peer that failed is left alone."""
SMOOTHING = 0.3
SHORTEST_SECONDS = 1e-4


class PeerLink:
    """One peer.

    Attributes:
        failure: why it failed the last time.

    Args:
        port: its KV port.
        fingerprint: of the model that it must have.
        node: how this node presents itself, and its deadlines.

    Raises:
        ConfigError: the address is not loopback while there is no cluster secret.
    """

    def __init__(
        self, port: PrefillPort, fingerprint: Fingerprint, identity: Identity | None, node: ClientOptions
    ) -> None:
        host, _, number = port.address.rpartition(":")
        self.address = port.address
        self.handoff = Handoff(
            (host.strip("[]"), int(number)),
            fingerprint,
            identity=identity,
            allow_quantisation=port.allow_quantisation,
            options=node,
        )
        self.rates = RateTable()
        self._bandwidth = FIRST_BANDWIDTH
        self._fixed = 0.0
        self._failed_at: float | None = None
        self.failure = ""
        self._free_at = 0.0

    @property
    def usable(self) -> bool:
        """Whether it did not fail just now."""
        return self._failed_at is None or time.monotonic() - self._failed_at > RETRY_SECONDS

    def expect(self, seconds: float | None) -> None:
        """Work of ours will keep it busy for `seconds` from now, beyond what does already."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now + (seconds or 0.0))

    def learn(self, outcome: Outcome) -> None:
        """Take a finished transfer's figures in."""
        if isinstance(outcome.error, PrefillBusyError):
            self._free_at = time.monotonic() + (outcome.error.retry_after or RETRY_SECONDS)
            return
        if outcome.error is not None:
            self._failed_at, self.failure = time.monotonic(), outcome.error.message
            return
        self._failed_at = None
        self.rates.observe(outcome.tokens, outcome.computing)
        exposed = max(outcome.transferring, SHORTEST_SECONDS)
        if exposed > outcome.computing:
            self._bandwidth = outcome.payload_bytes / exposed
        else:
            # The transfer hid behind the computation: the link carries at least this much.
            self._bandwidth = max(self._bandwidth, outcome.payload_bytes / max(outcome.computing, SHORTEST_SECONDS))
            self._fixed += SMOOTHING * (exposed - self._fixed)

    def estimate(self, codecs: tuple[CodecCost, ...]) -> Peer:
        """As the decision rule sees it.

        Args:
            codecs: that may be used.
        """
        queue = max(0.0, self._free_at - time.monotonic())
        return Peer(self.address, self.rates, self._bandwidth, queue=queue, fixed=self._fixed, codecs=codecs)
