"""The one internal request, and the stream of events that answers it.

Every HTTP dialect is translated into a `GenerationRequest`; every engine answers with `Event`s. Both travel between
the server and its runner subprocesses as msgpack (`msgspec`), so all of them are frozen structs of plain data.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from tandem.errors import EngineError, TandemError, error_classes

# ---------------------------------------------------------------------------------------------------------- request


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call that the model made in an earlier turn. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a conversation, already reduced to text."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class ToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether the model may, must or must not call a tool; `named` requires the tool called `name`."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None


class ChatPrompt(msgspec.Struct, frozen=True, omit_defaults=True, tag="chat"):
    """Messages to be rendered with the model's chat template.

    Attributes:
        thinking: True or False switches a thinking model's reasoning; None leaves it to the model's default.
        reasoning_effort: passed to templates that know it (`none`, `minimal`, `low`, `medium`, `high`, `xhigh`).
        parallel_tool_calls: False stops the answer after its first tool call.
        template_options: further variables for the chat template.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    thinking: bool | None = None
    reasoning_effort: str | None = None
    template_options: dict[str, Any] = {}


class TextPrompt(msgspec.Struct, frozen=True, omit_defaults=True, tag="text"):
    """Plain text, tokenised as it stands, with the tokenizer's usual special tokens (a leading BOS)."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True, omit_defaults=True, tag="tokens"):
    """Token ids, used unchanged."""

    token_ids: tuple[int, ...]


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokenPrompt


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. None means: the model card's value, else the model's own, else ours.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens with at least this probability mass; 1 keeps all.
        top_k: keep this many tokens; 0 keeps all.
        min_p: drop tokens less likely than this share of the likeliest; 0 drops none.
        seed: same seed, same request, same text, whatever else runs. None draws a fresh one.
        repetition_penalty: multiplicative, over the last `repetition_context_size` tokens; 1 is off.
        presence_penalty, frequency_penalty: additive, over the generated tokens (OpenAI's definition).
        logit_bias: added to the logits, by token id.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] = {}


class JsonConstraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer must be JSON; with a schema, JSON that the schema accepts. An empty schema means any object."""

    schema: dict[str, Any] = {}


class GenerationRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One answer to generate. `n` answers are `n` requests.

    Attributes:
        max_tokens: at most this many generated tokens; None means as many as the context holds. 0 is allowed
            together with `prompt_logprobs`: score the prompt, generate nothing.
        stop: the answer ends before the first of these; no part of one is emitted.
        logprobs: None for no log-probabilities, else how many alternatives to report per token (0 is allowed).
        prompt_logprobs: the same, for every token of the prompt.
        echo: emit the prompt's own text before the answer (text and token prompts only).
        ignore_eos: never end before `max_tokens` (benches).
        use_prefix_cache: False neither reads nor fills the prefix cache.
    """

    prompt: Prompt
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    constraint: JsonConstraint | None = None
    ignore_eos: bool = False
    use_prefix_cache: bool = True


# ----------------------------------------------------------------------------------------------------------- events


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


# ------------------------------------------------------------------------------------------------------- description


class ModelInfo(msgspec.Struct, frozen=True):
    """What a loaded instance says of its model.

    Attributes:
        context_length: the longest prompt plus answer, in tokens.
        capabilities: `text`, `thinking`, `tools`, ...
        engine: `mlx` or `sim`.
        dtype: of the weights as loaded, e.g. `float32`.
        weight_bytes: memory that the weights take.
        kv_bytes_per_token: cache growth per token and sequence, 0 where it is constant.
    """

    model_id: str
    engine: str
    architecture: str
    context_length: int
    vocabulary_size: int
    dtype: str
    capabilities: tuple[str, ...] = ("text",)
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0


class EngineLoad(msgspec.Struct, frozen=True):
    """How busy an engine is now. Counts of requests, bytes of memory; `steps` grows with every engine step."""

    waiting: int = 0
    prefilling: int = 0
    decoding: int = 0
    cache_bytes: int = 0
    prefix_cache_bytes: int = 0
    active_memory: int = 0
    steps: int = 0
    prefill_tps: float = 0.0
    decode_tps: float = 0.0
