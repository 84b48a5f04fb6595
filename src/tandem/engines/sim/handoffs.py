"""Both sides of the simulated engine's hand-offs.

The decode side knows what every entry must be, and looks at each one that it receives: the engine that would notice
least is the one that checks most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property

import msgspec
import numpy as np

from tandem.engines.base import EngineOptions, KvPlane
from tandem.engines.handoff.desk import PrefillDesk
from tandem.engines.handoff.remote import RemotePrefill, RemotePrefills
from tandem.engines.sim.cache import chain, fingerprint_of, first_wrong, layout_of
from tandem.engines.sim.device import Device
from tandem.engines.sim.peer_work import PeerWork
from tandem.engines.sim.prefix import Prefix, SimPrefixCache
from tandem.engines.sim.profile import SimProfile
from tandem.engines.sim.sequence import Sequence
from tandem.errors import HandoffError
from tandem.kv.outcome import Outcome
from tandem.kv.synthetic import SyntheticCache
from tandem.placement.handoff import NO_PEER, Decision, Here

logger = logging.getLogger("tandem.sim")

CHECKED_AT_ONCE = 256
"""Tokens whose entries are checked in one step: some milliseconds, so that running answers are not held up."""


class Handoffs:
    """Owned and called by the engine thread, but for the desk and `wake`.

    Args:
        chunk: tokens that are computed, then sent together.
        wake: tells the engine thread, from any other, that there is something to do.

    Attributes:
        receiving: sequences whose prompt a peer processes, or whose received entries are not all checked.
    """

    def __init__(
        self,
        options: EngineOptions,
        profile: SimProfile,
        prefix: SimPrefixCache,
        device: Device,
        chunk: int,
        wake: Callable[[], None],
    ) -> None:
        self._options = options
        self._prefix = prefix
        self._device = device
        self._chunk = chunk
        layout = layout_of(profile)
        self._cache = SyntheticCache(layout)
        self.desk = PrefillDesk(wake, device.seconds, limit=profile.peer_queue)
        self._peer_work = PeerWork(self._cache, prefix, self.desk, device)
        self._remotes: RemotePrefills | None = None
        self._wake = wake
        if options.prefill_peers:
            self.name_peers(options.prefill_peers)
        self.receiving: list[Sequence] = []

    @cached_property
    def plane(self) -> KvPlane:
        """For the KV port."""
        layout = self._cache.layout
        return KvPlane(layout, fingerprint_of(self._options.model_id, layout), self.desk)

    # ---------------------------------------------------------------------------------------------- asked of others

    @property
    def elsewhere(self) -> int:
        """Sequences that wait for another node, and for nothing here. From any thread."""
        return sum(not _collectable(one) for one in self.receiving.copy())

    def name_peers(self, addresses: tuple[str, ...]) -> None:
        """Replace the nodes that may prefill for this one."""
        if self._remotes is not None:
            self._remotes.name_peers(addresses)
        elif addresses:
            options = msgspec.structs.replace(self._options, prefill_peers=addresses)
            plane = self.plane
            self._remotes = RemotePrefills(options, plane.layout, plane.fingerprint, self._wake, checkpoint=0)

    def consider(self, sequence: Sequence, held: Prefix, queue: float) -> bool:
        """Begin a remote prefill if that is predicted to be sooner.

        Args:
            held: what the prefix cache has of the prompt.
            queue: seconds until this engine itself could begin.

        Returns:
            Whether `sequence` waits for entries now.
        """
        if sequence.scored:
            return False
        if self._remotes is None:
            sequence.answer.decided(Decision("local", None, "raw", None, None, NO_PEER))
            return False
        here = Here(self._device.rates, queue)
        remote, decision = self._remotes.consider(sequence.tokens, [], held.length, here, chunk=self._chunk)
        sequence.answer.decided(decision)
        if remote is None:
            return False
        sequence.remote = remote
        sequence.position, sequence.state = held
        self.receiving.append(sequence)
        return True

    @property
    def collectable(self) -> bool:
        """Whether a transfer has ended whose entries are not all checked."""
        return any(_collectable(one) for one in self.receiving)

    def collect(self) -> Sequence | None:
        """Check some entries of a transfer that ended.

        Returns:
            The sequence, once nothing of it is left to check and no other peer does the rest.
        """
        for sequence in self.receiving:
            remote = sequence.remote
            if remote is None or not _collectable(sequence):
                continue
            if remote.ended:
                sequence.outcome = remote.collect()
            assert sequence.outcome is not None
            return sequence if self._check(sequence, remote, sequence.outcome) else None
        return None

    def _check(self, sequence: Sequence, remote: RemotePrefill, outcome: Outcome) -> bool:
        start, end = sequence.position, min(sequence.position + CHECKED_AT_ONCE, outcome.complete)
        tampered = False
        if start < end:
            tokens = np.asarray(sequence.tokens[:end], np.uint32)
            wrong = first_wrong(self._cache, tokens, remote.staging, outcome.codec, start, end)
            right = end if wrong is None else wrong
            sequence.state = chain(sequence.state, sequence.tokens[start:right])
            sequence.position = right
            tampered = wrong is not None
            if wrong is not None:
                error = HandoffError(f"The entries of token {wrong} are wrong. They are not used; look at that node.")
                outcome = outcome._replace(complete=wrong, error=error)
                remote.outcomes[-1] = outcome
                remote.tried[-1].learn(outcome)
            elif right < outcome.complete:
                return False
        sequence.outcome = None
        received = sequence.position - remote.start
        if outcome.error is not None:
            logger.warning(
                "hand-off of request %s from %s broke off after %d tokens: %s",
                sequence.request_id,
                outcome.peer,
                received,
                outcome.error,
            )
            here = Here(self._device.rates)
            if not tampered and self._remotes is not None and self._remotes.go_on(remote, here, chunk=self._chunk):
                return False
        self.receiving.remove(sequence)
        sequence.remote = None
        sequence.answer.received(remote.outcomes, received)
        if sequence.keeps_prefix:
            self._prefix.store(sequence.tokens[: sequence.position], tail=False)
        return True

    def cancel(self, request_id: str) -> bool:
        """Stop waiting for a request's entries."""
        for sequence in self.receiving:
            if sequence.request_id == request_id:
                assert sequence.remote is not None
                sequence.remote.cancel()
                self.receiving.remove(sequence)
                return True
        return False

    # --------------------------------------------------------------------------------------------- asked for by others

    @property
    def serving(self) -> bool:
        """Whether a peer waits for work."""
        return self._peer_work.pending

    @property
    def serving_seconds(self) -> float:
        """Predicted for everything that peers wait for."""
        return self._peer_work.seconds

    def serve(self, limit: int) -> None:
        """Compute a chunk for a peer."""
        self._peer_work.step(limit)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.serving or self.collectable

    def close(self) -> None:
        """Close connections to peers."""
        for sequence in self.receiving:
            if sequence.remote is not None:
                sequence.remote.cancel()
        self.receiving.clear()
        if self._remotes is not None:
            self._remotes.close()


def _collectable(sequence: Sequence) -> bool:
    return sequence.remote is not None and (sequence.remote.ended or sequence.outcome is not None)
