"""Both sides of an engine's hand-offs, as far as every engine has them: prefills asked of others, and prefills that
others ask for."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from tandem.engines.base import EngineOptions, KvPlane, Output, PrefillPort
from tandem.engines.handoff.desk import PrefillDesk
from tandem.engines.handoff.remote import RemotePrefill, RemotePrefills
from tandem.engines.handoff.sequence import RemoteSequence
from tandem.engines.handoff.serving import Serving
from tandem.kv.codec import RAW
from tandem.kv.outcome import Outcome
from tandem.kv.staging import Landing
from tandem.placement.handoff import NO_PEER, Decision, Here
from tandem.types import PrefillProgress

logger = logging.getLogger("tandem.engine")

CHECKPOINT_TOKENS = 1024
"""How often engines ask for windows and states."""

S = TypeVar("S", bound=RemoteSequence)


class Handoffs(ABC, Generic[S]):
    """Owned and called by the engine thread, but for the desk and `wake`.

    Args:
        desk: where peers' prefills are queued.
        peer_work: has them computed.
        chunk: tokens that are computed, then sent together.
        checkpoint: how often windows and states are wanted, so that a broken hand-off can be continued.
        wake: tells the engine thread, from any other, that there is something to do.

    Attributes:
        receiving: sequences whose prompt a peer processes.
    """

    def __init__(
        self,
        options: EngineOptions,
        desk: PrefillDesk,
        peer_work: Serving,
        *,
        chunk: int,
        checkpoint: int,
        wake: Callable[[], None],
    ) -> None:
        self.desk = desk
        self.receiving: list[S] = []
        self._options = options
        self._peer_work = peer_work
        self._chunk = chunk
        self._checkpoint = checkpoint
        self._wake = wake
        self._remotes: RemotePrefills | None = None

    @property
    @abstractmethod
    def plane(self) -> KvPlane:
        """For the KV port."""

    # ---------------------------------------------------------------------------------------------- asked of others

    @property
    def elsewhere(self) -> int:
        """Sequences that wait for another node, and for nothing here. From any thread."""
        return sum(not self._arrived(one) for one in self.receiving.copy())

    @property
    def has_peers(self) -> bool:
        """Whether any node was named that may prefill for this one."""
        return self._remotes is not None and self._remotes.any

    def name_peers(self, peers: tuple[PrefillPort, ...]) -> None:
        """Replace the nodes that may prefill for this one."""
        if self._remotes is not None:
            self._remotes.name_peers(peers)
        elif peers:
            options = msgspec.structs.replace(self._options, prefill_peers=peers)
            plane = self.plane
            self._remotes = RemotePrefills(
                options, plane.layout, plane.fingerprint, self._wake, checkpoint=self._checkpoint, land=self._land
            )

    def cancel(self, request_id: str) -> bool:
        """Stop waiting for a request's entries."""
        for sequence in self.receiving:
            if sequence.request_id == request_id:
                assert sequence.remote is not None
                sequence.remote.cancel()
                self.receiving.remove(sequence)
                return True
        return False

    def _ask(self, sequence: S, held: Any, start: int, here: Here) -> bool:
        """Begin a remote prefill if that is predicted to be sooner; whether `sequence` waits for entries now."""
        if self._remotes is None:
            sequence.answer.decided(Decision("local", None, RAW, None, None, NO_PEER))
            return False
        remote, decision = self._remotes.consider(sequence.tokens, held, start, here, chunk=self._chunk)
        sequence.answer.decided(decision)
        if remote is None:
            return False
        sequence.remote = remote
        self.receiving.append(sequence)
        return True

    def _land(self, start: int, end: int) -> Landing | None:
        """The engine's own memory for the entries of the tokens `[start, end)`, where it can make it beforehand."""
        return None

    def _arrived(self, sequence: S) -> bool:
        """Whether a sequence's transfer has ended and there is something to do with what it brought."""
        return sequence.remote is not None and sequence.remote.ended

    def news(self) -> list[Output]:
        """What peers have computed of prompts since the last call."""
        outputs = []
        for one in self.receiving:
            if one.remote is not None and one.remote.progressed:
                one.told = one.remote.news()
                outputs.append(Output(one.request_id, [PrefillProgress(one.told, len(one.tokens))]))
        return outputs

    @property
    def has_news(self) -> bool:
        """Whether there is any."""
        return any(one.remote is not None and one.remote.progressed for one in self.receiving)

    def _ended(self, here: Here) -> Iterator[tuple[S, RemotePrefill, Outcome]]:
        """Sequences whose hand-off ended and that no other peer goes on with; they wait for nobody from then on."""
        for sequence in [one for one in self.receiving if self._arrived(one)]:
            remote = sequence.remote
            assert remote is not None
            outcome = remote.collect()
            if outcome.error is not None:
                self._broke_off(sequence, remote, outcome)
                if self._goes_on(remote, here):
                    continue
            self.receiving.remove(sequence)
            sequence.remote = None
            # What is missing still is computed at home.
            sequence.may_hand_off = False
            yield sequence, remote, outcome

    def _broke_off(self, sequence: S, remote: RemotePrefill, outcome: Outcome) -> None:
        logger.warning(
            "hand-off of request %s from %s broke off with %d of %d tokens complete: %s",
            sequence.request_id,
            outcome.peer,
            outcome.complete,
            remote.end,
            outcome.error,
        )

    def _goes_on(self, remote: RemotePrefill, here: Here) -> bool:
        """Ask another peer for the rest of a transfer that broke off, if that is sooner than computing it."""
        return self._remotes is not None and self._remotes.go_on(remote, here, chunk=self._chunk)

    # --------------------------------------------------------------------------------------------- asked for by others

    @property
    def serving(self) -> bool:
        """Whether a peer waits for work."""
        return self._peer_work.pending

    def serve(self, limit: int, *, idle: bool) -> None:
        """Do some of what peers wait for; see `Serving.step`."""
        self._peer_work.step(limit, idle=idle)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.serving or any(self._arrived(one) for one in self.receiving)

    def close(self) -> None:
        """Close connections to peers."""
        for sequence in self.receiving:
            if sequence.remote is not None:
                sequence.remote.cancel()
        self.receiving.clear()
        if self._remotes is not None:
            self._remotes.close()
