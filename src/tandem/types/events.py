"""What a request's stream consists of: every engine answers with these."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from tandem.errors import EngineError, TandemError, error_classes


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One alternative: its text, its id, its natural-log probability and its exact bytes."""

    token: str
    token_id: int
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token of the text with its log-probability. `logprob` is None for a prompt's first token."""

    token: str
    token_id: int
    logprob: float | None
    bytes: list[int]
    top: list[TopLogprob] = []


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The prompt was tokenised; `cached_tokens` of its `prompt_tokens` need no prefill."""

    prompt_tokens: int
    cached_tokens: int


class PrefillProgress(msgspec.Struct, frozen=True, array_like=True, tag="prefill"):
    """`processed_tokens` of `total_tokens` prompt tokens are in the cache."""

    processed_tokens: int
    total_tokens: int


class PromptScored(msgspec.Struct, frozen=True, array_like=True, tag="prompt"):
    """The prompt's text and, if they were asked for, its tokens' log-probabilities."""

    text: str
    logprobs: list[TokenLogprob] = []


class TextDelta(msgspec.Struct, frozen=True, array_like=True, tag="text"):
    """More of the answer, or of the reasoning before it. `logprobs` covers the tokens newly decided on."""

    text: str
    reasoning: bool = False
    logprobs: list[TokenLogprob] = []


class ToolCallDelta(msgspec.Struct, frozen=True, array_like=True, tag="tool"):
    """More of one tool call. The first delta of an `index` carries `id` and `name`; the `arguments` of all of them
    concatenate to JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Token counts of one answer. Cached tokens are part of the prompt, reasoning tokens of the completion."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class HandoffStatistics(msgspec.Struct, frozen=True):
    """Where a prompt was prefilled, and what that took. Times in seconds.

    Attributes:
        prefill: `local`; `remote`; `partial` when a hand-off broke off and the rest was computed here.
        reason: why, in one sentence.
        peer, codec: of the hand-off, if there was one.
        remote_tokens, local_tokens: prompt tokens that the peer's entries, and own work, supplied; the other ones came
            from the prefix cache.
        bytes: received, as sent.
        queued_seconds, computing_seconds: at the peer.
        exposed_seconds: of the transfer that computing did not hide, round trips included.
    """

    prefill: Literal["local", "remote", "partial"] = "local"
    reason: str = ""
    peer: str | None = None
    codec: str | None = None
    remote_tokens: int = 0
    local_tokens: int = 0
    bytes: int = 0
    queued_seconds: float = 0.0
    computing_seconds: float = 0.0
    exposed_seconds: float = 0.0


class Statistics(msgspec.Struct, frozen=True):
    """What one request cost. Times in seconds, rates in tokens per second, memory in bytes.

    Attributes:
        prompt_tps: prompt tokens that were not cached, per second from the start of the work to the first token.
        generation_tps: (n-1) / (time of last token - time of first token); 0 for a single token.
        peak_memory: the engine's peak since this request began.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    prefix_cache_hit: Literal["none", "partial", "exact"] = "none"
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    ttft_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tps: float = 0.0
    generation_tps: float = 0.0
    peak_memory: int = 0
    handoff: HandoffStatistics = HandoffStatistics()


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """The answer is complete. `stop_sequence` is the stop string that ended it, if one did."""

    reason: Literal["stop", "length", "tool_calls"]
    usage: Usage
    statistics: Statistics
    stop_sequence: str | None = None


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """The request ended in an error. Carries a `TandemError` across a process border."""

    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe `error`; anything that is not a `TandemError` becomes an `engine_error`."""
        if isinstance(error, TandemError):
            return cls(error.code, error.message, error.param, error.retry_after)
        return cls(EngineError.code, f"{type(error).__name__}: {error}")

    def error(self) -> TandemError:
        """The exception that this failure stands for."""
        kind = error_classes().get(self.code, EngineError)
        return kind(self.message, param=self.param, retry_after=self.retry_after)


Event: TypeAlias = Accepted | PrefillProgress | PromptScored | TextDelta | ToolCallDelta | Finished | Failure
"""What a request's stream consists of. `Finished` or `Failure` is the last event of every stream."""
