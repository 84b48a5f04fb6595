"""A producer without a model: entries that depend on every token before them, at set speeds. For tests and benches.

Anyone can compute what it must have sent (`entries`, `state`), so a single wrong, missing or foreign entry shows.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt

from tandem.errors import TandemError
from tandem.kv.dtypes import DTYPES, Array
from tandem.kv.fair_queue import FairQueue
from tandem.kv.job import Admission, PrefillJob, Producer
from tandem.kv.layout import Layout

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scrambled 64-bit numbers (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def _prefix_seeds(tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """For each position a number that depends on all tokens up to it and their order."""
    positions = np.arange(1, len(tokens) + 1, dtype=np.uint64) * _GOLDEN
    return np.cumsum(_mixed(tokens.astype(np.uint64) + positions), dtype=np.uint64)


def _values(seeds: npt.NDArray[np.uint64], dtype: str) -> Array:
    kind = DTYPES[dtype]
    if not kind.is_float:
        return (seeds >> np.uint64(64 - 8 * kind.itemsize)).astype(kind.array)
    floats = ((seeds >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23)) - np.float32(1)
    if dtype == "bfloat16":
        return (floats.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return floats.astype(kind.array)


class SyntheticCache:
    """What the cache of a model with this layout would hold."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def entries(self, tokens: npt.NDArray[np.uint32], layer: int, part: int, start: int, end: int) -> Array:
        """Entries `[heads, end - start, dim]` of one part."""
        spec = self.layout.layers[layer].parts[part]
        seeds = _prefix_seeds(tokens[:end])[start:]
        place = np.uint64((layer << 40) + (part << 32))
        heads = (np.arange(spec.heads, dtype=np.uint64) << np.uint64(16)) + place
        dims = np.arange(spec.dim, dtype=np.uint64)
        mixed = _mixed((heads[:, None] + dims)[:, None, :] * _GOLDEN + seeds[:, None])
        return _values(mixed, spec.dtype)

    def state(self, tokens: npt.NDArray[np.uint32], layer: int, number: int, seen: int) -> Array:
        """A state array as it is after `seen` tokens."""
        spec = self.layout.layers[layer].states[number]
        seed = _prefix_seeds(tokens[:seen])[-1] + np.uint64((layer << 40) + (number << 32) + 1)
        count = int(np.prod(spec.shape))
        return _values(_mixed(np.arange(count, dtype=np.uint64) * _GOLDEN + seed), spec.dtype).reshape(spec.shape)


class SyntheticProducer(Producer):
    """Works on one job at a time, in a thread of its own.

    Args:
        chunk: tokens computed together.
        tokens_per_second: speed; 0 for as fast as possible.
        limit: jobs that may wait.
        cached: tokens that it pretends to have in a prefix cache: they take no time.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        chunk: int = 512,
        tokens_per_second: float = 0.0,
        limit: int = 8,
        cached: int = 0,
    ) -> None:
        self.cache = SyntheticCache(layout)
        self._chunk = chunk
        self._rate = tokens_per_second
        self._cached = cached
        self._changed = threading.Condition()
        self._queue: FairQueue[PrefillJob] = FairQueue(limit)
        self._running: PrefillJob | None = None
        self._closed = False
        self.cancelled: list[PrefillJob] = []
        self._thread = threading.Thread(target=self._work, name="synthetic-prefill", daemon=True)
        self._thread.start()

    def submit(self, job: PrefillJob) -> Admission:
        with self._changed:
            before = [*([self._running] if self._running else []), *self._queue.in_order()]
            seconds = sum(other.plan.wanted.end for other in before) / self._rate if self._rate else 0.0
            self._queue.put(job.client, job, priority=job.priority, wait=seconds)
            self._changed.notify_all()
            return Admission(len(before), seconds)

    def cancel(self, job: PrefillJob) -> None:
        with self._changed:
            self._queue.remove(job)
            self.cancelled.append(job)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; the running job is cancelled."""
        with self._changed:
            self._closed = True
            if self._running is not None:
                self._running.cancel()
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not len(self._queue):
                    self._changed.wait()
                if self._closed:
                    return
                self._running = job = self._queue.get()
            try:
                self.produce(job)
            except TandemError as error:
                job.fail(error)
            with self._changed:
                self._running = None

    def produce(self, job: PrefillJob) -> None:
        """Compute a whole job, chunk by chunk."""
        start, end = job.plan.wanted.start, job.plan.wanted.end
        cached = min(self._cached, end)
        job.progress(0, cached=cached)
        points = [*range(self._chunk, end, self._chunk), *job.plan.checkpoints]
        processed = 0
        for point in sorted(set(points)):
            self._pace(job, max(0, point - max(processed, cached)))
            self._emit(job, processed, point)
            if point > start:
                job.progress(point, cached=cached)
            processed = point
        job.finish()

    def _emit(self, job: PrefillJob, first: int, last: int) -> None:
        for index in job.plan.layers:
            layer = self.cache.layout.layers[index]
            for span in job.needs(index, first, last):
                for part in range(len(layer.parts)):
                    job.emit(index, part, span.start, self.cache.entries(job.tokens, index, part, *span))
            if last in job.plan.checkpoints:
                for number in range(len(layer.states)):
                    job.emit_state(index, number, last, self.cache.state(job.tokens, index, number, last))

    def _pace(self, job: PrefillJob, tokens: int) -> None:
        until = time.monotonic() + (tokens / self._rate if self._rate else 0.0)
        with self._changed:
            while not job.cancelled and not self._closed and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
