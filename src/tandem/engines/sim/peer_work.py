"""Prefilling for other nodes: the simulated engine's side of a hand-off that it serves."""

from __future__ import annotations

import time
from typing import NamedTuple

from tandem.engines.handoff.desk import PrefillDesk
from tandem.engines.handoff.serving import PeerWork
from tandem.engines.sim.device import Device
from tandem.engines.sim.prefix import SimPrefixCache
from tandem.kv.dtypes import Array
from tandem.kv.job import PrefillJob
from tandem.kv.synthetic import SyntheticCache


class Entries(NamedTuple):
    """Of one part of a layer, from `token` on."""

    layer: int
    part: int
    token: int
    array: Array


class SimPeerWork(PeerWork[Entries]):
    """Makes entries up, in the time that a real device would need."""

    def __init__(self, cache: SyntheticCache, prefix: SimPrefixCache, desk: PrefillDesk, device: Device) -> None:
        super().__init__(desk)
        self._cache = cache
        self._prefix = prefix
        self._device = device
        self._tokens: list[int] = []

    @property
    def seconds(self) -> float:
        """Predicted for the job under way and those that wait."""
        return self._device.seconds(self.left) + self._desk.waiting_seconds

    def begin(self, job: PrefillJob) -> int:
        self._tokens = job.tokens.tolist()
        return self._prefix.find(self._tokens).length

    def compute(self, job: PrefillJob, position: int, limit: int) -> tuple[list[Entries], int]:
        begun, tokens, hit = time.monotonic(), self._tokens, position < self._cached
        end = min(position + limit, self._cached if hit else len(tokens))
        entries = [
            Entries(index, part, span.start, self._cache.entries(job.tokens, index, part, *span))
            for index in job.plan.layers
            for span in job.needs(index, position, end)
            for part in range(len(self._cache.layout.layers[index].parts))
        ]
        # What the prefix cache has costs no time, but is sent like everything else.
        if not hit:
            self._device.prefilled(end - position, begun)
            self._prefix.store(tokens[:end], tail=end == len(tokens))
        return entries, end

    def hand_over(self, job: PrefillJob, one: Entries) -> None:
        job.emit(one.layer, one.part, one.token, one.array)
