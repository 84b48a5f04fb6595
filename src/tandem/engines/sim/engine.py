"""A deterministic engine with set speeds: no weights, no arithmetic, real timing and real contract.

Tokens follow from a running hash of everything before them (and of the seed, unless the request is greedy), so that an
answer depends on its prompt alone. `decode_tps` is the pace of each running answer, `prefill_tps` that of one prompt at
a time; a step sleeps for what the slower real machine would need.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterable
from hashlib import blake2b

import msgspec

from tandem.engines.answer import Answer, score_prompt
from tandem.engines.base import Engine, EngineOptions, LoadProgress, Output, Prepared
from tandem.engines.sim.profile import SimProfile
from tandem.engines.sim.text import EOS, FIRST_WORD, VOCABULARY, WORDS, SimText
from tandem.errors import ContextTooLongError, CorruptModelError, UnsupportedError
from tandem.models.chat import prepare as render_prompt
from tandem.models.output.processor import OutputProcessor
from tandem.models.output.scores import TokenScore
from tandem.types import EngineLoad, Event, GenerationRequest, ModelInfo, PrefillProgress

PREFILL_CHUNK = 512
_PAIR = struct.Struct("<QI")


def chain(state: int, tokens: Iterable[int]) -> int:
    """The 64-bit hash of a sequence, continued by `tokens`."""
    for token in tokens:
        state = int.from_bytes(blake2b(_PAIR.pack(state, token), digest_size=8).digest(), "little")
    return state


class _Sequence(Prepared):
    def __init__(self, request_id: str, answer: Answer, script: list[int]) -> None:
        self.request_id = request_id
        self.answer = answer
        self.script = script
        self.position = -1
        self.state = 0
        self.due = 0.0


class SimEngine(Engine):
    """The simulated engine.

    Args:
        options: `profile` holds a `SimProfile` as plain data.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._profile = msgspec.convert(options.profile, SimProfile)
        self._text = SimText()
        self._waiting: list[_Sequence] = []
        self._prefilling: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._steps = 0

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
            kv_bytes_per_token=profile.layers * 2 * profile.kv_heads * profile.head_dim * 4,
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
        return _Sequence(request_id, answer, self._text.encode(self._profile.script))

    def submit(self, prepared: Prepared) -> None:
        assert isinstance(prepared, _Sequence)
        self._waiting.append(prepared)

    def cancel(self, request_id: str) -> bool:
        for queue in (self._waiting, self._prefilling, self._running):
            for sequence in queue:
                if sequence.request_id == request_id:
                    queue.remove(sequence)
                    return True
        return False

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prefilling or self._running)

    def load_now(self) -> EngineLoad:
        return EngineLoad(
            waiting=len(self._waiting),
            prefilling=len(self._prefilling),
            decoding=len(self._running),
            steps=self._steps,
            prefill_tps=self._profile.prefill_tps,
            decode_tps=self._profile.decode_tps * len(self._running),
        )

    def close(self) -> None:
        self._waiting.clear()
        self._prefilling.clear()
        self._running.clear()

    def step(self) -> list[Output]:
        self._steps += 1
        outputs: list[Output] = []
        while self._waiting and len(self._prefilling) + len(self._running) < self._options.max_batch:
            self._prefilling.append(self._waiting.pop(0))
        if self._prefilling:
            self._prefill(self._prefilling[0], outputs)
        elif self._running and self._profile.decode_tps:
            time.sleep(max(0.0, min(one.due for one in self._running) - time.monotonic()))
        now = time.monotonic()
        for sequence in [one for one in self._running if one.due <= now]:
            events = self._next_token(sequence)
            if sequence.answer.finished:
                self._running.remove(sequence)
            if events:
                outputs.append(Output(sequence.request_id, events))
        return outputs

    def _prefill(self, sequence: _Sequence, outputs: list[Output]) -> None:
        answer = sequence.answer
        tokens = answer.prompt.token_ids
        events: list[Event] = []
        if sequence.position < 0:
            events.append(answer.accept(0))
            sequence.position = 0
        chunk = tokens[sequence.position : sequence.position + PREFILL_CHUNK]
        if self._profile.prefill_tps:
            time.sleep(len(chunk) / self._profile.prefill_tps)
        sequence.state = chain(sequence.state, chunk)
        sequence.position += len(chunk)
        if len(tokens) > PREFILL_CHUNK:
            events.append(PrefillProgress(sequence.position, len(tokens)))
        if sequence.position == len(tokens):
            self._prefilling.remove(sequence)
            answer.prefilled()
            request = answer.request
            if request.echo or request.prompt_logprobs is not None:
                scores = [TokenScore(None)] + [self._score(token, request.prompt_logprobs or 0) for token in tokens[1:]]
                wanted = scores if request.prompt_logprobs is not None else []
                events.append(score_prompt(self._text, request, tokens, wanted))
            if answer.max_tokens == 0:
                events.extend(answer.finish("length"))
            else:
                sequence.due = time.monotonic() + self._token_seconds
                self._running.append(sequence)
        outputs.append(Output(sequence.request_id, events))

    @property
    def _token_seconds(self) -> float:
        return 1 / self._profile.decode_tps if self._profile.decode_tps else 0.0

    def _next_token(self, sequence: _Sequence) -> list[Event]:
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
        sequence.due += self._token_seconds
        return answer.add(token, None if request.logprobs is None else self._score(token, request.logprobs))

    def _score(self, token: int, top: int) -> TokenScore:
        others = [(token + 1 + index) % VOCABULARY for index in range(max(0, top - 1))]
        best = [(token, -0.1), *((other, -3.0 - index) for index, other in enumerate(others))]
        return TokenScore(-0.1, best[:top])
