"""Prefilling for other nodes: jobs become requests of vLLM's, which computes them in one batch with everything else.

A job's prompt is exactly the context that its client asks for, and vLLM is asked for one token after it, which nobody
reads: so the cache of every token of the context is computed, and no other.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection
from typing import Protocol

from tandem.engines.handoff.desk import PrefillDesk
from tandem.engines.handoff.serving import CONGESTION_PAUSE
from tandem.engines.vllm.exchange import Registry
from tandem.engines.vllm.peer_job import PeerJob
from tandem.errors import EngineError, TandemError

logger = logging.getLogger("tandem.vllm")

MOST_AT_ONCE = 8
"""Jobs that vLLM works on at a time. The desk decides whose turn is next, and is fair between clients; vLLM is not."""
MOST_HELD_BYTES = 512 << 20
"""While slow clients leave more than this waiting, no further job begins."""


class Prompts(Protocol):
    """vLLM, as far as prompts of peers are concerned."""

    def read(self, request_id: str, tokens: list[int]) -> str:
        """Have a prompt computed; vLLM's own name for the request.

        Raises:
            TandemError: it cannot be.
        """

    def abort(self, request_id: str) -> None:
        """Stop that. Harmless if it has ended."""

    def progress(self, vllm_id: str) -> tuple[int, int]:
        """Tokens of a prompt under way that are computed, and how many of them were in the prefix cache."""


class VllmPeerWork:
    """Jobs that vLLM works on. Used by the engine thread.

    Args:
        desk: where jobs come from.
        registry: where the connector finds their taps.
        prompts: vLLM.
        most: jobs that vLLM may work on at a time.
    """

    def __init__(
        self, desk: PrefillDesk, registry: Registry, prompts: Prompts, most: Callable[[], int] = lambda: MOST_AT_ONCE
    ) -> None:
        self._desk = desk
        self._registry = registry
        self._prompts = prompts
        self._most = most
        self._numbers = itertools.count()
        self._jobs: dict[str, PeerJob] = {}

    @property
    def pending(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._jobs) or len(self._desk) > 0

    @property
    def reading(self) -> int:
        """Jobs whose prompt vLLM computes."""
        return sum(not one.computed_all for one in self._jobs.values())

    @property
    def left(self) -> int:
        """Tokens that vLLM still has to compute for them."""
        return sum(one.job.plan.wanted.end - one.processed for one in self._jobs.values() if not one.computed_all)

    def step(self, limit: int, *, idle: bool) -> None:
        """Before vLLM's step: end what is done or not wanted any more, begin what may.

        Args:
            limit: vLLM's scheduler has its own.
            idle: vLLM has nothing to do.
        """
        self._settle()
        while len(self._jobs) < self._most() and self._held_bytes < MOST_HELD_BYTES:
            job = self._desk.take()
            if job is None:
                break
            one = PeerJob(f"peer-{next(self._numbers)}", job)
            self._jobs[one.request_id] = one
            self._begin(one)
        if idle and self._jobs and not self.reading:
            # All that is left waits for slow clients.
            time.sleep(CONGESTION_PAUSE)

    def stepped(self, finished: Collection[str]) -> int:
        """After vLLM's step.

        Args:
            finished: requests that ended in it, by the names that vLLM was given.

        Returns:
            Prompt tokens that the step computed for peers.
        """
        computed = 0
        for one in self._jobs.values():
            if one.computed_all:
                continue
            one.computed_all = one.request_id in finished
            end = one.job.plan.wanted.end
            processed, cached = (end, one.cached) if one.computed_all else self._prompts.progress(one.vllm_id)
            computed += one.advanced(processed, cached)
        self._settle()
        return computed

    @property
    def _held_bytes(self) -> int:
        return sum(one.held_bytes for one in self._jobs.values())

    def _begin(self, one: PeerJob) -> None:
        if one.job.cancelled:
            self._forget(one)
            return
        self._registry.tap(one.request_id, one, one.job.plan.wanted.start)
        try:
            one.vllm_id = self._prompts.read(one.request_id, one.job.tokens.tolist())
        except TandemError as error:
            self._refuse(one, error)
        except Exception as error:
            logger.exception("a peer's prompt was not taken")
            self._refuse(one, EngineError(f"The prompt could not be processed: {error}"))

    def _refuse(self, one: PeerJob, error: TandemError) -> None:
        one.job.fail(error)
        one.computed_all = True
        self._forget(one)

    def _settle(self) -> None:
        for one in list(self._jobs.values()):
            if one.settle():
                self._forget(one)

    def _forget(self, one: PeerJob) -> None:
        if one.vllm_id and not one.computed_all:
            self._prompts.abort(one.request_id)
        self._registry.drop(one.request_id)
        del self._jobs[one.request_id]
        self._desk.ended(one.job)

    def close(self) -> None:
        """Tell all clients that nothing more comes."""
        for one in list(self._jobs.values()):
            one.job.fail(EngineError("The prefill node is stopping. Prefill elsewhere."))
            self._forget(one)
