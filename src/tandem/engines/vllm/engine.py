"""The vLLM engine: vLLM's own continuous batching, stepped by the runner's engine thread.

Requests wait here until there is room in the batch; from then on vLLM decides who gets the device: one step computes a
token of every running answer and a chunk of the prompts. Text, stops and tool calls are made from the tokens by the
same code as in every engine.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput

from tandem.engines.answer import score_prompt
from tandem.engines.base import Engine, EngineOptions, KvPlane, LoadProgress, Output, PrefillPort, Prepared
from tandem.engines.pace import Pace
from tandem.engines.vllm.connector import transfer_config
from tandem.engines.vllm.constraints import Constraints
from tandem.engines.vllm.exchange import Registry, close_registry, open_registry
from tandem.engines.vllm.handoffs import VllmHandoffs
from tandem.engines.vllm.inside import Inside
from tandem.engines.vllm.load import LoadedModel, load
from tandem.engines.vllm.peer_prompts import PeerPrompts
from tandem.engines.vllm.request import prepare
from tandem.engines.vllm.scores import prompt_scores, score
from tandem.engines.vllm.sequence import Sequence
from tandem.errors import EngineError, InvalidRequestError
from tandem.models.text import TextModel
from tandem.placement.handoff import Here
from tandem.types import (
    EngineLoad,
    Event,
    Failure,
    GenerationRequest,
    ModelInfo,
    PrefillProgress,
    Sampling,
    TokenPrompt,
)


class VllmEngine(Engine):
    """One model on vLLM.

    Args:
        options: what to load and how.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._salts = itertools.count()
        self._waiting: list[Sequence] = []
        self._active: dict[str, Sequence] = {}
        self._steps = 0
        self._is_loaded = False
        self._loaded: LoadedModel
        self._text: TextModel
        self._inside: Inside
        self._constraints: Constraints
        self._pace: Pace
        self._registry: Registry | None = None
        self._handoffs: VllmHandoffs

    # ------------------------------------------------------------------------------------------------------- lifetime

    def load(self, report: Callable[[LoadProgress], None]) -> ModelInfo:
        options = self._options
        self._text = TextModel.load(options.folder)
        self._registry = registry = open_registry()
        self._loaded = loaded = load(options, report, kv_transfer=transfer_config(registry))
        self._engine = loaded.engine
        self._inside = Inside(self._engine)
        self._constraints = Constraints(self._engine)
        self._pace = Pace(loaded.chunk, options.max_decode_stall)
        prompts = PeerPrompts(self._engine, self._inside)
        self._handoffs = VllmHandoffs(
            options, registry, prompts, self._pace, self._inside.prefix_length, lambda: self.wake()
        )
        self._is_loaded = True
        return ModelInfo(
            model_id=options.model_id,
            engine="vllm",
            architecture=loaded.architecture,
            context_length=loaded.context_length,
            vocabulary_size=self._text.vocabulary_size,
            dtype=loaded.dtype,
            capabilities=self._text.capabilities,
            weight_bytes=loaded.weight_bytes,
            kv_bytes_per_token=self._inside.kv_bytes_per_token,
        )

    def warm_up(self) -> None:
        request = GenerationRequest(
            TokenPrompt((0,) * 9), max_tokens=2, sampling=Sampling(temperature=0.0), use_prefix_cache=False
        )
        self.submit(self.prepare("warm-up", request))
        while self.has_work:
            for output in self.step():
                for event in output.events:
                    if isinstance(event, Failure):
                        raise EngineError(f"The first request failed: {event.message}")

    # ------------------------------------------------------------------------------------------------------- requests

    def prepare(self, request_id: str, request: GenerationRequest) -> Prepared:
        return prepare(request_id, request, self._text, self._loaded.defaults, self._loaded.context_length)

    def submit(self, prepared: Prepared) -> None:
        assert isinstance(prepared, Sequence)
        self._waiting.append(prepared)

    def cancel(self, request_id: str) -> bool:
        for sequence in self._waiting:
            if sequence.request_id == request_id:
                self._waiting.remove(sequence)
                return True
        found = self._active.pop(request_id, None)
        if found is None:
            return self._handoffs.cancel(request_id)
        self._engine.abort_request([request_id])
        self._handoffs.forget(found)
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._active or (self._waiting and self._has_room) or self._handoffs.has_work)

    @property
    def _has_room(self) -> bool:
        return len(self._active) + len(self._handoffs.receiving) < self._options.max_batch

    def kv_plane(self) -> KvPlane | None:
        return self._handoffs.offered

    def name_peers(self, peers: tuple[PrefillPort, ...]) -> None:
        self._handoffs.name_peers(peers)

    def load_now(self) -> EngineLoad:
        if not self._is_loaded:
            return EngineLoad()
        active = list(self._active.values())
        decoding = sum(sequence.decoding for sequence in active)
        return EngineLoad(
            waiting=len(self._waiting),
            prefilling=len(active) - decoding + len(self._handoffs.receiving),
            elsewhere=self._handoffs.elsewhere,
            decoding=decoding,
            cache_bytes=self._inside.cache_bytes,
            prefix_cache_bytes=self._inside.prefix_cache_bytes,
            steps=self._steps,
            prefill_tps=self._pace.prefill_tps,
            decode_tps=self._pace.decode_tps,
        )

    # ----------------------------------------------------------------------------------------------------------- steps

    def step(self) -> list[Output]:
        self._steps += 1
        outputs = self._handoffs.news()
        for sequence in self._handoffs.collect(self._here()):
            self._start(sequence, outputs)
        self._admit(outputs)
        self._handoffs.serve(self._loaded.chunk, idle=not self._engine.has_unfinished_requests())
        if self._engine.has_unfinished_requests():
            self._compute(outputs)
        return outputs

    def _compute(self, outputs: list[Output]) -> None:
        """A step of vLLM's."""
        answering = [sequence for sequence in self._active.values() if sequence.decoding]
        reading = len(self._active) - len(answering) + self._handoffs.reading
        self._inside.limit(self._pace.chunk_limit(len(answering), reading + len(self._waiting)) + len(answering))
        begun = time.monotonic()
        results = {result.request_id: result for result in self._engine.step()}
        seconds = time.monotonic() - begun
        read = self._handoffs.stepped({name for name, result in results.items() if result.finished})
        for sequence in list(self._active.values()):
            before, was_decoding = sequence.position, sequence.decoding
            events = self._advance(sequence, results.get(sequence.request_id), begun)
            if not was_decoding:
                read += max(0, sequence.position - max(before, sequence.spared))
            if events:
                outputs.append(Output(sequence.request_id, events))
        self._pace.stepped(read, len(answering), seconds)

    def _here(self) -> Here:
        """This node as the decision about a hand-off sees it."""
        return self._handoffs.here(self._active.values(), len(self._waiting))

    def _admit(self, outputs: list[Output]) -> None:
        while self._waiting and self._has_room:
            sequence = self._waiting.pop(0)
            told = self._handoffs.consider(sequence, self._here())
            if told is None:
                self._start(sequence, outputs)
            else:
                outputs += told

    def _start(self, sequence: Sequence, outputs: list[Output]) -> None:
        """Give a request to vLLM; what it refuses fails alone."""
        engine = self._engine
        # Entries under a name that nobody else knows are found by nobody.
        salt = None if sequence.keeps_prefix else f"alone-{next(self._salts)}"
        if salt is not None and sequence.received is not None:
            # Or vLLM would not look at what was received either.
            sequence.params.skip_reading_prefix_cache = False
        prompt = tokens_input(sequence.tokens, cache_salt=salt)
        try:
            request = engine.input_processor.process_inputs(
                sequence.request_id, prompt, sequence.params, supported_tasks=engine.get_supported_tasks()
            )
        except (ValueError, VLLMValidationError) as error:
            self._handoffs.forget(sequence)
            outputs.append(
                Output(sequence.request_id, [Failure.of(InvalidRequestError(f"vLLM refuses this: {error}"))])
            )
            return
        if sequence.constraint is not None:
            # After vLLM's own checks, which want a tokenizer to compile a grammar with; ours is compiled.
            assert request.sampling_params is not None
            request.sampling_params.structured_outputs = self._constraints.attach(sequence)
        self._active[sequence.request_id] = sequence
        sequence.vllm_id = engine.add_request(sequence.request_id, request, sequence.params)

    def _advance(self, sequence: Sequence, result: Any, begun: float) -> list[Event]:
        """What the step that began at `begun` brought one request."""
        events: list[Event] = []
        if result is not None:
            assert isinstance(result, RequestOutput)
            self._read(sequence, len(sequence.tokens), result.num_cached_tokens or 0, begun, events)
            self._write(sequence, result, events)
        elif not sequence.decoding:
            computed = self._inside.computed(sequence.vllm_id)
            if computed.tokens:
                self._read(sequence, computed.tokens, computed.cached, begun, events)
        if sequence.broken is not None:
            events.append(Failure.of(sequence.broken))
        if sequence.broken is not None or sequence.answer.finished:
            del self._active[sequence.request_id]
            self._handoffs.forget(sequence)
            if result is None or not result.finished:
                self._engine.abort_request([sequence.request_id])
        return events

    def _read(self, sequence: Sequence, position: int, cached: int, begun: float, events: list[Event]) -> None:
        """So many of the prompt's tokens are in the cache now."""
        if sequence.decoding:
            return
        if not sequence.accepted:
            sequence.accepted = True
            sequence.cached = cached
            sequence.position = cached
            events.append(sequence.answer.accept(cached, begun))
        total = len(sequence.tokens)
        sequence.spared = cached
        # A sequence that was put aside begins anew; its reader is told of nothing twice.
        if position > sequence.position:
            if position > sequence.told and (position < total or sequence.position > sequence.cached):
                events.append(PrefillProgress(min(position, total), total))
            sequence.position = position

    def _write(self, sequence: Sequence, result: RequestOutput, events: list[Event]) -> None:
        """The answer's next tokens."""
        answer = sequence.answer
        request = answer.request
        if not sequence.decoding:
            sequence.decoding = True
            answer.prefilled()
            if sequence.received is not None:
                answer.received(sequence.received.outcomes, sequence.received.used or 0)
                self._handoffs.forget(sequence)
            if request.echo or request.prompt_logprobs is not None:
                scores = prompt_scores(sequence.tokens, result.prompt_logprobs, request.prompt_logprobs or 0)
                events.append(score_prompt(self._text, request, sequence.tokens, scores))
            if answer.max_tokens == 0:
                events.extend(answer.finish("length"))
                return
        (completion,) = result.outputs
        for index, token in enumerate(completion.token_ids):
            told = None
            if request.logprobs is not None and completion.logprobs is not None:
                told = score(token, completion.logprobs[index], request.logprobs)
            events.extend(answer.add(token, told))
            if answer.finished:
                return
        if completion.finish_reason == "length":
            events.extend(answer.finish("length"))
        elif completion.finish_reason is not None and sequence.broken is None:
            sequence.broken = EngineError(f"vLLM ended the answer: {completion.finish_reason}.")

    def check_idle(self) -> None:
        """Assert that nothing is left of requests that have ended. For tests."""
        assert not self.has_work
        assert self._inside.is_empty
        assert self._registry is not None
        assert self._registry.empty

    def close(self) -> None:
        self._waiting.clear()
        if self._is_loaded:
            self._is_loaded = False
            self._handoffs.close()
            with contextlib.suppress(KeyError):
                self._engine.abort_request(list(self._active))
            self._active.clear()
            self._engine.engine_core.shutdown()
            # vLLM has one connector a process: the next engine would get this one's.
            ensure_kv_transfer_shutdown()
        if self._registry is not None:
            close_registry(self._registry)
