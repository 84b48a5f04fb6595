"""How models write tool calls: the markers around one, and how to read what is between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

CallParser: TypeAlias = Callable[[str, "list[dict[str, Any]]"], "dict[str, Any] | list[dict[str, Any]]"]
"""Text between the markers and the offered tools (OpenAI's form) to `{name, arguments[, id]}`, or several of them.
Raises whatever it likes on text that is no call."""

Style: TypeAlias = Literal["json", "bare", "whole"]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write a tool call.

    Attributes:
        name: what it is called in logs and errors.
        start, end: the markers. An empty `end` means that calls last until the end of the answer.
        style: `json`: JSON objects with `name` and `arguments` between the markers, read while they arrive;
            `bare`: the same, but the answer itself is the JSON object; `whole`: `parse` reads it when it is complete.
        parse: for `whole`.
        arguments_key: `arguments` or `parameters`; what the model itself writes. Both are understood.
    """

    name: str
    start: str
    end: str
    style: Style
    parse: CallParser | None = None
    arguments_key: str = "arguments"


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>", "json")
"""What we ask of models whose template knows no tools; also what Qwen 2.5 and 3 and the Hermes models write."""

LLAMA = CallFormat("llama", "<|python_tag|>", "", "bare", arguments_key="parameters")
"""Llama 3.1 and later: `{"name": ..., "parameters": {...}}`, sometimes behind `<|python_tag|>`."""


def find_call_format(tokenizer: Any, template: str | None) -> CallFormat | None:
    """The format that a model's own chat template asks for, or None if it asks for none that we can read.

    Args:
        tokenizer: mlx-lm's `TokenizerWrapper`, which recognises most formats.
        template: the chat template's source, where it has one.
    """
    if tokenizer.tool_parser is not None:
        name = tokenizer.tool_parser.__module__.rsplit(".", 1)[-1]
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        if name == "json_tools":
            return CallFormat(name, start, end, "json")
        return CallFormat(name, start, end, "whole", tokenizer.tool_parser)
    if template and "ipython" in template and '"parameters"' in template and "<|eot_id|>" in template:
        return LLAMA
    if template and "tools" in template and "<tool_call>" in template and "</tool_call>" in template:
        return HERMES
    return None
