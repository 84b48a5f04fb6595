"""Which parser cuts an answer into channels: one entry for each family of output formats.

`tags` covers every model that puts markers into its text. Formats with a grammar of their own (channels with
recipients, markup with nested invocations) get an entry here and a `Channels` class; nothing else has to change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tandem.models.output.channels import TagChannels
from tandem.models.output.pieces import Channels, PlainChannels
from tandem.models.prompt import RenderedPrompt
from tandem.models.text import TextModel

ChannelsFactory: TypeAlias = Callable[[TextModel, RenderedPrompt], Channels]


def _tags(text_model: TextModel, prompt: RenderedPrompt) -> Channels:
    if text_model.thinking is None and prompt.call_format is None and not text_model.hidden_markers:
        return PlainChannels()
    return TagChannels(
        thinking=text_model.thinking,
        inside_thinking=prompt.inside_thinking,
        call_format=prompt.call_format,
        tools=prompt.tools,
        parallel=prompt.parallel_tool_calls,
        hidden=text_model.hidden_markers,
    )


FORMATS: dict[str, ChannelsFactory] = {"tags": _tags}
"""Factories by the name that `TextModel.output_format` gives."""


def channels_for(text_model: TextModel, prompt: RenderedPrompt) -> Channels:
    """The parser for one answer. Plain prompts get plain text."""
    if not prompt.is_chat:
        return PlainChannels()
    return FORMATS[text_model.output_format](text_model, prompt)
