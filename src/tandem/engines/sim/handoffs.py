"""Both sides of the simulated engine's hand-offs.

The decode side knows what every entry must be, and looks at each one that it receives: the engine that would notice
least is the one that checks most.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from tandem.engines.base import EngineOptions, KvPlane
from tandem.engines.handoff.desk import PrefillDesk
from tandem.engines.handoff.handoffs import Handoffs
from tandem.engines.handoff.remote import RemotePrefill
from tandem.engines.sim.cache import chain, fingerprint_of, first_wrong, layout_of
from tandem.engines.sim.device import Device
from tandem.engines.sim.peer_work import SimPeerWork
from tandem.engines.sim.prefix import Prefix, SimPrefixCache
from tandem.engines.sim.profile import SimProfile
from tandem.engines.sim.sequence import Sequence
from tandem.errors import HandoffError
from tandem.kv.outcome import Outcome
from tandem.kv.synthetic import SyntheticCache
from tandem.placement.handoff import Here

CHECKED_AT_ONCE = 256
"""Tokens whose entries are checked in one step: some milliseconds, so that running answers are not held up."""


class SimHandoffs(Handoffs[Sequence]):
    """Sequences whose received entries are not all checked are `receiving`, too."""

    def __init__(
        self,
        options: EngineOptions,
        profile: SimProfile,
        prefix: SimPrefixCache,
        device: Device,
        chunk: int,
        wake: Callable[[], None],
    ) -> None:
        self._cache = SyntheticCache(layout_of(profile))
        self._quantisation = profile.quantisation
        desk = PrefillDesk(wake, device.seconds, limit=profile.peer_queue)
        self._sim_work = SimPeerWork(self._cache, prefix, desk, device)
        super().__init__(options, desk, self._sim_work, chunk=chunk, checkpoint=0, wake=wake)
        self._prefix = prefix
        self._device = device
        self.name_peers(options.prefill_peers)

    @cached_property
    def plane(self) -> KvPlane:
        """For the KV port."""
        layout = self._cache.layout
        return KvPlane(layout, fingerprint_of(self._options.model_id, layout, self._quantisation), self.desk)

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
        if not self._ask(sequence, [], held.length, Here(self._device.rates, queue)):
            return False
        sequence.position, sequence.state = held
        return True

    @property
    def collectable(self) -> bool:
        """Whether a transfer has ended whose entries are not all checked."""
        return any(self._arrived(one) for one in self.receiving)

    def collect(self) -> Sequence | None:
        """Check some entries of a transfer that ended.

        Returns:
            The sequence, once nothing of it is left to check and no other peer does the rest.
        """
        for sequence in self.receiving:
            remote = sequence.remote
            if remote is None or not self._arrived(sequence):
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
            self._broke_off(sequence, remote, outcome)
            # What the staging calls complete beyond a wrong entry is not to be trusted: nobody is asked for a rest.
            if not tampered and self._goes_on(remote, Here(self._device.rates)):
                return False
        self.receiving.remove(sequence)
        sequence.remote = None
        sequence.answer.received(remote.outcomes, received)
        sequence.mixed = remote.mixed and received > 0
        if sequence.keeps_prefix:
            self._prefix.store(sequence.tokens[: sequence.position], tail=False)
        return True

    def _arrived(self, sequence: Sequence) -> bool:
        return super()._arrived(sequence) or sequence.outcome is not None

    @property
    def serving_seconds(self) -> float:
        """Predicted for everything that peers wait for."""
        return self._sim_work.seconds
