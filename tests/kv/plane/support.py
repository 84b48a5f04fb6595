"""A server with a synthetic producer, and checks of what came out of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from tandem.kv.client import Handoff
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.job import Admission, PrefillJob, Producer
from tandem.kv.layout import Layout
from tandem.kv.peer import ClientOptions
from tandem.kv.plan import Wanted
from tandem.kv.server import PrefillServer, ServerOptions
from tandem.kv.staging import Staging
from tandem.kv.synthetic import SyntheticCache, SyntheticProducer
from tandem.kv.tls import Identity
from tests.kv.layouts import LAYOUTS, fingerprint

PROMPT = np.random.default_rng(11).integers(0, 50000, 5000).astype(np.uint32)
QUICK = ClientOptions(connect=2.0, handshake=2.0, silence=2.0, stall=3.0, queue=3.0, drain=1.0)


@contextmanager
def serving(
    layout: Layout = LAYOUTS["attention"],
    producer: Producer | None = None,
    *,
    identity: Identity | None = None,
    options: ServerOptions | None = None,
    model: Fingerprint | None = None,
    checkpoints: bool = True,
) -> Iterator[PrefillServer]:
    """A server on a free port of loopback."""
    own = SyntheticProducer(layout, chunk=64)
    try:
        with PrefillServer(
            producer or own,
            layout,
            model or fingerprint(layout),
            identity=identity,
            options=options or ServerOptions(frame_bytes=8192),
            checkpoints=checkpoints,
        ) as server:
            yield server
    finally:
        own.close()


def handoff(
    address: tuple[str, int],
    layout: Layout = LAYOUTS["attention"],
    *,
    identity: Identity | None = None,
    options: ClientOptions = QUICK,
    model: Fingerprint | None = None,
    allow_quantisation: bool = False,
) -> Handoff:
    """A client of `address` with the same made-up model."""
    return Handoff(
        address, model or fingerprint(layout), identity=identity, options=options, allow_quantisation=allow_quantisation
    )


def wrong_entries(staging: Staging, upto: int, tokens: np.ndarray = PROMPT) -> str:
    """Which of the entries that a cache of `upto` tokens needs are wrong; empty if none is."""
    cache, plan = SyntheticCache(staging.plan.layout), staging.plan
    if upto == plan.wanted.start:
        return ""
    for index in plan.layers:
        layer = plan.layer(index)
        for number, part in enumerate(layer.parts):
            heads = plan.heads(part)
            for span in layer.needed(plan.wanted.start, upto):
                expected = cache.entries(tokens, index, number, *span)[heads.start : heads.end]
                if not np.array_equal(staging.entries(index, number, *span), expected):
                    return f"layer {index}, part {number}, tokens {span}"
        for number in range(len(layer.states)):
            if not np.array_equal(staging.state(index, number, upto), cache.state(tokens, index, number, upto)):
                return f"layer {index}, state {number} after {upto}"
    return ""


def staged(wanted: Wanted, layout: Layout = LAYOUTS["attention"]) -> Staging:
    """An empty staging."""
    return Staging(layout, wanted)


class HeldProducer(Producer):
    """Does nothing by itself: tests pull jobs out and feed them. Submitting runs `on_submit`."""

    def __init__(self, on_submit: Callable[[PrefillJob], Admission | None] = lambda job: None) -> None:
        self.jobs: list[PrefillJob] = []
        self.cancelled: list[PrefillJob] = []
        self._changed = threading.Condition()
        self._on_submit = on_submit

    def submit(self, job: PrefillJob) -> Admission:
        admission = self._on_submit(job)
        with self._changed:
            self.jobs.append(job)
            self._changed.notify_all()
        return admission or Admission()

    def cancel(self, job: PrefillJob) -> None:
        with self._changed:
            self.cancelled.append(job)
            self._changed.notify_all()

    def wait_for_job(self, number: int = 0) -> PrefillJob:
        """The job with this number, once it was submitted."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.jobs) > number, 10)
            return self.jobs[number]

    def wait_for_cancel(self) -> PrefillJob:
        """The first cancelled job, once there is one."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.cancelled, 10)
            return self.cancelled[0]


def feed(job: PrefillJob, first: int, last: int) -> None:
    """Emit what is needed of the tokens `[first, last)`."""
    cache = SyntheticCache(job.plan.layout)
    for index in job.plan.layers:
        for span in job.needs(index, first, last):
            for part in range(len(job.plan.layer(index).parts)):
                job.emit(index, part, span.start, cache.entries(job.tokens, index, part, *span))
        if last in job.plan.checkpoints:
            for number in range(len(job.plan.layer(index).states)):
                job.emit_state(index, number, last, cache.state(job.tokens, index, number, last))
