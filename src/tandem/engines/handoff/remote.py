"""Having prompts prefilled elsewhere: what any engine needs for the hand-offs that it asks for.

A transfer runs in a thread of its own and writes into staging memory; running answers go on meanwhile. The engine
thread commits what is complete, once, into a cache that nobody uses yet.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tandem.engines.base import EngineOptions, PrefillPort
from tandem.engines.handoff.codecs import codec_costs
from tandem.engines.handoff.peer_link import PeerLink
from tandem.errors import HandoffError
from tandem.kv.codec import RAW
from tandem.kv.control import Progress
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.layout import Layout
from tandem.kv.outcome import Outcome
from tandem.kv.peer import ClientOptions
from tandem.kv.plan import Wanted
from tandem.kv.staging import Landing, Staging
from tandem.kv.tls import identity_for
from tandem.kv.transfer import Transfer
from tandem.placement.handoff import NO_PEER, CodecCost, Decision, Here, PromptSize, decide

MOST_REMEMBERED = 32
"""Peers that are not named any more, and whose rates are kept in case they come back."""
UNKNOWN_WORTH_TOKENS = 256
"""A peer whose speed is not known yet is tried for prompts from this many tokens on; the trial tells."""


class RemotePrefill:
    """One prompt's hand-off under way: a transfer from one peer, and where that breaks off, the rest from another.

    Attributes:
        held: the cache of the first `start` tokens, this node's own.
        decision: why it was asked for.
        tried: peers that were asked so far.
        outcomes: what came of each of them, as far as it was collected.
    """

    def __init__(
        self,
        layout: Layout,
        tokens: list[int],
        held: Any,
        start: int,
        decision: Decision,
        wake: Callable[[], None],
        checkpoint: int,
        landing: Landing | None = None,
    ) -> None:
        self.tokens = tokens
        self.held = held
        self.start = start
        self.end = len(tokens) - 1
        self.decision = decision
        self.staging = Staging(layout, Wanted(start, self.end, checkpoint=checkpoint), landing=landing)
        self.tried: list[PeerLink] = []
        self.outcomes: list[Outcome] = []
        self._wake = wake
        self._lock = threading.Lock()
        self._cancelled = False
        self._transfer: Transfer | None = None
        self._ended: Outcome | None = None
        self._processed = self._reported = 0

    @property
    def mixed(self) -> bool:
        """Whether weights of another quantisation computed some of what has arrived."""
        return any(outcome.mixed for outcome in self.outcomes)

    @property
    def ended(self) -> bool:
        """Whether the transfer is over and `collect` may be called."""
        return self._ended is not None

    def ask(self, peer: PeerLink, codec: str, most_queue: float) -> None:
        """Ask `peer` for what is still missing.

        Raises:
            HandoffError: nothing is.
        """
        codecs = (codec,) if codec == RAW else (codec, RAW)
        transfer = peer.handoff.transfer(
            self.tokens, self.staging, codecs=codecs, most_queue=most_queue, on_progress=self._progress
        )
        self.tried.append(peer)
        self._ended = None
        with self._lock:
            self._transfer = transfer
            if self._cancelled:
                transfer.cancel()
        threading.Thread(target=self._run, args=(transfer,), name="handoff", daemon=True).start()

    def _run(self, transfer: Transfer) -> None:
        self._ended = transfer.run()
        self._wake()

    def _progress(self, progress: Progress) -> None:
        if progress.processed > self._processed:
            self._processed = progress.processed
            self._wake()

    @property
    def progressed(self) -> bool:
        """Whether `news` has any."""
        return self._processed > self._reported

    def news(self) -> int:
        """How many prompt tokens the peer has computed."""
        self._reported = self._processed
        return self._reported

    def collect(self) -> Outcome:
        """Take the figures of the transfer that ended."""
        assert self._ended is not None
        outcome, self._ended = self._ended, None
        self.outcomes.append(outcome)
        self.tried[-1].learn(outcome)
        return outcome

    def cancel(self) -> None:
        """Stop it here and at the peer. The outcome no longer matters."""
        with self._lock:
            self._cancelled = True
            if self._transfer is not None:
                self._transfer.cancel()


class RemotePrefills:
    """All peers of this instance. Used by the engine thread alone.

    Args:
        options: names them, and the codec.
        layout, fingerprint: of the loaded model.
        wake: tells the engine thread that a transfer ended.
        checkpoint: how often windows and states are wanted, so that a broken hand-off can be continued.
        land: makes the engine's memory for the tokens `[start, end)`.
    """

    def __init__(
        self,
        options: EngineOptions,
        layout: Layout,
        fingerprint: Fingerprint,
        wake: Callable[[], None],
        *,
        checkpoint: int,
        land: Callable[[int, int], Landing | None],
    ) -> None:
        self._layout = layout
        self._land = land
        self._fingerprint = fingerprint
        self._wake = wake
        self._checkpoint = checkpoint
        self._node = ClientOptions(node=options.node_id, open=options.cluster_open)
        self._identity = identity_for(options.cluster_secret, options.node_id)
        self._codecs: tuple[CodecCost, ...] = codec_costs(options.kv_codec, layout)
        self._peers: list[PeerLink] = []
        self._known: dict[PrefillPort, PeerLink] = {}
        self.name_peers(options.prefill_peers)

    def name_peers(self, peers: Sequence[PrefillPort]) -> None:
        """From now on these KV ports may prefill for this instance. What was learnt of those that stay or come back as
        they were is kept.

        Raises:
            ConfigError: an address is not loopback while there is no cluster secret.
        """
        links = {
            port: self._known.pop(port) if port in self._known else self._link(port) for port in dict.fromkeys(peers)
        }
        for forgotten in list(self._known)[:-MOST_REMEMBERED]:
            self._known.pop(forgotten).handoff.close()
        self._known |= links
        self._peers = list(links.values())

    @property
    def any(self) -> bool:
        """Whether there are any peers."""
        return bool(self._peers)

    def _link(self, port: PrefillPort) -> PeerLink:
        return PeerLink(port, self._fingerprint, self._identity, self._node)

    def consider(
        self, tokens: list[int], held: Any, start: int, here: Here, *, chunk: int
    ) -> tuple[RemotePrefill | None, Decision]:
        """Begin a hand-off if the first token is predicted to come sooner with it.

        Args:
            held: this node's own cache of the first `start` tokens.
        """
        end = len(tokens) - 1
        peers = [peer for peer in self._peers if peer.usable]
        decision = self._decide(self._size(start, end, chunk), here, peers, try_unknown=True)
        if decision.choice == "local":
            return None, decision if peers else replace(decision, reason=self._why_none())
        landing = self._land(start, end)
        remote = RemotePrefill(self._layout, tokens, held, start, decision, self._wake, self._checkpoint, landing)
        try:
            self._ask(remote, decision)
        except HandoffError as error:
            return None, Decision("local", None, RAW, decision.local_seconds, None, error.message)
        return remote, decision

    def go_on(self, remote: RemotePrefill, here: Here, *, chunk: int) -> bool:
        """After a transfer broke off: ask another peer for the rest, if that is predicted to be sooner than computing
        it here.

        Returns:
            Whether one was asked.
        """
        complete = remote.staging.complete_through()
        if complete >= remote.end:
            return False
        peers = [peer for peer in self._peers if peer.usable and peer not in remote.tried]
        decision = self._decide(self._size(complete, remote.end, chunk), here, peers, try_unknown=False)
        if decision.choice == "local":
            return False
        self._ask(remote, decision)
        return True

    def _why_none(self) -> str:
        """Why no peer can be asked."""
        if not self._peers:
            return NO_PEER
        failed = "; ".join(f"{peer.address}: {peer.failure}" for peer in self._peers)
        return f"No prefill peer is asked for some seconds after it failed. {failed}"

    def close(self) -> None:
        """Close idle connections."""
        for peer in self._known.values():
            peer.handoff.close()

    def _size(self, start: int, end: int, chunk: int) -> PromptSize:
        per_token = self._layout.bytes_per_token
        constant = self._layout.bytes_between(start, end) - per_token * (end - start)
        return PromptSize(end, start, per_token, constant, chunk)

    def _decide(self, size: PromptSize, here: Here, peers: list[PeerLink], *, try_unknown: bool) -> Decision:
        decision = decide(size, here, [peer.estimate(self._codecs) for peer in peers])
        untried = next((peer for peer in peers if not peer.rates.known), None)
        if try_unknown and untried and decision.choice == "local" and size.missing >= UNKNOWN_WORTH_TOKENS:
            reason = f"{untried.address} is tried for the first time, to learn its speed."
            return Decision("remote", untried.address, self._codecs[0].name, decision.local_seconds, None, reason)
        return decision

    def _ask(self, remote: RemotePrefill, decision: Decision) -> None:
        peer = next(one for one in self._peers if one.address == decision.peer)
        # Once the peer's queue is longer than what it was to gain, computing here is sooner.
        most_queue = math.inf
        if decision.local_seconds is not None and decision.remote_seconds is not None:
            most_queue = max(0.0, decision.local_seconds - decision.remote_seconds)
        remote.ask(peer, decision.codec, most_queue)
        peer.expect(decision.remote_seconds)
