"""Prefilling for other nodes: the simulated engine's side of a hand-off that it serves."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import NamedTuple

from tandem.engines.handoff.desk import PrefillDesk
from tandem.engines.sim.device import Device
from tandem.engines.sim.prefix import SimPrefixCache
from tandem.errors import CancelledError, EngineError, TandemError
from tandem.kv.dtypes import Array
from tandem.kv.job import PrefillJob
from tandem.kv.synthetic import SyntheticCache

logger = logging.getLogger("tandem.sim")

CONGESTION_PAUSE = 0.002


class _Entries(NamedTuple):
    layer: int
    part: int
    token: int
    array: Array


class PeerWork:
    """One job at a time, a chunk a step. Entries leave after every chunk."""

    def __init__(self, cache: SyntheticCache, prefix: SimPrefixCache, desk: PrefillDesk, device: Device) -> None:
        self._cache = cache
        self._prefix = prefix
        self._desk = desk
        self._device = device
        self._job: PrefillJob | None = None
        self._tokens: list[int] = []
        self._position = 0
        self._cached = 0
        self._unsent: deque[_Entries] = deque()

    @property
    def pending(self) -> bool:
        """Whether there is anything to do."""
        return self._job is not None or len(self._desk) > 0

    @property
    def seconds(self) -> float:
        """Predicted for the job under way and those that wait."""
        left = len(self._tokens) - self._position if self._job is not None else 0
        return self._device.seconds(left) + self._desk.waiting_seconds

    def step(self, limit: int) -> None:
        """Compute the next chunk of at most `limit` tokens for whoever's turn it is."""
        if self._job is None:
            self._job = self._desk.take()
            self._tokens = []
            self._unsent.clear()
        job = self._job
        if job is None:
            return
        try:
            self._advance(job, limit)
        except CancelledError:
            self._forget()
        except TandemError as error:
            job.fail(error)
            self._forget()
        except Exception as error:
            logger.exception("a peer's prefill failed")
            job.fail(EngineError(f"The prompt could not be processed: {error}"))
            self._forget()

    def _advance(self, job: PrefillJob, limit: int) -> None:
        if job.cancelled:
            raise CancelledError("Nobody waits for this prefill any more.")
        if job.congested:
            # The client takes entries more slowly than they are computed. Others' work comes first.
            time.sleep(CONGESTION_PAUSE)
            return
        if not self._unsent:
            self._compute(job, limit)
        # Handing over more than there is room for would block the engine thread.
        while self._unsent and not job.congested:
            one = self._unsent.popleft()
            job.emit(one.layer, one.part, one.token, one.array)
        if not self._unsent:
            job.progress(self._position, cached=self._cached)
            if self._position == len(self._tokens):
                job.finish()
                self._forget()

    def _compute(self, job: PrefillJob, limit: int) -> None:
        if not self._tokens:
            job.progress(0)
            self._tokens = job.tokens.tolist()
            self._position, self._cached = 0, self._prefix.find(self._tokens).length
        begun, tokens = time.monotonic(), self._tokens
        start, hit = self._position, self._position < self._cached
        end = min(start + limit, self._cached if hit else len(tokens))
        self._unsent.extend(self._entries(job, start, end))
        # What the prefix cache has costs no time, but is sent like everything else.
        if not hit:
            self._device.prefilled(end - start, begun)
            self._prefix.store(tokens[:end], tail=end == len(tokens))
        self._position = end

    def _forget(self) -> None:
        self._job = None
        self._desk.ended()

    def _entries(self, job: PrefillJob, start: int, end: int) -> list[_Entries]:
        """What is wanted of the tokens `[start, end)`."""
        return [
            _Entries(index, part, span.start, self._cache.entries(job.tokens, index, part, *span))
            for index in job.plan.layers
            for span in job.needs(index, start, end)
            for part in range(len(self._cache.layout.layers[index].parts))
        ]
