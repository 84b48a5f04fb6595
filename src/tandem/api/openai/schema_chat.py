"""The body of `POST /v1/chat/completions`, as clients send it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from tandem.api.openai.schema_common import GenerationFields, JsonObject, RequestModel

FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ContentPart(RequestModel):
    """One part of a message. Only the kinds that are text are understood."""

    # Any string is taken here, so that `convert` can refuse an image as an image.
    type: str = Field(
        description="Images and others are refused.",
        json_schema_extra={"enum": ["text", "input_text", "output_text", "refusal"]},
    )
    text: str | None = None
    refusal: str | None = None


class FunctionCall(RequestModel):
    """A call the model made; `arguments` is JSON text (an object is taken, too)."""

    name: str
    arguments: str | JsonObject | None = None


class ChatToolCall(RequestModel):
    """One tool call of an earlier answer."""

    id: str | None = None
    type: str | None = "function"
    function: FunctionCall


class ChatMessage(RequestModel):
    """One turn. `content` is text, one part or a list of parts; parts are joined by line breaks."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | ContentPart | list[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None


class FunctionDefinition(RequestModel):
    """A function the model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ChatTool(RequestModel):
    """A tool; only functions are understood."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(RequestModel):
    """The function that must be called."""

    name: FunctionName


class NamedToolChoice(RequestModel):
    """Requires one particular function."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFormat(RequestModel):
    """A named JSON schema."""

    name: str | None = None
    description: str | None = None
    json_schema: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatRequest(GenerationFields):
    """A chat completion request."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="At most this many generated tokens.")
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="Wins over `max_tokens`.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Needs `logprobs`.")
    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: JsonObject | None = Field(None, description="Further variables of the chat template.")
    modalities: list[Annotated[str, Field(json_schema_extra={"enum": ["text"]})]] | None = None
    metadata: Any = Field(None, description="Accepted and ignored.")
    store: Any = Field(None, description="Accepted and ignored.")
    service_tier: Any = Field(None, description="Accepted and ignored.")


class BenchChatRequest(ChatRequest):
    """A chat completion request with exo's bench conventions: an exact number of tokens, and a cold cache."""

    ignore_eos: bool | None = Field(True, description="Generate exactly `max_tokens` tokens.")
    use_prefix_cache: bool | None = Field(False, description="Read and fill the prefix cache.")
