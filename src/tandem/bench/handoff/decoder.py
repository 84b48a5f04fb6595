"""A decode engine that has every prompt prefilled by its peer, a process of its own.

`python -m tandem.bench.handoff.decoder` loads the real engine and steps it as a runner does. The decision rule is
replaced by one that always says remote: on one machine it would rightly say that a hand-off over a slow link is not
worth it. Everything else, from the request to the commit and the first token, is the product's own.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.bench.handoff.children import answer_questions
from tandem.bench.handoff.peak import PeakMemory, settle
from tandem.engines.base import Engine, EngineOptions
from tandem.engines.handoff import remote
from tandem.engines.registry import build_engine
from tandem.errors import DeadlineError, EngineError
from tandem.placement.handoff import Decision, Here, Peer, PromptSize
from tandem.types import Failure, Finished, GenerationRequest, Sampling, TokenPrompt

DEADLINE = 300.0


def always_remote(size: PromptSize, here: Here, peers: Sequence[Peer]) -> Decision:
    """The decision rule of the bench."""
    if not peers:
        raise EngineError("The peer failed a moment ago and is not asked again yet. See the messages before this one.")
    return Decision("remote", peers[0].name, "raw", None, None, "The bench says so.")


class Decoder:
    """An engine and the loop around it."""

    def __init__(self, options: EngineOptions) -> None:
        self._woken = threading.Event()
        self.engine: Engine = build_engine(options)
        self.engine.wake = self._woken.set
        self.engine.load(lambda _: None)
        self.engine.warm_up()
        self._number = 0

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer the prompt `tokens` with `max_tokens` tokens; with `memory`, watch the peak.

        Raises:
            TandemError: the engine failed, the prompt was not prefilled by the peer, or all took too long.
        """
        self._number += 1
        prompt = TokenPrompt(tuple(question["tokens"]))
        request = GenerationRequest(
            prompt, max_tokens=question["max_tokens"], sampling=Sampling(temperature=0.0), ignore_eos=True
        )
        watch = self._watch() if question.get("memory") else None
        self.engine.submit(self.engine.prepare(f"bench-{self._number}", request))
        memory: dict[str, Any] = {}
        finished = self._run(watch, memory)
        handoff = finished.statistics.handoff
        if handoff.prefill != "remote":
            raise EngineError(f"The prompt was prefilled here ({handoff.prefill}): {handoff.reason}")
        return {"statistics": msgspec.to_builtins(finished.statistics), "memory": memory}

    def _run(self, watch: PeakMemory | None, memory: dict[str, Any]) -> Finished:
        until = time.monotonic() + DEADLINE
        while True:
            self._woken.clear()
            if not self.engine.has_work and not self._woken.wait(until - time.monotonic()):
                raise DeadlineError(f"The hand-off took longer than {DEADLINE:.0f} s.")
            for output in self.engine.step() if self.engine.has_work else ():
                for event in output.events:
                    if isinstance(event, Failure):
                        raise event.error()
                    if isinstance(event, Finished):
                        if watch is not None:
                            memory["first_token_peak"] = watch.peak()
                            watch.close()
                        return event
            if watch is not None and not memory and self.engine.load_now().decoding:
                # The step that committed the cache is over, the first one that decodes with it is not begun.
                memory |= {
                    "method": watch.method,
                    "baseline": watch.baseline,
                    "peak": watch.peak(),
                    "allocator_cache": _allocator_cache(),
                }

    def _watch(self) -> PeakMemory:
        # What earlier requests left for reuse must not make this one look cheaper than it is.
        _clear_allocator_cache()
        settle()
        return PeakMemory()


def _allocator_cache() -> int:
    import mlx.core as mx

    return int(mx.get_cache_memory())


def _clear_allocator_cache() -> None:
    import mlx.core as mx

    mx.clear_cache()


def main() -> None:
    """Settings: those of `EngineOptions`. Says the bytes that a hand-off of `tokens` moves, for questions about it."""
    options = msgspec.convert(json.loads(sys.argv[1]), EngineOptions)
    setattr(remote, "decide", always_remote)  # noqa: B010  # a name that the module does not export
    decoder = Decoder(options)
    plane = decoder.engine.kv_plane()
    assert plane is not None

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if "measure" in question:
            return {"bytes": plane.layout.bytes_between(0, question["measure"])}
        return decoder.answer(question)

    answer_questions({}, answer)


if __name__ == "__main__":
    main()
