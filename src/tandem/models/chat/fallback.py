"""Tools for models whose chat template knows none: described in the system message, called in Hermes' markup."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tandem.models.call_formats import HERMES
from tandem.models.chat.messages import call_arguments, tool_description
from tandem.types import Message, Tool, ToolChoice

_INTRODUCTION = """\
# Tools
You may call the functions listed here, one JSON description a line:
<tools>
{tools}
</tools>
To call a function, write this block, with a JSON object as arguments that fits the function's parameters:
{start}
{{"name": "function-name", "arguments": {{"parameter": "value"}}}}
{end}
{how_many} The result comes back in a <tool_response> block. {whether}"""


def describe_tools(tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> str:
    """The section of the system message that teaches the model its tools."""
    if choice.mode == "named":
        whether = f"Call the function {choice.name} now."
    elif choice.mode == "required":
        whether = "Call a function now."
    else:
        whether = "Call a function only if it helps; otherwise answer in plain words."
    return _INTRODUCTION.format(
        tools="\n".join(json.dumps(tool_description(tool)["function"], ensure_ascii=False) for tool in tools),
        start=HERMES.start,
        end=HERMES.end,
        how_many="Several calls are several blocks." if parallel else "Make one call at most.",
        whether=whether,
    )


def without_tools(messages: Sequence[Message]) -> list[Message]:
    """The conversation in the roles that every template knows: calls as assistant text, results as user turns."""
    result: list[Message] = []
    answering = False
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            _append_user(result, text, join=answering)
            answering = True
        elif message.role == "user":
            _append_user(result, message.content, join=answering)
            answering = False
        elif message.role == "assistant" and message.tool_calls:
            result.append(Message("assistant", _calls_as_text(message), reasoning=message.reasoning))
            answering = False
        else:
            result.append(message)
            answering = False
    return result


def _append_user(messages: list[Message], text: str, join: bool) -> None:
    # Templates want turns to alternate, so results and what the user adds to them are one turn.
    if join:
        text = f"{messages.pop().content}\n{text}"
    messages.append(Message("user", text))


def _calls_as_text(message: Message) -> str:
    blocks = [message.content] if message.content else []
    for call in message.tool_calls:
        text = json.dumps({"name": call.name, "arguments": call_arguments(call)}, ensure_ascii=False)
        blocks.append(f"{HERMES.start}\n{text}\n{HERMES.end}")
    return "\n".join(blocks)
