"""Messages in the form that chat templates read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from tandem.types import Message, Tool, ToolCall


def merge_system(messages: Sequence[Message]) -> list[Message]:
    """All system messages as one, at the beginning: most templates accept no other place for one."""
    system = [message.content for message in messages if message.role == "system"]
    others = [message for message in messages if message.role != "system"]
    if not system:
        return others
    return [Message("system", "\n".join(system)), *others]


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """The leading system message as the beginning of the first user message, for templates that know no system role."""
    if not messages or messages[0].role != "system":
        return list(messages)
    system, *others = messages
    for index, message in enumerate(others):
        if message.role == "user":
            others[index] = Message("user", f"{system.content}\n\n{message.content}", name=message.name)
            return others
    return [Message("user", system.content), *others]


def tool_description(tool: Tool) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def call_arguments(call: ToolCall) -> Any:
    """A call's arguments as an object. Text that is no JSON (a call that was cut) stays text."""
    if not call.arguments.strip():
        return {}
    try:
        return json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments


def short_call_id(call_id: str) -> str:
    """The nine letters or digits that Mistral's templates insist on, always the same for the same id."""
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def template_messages(
    messages: Sequence[Message], *, reasoning_key: str | None, short_ids: bool
) -> list[dict[str, Any]]:
    """Messages as dictionaries.

    Args:
        messages: the conversation.
        reasoning_key: where the template looks for an assistant message's reasoning, or None.
        short_ids: give tool calls ids of nine letters or digits.
    """
    rename = short_call_id if short_ids else str
    names: dict[str, str] = {}
    result: list[dict[str, Any]] = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning and reasoning_key:
            entry[reasoning_key] = message.reasoning
        if message.tool_calls:
            names.update((call.id, call.name) for call in message.tool_calls)
            entry["tool_calls"] = [
                {
                    "id": rename(call.id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call_arguments(call)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            entry["tool_call_id"] = rename(message.tool_call_id)
        name = message.name or names.get(message.tool_call_id or "")
        if name:
            entry["name"] = name
        result.append(entry)
    return result
