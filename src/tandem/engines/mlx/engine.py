"""The MLX engine: which request gets the device next.

Each step decodes one token for every running answer, then prefills one chunk of one waiting prompt. While answers run,
chunks are small enough that none of them pauses for longer than `max_decode_stall`. Prompts are prefilled one at a
time, unpadded, so that what the model computes for a prompt never depends on its neighbours.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable

import mlx.core as mx

from tandem.engines.answer import score_prompt
from tandem.engines.base import Engine, EngineOptions, KvPlane, LoadProgress, Output, PrefillPort, Prepared
from tandem.engines.mlx.cache_kinds import is_batchable
from tandem.engines.mlx.handoffs import MlxHandoffs
from tandem.engines.mlx.load import LoadedModel, load
from tandem.engines.mlx.memory import MemoryBudget, measure_sequence
from tandem.engines.mlx.pace import usual_chunk
from tandem.engines.mlx.prefill import Prefill
from tandem.engines.mlx.prefix_cache import PrefixCache
from tandem.engines.mlx.request import Sequence, prepare
from tandem.engines.mlx.running import Running
from tandem.engines.pace import Pace
from tandem.errors import EngineError
from tandem.models.text import TextModel
from tandem.placement.handoff import Here
from tandem.types import EngineLoad, Event, Failure, GenerationRequest, ModelInfo, PrefillProgress

logger = logging.getLogger("tandem.mlx")

CLEAR_CACHE_STEPS = 256


class MlxEngine(Engine):
    """One model on MLX.

    Args:
        options: what to load and how.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._numbers = itertools.count(1)
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._may_admit = False
        self._admitted = self._steps = 0
        self._pace = Pace(options.prefill_chunk or usual_chunk(), options.max_decode_stall)
        self._is_loaded = False
        self._loaded: LoadedModel
        self._text: TextModel
        self._running: Running
        self._prefix: PrefixCache
        self._memory: MemoryBudget
        self._handoffs: MlxHandoffs

    # ------------------------------------------------------------------------------------------------------- lifetime

    def load(self, report: Callable[[LoadProgress], None]) -> ModelInfo:
        options = self._options
        self._loaded = loaded = load(options, report)
        self._text = TextModel.load(options.folder)
        seen = loaded.seen_cache()
        size = measure_sequence(seen)
        self._memory = MemoryBudget.measure(size, padded=is_batchable(seen))
        self._prefix = PrefixCache(loaded.make_cache, self._memory.prefix_budget(options.prefix_cache_bytes))
        self._handoffs = MlxHandoffs(options, loaded, seen, self._prefix, self._pace, lambda: self.wake())
        self._running = Running(loaded, self._prefix, self._pace, self._text.vocabulary_size)
        self._is_loaded = True
        return ModelInfo(
            model_id=options.model_id,
            engine="mlx",
            architecture=loaded.architecture,
            context_length=loaded.context_length,
            vocabulary_size=self._text.vocabulary_size,
            dtype=str(loaded.dtype).removeprefix("mlx.core."),
            capabilities=self._text.capabilities,
            weight_bytes=loaded.weight_bytes,
            kv_bytes_per_token=size.bytes_per_token,
        )

    def warm_up(self) -> None:
        cache = self._loaded.make_cache()
        prefill = Prefill(self._loaded.model, [0] * 9, cache, 0)
        prefill.step(prefill.total)
        self._running.warm_up(prefill.tokens, cache)
        mx.clear_cache()

    # ------------------------------------------------------------------------------------------------------- requests

    def prepare(self, request_id: str, request: GenerationRequest) -> Prepared:
        return prepare(request_id, request, self._text, self._loaded, self._memory)

    def submit(self, prepared: Prepared) -> None:
        assert isinstance(prepared, Sequence)
        prepared.number = next(self._numbers)
        if not self.has_work:
            mx.reset_peak_memory()
        self._waiting.append(prepared)
        self._may_admit = True

    def cancel(self, request_id: str) -> bool:
        for queue in (self._waiting, self._prefilling):
            for sequence in queue:
                if sequence.request_id == request_id:
                    queue.remove(sequence)
                    return True
        if self._running.cancel(request_id):
            self._memory.active = self._running.nbytes
            return True
        self._may_admit = bool(self._waiting)
        return self._handoffs.cancel(request_id)

    @property
    def has_work(self) -> bool:
        admits = self._waiting and (self._may_admit or not self._handoffs.receiving)
        return bool(self._prefilling or self._running or admits) or self._handoffs.has_work

    def kv_plane(self) -> KvPlane:
        return self._handoffs.plane

    def name_peers(self, peers: tuple[PrefillPort, ...]) -> None:
        self._handoffs.name_peers(peers)

    def load_now(self) -> EngineLoad:
        if not self._is_loaded:
            return EngineLoad()
        return EngineLoad(
            waiting=len(self._waiting),
            prefilling=len(self._prefilling) + len(self._handoffs.receiving),
            elsewhere=self._handoffs.elsewhere,
            decoding=len(self._running),
            cache_bytes=self._memory.active,
            prefix_cache_bytes=self._prefix.nbytes,
            active_memory=mx.get_active_memory(),
            steps=self._steps,
            prefill_tps=self._pace.prefill_tps,
            decode_tps=self._pace.decode_tps,
        )

    # ----------------------------------------------------------------------------------------------------------- steps

    def step(self) -> list[Output]:
        self._steps += 1
        outputs: list[Output] = []
        self._running.step(outputs)
        outputs += self._handoffs.news()
        self._prefilling.extend(self._handoffs.collect(self._here([])))
        self._admit()
        if self._handoffs.has_peers:
            self._offer(outputs)
        # Own prompts and those of peers take turns.
        if self._handoffs.serving and (self._steps % 2 or not self._prefilling):
            self._handoffs.serve(self._chunk_limit(), idle=not (self._running or self._prefilling))
        elif self._prefilling:
            self._prefill(outputs)
        self._may_admit = len(self._active) < self._admitted
        if self._steps % CLEAR_CACHE_STEPS == 0 or not self.has_work:
            mx.clear_cache()
        self._memory.active = self._running.nbytes
        return outputs

    def _admit(self) -> None:
        """Let waiting requests in, in order, while there is room in the batch and in memory."""
        active = self._active
        while self._waiting and len(active) < self._options.max_batch:
            if active and not self._memory.fits(self._reserved([*active, self._waiting[0]])):
                break
            active.append(self._waiting.pop(0))
            self._prefilling.append(active[-1])
        self._admitted = len(active)
        # What is kept for later makes room for what runs now, before it is needed.
        self._prefix.limit(self._memory.total - max(self._reserved(active), self._memory.active))

    @property
    def _active(self) -> list[Sequence]:
        return [*self._prefilling, *self._running, *self._handoffs.receiving]

    def _offer(self, outputs: list[Output]) -> None:
        """Have prompts that would wait here prefilled elsewhere, where that is sooner.

        A prompt that stays is considered again when its turn comes: until then its queue shrinks, and peers get idle.
        """
        for sequence in [one for one in self._prefilling if one.prefill is None and not one.offered]:
            before = [one for one in self._prefilling if one.prefill is not None or one.offered]
            sequence.offered = True
            if not before:
                continue  # its turn is now
            prefill = self._begin(sequence)
            if not prefill.done and self._handoffs.consider(
                sequence, prefill.cache, prefill.position, self._here(before)
            ):
                outputs.append(Output(sequence.request_id, [sequence.answer.accept(prefill.position)]))
                self._prefilling.remove(sequence)

    def _here(self, before: list[Sequence]) -> Here:
        return self._pace.here(
            [len(one.tokens) - one.position for one in before],
            len(self._running),
            len(self._prefilling) + len(self._waiting),
            shared=self._handoffs.serving,
        )

    def _reserved(self, active: list[Sequence]) -> int:
        return self._memory.together([sequence.reserved for sequence in active])

    def _prefill(self, outputs: list[Output]) -> None:
        now = time.monotonic()
        # Shortest work first keeps the mean wait low; what has waited counts against it, so that nothing starves.
        sequence = min(
            self._prefilling,
            key=lambda one: (len(one.tokens) - one.position) / self._pace.prefill_tps - (now - one.answer.arrived),
        )
        events: list[Event] = []
        try:
            self._prefill_chunk(sequence, events)
        except Exception as error:
            logger.exception("prefill of request %s failed", sequence.request_id)
            if sequence in self._prefilling:
                self._prefilling.remove(sequence)
            events.append(Failure.of(EngineError(f"The prompt could not be processed: {error}")))
        if events:
            outputs.append(Output(sequence.request_id, events))

    def _prefill_chunk(self, sequence: Sequence, events: list[Event]) -> None:
        prefill = sequence.prefill
        if prefill is None:
            prefill = self._begin(sequence)
            events.append(sequence.answer.accept(prefill.position))
            if not prefill.done and self._handoffs.consider(sequence, prefill.cache, prefill.position, self._here([])):
                self._prefilling.remove(sequence)
                return
            sequence.prefill = prefill
        if not prefill.done:
            begun = time.monotonic()
            count = prefill.step(self._chunk_limit())
            self._pace.prefilled(count, time.monotonic() - begun)
            if sequence.keeps_prefix:
                self._prefix.store(prefill.tokens[: prefill.position], prefill.cache, tail=prefill.done)
            if prefill.total > count:
                events.append(
                    PrefillProgress(prefill.position + 1 if prefill.done else prefill.position, len(prefill.tokens))
                )
        if prefill.done:
            self._prefilling.remove(sequence)
            self._start_answer(sequence, prefill, events)

    def _begin(self, sequence: Sequence) -> Prefill:
        self._running.keep_prompts_like(sequence.tokens)
        hit = self._prefix.find(sequence.tokens[:-1]) if sequence.keeps_prefix and not sequence.scored else None
        return Prefill(
            self._loaded.model,
            sequence.tokens,
            hit.cache if hit else self._loaded.make_cache(),
            hit.length if hit else 0,
            alternatives=sequence.answer.request.prompt_logprobs,
        )

    def _chunk_limit(self) -> int:
        return self._pace.chunk_limit(len(self._running), len(self._prefilling) + len(self._waiting))

    def _start_answer(self, sequence: Sequence, prefill: Prefill, events: list[Event]) -> None:
        answer = sequence.answer
        answer.prefilled()
        request = answer.request
        if request.echo or request.prompt_logprobs is not None:
            events.append(score_prompt(self._text, request, sequence.tokens, prefill.scores))
        sequence.prefill = None
        if answer.max_tokens == 0:
            events.extend(answer.finish("length"))
            return
        self._running.start(sequence, prefill.cache)

    def check_idle(self) -> None:
        """Assert that nothing is left of requests that have ended. For tests, and cheap enough for an idle moment."""
        assert not self.has_work
        self._running.check_idle()
        self._prefix.check()

    def close(self) -> None:
        self._handoffs.close()
        self._prefix.clear()
        mx.clear_cache()
