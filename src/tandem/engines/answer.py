"""One request's bookkeeping, the same in every engine: when it ends, what it cost, what to tell its reader."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from tandem.kv.transfer import Outcome
from tandem.models.output.processor import OutputProcessor
from tandem.models.output.scores import TokenScore, describe_score
from tandem.models.prompt import RenderedPrompt
from tandem.models.text import TextModel
from tandem.placement.handoff import Decision
from tandem.types import (
    Accepted,
    Event,
    Finished,
    GenerationRequest,
    HandoffStatistics,
    PromptScored,
    Statistics,
    TextPrompt,
    Usage,
)


class Answer:
    """From the prompt's acceptance to the `Finished` event.

    Args:
        prompt: the rendered prompt.
        output: turns tokens into text and tool-call events.
        eos_ids: tokens that end the answer.
        max_tokens: generated tokens at most; at least 1 unless the request only scores its prompt.
        arrived: `time.monotonic()` when the request reached the runner.
        peak_memory: bytes, asked when the answer ends.
    """

    def __init__(
        self,
        request_id: str,
        request: GenerationRequest,
        prompt: RenderedPrompt,
        output: OutputProcessor,
        eos_ids: frozenset[int],
        max_tokens: int,
        arrived: float,
        peak_memory: Callable[[], int] = lambda: 0,
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.finished = False
        self.generated = 0
        self._output = output
        self._eos_ids = frozenset[int]() if request.ignore_eos else eos_ids
        self._cached = 0
        self._reason = ""
        self._outcomes: list[Outcome] = []
        self._remote_tokens = 0
        self.arrived = arrived
        self._peak_memory = peak_memory
        self._started = self._prefilled = self._first = self._last = arrived

    def accept(self, cached: int, began: float | None = None) -> Accepted:
        """Work begins, or began at `began`; `cached` prompt tokens need none."""
        self._started = time.monotonic() if began is None else began
        self._cached = cached
        return Accepted(len(self.prompt.token_ids), cached)

    def decided(self, decision: Decision) -> None:
        """Whether another node is asked to prefill, and why."""
        self._reason = decision.reason

    def received(self, outcomes: list[Outcome], tokens: int) -> None:
        """Other nodes' prefill ended; `tokens` of it are used.

        Args:
            outcomes: of each peer that was asked, in order.
        """
        self._outcomes = outcomes
        self._remote_tokens = tokens

    def prefilled(self) -> None:
        """The prompt is in the cache."""
        self._prefilled = time.monotonic()

    def add(self, token: int, score: TokenScore | None) -> list[Event]:
        """The next generated token's events; the last of them is `Finished` when it ends the answer."""
        self._last = time.monotonic()
        if self.generated == 0:
            self._first = self._last
        self.generated += 1
        if token in self._eos_ids:
            return self.finish("stop")
        events: list[Event] = [*self._output.feed(token, score)]
        if self._output.stopped:
            events += self.finish("stop")
        elif self.generated >= self.max_tokens:
            events += self.finish("length")
        return events

    def finish(self, reason: Literal["stop", "length"]) -> list[Event]:
        """End the answer now: what was held back, and `Finished`."""
        self.finished = True
        events: list[Event] = [*self._output.finish(reason)]
        usage = Usage(
            prompt_tokens=len(self.prompt.token_ids),
            completion_tokens=self.generated,
            cached_tokens=self._cached,
            reasoning_tokens=self._output.reasoning_tokens,
        )
        events.append(Finished(self._output.reason, usage, self.statistics(), self._output.stop_sequence))
        return events

    def statistics(self) -> Statistics:
        """What the request cost so far."""
        prompt_tokens = len(self.prompt.token_ids)
        prefill = self._prefilled - self._started
        decode = self._last - self._first
        hit: Literal["none", "partial", "exact"]
        hit = "none" if not self._cached else "exact" if self._cached >= prompt_tokens - 1 else "partial"
        # Up to the first token: the prompt's last token is processed by the step that brings it.
        reading = self._first - self._started
        return Statistics(
            prompt_tokens=prompt_tokens,
            generation_tokens=self.generated,
            cached_tokens=self._cached,
            prefix_cache_hit=hit,
            queue_seconds=self._started - self.arrived,
            prefill_seconds=prefill,
            ttft_seconds=self._first - self.arrived,
            decode_seconds=decode,
            prompt_tps=(prompt_tokens - self._cached) / reading if reading > 0 else 0.0,
            generation_tps=(self.generated - 1) / decode if decode > 0 else 0.0,
            peak_memory=self._peak_memory(),
            handoff=self._handoff(prompt_tokens),
        )

    def _handoff(self, prompt_tokens: int) -> HandoffStatistics:
        outcomes = self._outcomes
        local = prompt_tokens - self._cached - self._remote_tokens
        if not outcomes:
            return HandoffStatistics(reason=self._reason, local_tokens=local)
        last = outcomes[-1]
        whole = last.error is None
        failures = [f"{outcome.peer}: {outcome.error}" for outcome in outcomes if outcome.error is not None]
        rest = [f"{last.peer} did the rest."] if whole and failures else []
        return HandoffStatistics(
            prefill="remote" if whole else "partial" if self._remote_tokens else "local",
            reason=" ".join([*failures, *rest]) or self._reason,
            peer=last.peer,
            codec=last.codec,
            remote_tokens=self._remote_tokens,
            local_tokens=local,
            bytes=sum(outcome.payload_bytes for outcome in outcomes),
            queued_seconds=sum(outcome.queued for outcome in outcomes),
            computing_seconds=sum(outcome.computing for outcome in outcomes),
            exposed_seconds=sum(outcome.transferring for outcome in outcomes),
        )


def score_prompt(
    text: TextModel, request: GenerationRequest, tokens: list[int], scores: list[TokenScore]
) -> PromptScored:
    """The event that answers `echo` and `prompt_logprobs`.

    Args:
        scores: one for each of `tokens`, or none.
    """
    prompt = request.prompt
    echoed = ""
    if request.echo:
        echoed = prompt.text if isinstance(prompt, TextPrompt) else text.decode(tokens)
    described = [describe_score(text, token, score) for token, score in zip(tokens, scores, strict=False)]
    return PromptScored(echoed, described)
