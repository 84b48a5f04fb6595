"""From an answer's tokens to its events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from tandem.models.output.detokenize import detokenizer_for
from tandem.models.output.formats import channels_for
from tandem.models.output.ledger import Ledger
from tandem.models.output.pieces import Kind, Piece, PlainChannels
from tandem.models.output.scores import TokenScore, describe_score
from tandem.models.output.stop import StopStrings
from tandem.models.prompt import RenderedPrompt
from tandem.models.text import TextModel
from tandem.types import TextDelta, TokenLogprob, ToolCallDelta

OutputEvent: TypeAlias = TextDelta | ToolCallDelta
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class OutputProcessor:
    """Turns one answer's tokens into text, reasoning and tool-call events.

    Feed it every generated token except the one that ends the answer; look at `stopped` after each call; call
    `finish` once. Stop strings are looked for in the answer as the model writes it, markup and reasoning included.

    Args:
        text_model: the model's text side.
        prompt: the rendered prompt, which says in what state the answer begins and what may occur in it.
        stop: stop strings.
        logprobs: log-probabilities are wanted; then every token needs its `TokenScore`.

    Attributes:
        stopped: the answer is over before the model said so: a stop string matched, or the one allowed tool call is
            complete. The engine should drop the sequence; further tokens are ignored.
        reason: why the answer ended; set by `finish`.
    """

    def __init__(
        self, text_model: TextModel, prompt: RenderedPrompt, *, stop: Sequence[str] = (), logprobs: bool = False
    ) -> None:
        self._text_model = text_model
        self._detokenizer = detokenizer_for(text_model, prompt.continues)
        self._stop = StopStrings(stop) if any(stop) else None
        self._channels = channels_for(text_model, prompt)
        self._logprobs = logprobs
        is_plain = isinstance(self._channels, PlainChannels)
        self._ledger = None if is_plain and self._stop is None and not logprobs else Ledger()
        self._passes_through = is_plain and self._ledger is None
        self._finished = False
        self.stopped = False
        self.reason: FinishReason = "stop"

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stop.matched if self._stop is not None else None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, the markers around it included."""
        return self._ledger.reasoning if self._ledger is not None else 0

    @property
    def settled_tokens(self) -> int | None:
        """Tokens whose text has been decided on; after a stop string, those that lie wholly before it. None when
        nobody needs them counted (plain text without stop strings or log-probabilities)."""
        return self._ledger.settled if self._ledger is not None else None

    def feed(self, token_id: int, score: TokenScore | None = None) -> list[OutputEvent]:
        """The events that one more token decides."""
        if self.stopped:
            return []
        detokenizer = self._detokenizer
        text = detokenizer.push(token_id)
        if self._ledger is None:
            return [TextDelta(text)] if text else []
        described = None
        if self._logprobs and score is not None:
            described = describe_score(self._text_model, token_id, score)
        self._ledger.add(len(text), detokenizer.pending, described)
        return self._events(self._cut(text))

    def feed_many(self, tokens: Iterable[tuple[int, TokenScore | None]]) -> list[OutputEvent]:
        """The same for several tokens at once, in fewer events."""
        if self._passes_through:
            push = self._detokenizer.push
            text = "".join([push(token_id) for token_id, _ in tokens])
            return [TextDelta(text)] if text else []
        events: list[OutputEvent] = []
        for token_id, score in tokens:
            events.extend(self.feed(token_id, score))
        return _merged(events)

    def finish(self, reason: Literal["stop", "length"]) -> list[OutputEvent]:
        """The last events, with everything that was held back.

        Args:
            reason: `stop`: the model ended its answer, or `stopped` is set; `length`: it was cut off.
        """
        assert not self._finished, "an answer ends once"
        self._finished = True
        pieces: list[Piece] = []
        if not self.stopped:
            text = self._detokenizer.finish()
            if self._ledger is not None:
                self._ledger.end(len(text))
            if self._stop is not None:
                text = self._stop.push(text)
                if self._stop.matched is None:
                    text += self._stop.finish()
            self._channels.push(text, pieces)
            self._channels.finish(reason == "length" and self.stop_sequence is None, pieces)
        events = self._events(pieces, is_last=True)
        self.reason = reason
        if self.stopped or self.stop_sequence is not None:
            self.reason = "stop"
        if self.reason == "stop" and self.stop_sequence is None and self._channels.completed_calls:
            self.reason = "tool_calls"
        return events

    def _cut(self, text: str) -> list[Piece]:
        """New text through stop strings and channels."""
        pieces: list[Piece] = []
        if not text:
            return pieces
        stop = self._stop
        if stop is not None:
            text = stop.push(text)
        self._channels.push(text, pieces)
        if stop is not None and stop.matched is not None:
            self._channels.finish(True, pieces)
            self.stopped = True
        elif self._channels.ended:
            self.stopped = True
        return pieces

    def _events(self, pieces: list[Piece], is_last: bool = False) -> list[OutputEvent]:
        """Pieces as events: neighbouring texts of one kind in one event, each with its tokens' log-probabilities."""
        ledger = self._ledger
        if ledger is None:
            return [TextDelta(piece.text) for piece in pieces if piece.text]
        events: list[OutputEvent] = []
        for piece in pieces:
            if piece.call is not None:
                events.append(piece.call)
            elif piece.text:
                events.append(TextDelta(piece.text, piece.kind is Kind.REASONING))
            events.extend(_logprob_events(ledger.settle(piece)))
        if is_last:
            events.extend(_logprob_events(ledger.rest()))
        return _merged(events)


def _logprob_events(attributions: list[tuple[Kind, TokenLogprob]]) -> list[OutputEvent]:
    return [TextDelta("", kind is Kind.REASONING, [logprob]) for kind, logprob in attributions]


def _merged(events: list[OutputEvent]) -> list[OutputEvent]:
    """Neighbouring events of one kind as one."""
    if len(events) < 2:
        return events
    result: list[OutputEvent] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta) and event.reasoning == last.reasoning:
            result[-1] = TextDelta(last.text + event.text, event.reasoning, [*last.logprobs, *event.logprobs])
        elif isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta) and event.index == last.index:
            result[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + event.arguments)
        else:
            result.append(event)
    return result
