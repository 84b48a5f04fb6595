"""A deterministic engine with set speeds: no weights, no arithmetic, real timing and real contract.

Tokens follow from a running hash of everything before them (and of the seed, unless the request is greedy), so that an
answer depends on its prompt alone. `decode_tps` is the pace of each running answer, `prefill_tps` that of one prompt at
a time, an own one or another node's; a step sleeps for what the slower real machine would need. What an answer loses to
a prefill step it does not get back.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import msgspec

from tandem.engines.answer import Answer, score_prompt
from tandem.engines.base import Engine, EngineOptions, KvPlane, LoadProgress, Output, PrefillPort, Prepared
from tandem.engines.sim.cache import chain, layout_of
from tandem.engines.sim.device import Device
from tandem.engines.sim.handoffs import SimHandoffs
from tandem.engines.sim.prefix import NOTHING, Prefix, SimPrefixCache
from tandem.engines.sim.profile import SimProfile
from tandem.engines.sim.sequence import Sequence
from tandem.engines.sim.text import EOS, FIRST_WORD, VOCABULARY, WORDS, SimText
from tandem.errors import ContextTooLongError, CorruptModelError, UnsupportedError
from tandem.models.chat import prepare as render_prompt
from tandem.models.output.processor import OutputProcessor
from tandem.models.output.scores import TokenScore
from tandem.types import EngineLoad, Event, GenerationRequest, ModelInfo, PrefillProgress

PREFILL_CHUNK = 512
SMALLEST_CHUNK = 64


class SimEngine(Engine):
    """The simulated engine.

    Args:
        options: `profile` holds a `SimProfile` as plain data.

    Raises:
        ConfigError: peers are named that may not be talked to without a cluster secret.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._profile = profile = msgspec.convert(options.profile, SimProfile)
        self._text = SimText()
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._running: list[Sequence] = []
        self._steps = 0
        self._chunk = options.prefill_chunk or PREFILL_CHUNK
        self._device = Device(profile.prefill_tps)
        entries = profile.prefix_entries if profile.prefix_hits else 0
        self._bytes_per_token = layout_of(profile).bytes_per_token
        self._prefix = SimPrefixCache(entries, self._bytes_per_token)
        self._handoffs = SimHandoffs(options, profile, self._prefix, self._device, self._chunk, lambda: self.wake())

    def load(self, report: Callable[[LoadProgress], None]) -> ModelInfo:
        profile = self._profile
        for layer in range(profile.layers):
            time.sleep(profile.load_seconds / profile.layers)
            report(LoadProgress(layer + 1, profile.layers))
        if profile.fail_at_load:
            raise CorruptModelError("The simulated model was told to fail at loading.")
        return ModelInfo(
            model_id=self._options.model_id,
            engine="sim",
            architecture="sim",
            context_length=self._options.context_length or profile.context_length,
            vocabulary_size=VOCABULARY,
            dtype="float32",
            capabilities=self._text.capabilities,
            kv_bytes_per_token=self._bytes_per_token,
        )

    def warm_up(self) -> None:
        chain(0, range(64))

    def prepare(self, request_id: str, request: GenerationRequest) -> Prepared:
        arrived = time.monotonic()
        if request.constraint is not None:
            raise UnsupportedError("The simulated engine cannot constrain its answers.", param="response_format")
        prompt = render_prompt(self._text, request.prompt)
        limit = self._options.context_length or self._profile.context_length
        room = limit - len(prompt.token_ids)
        if room < (0 if request.max_tokens == 0 else 1):
            raise ContextTooLongError(
                f"The prompt has {len(prompt.token_ids)} tokens; the context holds {limit}, answer included."
            )
        max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
        output = OutputProcessor(self._text, prompt, stop=request.stop, logprobs=request.logprobs is not None)
        answer = Answer(request_id, request, prompt, output, self._text.eos_ids, max_tokens, arrived)
        return Sequence(request_id, answer, self._text.encode(self._profile.script))

    def submit(self, prepared: Prepared) -> None:
        assert isinstance(prepared, Sequence)
        self._waiting.append(prepared)

    def cancel(self, request_id: str) -> bool:
        for queue in (self._waiting, self._prefilling, self._running):
            for sequence in queue:
                if sequence.request_id == request_id:
                    queue.remove(sequence)
                    return True
        return self._handoffs.cancel(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._prefilling or self._running or (self._waiting and self._has_room) or self._handoffs.has_work)

    @property
    def _has_room(self) -> bool:
        active = len(self._prefilling) + len(self._running) + len(self._handoffs.receiving)
        return active < self._options.max_batch

    def kv_plane(self) -> KvPlane:
        return self._handoffs.plane

    def name_peers(self, peers: tuple[PrefillPort, ...]) -> None:
        self._handoffs.name_peers(peers)

    def load_now(self) -> EngineLoad:
        return EngineLoad(
            waiting=len(self._waiting),
            prefilling=len(self._prefilling) + len(self._handoffs.receiving),
            elsewhere=self._handoffs.elsewhere,
            decoding=len(self._running),
            prefix_cache_bytes=self._prefix.nbytes,
            steps=self._steps,
            prefill_tps=self._profile.prefill_tps,
            decode_tps=self._profile.decode_tps * len(self._running),
        )

    def check_idle(self) -> None:
        """Assert that nothing is left of requests that have ended. For tests."""
        assert not self.has_work
        assert not self._waiting
        assert not self._handoffs.receiving
        self._prefix.check()

    def close(self) -> None:
        self._waiting.clear()
        self._prefilling.clear()
        self._running.clear()
        self._handoffs.close()
        self._prefix.clear()

    def step(self) -> list[Output]:
        self._steps += 1
        outputs: list[Output] = []
        received = self._handoffs.collect()
        if received is not None:
            # Mostly one token is left of it: that must not wait for somebody's long prompt.
            place = 0 if received.missing <= self._chunk else len(self._prefilling)
            self._prefilling.insert(place, received)
        while self._waiting and self._has_room:
            self._admit(self._waiting.pop(0), outputs)
        # A check takes a fraction of the time that a chunk does. Own prompts and those of peers take turns.
        if self._handoffs.collectable:
            pass
        elif self._handoffs.serving and (self._steps % 2 or not self._prefilling):
            # Its answers are paced by sleeping, so that it always has the time to wait for a slow client.
            self._handoffs.serve(self._chunk_limit(), idle=True)
        elif self._prefilling:
            self._prefill(self._prefilling[0], outputs)
        elif self._running and self._profile.decode_tps:
            time.sleep(max(0.0, min(one.due for one in self._running) - time.monotonic()))
        now = time.monotonic()
        for sequence in [one for one in self._running if one.due <= now]:
            events = self._next_token(sequence, now)
            if sequence.answer.finished:
                self._running.remove(sequence)
                if sequence.keeps_prefix:
                    # The last token was chosen and never read.
                    self._prefix.store([*sequence.tokens, *sequence.written[:-1]], tail=True)
            if events:
                outputs.append(Output(sequence.request_id, events))
        return outputs

    def _chunk_limit(self) -> int:
        if not (self._running and self._profile.prefill_tps):
            return self._chunk
        affordable = int(self._options.max_decode_stall * self._profile.prefill_tps)
        return min(self._chunk, max(SMALLEST_CHUNK, affordable))

    def _admit(self, sequence: Sequence, outputs: list[Output]) -> None:
        """Let a peer prefill the prompt, or put it into the line for this engine's own device."""
        held = self._held(sequence)
        own = sum(self._device.seconds(one.missing) for one in self._prefilling)
        mine = self._device.seconds(len(sequence.tokens) - held.length)
        queue = own + min(self._handoffs.serving_seconds, own + mine)
        if self._handoffs.consider(sequence, held, queue):
            outputs.append(Output(sequence.request_id, [sequence.answer.accept(held.length)]))
        else:
            self._prefilling.append(sequence)

    def _held(self, sequence: Sequence) -> Prefix:
        return self._prefix.find(sequence.tokens[:-1]) if sequence.keeps_prefix and not sequence.scored else NOTHING

    def _prefill(self, sequence: Sequence, outputs: list[Output]) -> None:
        answer, tokens = sequence.answer, sequence.tokens
        events: list[Event] = []
        if sequence.position < 0:
            sequence.position, sequence.state = self._held(sequence)
            events.append(answer.accept(sequence.position))
        begun = time.monotonic()
        chunk = tokens[sequence.position : sequence.position + self._chunk_limit()]
        sequence.state = chain(sequence.state, chunk)
        sequence.position += len(chunk)
        done = sequence.position == len(tokens)
        self._device.prefilled(len(chunk), begun)
        if sequence.keeps_prefix:
            self._prefix.store(tokens[: sequence.position], tail=done)
        if len(tokens) > self._chunk:
            events.append(PrefillProgress(sequence.position, len(tokens)))
        if done:
            self._prefilling.remove(sequence)
            self._start_answer(sequence, events)
        if events:
            outputs.append(Output(sequence.request_id, events))

    def _start_answer(self, sequence: Sequence, events: list[Event]) -> None:
        answer, tokens = sequence.answer, sequence.tokens
        answer.prefilled()
        request = answer.request
        if request.echo or request.prompt_logprobs is not None:
            scores = [TokenScore(None)] + [self._score(token, request.prompt_logprobs or 0) for token in tokens[1:]]
            events.append(score_prompt(self._text, request, tokens, scores if sequence.scored else []))
        if answer.max_tokens == 0:
            events.extend(answer.finish("length"))
        else:
            sequence.due = time.monotonic() + self._token_seconds
            self._running.append(sequence)

    @property
    def _token_seconds(self) -> float:
        return 1 / self._profile.decode_tps if self._profile.decode_tps else 0.0

    def _next_token(self, sequence: Sequence, now: float) -> list[Event]:
        profile, answer = self._profile, sequence.answer
        count = answer.generated
        if profile.die_at_token and count + 1 == profile.die_at_token:
            os._exit(profile.die_status)
        if profile.hang_at_token and count + 1 == profile.hang_at_token:
            threading.Event().wait()
        request = answer.request
        length = len(sequence.script) if sequence.script else profile.answer_tokens
        if count >= length and not request.ignore_eos:
            token = EOS
        elif sequence.script:
            token = sequence.script[count % length]
        else:
            seed = 0 if request.sampling.temperature == 0 else request.sampling.seed or 0
            token = FIRST_WORD + chain(sequence.state, [seed & 0xFFFFFFFF]) % len(WORDS)
        sequence.state = chain(sequence.state, [token])
        sequence.written.append(token)
        sequence.due = max(sequence.due + self._token_seconds, now)
        return answer.add(token, None if request.logprobs is None else self._score(token, request.logprobs))

    def _score(self, token: int, top: int) -> TokenScore:
        others = [(token + 1 + index) % VOCABULARY for index in range(max(0, top - 1))]
        best = [(token, -0.1), *((other, -3.0 - index) for index, other in enumerate(others))]
        return TokenScore(-0.1, best[:top])
