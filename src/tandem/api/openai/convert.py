"""From OpenAI's bodies to `GenerationRequest`. Everything that needs more than one field is checked here."""

from __future__ import annotations

import json
import uuid
from typing import Literal

import msgspec

from tandem.api.openai.schema_chat import ChatMessage, ChatRequest, ContentPart, NamedToolChoice, ResponseFormat
from tandem.api.openai.schema_common import REFUSED, GenerationFields
from tandem.api.openai.schema_completions import MAX_PROMPTS, CompletionRequest
from tandem.errors import InvalidRequestError, UnsupportedError
from tandem.types import (
    ChatPrompt,
    GenerationRequest,
    JsonConstraint,
    Message,
    Sampling,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolCall,
    ToolChoice,
)

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_IMAGE_PARTS = frozenset({"image_url", "image", "input_image"})
_SEED_RANGE = 2**63


def chat_requests(body: ChatRequest) -> list[GenerationRequest]:
    """One request for each of the `n` answers.

    Raises:
        InvalidRequestError: fields contradict each other.
        UnsupportedError: something is asked for that we cannot do.
    """
    _refuse(body)
    if body.modalities and set(body.modalities) != {"text"}:
        raise UnsupportedError("`modalities` other than text are not supported.", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    request = GenerationRequest(
        prompt=_chat_prompt(body),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        sampling=_sampling(body),
        stop=body.stops,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        constraint=_constraint(body.response_format),
        ignore_eos=bool(body.ignore_eos),
        use_prefix_cache=body.use_prefix_cache is not False,
    )
    return _repeat(request, body.n or 1)


def completion_requests(body: CompletionRequest) -> list[GenerationRequest]:
    """One request for each prompt and each of its `n` answers, in the order of OpenAI's choice indexes.

    Raises:
        InvalidRequestError, UnsupportedError: as `chat_requests`.
    """
    _refuse(body)
    answers = body.n or 1
    echo = bool(body.echo)
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if body.suffix:
        raise UnsupportedError("`suffix` is not supported: filling in the middle needs a model for it.", param="suffix")
    if body.best_of is not None and body.best_of != answers:
        raise UnsupportedError("`best_of` must equal `n`: answers are not ranked.", param="best_of")
    if max_tokens == 0 and not echo:
        raise InvalidRequestError("`max_tokens` 0 needs `echo`: nothing would be returned.", param="max_tokens")
    prompt_logprobs = body.logprobs if echo else None
    if max_tokens == 0 and prompt_logprobs is None:
        prompt_logprobs = 0
    prompts = _prompts(body)
    if len(prompts) * answers > MAX_PROMPTS:
        raise InvalidRequestError(f"Prompts times `n` may be {MAX_PROMPTS} at most: send several requests.", param="n")
    request = GenerationRequest(
        prompt=prompts[0],
        max_tokens=max_tokens,
        sampling=_sampling(body),
        stop=body.stops,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        ignore_eos=bool(body.ignore_eos),
        use_prefix_cache=body.use_prefix_cache is not False,
    )
    return [
        answer for prompt in prompts for answer in _repeat(msgspec.structs.replace(request, prompt=prompt), answers)
    ]


def _refuse(body: GenerationFields) -> None:
    for name, value in (body.model_extra or {}).items():
        if name in REFUSED and value:
            raise UnsupportedError(f"`{name}` is not supported. {REFUSED[name]}", param=name)


def _repeat(request: GenerationRequest, answers: int) -> list[GenerationRequest]:
    seed = request.sampling.seed
    if answers == 1 or seed is None:
        return [request] * answers
    return [
        msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, seed=(seed + number) % _SEED_RANGE)
        )
        for number in range(answers)
    ]


def _sampling(body: GenerationFields) -> Sampling:
    # Samplers read a top_p of 0 as "off", but the smallest set of tokens with mass 0 is the likeliest token alone.
    only_likeliest = body.top_p == 0
    return Sampling(
        temperature=body.temperature,
        top_p=None if only_likeliest else body.top_p,
        top_k=1 if only_likeliest else (0 if body.top_k == -1 else body.top_k),
        min_p=body.min_p,
        seed=None if body.seed is None else body.seed % _SEED_RANGE,
        repetition_penalty=body.repetition_penalty,
        repetition_context_size=body.repetition_context_size,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
    )


def _prompts(body: CompletionRequest) -> list[TextPrompt | TokenPrompt]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if isinstance(prompt[0], int):
        return [TokenPrompt(tuple(prompt))]
    return [TextPrompt(item) if isinstance(item, str) else TokenPrompt(tuple(item)) for item in prompt]


def _constraint(form: ResponseFormat | None) -> JsonConstraint | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return JsonConstraint()
    if form.json_schema is None:
        raise InvalidRequestError(
            "`response_format` of type json_schema needs `json_schema`.", param="response_format.json_schema"
        )
    return JsonConstraint(form.json_schema.json_schema or {})


def _chat_prompt(body: ChatRequest) -> ChatPrompt:
    options = dict(body.chat_template_kwargs or {})
    thinking = options.pop("enable_thinking", None) if body.enable_thinking is None else body.enable_thinking
    if thinking is not None and not isinstance(thinking, bool):
        raise InvalidRequestError(
            "`enable_thinking` must be true or false.", param="chat_template_kwargs.enable_thinking"
        )
    options.pop("enable_thinking", None)
    effort: str | None = body.reasoning_effort
    if effort is None and thinking is not None:
        effort = "medium" if thinking else "none"
    elif effort is not None and thinking is None:
        thinking = effort != "none"
    return ChatPrompt(
        messages=tuple(_message(message, f"messages[{number}]") for number, message in enumerate(body.messages)),
        tools=tuple(
            Tool(tool.function.name, tool.function.description or "", tool.function.parameters or {})
            for tool in body.tools or ()
        ),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        thinking=thinking,
        reasoning_effort=effort,
        template_options=options,
    )


def _tool_choice(body: ChatRequest) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    names = {tool.function.name for tool in body.tools or ()}
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in names:
            raise InvalidRequestError(
                f"`tool_choice` names '{choice.function.name}', which is not among `tools`.", param="tool_choice"
            )
        return ToolChoice("named", choice.function.name)
    if choice == "required" and not names:
        raise InvalidRequestError("`tool_choice` required needs `tools`.", param="tool_choice")
    return ToolChoice(choice)


_ROLES: dict[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def _message(message: ChatMessage, param: str) -> Message:
    calls = tuple(
        ToolCall(
            call.id or f"call_{uuid.uuid4().hex[:24]}",
            call.function.name,
            _arguments(call.function.arguments),
        )
        for call in message.tool_calls or ()
    )
    call_id = message.tool_call_id
    # The older form has no ids: the function's name ties call and result together.
    if message.function_call is not None and not calls:
        name = message.function_call.name
        calls = (ToolCall(f"call_{name}", name, _arguments(message.function_call.arguments)),)
    if message.role == "function" and call_id is None and message.name is not None:
        call_id = f"call_{message.name}"
    return Message(
        role=_ROLES[message.role],
        content=_content(message.content, param),
        reasoning=message.reasoning_content or message.reasoning,
        tool_calls=calls,
        tool_call_id=call_id,
        name=message.name,
    )


def _arguments(arguments: str | dict[str, object] | None) -> str:
    if arguments is None:
        return "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _content(content: str | ContentPart | list[ContentPart] | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, ContentPart):
        return _part(content, f"{param}.content")
    return "\n".join(_part(part, f"{param}.content[{number}]") for number, part in enumerate(content))


def _part(part: ContentPart, param: str) -> str:
    if part.type in _TEXT_PARTS:
        if part.text is None:
            raise InvalidRequestError(f"`{param}`: a part of type {part.type} needs `text`.", param=param)
        return part.text
    if part.type == "refusal":
        return part.refusal or ""
    if part.type in _IMAGE_PARTS:
        raise UnsupportedError("Images are not supported yet: send text parts only.", param=param)
    raise UnsupportedError(
        f"Content parts of type '{part.type[:64]}' are not supported: send text parts only.", param=param
    )
