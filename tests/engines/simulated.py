"""Simulated engines in this process, each with a thread of its own, as a runner has."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tandem.engines.base import EngineOptions, PrefillPort
from tandem.engines.registry import build_engine
from tandem.engines.sim.profile import SimProfile
from tandem.kv.server import PrefillServer, ServerOptions
from tandem.types import Failure, Finished, GenerationRequest

from .drive import Answered, collect

DEADLINE = 60.0
T = TypeVar("T")
OPTIONS = set(EngineOptions.__struct_fields__)


def sim_engine(**fields: Any) -> Any:
    """A loaded simulated engine. Fields are `EngineOptions`', the others the profile's."""
    options = {"engine": "sim", "model_id": "sim"} | {key: value for key, value in fields.items() if key in OPTIONS}
    profile = SimProfile(**{key: value for key, value in fields.items() if key not in OPTIONS})
    made = build_engine(EngineOptions(profile=profile.to_dict(), **options))  # type: ignore[arg-type]
    made.load(lambda progress: None)
    made.warm_up()
    return made


class Running:
    """An engine at work.

    Args:
        serve: opens a KV port; with the port's options, if they matter.

    Attributes:
        port: the KV port, if there is one.
    """

    def __init__(self, *, serve: bool | ServerOptions = False, **fields: Any) -> None:
        self.engine = sim_engine(**fields)
        self.port: PrefillServer | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[str, Answered] = {}
        self._ended: dict[str, Future[Answered]] = {}
        self._stepped = threading.Condition()
        self._closing = False
        self.engine.wake = lambda: self._inbox.put(lambda: None)
        if serve:
            plane = self.engine.kv_plane()
            options = serve if isinstance(serve, ServerOptions) else None
            self.port = PrefillServer(plane.producer, plane.layout, plane.fingerprint, options=options)
        self._thread = threading.Thread(target=self._work, name="engine")
        self._thread.start()

    @property
    def address(self) -> str:
        """Of the KV port."""
        assert self.port is not None
        return f"127.0.0.1:{self.port.address[1]}"

    @property
    def peer(self) -> PrefillPort:
        """The KV port, as others are told of it."""
        return PrefillPort(self.address)

    def do(self, action: Callable[[Any], T]) -> T:
        """Call `action` with the engine, on its thread."""
        result: Future[T] = Future()

        def call() -> None:
            try:
                result.set_result(action(self.engine))
            except Exception as error:  # noqa: BLE001 - `result` raises it again, where it is read
                result.set_exception(error)

        self._inbox.put(call)
        return result.result(DEADLINE)

    def submit(self, *requests: GenerationRequest) -> list[str]:
        """Hand in all of them between two steps; their ids."""
        ids = [f"q{len(self._ended) + index}" for index in range(len(requests))]
        prepared = [self.engine.prepare(one, request) for one, request in zip(ids, requests, strict=True)]
        for one in ids:
            self._answers[one] = Answered()
            self._ended[one] = Future()
        self.do(lambda engine: [engine.submit(one) for one in prepared])
        return ids

    def answer(self, request_id: str) -> Answered:
        """Wait for an answer's end."""
        return self._ended[request_id].result(DEADLINE)

    def ask(self, *requests: GenerationRequest) -> list[Answered]:
        """Submit, and wait for all."""
        return [self.answer(one) for one in self.submit(*requests)]

    def so_far(self, request_id: str) -> Answered:
        """What has come of an answer."""
        return self._answers[request_id]

    def until(self, condition: Callable[[Any], bool]) -> None:
        """Wait until it holds after a step."""
        deadline = time.monotonic() + DEADLINE
        with self._stepped:
            while not condition(self.engine):
                assert self._stepped.wait(deadline - time.monotonic()), "it did not happen in time"

    def idle(self) -> None:
        """Wait until nothing is left to do, and check that nothing is left over."""
        self.until(lambda engine: not engine.has_work and not engine._handoffs.receiving)
        self.do(lambda engine: engine.check_idle())

    def close(self) -> None:
        """End the port, the thread and the engine."""
        if self.port is not None:
            self.port.close()
        self._closing = True
        self._inbox.put(lambda: None)
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        self.engine.close()

    def _work(self) -> None:
        while not self._closing:
            while not self._closing and (not self._inbox.empty() or not self.engine.has_work):
                action = self._inbox.get()
                if action is not None:
                    action()
                with self._stepped:
                    self._stepped.notify_all()
            outputs = self.engine.step() if self.engine.has_work else []
            collect(outputs, self._answers)
            for output in outputs:
                last = output.events[-1] if output.events else None
                if isinstance(last, Finished | Failure):
                    self._ended[output.request_id].set_result(self._answers[output.request_id])
            with self._stepped:
                self._stepped.notify_all()
