"""One request's way into a staging: judges every frame before its payload is received."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tandem.errors import HandoffError, InvalidRequestError, WireError
from tandem.kv.codec import CODEC_IDS, RAW, Codec
from tandem.kv.control import Done
from tandem.kv.dtypes import DTYPES, Array
from tandem.kv.intervals import Span
from tandem.kv.plan import Plan, Wanted
from tandem.kv.wire import CodecId, FrameType, Header

if TYPE_CHECKING:
    from tandem.kv.layout import Part
    from tandem.kv.staging import PartBuffer, Segment, Staging


class _Asked(NamedTuple):
    """What a data frame of one layer and part may bring; looked up for every frame, so worked out once."""

    part: Part
    heads: Span
    spans: tuple[Span, ...]
    dtype: int
    row_bytes: int


class Intake:
    """Made by `Staging.open`. One reader uses it: `destinations`, receive, `commit`, frame by frame; then `finish`.

    Attributes:
        codec: the codec that the server chose. Data frames may use it, or be raw.
        finished: everything that this request asked for is there.
        bytes: received payload, as sent.
    """

    def __init__(self, staging: Staging, nonce: int, wanted: Wanted) -> None:
        self.plan = Plan(staging.plan.layout, wanted)
        self.nonce = nonce
        self.codec = RAW
        self.finished = False
        self.bytes = 0
        self._staging = staging
        self._closed = False
        self._pending: Header | None = None
        self._asked = {
            (index, number): _Asked(
                part, self.plan.heads(part), self.plan.spans(index), DTYPES[part.dtype].code, part.row_bytes
            )
            for index in self.plan.layers
            for number, part in enumerate(self.plan.layer(index).parts)
        }
        self._scratch = np.empty(0, np.uint8)
        with staging.lock:
            self._check_within(staging.plan)
            for key, asked in self._asked.items():
                staging.parts[key].forget_from(wanted.start, asked.heads)
            staging.states = {
                key: buffer
                for key, buffer in staging.states.items()
                if key[0] not in self.plan.layers or (key[2] <= wanted.start and buffer.verified[0])
            }

    def _check_within(self, outer: Plan) -> None:
        inside = (
            outer.wanted.start <= self.plan.wanted.start
            and self.plan.wanted.end == outer.wanted.end
            and self.plan.wanted.checkpoint in (outer.wanted.checkpoint, 0)
            and set(self.plan.layers) <= set(outer.layers)
            and all(
                outer.heads(part).start <= self.plan.heads(part).start
                and self.plan.heads(part).end <= outer.heads(part).end
                for index in self.plan.layers
                for part in self.plan.layer(index).parts
            )
        )
        if not inside:
            raise InvalidRequestError(
                f"{self.plan.wanted} is not within what is staged, {outer.wanted}. Ask for a part of it.",
                param="wanted",
            )

    def destinations(self, header: Header) -> list[memoryview]:
        """Where a data or state frame's payload belongs.

        Raises:
            WireError: the frame is not of this request, not asked for, there already, or of another dtype, codec or
                size. Nothing was changed.
        """
        if self._closed or self._pending is not None:
            raise WireError("A frame came while none is expected. The peer is broken.")
        if header.nonce != self.nonce:
            raise WireError(
                f"A frame of request {header.nonce:016x} came in answer to {self.nonce:016x}: it is stale or foreign."
            )
        with self._staging.lock:
            views = self._state(header) if header.type == FrameType.STATE else self._data(header)
        self._pending = header
        return views

    def commit(self, header: Header) -> None:
        """Count a frame whose payload was received and whose checksum was right.

        Raises:
            WireError: its encoded payload cannot be decoded.
        """
        if header is not self._pending or self._closed:
            raise WireError("A frame was committed that was not announced. The peer is broken.")
        codec = CODEC_IDS.get(header.codec)
        if codec is not None:
            self._decode(header, codec)
        with self._staging.lock:
            if header.type == FrameType.STATE:
                buffer = self._staging.states[header.layer, header.part, header.token_end]
                buffer.verified[0] = True
                self._staging.prune_states(header.token_end)
            else:
                part = self._buffer(header)
                part.verified.add(header.heads, header.tokens)
        self.bytes += header.length
        self._pending = None

    def finish(self, done: Done) -> None:
        """Check the server's claim that everything was sent.

        Raises:
            WireError: its counts are not the requested ones, or something is missing.
        """
        expected = [self.plan.count(index) for index in self.plan.layers]
        if done.end != self.plan.wanted.end or len(done.counts) != len(expected):
            raise WireError(
                f"The peer finished {len(done.counts)} layers at token {done.end}; asked for were {len(expected)} at "
                f"{self.plan.wanted.end}. What is complete is kept, the rest is computed here."
            )
        for index, count, claimed in zip(self.plan.layers, expected, done.counts, strict=True):
            if claimed != count or not self._has_all_of(index):
                raise WireError(
                    f"The peer finished with {claimed} of {count} entries of layer {index}, or not all arrived. "
                    "What is complete is kept, the rest is computed here."
                )
        self._closed = True
        self.finished = True

    def close(self) -> None:
        """Refuse all further frames. What was verified stays."""
        self._closed = True

    # ----------------------------------------------------------------------------------------------------- the details

    def _state(self, header: Header) -> list[memoryview]:
        states = self.plan.layer(header.layer).states if header.layer in self.plan.layers else ()
        if header.part >= len(states) or header.token_end not in self.plan.checkpoints:
            raise WireError(
                f"State {header.part} of layer {header.layer} after {header.token_end} tokens was not asked for."
            )
        state = states[header.part]
        self._check_dtype(header, DTYPES[state.dtype].code)
        if header.length != state.nbytes:
            raise WireError(
                f"A state of {header.length} bytes came for one of {state.nbytes}. Are the models the same?"
            )
        buffer = self._staging.state_buffer(header.layer, header.part, header.token_end)
        if buffer is None:
            raise WireError(f"State {header.part} of layer {header.layer} came twice. The peer is broken.")
        return [buffer.array.reshape(-1).view(np.uint8).data]

    def _data(self, header: Header) -> list[memoryview]:
        asked = self._asked.get((header.layer, header.part))
        if asked is None:
            raise WireError(f"Part {header.part} of layer {header.layer} was not asked for. The peer is broken.")
        heads, tokens = header.heads, header.tokens
        wanted = any(span.start <= tokens.start and tokens.end <= span.end for span in asked.spans)
        if not wanted or not asked.heads.start <= heads.start < heads.end <= asked.heads.end:
            raise WireError(
                f"Tokens [{tokens.start}, {tokens.end}), heads [{heads.start}, {heads.end}) of layer {header.layer} "
                "were not asked for. The peer is broken."
            )
        self._check_dtype(header, asked.dtype)
        codec, row_bytes = self._codec(header), asked.row_bytes
        if codec is not None:
            if not codec.applies_to(asked.part):
                raise WireError(
                    f"{asked.part.name} of {asked.part.dtype} cannot be in codec {codec.name}. The peer is broken."
                )
            row_bytes = codec.row_bytes(asked.part.dim)
        if header.length != row_bytes * header.head_count * header.token_count:
            raise WireError(
                f"A frame of {header.length} bytes came for {header.head_count} heads and {header.token_count} tokens "
                f"of {row_bytes} bytes. The peer is broken."
            )
        buffer = self._staging.parts.get((header.layer, header.part))
        segment = buffer.segment(tokens.start, tokens.end) if buffer else None
        if buffer is None or segment is None:
            raise WireError(f"Layer {header.layer} is no longer received into. The peer is broken.")
        try:
            buffer.reserved.add(heads, tokens)
        except ValueError:
            raise WireError(
                f"Tokens [{tokens.start}, {tokens.end}) of layer {header.layer} came twice. The peer is broken."
            ) from None
        if codec is None:
            return _rows(segment, asked.row_bytes, heads.start - buffer.heads.start, header)
        if len(self._scratch) < header.length:
            self._scratch = np.empty(header.length, np.uint8)
        return [self._scratch[: header.length].data]

    def _codec(self, header: Header) -> Codec | None:
        if header.codec == CodecId.RAW:
            return None
        codec = CODEC_IDS[header.codec]
        if codec.name != self.codec:
            raise WireError(f"A frame in codec {codec.name} came where {self.codec} was agreed on. The peer is broken.")
        return codec

    @staticmethod
    def _check_dtype(header: Header, code: int) -> None:
        if header.dtype != code:
            raise WireError(f"Entries of dtype {header.dtype} came for dtype {code}. Are the models the same?")

    def _decode(self, header: Header, codec: Codec) -> None:
        buffer = self._buffer(header)
        segment = buffer.segment(header.token_start, header.token_end)
        assert segment is not None  # `_data` found it
        first_head = header.head_start - buffer.heads.start
        tokens = segment.tokens(header.token_start, header.token_end)
        out: Array = tokens[first_head : first_head + header.head_count]
        codec.decode(self._scratch[: header.length].data, out, buffer.part.dtype)

    def _buffer(self, header: Header) -> PartBuffer:
        buffer = self._staging.parts.get((header.layer, header.part))
        if buffer is None:
            raise HandoffError(f"Layer {header.layer} was released while it was received. Release what is finished.")
        return buffer

    def _has_all_of(self, index: int) -> bool:
        layer, staging = self.plan.layer(index), self._staging
        with staging.lock:
            if layer.kind == "state":
                # States of earlier checkpoints may have been dropped already; that they came is why.
                keys = ((index, number, self.plan.wanted.end) for number in range(len(layer.states)))
                return all(key in staging.states and staging.states[key].verified[0] for key in keys)
            return all(
                (index, number) in staging.parts
                and staging.parts[index, number].covers(self.plan.spans(index), self.plan.heads(part))
                for number, part in enumerate(layer.parts)
            )


def _rows(segment: Segment, row: int, first_head: int, header: Header) -> list[memoryview]:
    """The memory of a frame's entries: one piece per head, or a single one where they touch."""
    length, first, size = segment.array.shape[1], header.token_start - segment.first, header.token_count * row
    begin, stride = (first_head * length + first) * row, length * row
    if size == stride:
        return [segment.rows[begin : begin + header.head_count * size]]
    return [segment.rows[at : at + size] for at in range(begin, begin + header.head_count * stride, stride)]
