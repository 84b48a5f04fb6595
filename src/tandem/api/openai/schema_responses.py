"""What the OpenAI routes answer, for `/openapi.json` and for tests. The bodies themselves are written by `collect`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class ResponseModel(BaseModel):
    """Nothing but the declared members."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PromptTokensDetails(ResponseModel):
    """How the prompt's tokens divide."""

    cached_tokens: int
    audio_tokens: int


class CompletionTokensDetails(ResponseModel):
    """How the answer's tokens divide."""

    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageObject(ResponseModel):
    """Token counts over all choices; a prompt with several answers counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprobObject(ResponseModel):
    """One alternative."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobObject(TopLogprobObject):
    """One token of the answer."""

    top_logprobs: list[TopLogprobObject]


class ChatLogprobs(ResponseModel):
    """Log-probabilities of a chat answer."""

    content: list[TokenLogprobObject]
    refusal: None


class FunctionObject(ResponseModel):
    """A called function; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallObject(ResponseModel):
    """One tool call."""

    id: str
    type: Literal["function"]
    function: FunctionObject


class AssistantMessage(ResponseModel):
    """The answer. `content` is null when there are only tool calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallObject] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoiceObject(ResponseModel):
    """One answer to a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(ResponseModel):
    """The response to a chat completion request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoiceObject]
    usage: UsageObject


class PeakMemory(ResponseModel):
    """Memory in bytes."""

    in_bytes: int = Field(alias="inBytes")


class HandoffStats(ResponseModel):
    """Where the prompt was read, and what that took. Times in seconds."""

    prefill: Literal["local", "remote", "partial"]
    reason: str
    peer: str | None
    codec: str | None
    remote_tokens: int
    local_tokens: int
    bytes: int
    queued_seconds: float
    computing_seconds: float
    exposed_seconds: float


class GenerationStats(ResponseModel):
    """What an answer cost. Times in seconds, rates in tokens per second."""

    prompt_tokens: int
    generation_tokens: int
    cached_tokens: int
    prefix_cache_hit: Literal["none", "partial", "exact"]
    queue_seconds: float
    prefill_seconds: float
    ttft_seconds: float
    decode_seconds: float
    prompt_tps: float
    generation_tps: float
    handoff: HandoffStats
    peak_memory_usage: PeakMemory


class BenchChatCompletion(ChatCompletion):
    """A chat completion with the statistics of its first answer."""

    generation_stats: GenerationStats


class CompletionLogprobsObject(ResponseModel):
    """Log-probabilities of a text completion: one entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoiceObject(ResponseModel):
    """One text completion."""

    index: int
    text: str
    logprobs: CompletionLogprobsObject | None
    finish_reason: FinishReason


class Completion(ResponseModel):
    """The response to a text completion request."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoiceObject]
    usage: UsageObject


class ModelObject(ResponseModel):
    """A model that is served, or on disk."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    hugging_face_id: str
    name: str
    description: str
    context_length: int
    tags: list[str]
    storage_size_megabytes: int
    supports_tensor: bool
    tasks: list[str]
    is_custom: bool
    family: str
    quantization: str
    base_model: str
    capabilities: list[str]
    reasoning_dialect: str
    aliases: list[str]
    state: str = Field(description="`ready`, another state of its instance, `downloaded`, or `known`.")


class ModelList(ResponseModel):
    """All models of this node."""

    object: Literal["list"]
    data: list[ModelObject]


class Cancelled(ResponseModel):
    """A request was told to end."""

    message: str
    command_id: str


class InstanceHealth(ResponseModel):
    """One instance, as far as health goes."""

    instance_id: str
    model: str
    state: str
    error: str | None
    restarts: int


class Health(ResponseModel):
    """`green`: every instance is ready; `yellow`: some are; `red`: none is, and `error` says why."""

    status: Literal["green", "yellow", "red"]
    instances: list[InstanceHealth]
    error: dict[str, Any] | None = None
