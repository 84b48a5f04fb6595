"""The one internal request: every HTTP dialect is translated into it."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec


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
