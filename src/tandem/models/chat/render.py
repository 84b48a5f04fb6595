"""Prompts of every kind to token ids, and a conversation through the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tandem.errors import InvalidRequestError
from tandem.models.call_formats import HERMES
from tandem.models.chat.fallback import describe_tools, without_tools
from tandem.models.chat.messages import fold_system, merge_system, template_messages, tool_description
from tandem.models.prompt import RenderedPrompt
from tandem.models.text import TextModel
from tandem.types import ChatPrompt, Message, Prompt, TextPrompt, Tool

# Parameters of the renderer itself, which a request must not touch: `chat_template` would run a template of the
# client's choice, the others would change what comes back.
_RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_NINE_CHARACTER_IDS = re.compile(r"length\s*[!=]=\s*9\b")


def prepare(text_model: TextModel, prompt: Prompt) -> RenderedPrompt:
    """Token ids of any prompt.

    Raises:
        InvalidRequestError: the template refuses the conversation, a token id does not exist, or a prompt is empty.
    """
    if isinstance(prompt, ChatPrompt):
        return render(text_model, prompt)
    if isinstance(prompt, TextPrompt):
        token_ids = text_model.encode(prompt.text, add_special_tokens=True)
        if not token_ids:
            token_ids = _empty_prompt(text_model)
        return RenderedPrompt(token_ids, prompt.text)
    wrong = next((token for token in prompt.token_ids if not 0 <= token < text_model.vocabulary_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"Token id {wrong} is not in this model's vocabulary (0 to {text_model.vocabulary_size - 1}).",
            param="prompt",
        )
    return RenderedPrompt(list(prompt.token_ids) or _empty_prompt(text_model))


def render(text_model: TextModel, prompt: ChatPrompt) -> RenderedPrompt:
    """A conversation as the model's chat template writes it.

    Raises:
        InvalidRequestError: the model has no chat template, or the template refuses the conversation; the message is
            then the template's own.
    """
    if not text_model.has_chat_template:
        raise InvalidRequestError(
            "This model has no chat template. Send a plain prompt to /v1/completions, or use an instruct model.",
            param="messages",
        )
    if not prompt.messages:
        raise InvalidRequestError("`messages` is empty; a conversation needs at least one message.", param="messages")
    tools = _offered_tools(prompt)
    messages, prefill = _split_prefill(prompt.messages)
    try:
        text = _apply(text_model, prompt, messages, tools)
    except RecursionError as error:
        raise InvalidRequestError("`tools` are nested too deeply.", param="tools") from error
    inside, may_think = _thinking_state(text_model, text, prompt.thinking)
    if prefill is not None:
        text, inside = _append_prefill(text_model, text, prefill, inside)
        may_think = False
    call_format = None
    if tools:
        call_format = text_model.call_format if text_model.knows_tools else HERMES
    return RenderedPrompt(
        token_ids=text_model.encode(text, add_special_tokens=False),
        text=text,
        is_chat=True,
        inside_thinking=inside,
        may_think=may_think,
        continues=prefill is not None,
        call_format=call_format,
        tools=[tool_description(tool) for tool in tools],
        parallel_tool_calls=prompt.parallel_tool_calls,
    )


def _offered_tools(prompt: ChatPrompt) -> tuple[Tool, ...]:
    choice = prompt.tool_choice
    if choice.mode == "none":
        return ()
    if choice.mode == "required" and not prompt.tools:
        raise InvalidRequestError("`tool_choice` requires a tool call, but `tools` is empty.", param="tool_choice")
    if choice.mode == "named" and all(tool.name != choice.name for tool in prompt.tools):
        raise InvalidRequestError(
            f"`tool_choice` names the tool {choice.name!r}, which is not in `tools`.", param="tool_choice"
        )
    return prompt.tools


def _split_prefill(messages: Sequence[Message]) -> tuple[list[Message], Message | None]:
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls:
        return list(messages), None
    return list(messages[:-1]), last if last.content or last.reasoning else None


def _apply(text_model: TextModel, prompt: ChatPrompt, messages: list[Message], tools: Sequence[Tool]) -> str:
    source = text_model.template or ""
    messages = merge_system(messages)
    if not text_model.knows_tools:
        messages = without_tools(messages)
        if tools:
            section = describe_tools(tools, prompt.tool_choice, prompt.parallel_tool_calls)
            messages = merge_system([*messages, Message("system", section)])
    if not text_model.accepts_system:
        messages = fold_system(messages)
    variables = _variables(text_model, prompt)
    if tools and text_model.knows_tools:
        variables["tools"] = [tool_description(tool) for tool in tools]
    entries = template_messages(
        messages,
        reasoning_key=_reasoning_key(source),
        short_ids=_NINE_CHARACTER_IDS.search(source) is not None,
    )
    try:
        return text_model.apply_template(entries, add_generation_prompt=True, **variables)
    except Exception as error:  # the template is the model author's code and raises what it likes
        raise InvalidRequestError(
            f"The model's chat template refuses this conversation: {error}", param="messages"
        ) from error


def _variables(text_model: TextModel, prompt: ChatPrompt) -> dict[str, Any]:
    reserved = _RESERVED_VARIABLES.intersection(prompt.template_options)
    if reserved:
        raise InvalidRequestError(
            f"Template options must not set {', '.join(sorted(reserved))}; these belong to the server.",
            param="chat_template_kwargs",
        )
    variables = dict(prompt.template_options)
    thinking = prompt.thinking
    if thinking is None and prompt.reasoning_effort is not None:
        thinking = prompt.reasoning_effort != "none"
    if thinking is not None:
        variables.setdefault("enable_thinking", thinking)
    if text_model.renders_in_python:
        # A function, unlike a template, refuses variables that it does not know.
        return variables
    if thinking is not None:
        variables.setdefault("thinking", thinking)
    if prompt.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", prompt.reasoning_effort)
    return variables


def _reasoning_key(template: str) -> str | None:
    if "reasoning_content" in template or not template:
        return "reasoning_content"
    if re.search(r"message(\.|\[['\"])thinking\b", template):
        return "thinking"
    if re.search(r"message(\.|\[['\"])reasoning\b", template):
        return "reasoning"
    return None


def _thinking_state(text_model: TextModel, text: str, wanted: bool | None) -> tuple[bool, bool]:
    """Whether the prompt ends inside the reasoning, and whether the model may open it by itself."""
    tags = text_model.thinking
    if tags is None:
        return False, False
    end = text.rstrip()
    inside = end.endswith(tags.start)
    closed = end.endswith(tags.end)
    return inside, not inside and not closed and wanted is not False


def _append_prefill(text_model: TextModel, text: str, prefill: Message, inside: bool) -> tuple[str, bool]:
    """Continue a partial assistant message: its reasoning inside the reasoning, its content after it."""
    tags = text_model.thinking
    if tags is None:
        return text + prefill.content, False
    if prefill.reasoning:
        if not inside:
            text += f"{tags.start}\n"
            inside = True
        text += prefill.reasoning
    if prefill.content:
        if inside:
            text += f"\n{tags.end}\n\n"
        text += prefill.content
        # A client that does not separate the two sends reasoning as part of the content.
        inside = prefill.content.rfind(tags.start) > prefill.content.rfind(tags.end)
    return text, inside


def _empty_prompt(text_model: TextModel) -> list[int]:
    """What an empty text starts from: the token that begins, or else separates, documents."""
    if text_model.bos_id is not None:
        return [text_model.bos_id]
    if text_model.eos_ids:
        return [min(text_model.eos_ids)]
    raise InvalidRequestError("The prompt is empty; send at least one token.", param="prompt")
