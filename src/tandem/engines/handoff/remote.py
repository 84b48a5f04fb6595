"""Having prompts prefilled elsewhere: the engine's side of a hand-off that it asked for.

The transfer runs in a thread of its own and writes into staging memory; running answers go on meanwhile. The engine
thread commits what is complete, once, into a cache that nobody uses yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tandem.engines.base import EngineOptions
from tandem.errors import HandoffError
from tandem.kv.client import Handoff
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.layout import Layout
from tandem.kv.peer import ClientOptions
from tandem.kv.plan import Wanted
from tandem.kv.staging import Staging
from tandem.kv.tls import Identity, identity_for
from tandem.kv.transfer import Outcome
from tandem.placement.handoff import Decision, Here, Peer, PromptSize, decide
from tandem.placement.rates import RateTable

UNKNOWN_WORTH_TOKENS = 256
"""A peer whose speed is not known yet is tried for prompts from this many tokens on; the trial tells."""
FIRST_BANDWIDTH = 100e6


class RemotePrefill:
    """One prompt's hand-off under way.

    Attributes:
        held: the cache of the first `start` tokens, this node's own.
        decision: why it was asked for.
        outcome: what came of it; None while it runs.
    """

    def __init__(
        self,
        peer: PeerLink,
        layout: Layout,
        tokens: list[int],
        held: list[Any],
        start: int,
        decision: Decision,
        wake: Callable[[], None],
        checkpoint: int,
    ) -> None:
        self.peer = peer
        self.held = held
        self.start = start
        self.decision = decision
        self.outcome: Outcome | None = None
        self.staging = Staging(layout, Wanted(start, len(tokens) - 1, checkpoint=checkpoint))
        self._wake = wake
        self._transfer = peer.handoff.transfer(tokens, self.staging)
        self._thread = threading.Thread(target=self._run, name="handoff", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.outcome = self._transfer.run()
        self._wake()

    def cancel(self) -> None:
        """Stop it here and at the peer. The outcome no longer matters."""
        self._transfer.cancel()


class PeerLink:
    """A peer that prefills for this node, and what is known of its speed."""

    def __init__(self, address: str, fingerprint: Fingerprint, identity: Identity | None, node_id: str) -> None:
        host, _, port = address.rpartition(":")
        self.address = address
        self.handoff = Handoff(
            (host.strip("[]"), int(port)),
            fingerprint,
            identity=identity,
            options=ClientOptions(node=node_id),
        )
        self.rates = RateTable()
        self.bandwidth = FIRST_BANDWIDTH
        self.fixed = 0.0
        self.failed_at: float | None = None

    def learn(self, outcome: Outcome) -> None:
        """Take a finished transfer's figures in."""
        if outcome.error is not None:
            self.failed_at = time.monotonic()
            return
        self.failed_at = None
        self.rates.observe(outcome.tokens, outcome.computing)
        exposed = max(outcome.transferring, 1e-4)
        if exposed > outcome.computing:
            self.bandwidth = outcome.payload_bytes / exposed
        else:
            # The transfer hid behind the computation: the link carries at least this much.
            self.bandwidth = max(self.bandwidth, outcome.payload_bytes / max(outcome.computing, 1e-3))
            self.fixed += 0.3 * (exposed - self.fixed)

    def estimate(self) -> Peer:
        """As the decision rule sees it."""
        return Peer(self.address, self.rates, self.bandwidth, fixed=self.fixed)


class RemotePrefills:
    """All peers of this instance.

    Args:
        options: names them.
        layout, fingerprint: of the loaded model.
        wake: tells the engine thread that a transfer ended.
        checkpoint: how often windows and states are wanted, so that a broken hand-off can be continued.
    """

    RETRY_SECONDS = 5.0

    def __init__(
        self,
        options: EngineOptions,
        layout: Layout,
        fingerprint: Fingerprint,
        wake: Callable[[], None],
        *,
        checkpoint: int,
    ) -> None:
        self._layout = layout
        self._wake = wake
        self._checkpoint = checkpoint
        identity = identity_for(options.cluster_secret, options.node_id)
        self._peers = [PeerLink(address, fingerprint, identity, options.node_id) for address in options.prefill_peers]

    def consider(
        self, tokens: list[int], held: list[Any], start: int, here: Here, *, chunk: int
    ) -> tuple[RemotePrefill | None, Decision]:
        """Begin a hand-off if the first token is predicted to come sooner with it."""
        end = len(tokens) - 1
        size = PromptSize(end, start, self._layout.bytes_per_token, self._layout.bytes_between(0, 1), chunk=chunk)
        now = time.monotonic()
        usable = [peer for peer in self._peers if peer.failed_at is None or now - peer.failed_at > self.RETRY_SECONDS]
        decision = decide(size, here, [peer.estimate() for peer in usable])
        untried = next((peer for peer in usable if not peer.rates.known), None)
        if untried is not None and decision.choice == "local" and size.missing >= UNKNOWN_WORTH_TOKENS:
            reason = f"{untried.address} is tried for the first time, to learn its speed."
            decision = Decision("remote", untried.address, "raw", decision.local_seconds, None, reason)
        if decision.choice == "local":
            return None, decision
        peer = next(one for one in usable if one.address == decision.peer)
        try:
            remote = RemotePrefill(peer, self._layout, tokens, held, start, decision, self._wake, self._checkpoint)
        except HandoffError as error:
            return None, Decision("local", None, "raw", decision.local_seconds, None, error.message)
        return remote, decision

    def close(self) -> None:
        """Close idle connections."""
        for peer in self._peers:
            peer.handoff.close()
