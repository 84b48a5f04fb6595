"""Grammars of constrained answers, in llguidance's dialect of Lark.

An answer is an optional stretch of reasoning, then JSON under a schema, or tool calls in the model's own markup, or a
choice of the two.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tandem.errors import UnsupportedError
from tandem.models.call_formats import CallFormat
from tandem.models.prompt import RenderedPrompt
from tandem.models.text import TextModel
from tandem.types import JsonConstraint, Tool

# Between two JSON tokens: nothing, a space, or a line break with its indentation. Without a bound, a model that does
# not want to go on writes white space until its token limit.
_WHITE_SPACE = r"[ ]|\n[ \t]{0,32}"

# A weak model that is made to call goes on calling until something ends it.
_MOST_CALLS = 8

_REASONING_TEXT = r"/(.|\n)*/"
_AFTER_REASONING = r"/[ \n]{0,4}/"


def json_rule(constraint: JsonConstraint) -> str:
    """JSON that the constraint's schema accepts; without a schema, any object."""
    return _json(constraint.schema or {"type": "object"})


def calls_rules(text_model: TextModel, call_format: CallFormat, tools: Sequence[Tool], parallel: bool) -> list[str]:
    """Rules, the first of which (`calls`) is one or more calls of `tools`.

    Raises:
        UnsupportedError: no grammar is known for the format.
    """
    before, between_calls, after = _section(text_model, call_format)
    rules = []
    for index, tool in enumerate(tools):
        opening, closing = _call(text_model, call_format, tool.name)
        schema = {"type": "object", **tool.parameters}
        rules.append(f"call_{index}: {opening} {_json(schema)} {closing}")
    one = " | ".join(f"call_{index}" for index in range(len(tools)))
    several = parallel and between_calls is not None
    repeated = f"call ({between_calls} call){{0,{_MOST_CALLS - 1}}}" if several else "call"
    return [f"calls: {before} {repeated} {after}", f"call: {one}", *rules]


def whole_grammar(text_model: TextModel, prompt: RenderedPrompt, start: str, rules: Sequence[str]) -> str:
    """The grammar of an answer: `start` is the right-hand side of what comes after the reasoning."""
    lines = [f"answer: {start}", *rules]
    tags = text_model.thinking
    if tags is None or not (prompt.inside_thinking or prompt.may_think):
        return "\n".join([f"start: {start}", *rules])
    lines.append(f"AFTER_REASONING: {_AFTER_REASONING}")
    end = marker(text_model, tags.end)
    if end.startswith("<["):
        lines.append(f"REASONING: {_REASONING_TEXT}")
        lines.append(f"reasoning: REASONING {end}")
    else:
        # Read to the first end marker, wherever in a token that lies.
        lines.append(f"reasoning[suffix={_literal(tags.end)}]: {_REASONING_TEXT}")
    if prompt.inside_thinking:
        return "\n".join(["start: reasoning AFTER_REASONING answer", *lines])
    opened = f"{marker(text_model, tags.start)} reasoning AFTER_REASONING"
    return "\n".join([f"start: ({opened})? answer", *lines])


def marker(text_model: TextModel, text: str) -> str:
    """Markup as the model writes it: control tokens by their id, everything else as text."""
    parts: list[str] = []
    at = 0
    for token_id in text_model.encode(text):
        if token_id not in text_model.special_ids:
            continue
        control = text_model.token_text(token_id)
        begin = text.index(control, at)
        parts += [_literal(text[at:begin]), f"<[{token_id}]>"]
        at = begin + len(control)
    parts.append(_literal(text[at:]))
    return " ".join(part for part in parts if part)


def _section(text_model: TextModel, call_format: CallFormat) -> tuple[str, str | None, str]:
    """What stands before all calls, between two of them (None: there is only one), and after all."""
    if call_format.style == "json":
        return "", _literal("\n"), ""
    if call_format.style == "bare":
        return "", None, ""
    if call_format.name == "mistral":
        return marker(text_model, call_format.start), None, ""
    if call_format.name == "kimi_k2":
        return marker(text_model, call_format.start), "", marker(text_model, call_format.end)
    raise UnsupportedError(
        f"`tool_choice` cannot force a call with this model: its call format ({call_format.name}) has no grammar. "
        'Use tool_choice "auto".',
        param="tool_choice",
    )


def _call(text_model: TextModel, call_format: CallFormat, name: str) -> tuple[str, str]:
    """What stands around one call's arguments."""
    quoted = json.dumps(name, ensure_ascii=False)
    named = f'{{"name": {quoted}, "{call_format.arguments_key}": '
    if call_format.style == "json":
        opening = f"{marker(text_model, call_format.start)} {_literal(chr(10) + named)}"
        return opening, f"{_literal('}' + chr(10))} {marker(text_model, call_format.end)}"
    if call_format.style == "bare":
        return _literal(named), _literal("}")
    if call_format.name == "mistral":
        if text_model.template is not None and "[ARGS]" in text_model.template:
            return f"{_literal(name)} {marker(text_model, '[ARGS]')}", ""
        return _literal(f"[{named}"), _literal("}]")
    opening = f"{marker(text_model, '<|tool_call_begin|>')} {_literal(f'functions.{name}:')} /[0-9]{{1,3}}/"
    opening += f" {marker(text_model, '<|tool_call_argument_begin|>')}"
    return opening, marker(text_model, "<|tool_call_end|>")


def _json(schema: dict[str, Any]) -> str:
    # Keywords that cannot be enforced come back as warnings, on which the caller decides.
    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": True}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
