"""Chat and text completions as server-sent events.

This runs for every token of every stream, so chunks are put together from prepared bytes: only what differs between
two chunks is encoded.
"""

from __future__ import annotations

import msgspec

from tandem.api.openai.logprobs import CompletionLogprobs, chat_logprobs
from tandem.api.openai.reply import Reply
from tandem.api.openai.usage import stats_comments, usage_object
from tandem.types import Event, Finished, PrefillProgress, PromptScored, TextDelta, ToolCallDelta

_encode = msgspec.json.encode


class _Writer:
    """What the two dialects share: the head of a chunk, progress, usage and statistics."""

    kind: str

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._head = b"data: " + _encode(reply.head(self.kind))[:-1] + b',"system_fingerprint":null,"choices":['
        self._end = (b',"usage":null}' if reply.include_usage else b"}") + b"\n\n"
        self._finished: dict[int, Finished] = {}

    def write(self, number: int, events: list[Event]) -> bytes:
        """The chunks for `events` of answer `number`."""
        chunks: list[bytes] = []
        for event in events:
            if isinstance(event, PrefillProgress):
                chunks.append(self._progress(event))
            else:
                if isinstance(event, Finished):
                    self._finished[number] = event
                self._event(number, event, chunks)
        return b"".join(chunks)

    def _event(self, number: int, event: Event, chunks: list[bytes]) -> None:
        raise NotImplementedError

    def end(self) -> bytes:
        """The usage chunk, if it was asked for, and the statistics."""
        usage = b""
        if self._reply.include_usage:
            counts = _encode(usage_object(self._finished, self._reply.answers))
            usage = self._head + b'],"usage":' + counts + b"}\n\n"
        return usage + stats_comments(self._finished)

    def _progress(self, event: PrefillProgress) -> bytes:
        progress = {
            "PrefillProgressChunk": {
                "model": self._reply.model,
                "processed_tokens": event.processed_tokens,
                "total_tokens": event.total_tokens,
            }
        }
        return b": prefill_progress " + _encode(progress) + b"\n\n"


class ChatWriter(_Writer):
    """Writes `chat.completion.chunk` objects: one role delta per answer, then text, reasoning and tool calls."""

    kind = "chat.completion.chunk"

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._spoken: set[int] = set()
        self._no_finish = b',"finish_reason":null}]' + self._end

    def _event(self, number: int, event: Event, chunks: list[bytes]) -> None:
        head = b'%b{"index":%d,"delta":' % (self._head, number)
        if isinstance(event, TextDelta):
            if not event.text and not event.logprobs:
                return
            self._role(number, head, chunks)
            member = b"reasoning_content" if event.reasoning else b"content"
            logprobs = b"null"
            if event.logprobs:
                logprobs = b'{"content":[%b],"refusal":null}' % chat_logprobs(event.logprobs)
            chunks.append(
                b'%b{"%b":%b},"logprobs":%b%b' % (head, member, _encode(event.text), logprobs, self._no_finish)
            )
        elif isinstance(event, ToolCallDelta):
            self._role(number, head, chunks)
            chunks.append(b'%b{"tool_calls":[%b]},"logprobs":null%b' % (head, _encode(_call(event)), self._no_finish))
        elif isinstance(event, Finished):
            self._role(number, head, chunks)
            reason = event.reason.encode()
            chunks.append(b'%b{},"logprobs":null,"finish_reason":"%b"}]%b' % (head, reason, self._end))

    def _role(self, number: int, head: bytes, chunks: list[bytes]) -> None:
        if number not in self._spoken:
            self._spoken.add(number)
            delta = b'{"role":"assistant","content":"","refusal":null}'
            chunks.append(b'%b%b,"logprobs":null%b' % (head, delta, self._no_finish))


def _call(event: ToolCallDelta) -> dict[str, object]:
    if event.id is None and event.name is None:
        return {"index": event.index, "function": {"arguments": event.arguments}}
    return {
        "index": event.index,
        "id": event.id,
        "type": "function",
        "function": {"name": event.name, "arguments": event.arguments},
    }


class CompletionWriter(_Writer):
    """Writes `text_completion` objects."""

    kind = "text_completion"

    def __init__(self, reply: Reply, logprobs: bool) -> None:
        super().__init__(reply)
        self._asked = logprobs
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def _event(self, number: int, event: Event, chunks: list[bytes]) -> None:
        if not isinstance(event, PromptScored | TextDelta | Finished):
            return
        lists = self._logprobs.setdefault(number, CompletionLogprobs()).event(event) if self._asked else None
        text, reason = "", b"null"
        if isinstance(event, Finished):
            reason = b'"%b"' % event.reason.encode()
        else:
            text = event.text
            if not text and lists is None:
                return
        logprobs = b"null" if lists is None else _encode(lists)
        chunks.append(
            b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}]%b'
            % (self._head, number, _encode(text), logprobs, reason, self._end)
        )
