"""An answer on its way to the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tandem.cli.output import note, stderr
from tandem.types import Event, Finished, PrefillProgress, TextDelta

_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""What a model writes must not steer the terminal."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
LONG_PROMPT = 2000
"""Prompt tokens from which on reading them takes long enough to be shown."""


@dataclass(slots=True)
class Answer:
    """What has arrived of an answer."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finished: Finished | None = None

    def to_dict(self, model: str) -> dict[str, Any]:
        """The answer as plain data, for JSON."""
        assert self.finished is not None
        return {
            "model": model,
            "text": "".join(self.text),
            "reasoning": "".join(self.reasoning) or None,
            "finish_reason": self.finished.reason,
            "usage": dict(
                zip(self.finished.usage.__struct_fields__, msgspec.to_builtins(self.finished.usage), strict=True)
            ),
            "statistics": msgspec.to_builtins(self.finished.statistics),
        }


def print_answer(events: Generator[Event], answer: Answer, *, quiet: bool = False) -> None:
    """Write the text to standard output as it arrives, and collect it in `answer`.

    Reasoning appears dimmed on a terminal, and not at all elsewhere.

    Args:
        quiet: only collect.

    Raises:
        TandemError: the answer failed; the text before that has been written.
    """
    writer = _Writer(quiet)
    # Whatever ends the loop, closing the events cancels the request.
    with closing(events), closing(writer):
        for event in events:
            if isinstance(event, TextDelta):
                (answer.reasoning if event.reasoning else answer.text).append(event.text)
                writer.text(event)
            elif isinstance(event, PrefillProgress):
                writer.progress(event)
            elif isinstance(event, Finished):
                answer.finished = event


class _Writer:
    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._terminal = sys.stdout.isatty()
        self._colour = self._terminal and not os.environ.get("NO_COLOR")
        self._shows_progress = not quiet and stderr().is_terminal
        self._progress_shown = False
        self._was_reasoning = False
        self._line_open = False

    def text(self, event: TextDelta) -> None:
        if self._quiet or not event.text or (event.reasoning and not self._terminal):
            return
        self._clear_progress()
        text = event.text.translate(_CONTROL) if self._terminal else event.text
        if self._was_reasoning and not event.reasoning:
            sys.stdout.write("\n")
        if event.reasoning and self._colour:
            text = f"{DIM}{text}{PLAIN}"
        self._was_reasoning = event.reasoning
        self._line_open = not event.text.endswith("\n")
        sys.stdout.write(text)
        sys.stdout.flush()

    def progress(self, event: PrefillProgress) -> None:
        if self._shows_progress and event.total_tokens >= LONG_PROMPT:
            sys.stderr.write(f"\rreading the prompt: {event.processed_tokens} of {event.total_tokens} tokens")
            sys.stderr.flush()
            self._progress_shown = True

    def _clear_progress(self) -> None:
        if self._progress_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._progress_shown = False

    def close(self) -> None:
        self._clear_progress()
        if self._line_open:
            sys.stdout.write("\n")
            sys.stdout.flush()


def print_statistics(finished: Finished) -> None:
    """One dim line on standard error."""
    usage, statistics = finished.usage, finished.statistics
    parts = [f"{usage.completion_tokens} tokens"]
    if statistics.generation_tps:
        parts.append(f"{statistics.generation_tps:.1f} tokens/s")
    parts.append(f"first token after {statistics.ttft_seconds:.2f} s")
    cached = f", {usage.cached_tokens} cached" if usage.cached_tokens else ""
    rate = f" at {statistics.prompt_tps:.0f} tokens/s" if statistics.prompt_tps else ""
    parts.append(f"prompt {usage.prompt_tokens} tokens{cached}{rate}")
    if finished.reason == "length":
        parts.append("cut off at the length limit")
    note(f"[{' · '.join(parts)}]")
