"""Both sides of the engine's hand-offs: what is vLLM's own about them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import cached_property

from tandem.engines.base import EngineOptions, KvPlane, Output, PrefillPort
from tandem.engines.handoff.desk import PrefillDesk
from tandem.engines.handoff.handoffs import CHECKPOINT_TOKENS, Handoffs
from tandem.engines.handoff.identity import fingerprint_of
from tandem.engines.pace import Pace
from tandem.engines.vllm.exchange import Registry
from tandem.engines.vllm.layout import layout_of
from tandem.engines.vllm.peer_work import Prompts, VllmPeerWork
from tandem.engines.vllm.received import Received
from tandem.engines.vllm.sequence import Sequence
from tandem.errors import UnsupportedError
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.layout import Layout
from tandem.placement.handoff import Here

logger = logging.getLogger("tandem.vllm")


class VllmHandoffs(Handoffs[Sequence]):
    """Layout and fingerprint are made when somebody needs them: the fingerprint reads the model's files.

    Args:
        registry: of the loaded model's connector.
        prompts: vLLM, for the prompts of peers.
        pace: the engine's measured speeds.
        prefix_length: how many leading tokens of a prompt vLLM's prefix cache has now.
    """

    def __init__(
        self,
        options: EngineOptions,
        registry: Registry,
        prompts: Prompts,
        pace: Pace,
        prefix_length: Callable[[list[int]], int],
        wake: Callable[[], None],
    ) -> None:
        desk = PrefillDesk(wake, pace.seconds)
        self._work = VllmPeerWork(desk, registry, prompts)
        super().__init__(options, desk, self._work, chunk=pace.chunk, checkpoint=CHECKPOINT_TOKENS, wake=wake)
        self._registry = registry
        self._pace = pace
        self._prefix_length = prefix_length
        self._may_mix = False
        self.name_peers(options.prefill_peers)

    @cached_property
    def layout(self) -> Layout:
        """What the model's cache looks like.

        Raises:
            UnsupportedError: it is of a kind that cannot be handed off.
        """
        return layout_of(self._registry.layers())

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What a peer's model has to agree with."""
        return fingerprint_of(self.layout, self._options.folder)

    @property
    def plane(self) -> KvPlane:
        """For the KV port."""
        # Steps end where vLLM's scheduler puts them, and its prefix cache has windows and states of its own ends alone.
        checkpoints = all(layer.kind == "tokens" for layer in self.layout.layers)
        return KvPlane(self.layout, self.fingerprint, self.desk, checkpoints=checkpoints)

    @property
    def offered(self) -> KvPlane | None:
        """`plane`, if this model's cache can be handed off."""
        try:
            return self.plane
        except UnsupportedError as error:
            logger.warning("no prompts for other nodes: %s", error.message)
            return None

    def name_peers(self, peers: tuple[PrefillPort, ...]) -> None:
        super().name_peers(peers)
        self._may_mix = any(peer.allow_quantisation for peer in peers)

    # ---------------------------------------------------------------------------------------------- asked of others

    def here(self, active: Collection[Sequence], waiting: int) -> Here:
        """This node as the decision about a hand-off sees it.

        Args:
            active: requests that vLLM has.
            waiting: requests that it has not yet.
        """
        before = [one.missing for one in active if not one.decoding]
        if self._work.left:
            before.append(self._work.left)
        running = sum(one.decoding for one in active)
        return self._pace.here(before, running, len(before) + waiting, shared=False)

    def consider(self, sequence: Sequence, here: Here) -> list[Output] | None:
        """Begin a remote prefill if that is predicted to be sooner.

        Returns:
            What to tell the reader, if `sequence` waits for entries now; else None.
        """
        if sequence.scored or not sequence.may_hand_off:
            return None
        # What weights of another quantisation compute may not follow blocks that others find, so there it begins anew.
        held = self._prefix_length(sequence.tokens) if sequence.keeps_prefix and not self._may_mix else 0
        if held >= len(sequence.tokens) - 1 or not self._ask(sequence, None, held, here):
            return None
        sequence.accepted = True
        sequence.cached = sequence.position = held
        return [Output(sequence.request_id, [sequence.answer.accept(held)])]

    def collect(self, here: Here) -> list[Sequence]:
        """Sequences whose hand-off ended. vLLM loads what arrived once it is given them, and computes the rest."""
        ended: list[Sequence] = []
        for sequence, remote, outcome in self._ended(here):
            sequence.received = Received(sequence.request_id, remote, outcome.complete)
            sequence.mixed = remote.mixed and outcome.complete > remote.start
            if outcome.complete > remote.start:
                self._registry.source(sequence.request_id, sequence.received)
            ended.append(sequence)
        return ended

    def forget(self, sequence: Sequence) -> None:
        """vLLM has begun its answer, or nobody wants it: what was received is not needed any more."""
        self._registry.drop(sequence.request_id)
        sequence.received = None

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return super().has_work or self.has_news

    # -------------------------------------------------------------------------------------------- asked for by others

    @property
    def reading(self) -> int:
        """Peers' prompts that vLLM computes."""
        return self._work.reading

    def stepped(self, finished: set[str]) -> int:
        """See `VllmPeerWork.stepped`."""
        return self._work.stepped(finished)

    def close(self) -> None:
        super().close()
        self._work.close()
