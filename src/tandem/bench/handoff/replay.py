"""A prefill node that replays a prefill which it recorded before, at a set rate: a process of its own.

While it sends it computes nothing, so a decode engine on the same machine loses only what receiving costs. The
entries, the model's fingerprint and the server are real. `python -m tandem.bench.handoff.replay` records what its
parent names.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np

from tandem.bench.handoff.children import answer_questions
from tandem.engines.base import Engine, EngineOptions, KvPlane
from tandem.engines.registry import build_engine
from tandem.errors import CancelledError, InvalidRequestError
from tandem.kv.job import Admission, Outgoing, PrefillJob, Producer
from tandem.kv.plan import Plan, Wanted
from tandem.kv.server import PrefillServer, ServerOptions
from tandem.kv.tls import identity_for

UNBOUNDED = 1 << 62
SHORTEST_WAIT = 0.004
"""Seconds. A link delivers in bursts, too, and each wait of the sender takes time from a decode engine beside it."""


class Recorder:
    """Prefills prompts with the real engine and keeps every entry that it would have sent."""

    def __init__(self, options: EngineOptions) -> None:
        self._engine: Engine = build_engine(options)
        self._engine.load(lambda _: None)
        plane = self._engine.kv_plane()
        assert plane is not None
        self.plane: KvPlane = plane

    def record(self, tokens: list[int]) -> list[Outgoing]:
        """A prompt's entries, in the order in which they were computed, in memory of their own.

        Raises:
            TandemError: the engine failed.
        """
        job = PrefillJob(
            Plan(self.plane.layout, Wanted(0, len(tokens))), np.array(tokens, np.uint32), backlog_bytes=UNBOUNDED
        )
        self.plane.producer.submit(job)
        kept: list[Outgoing] = []
        while job.end is None or not kept:
            self._engine.step()
            while (item := job.take()) is not None:
                kept.append(item._replace(array=np.array(item.array)))
        if isinstance(job.end, Exception):
            raise job.end
        return kept


class ReplayProducer(Producer):
    """Emits recorded entries.

    Args:
        rate: bytes per second.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._length, self._items = 0, list[Outgoing]()

    def keep(self, length: int, items: list[Outgoing]) -> None:
        """Have an answer for contexts of up to `length` tokens. Whose entries they are makes no difference to
        what receiving them costs, and recording them takes long."""
        self._length, self._items = length, items

    def submit(self, job: PrefillJob) -> Admission:
        end = len(job.tokens)
        if end > self._length:
            raise InvalidRequestError("No prompt of this length was recorded. Prefill it yourself.", param="tokens")
        items = [
            item if item.is_state else item._replace(array=item.array[:, : end - item.token])
            for item in self._items
            if item.token < end
        ]
        threading.Thread(target=self._replay, args=(job, items), daemon=True).start()
        return Admission()

    def cancel(self, job: PrefillJob) -> None:
        pass

    def _replay(self, job: PrefillJob, items: list[Outgoing]) -> None:
        began, sent, told = time.monotonic(), 0, 0
        job.progress(0)
        with contextlib.suppress(CancelledError):
            for item in items:
                sent += item.array.nbytes
                if (wait := began + sent / self._rate - time.monotonic()) > SHORTEST_WAIT:
                    time.sleep(wait)
                if item.token > told:
                    told = item.token
                    job.progress(told)
                if item.is_state:
                    job.emit_state(item.layer, item.part, item.token, item.array)
                else:
                    job.emit(item.layer, item.part, item.token, item.array)
            job.finish()


def main() -> None:
    """Settings: `engine` (as `EngineOptions`; host and secret of its KV port count), `rate`.

    Says its `port`; `{"record": tokens}` has a prompt recorded.
    """
    settings: dict[str, Any] = json.loads(sys.argv[1])
    options = msgspec.convert(settings["engine"], EngineOptions)
    recorder = Recorder(options)
    producer = ReplayProducer(settings["rate"])
    plane = recorder.plane

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        tokens = question["record"]
        items = recorder.record(tokens)
        producer.keep(len(tokens), items)
        return {"bytes": sum(item.array.nbytes for item in items)}

    identity, listen = identity_for(options.cluster_secret, options.node_id), ServerOptions(host=options.kv_host)
    with PrefillServer(producer, plane.layout, plane.fingerprint, identity=identity, options=listen) as server:
        answer_questions({"port": server.address[1]}, answer)


if __name__ == "__main__":
    main()
