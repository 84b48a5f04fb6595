"""A prompt that is ready for an engine, and the state in which its answer begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tandem.models.call_formats import CallFormat


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Token ids and the start state of the answer's parser.

    Attributes:
        token_ids: what the engine prefills.
        text: the rendered text, or None where only token ids were given.
        is_chat: the answer may hold reasoning and tool calls; plain prompts get plain text.
        inside_thinking: the prompt ends with the marker that opens the model's reasoning.
        may_think: the model may open its reasoning by itself.
        continues: the answer goes on with the prompt's own text (a plain prompt, or a partial assistant message), so
            a space at its beginning is meant.
        call_format: how tool calls are written, if the request offers tools.
        tools: the offered tools in OpenAI's form, for parsers that need their schemas.
        parallel_tool_calls: False ends the answer after its first tool call.
    """

    token_ids: list[int]
    text: str | None = None
    is_chat: bool = False
    inside_thinking: bool = False
    may_think: bool = False
    continues: bool = True
    call_format: CallFormat | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    parallel_tool_calls: bool = True
