"""Chat and text completions as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.api.openai.logprobs import CompletionLogprobs, chat_logprobs
from tandem.api.openai.reply import Reply
from tandem.api.openai.usage import generation_stats, usage_object
from tandem.types import Event, Finished, PromptScored, TextDelta, ToolCallDelta


class ChatChoice:
    """Gathers one answer to a chat."""

    def __init__(self, logprobs: bool) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}
        # Kept as JSON text, made while the tokens arrive: a long answer's would take milliseconds at its end.
        self._logprobs: list[bytes] | None = [] if logprobs else None
        self.finished: Finished | None = None

    def add(self, events: list[Event]) -> None:
        """Take in further events."""
        for event in events:
            if isinstance(event, TextDelta):
                (self._reasoning if event.reasoning else self._content).append(event.text)
                if self._logprobs is not None and event.logprobs:
                    self._logprobs.append(chat_logprobs(event.logprobs))
            elif isinstance(event, ToolCallDelta):
                if event.index not in self._calls:
                    self._calls[event.index] = {"id": event.id, "name": event.name}
                    self._arguments[event.index] = []
                self._arguments[event.index].append(event.arguments)
            elif isinstance(event, Finished):
                self.finished = event

    def choice(self, number: int) -> dict[str, Any]:
        """The answer as a member of `choices`."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(self._arguments[index])},
                }
                for index, call in sorted(self._calls.items())
            ]
        logprobs = None
        if self._logprobs is not None:
            logprobs = {"content": msgspec.Raw(b"[" + b",".join(self._logprobs) + b"]"), "refusal": None}
        return {
            "index": number,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self.finished.reason if self.finished else None,
        }


class CompletionChoice:
    """Gathers one text completion."""

    def __init__(self, logprobs: bool) -> None:
        self._text: list[str] = []
        self._lists = CompletionLogprobs() if logprobs else None
        self._logprobs: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        self.finished: Finished | None = None

    def add(self, events: list[Event]) -> None:
        """Take in further events."""
        for event in events:
            if not isinstance(event, PromptScored | TextDelta | Finished):
                continue
            if isinstance(event, Finished):
                self.finished = event
            else:
                self._text.append(event.text)
            lists = self._lists.event(event) if self._lists is not None else None
            for name, values in (lists or {}).items():
                self._logprobs[name].extend(values)

    def choice(self, number: int) -> dict[str, Any]:
        """The answer as a member of `choices`."""
        return {
            "index": number,
            "text": "".join(self._text),
            "logprobs": None if self._lists is None else self._logprobs,
            "finish_reason": self.finished.reason if self.finished else None,
        }


def response_body(reply: Reply, kind: str, choices: Sequence[ChatChoice | CompletionChoice], stats: bool) -> bytes:
    """The whole response as JSON text.

    Args:
        kind: value of `object`.
        stats: add `generation_stats` (of the first answer), as exo's bench route does.
    """
    finished = {number: choice.finished for number, choice in enumerate(choices) if choice.finished is not None}
    body = {
        **reply.head(kind),
        "system_fingerprint": None,
        "choices": [choice.choice(number) for number, choice in enumerate(choices)],
        "usage": usage_object(finished, reply.answers),
    }
    if stats:
        body["generation_stats"] = generation_stats(finished[0].statistics, "inBytes")
    return msgspec.json.encode(body)
