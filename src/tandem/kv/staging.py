"""Where received entries wait until all of them have arrived and been checked.

A `Staging` has one buffer per layer, part and needed token range, `[heads, tokens, dim]`, allocated up front. Where an
engine can make them, these are the arrays of the cache itself, which saves it a copy of everything (`Landing`). One
`Intake` per request decides, before a byte of a frame's payload is received, whether the frame may be written and
where to; after its checksum was verified, the entries count. What was not verified cannot be read.

Several intakes may fill one staging at the same time (layer or head ranges from several peers), or one after the
other (the rest of a hand-off that broke off).
"""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

import numpy as np

from tandem.errors import HandoffError
from tandem.kv.arena import Arena
from tandem.kv.coverage import Coverage
from tandem.kv.dtypes import DTYPES, Array
from tandem.kv.intake import Intake
from tandem.kv.intervals import Span
from tandem.kv.layout import Layout, Part
from tandem.kv.plan import Plan, Wanted


class Landing(Protocol):
    """Memory of an engine's own cache, which nothing uses yet, for entries to arrive in."""

    def view(self, layer: int, part: int) -> Array | None:
        """`[heads, tokens, dim]`, contiguous, all heads, from token 0 to at least the last that is wanted. None where a
        buffer is needed that is copied later."""
        ...


class Segment(NamedTuple):
    """A buffer of one part that is to receive the tokens `span`.

    Attributes:
        array: `[heads, tokens, dim]`; its first token is number `first`, its last one may be beyond `span`.
        rows: the same memory as bytes.
    """

    span: Span
    first: int
    array: Array
    rows: memoryview

    @classmethod
    def of(cls, span: Span, first: int, array: Array) -> Segment:
        """With its bytes."""
        return cls(span, first, array, array.reshape(-1).view(np.uint8).data)

    def tokens(self, start: int, end: int) -> Array:
        """The entries of the tokens `[start, end)`."""
        return self.array[:, start - self.first : end - self.first]


class PartBuffer:
    """All that is staged of one part.

    Attributes:
        heads: which heads, by their number in the model.
        reserved: what some frame was accepted for, received or not.
        verified: whose entries are there.
    """

    def __init__(self, part: Part, heads: Span, segments: list[Segment]) -> None:
        self.part = part
        self.heads = heads
        self.reserved = Coverage(heads)
        self.verified = Coverage(heads)
        self.segments = segments

    def segment(self, start: int, end: int) -> Segment | None:
        """The segment that holds all of the tokens `[start, end)`."""
        return next((one for one in self.segments if one.span.start <= start and end <= one.span.end), None)

    def covers(self, spans: tuple[Span, ...], heads: Span | None = None) -> bool:
        """Whether all heads have verified entries for all of these tokens."""
        return all(self.verified.covers(heads or self.heads, span) for span in spans)

    def forget_from(self, token: int, heads: Span) -> None:
        """Drop `token` and everything after it, and all that was reserved and never verified."""
        self.verified.forget_from(token, heads)
        self.reserved.reset(self.verified, heads)


class StateBuffer(NamedTuple):
    """One state array as it is after some number of tokens."""

    array: Array
    verified: list[bool]


class Staging:
    """Receives what `wanted` names of a model with this layout.

    Args:
        landing: the engine's memory, for parts whose heads are all wanted. Other parts share one mapping.

    Raises:
        InvalidRequestError: `wanted` does not fit the layout.

    Attributes:
        plan: what is expected.
        nbytes: memory that the entries take (states come on top).
    """

    def __init__(self, layout: Layout, wanted: Wanted, *, landing: Landing | None = None) -> None:
        self.plan = Plan(layout, wanted)
        self.landing = landing
        self.lock = threading.Lock()
        self.parts: dict[tuple[int, int], PartBuffer] = {}
        self.states: dict[tuple[int, int, int], StateBuffer] = {}
        parts = [(index, *one) for index in self.plan.layers for one in enumerate(self.plan.layer(index).parts)]
        landed = {(index, number): self._landed(index, number) for index, number, _ in parts}
        copied = [(index, part) for index, number, part in parts if landed[index, number] is None]
        # Memory of an arena is not present before it is written to: what the sum has too much costs nothing.
        self._arena = Arena(self.plan.entry_bytes if copied else 0, sum(len(self.plan.spans(one)) for one, _ in copied))
        for index, number, part in parts:
            heads, spans, array = self.plan.heads(part), self.plan.spans(index), landed[index, number]
            if array is not None:
                segments = [Segment.of(span, 0, array) for span in spans]
            else:
                dtype = DTYPES[part.dtype].array
                segments = [
                    Segment.of(span, span.start, self._arena.allocate((heads.length, span.length, part.dim), dtype))
                    for span in spans
                ]
            self.parts[index, number] = PartBuffer(part, heads, segments)
        self.nbytes = sum(one.array.nbytes for part in self.parts.values() for one in part.segments)

    def _landed(self, layer: int, number: int) -> Array | None:
        part = self.plan.layer(layer).parts[number]
        if self.landing is None or self.plan.heads(part).length != part.heads:
            return None
        return self.landing.view(layer, number)

    # --------------------------------------------------------------------------------------------------- being filled

    def open(self, nonce: int, wanted: Wanted | None = None) -> Intake:
        """Begin to receive, from one peer, what is missing (or the part of it that `wanted` names).

        Whatever was received beyond `wanted.start` in these layers and heads, whole or not, is dropped.

        Raises:
            InvalidRequestError: `wanted` is not within this staging.
        """
        return Intake(self, nonce, self.rest() if wanted is None else wanted)

    def rest(self) -> Wanted:
        """What is still missing: everything from `complete_through()` on.

        Raises:
            HandoffError: nothing is.
        """
        complete = self.complete_through()
        if complete >= self.plan.wanted.end:
            raise HandoffError("Everything was received; there is nothing left to ask a peer for.")
        return self.plan.wanted._replace(start=complete)

    # ------------------------------------------------------------------------------------------------------- reading

    def complete_through(self) -> int:
        """The largest t for which everything that a cache needs after t tokens is here and verified, where the entries
        before `wanted.start` are the caller's own. `wanted.start` if nothing is usable. Windows and states make this a
        checkpoint of the plan; `tokens` layers alone allow any t."""
        with self.lock:
            return self._complete_through()

    def _complete_through(self) -> int:
        start, end = self.plan.wanted.start, self.plan.wanted.end
        reach = end
        candidates = set(self.plan.checkpoints)
        for (index, _), buffer in self.parts.items():
            if self.plan.layer(index).kind == "tokens":
                reach = min(reach, buffer.verified.end_of(start))
            else:
                candidates |= buffer.verified.ends()
        candidates.add(reach)
        fitting = (t for t in sorted(candidates, reverse=True) if start < t <= reach and self._complete_at(t))
        return next(fitting, start)

    def _complete_at(self, tokens: int) -> bool:
        start = self.plan.wanted.start
        for index in self.plan.layers:
            layer = self.plan.layer(index)
            if layer.kind == "state" and not self._states_at(index, tokens):
                return False
            spans = layer.needed(start, tokens)
            if not all(self.parts[index, number].covers(spans) for number in range(len(layer.parts))):
                return False
        return True

    def _states_at(self, index: int, tokens: int) -> bool:
        keys = ((index, number, tokens) for number in range(len(self.plan.layer(index).states)))
        return all(key in self.states and self.states[key].verified[0] for key in keys)

    def entries(self, layer: int, part: int, start: int, end: int) -> Array:
        """Verified entries `[heads, tokens, dim]` of the tokens `[start, end)`, read-only, not copied.

        Raises:
            HandoffError: not all of them have arrived and been verified, or the layer was released.
        """
        with self.lock:
            buffer = self.parts.get((layer, part))
            segment = buffer.segment(start, end) if buffer else None
            if buffer is None or segment is None or not buffer.covers((Span(start, end),)):
                raise HandoffError(
                    f"Entries [{start}, {end}) of layer {layer}, part {part} are not here. Prefill them."
                )
            return _read_only(segment.tokens(start, end))

    def state(self, layer: int, number: int, tokens: int) -> Array:
        """The verified state array `number` of a layer as it is after `tokens` tokens, read-only, not copied.

        Raises:
            HandoffError: it has not arrived, or was not verified.
        """
        with self.lock:
            buffer = self.states.get((layer, number, tokens))
            if buffer is None or not buffer.verified[0]:
                raise HandoffError(f"State {number} of layer {layer} after {tokens} tokens is not here. Prefill again.")
            return _read_only(buffer.array)

    def release(self, layer: int) -> None:
        """Free the memory of a layer whose entries were committed. Nothing of it can be read any more, and arrays that
        `entries` returned of it hold rubbish from now on."""
        with self.lock:
            released = [key for key in self.parts if key[0] == layer]
            for key in released:
                for segment in self.parts.pop(key).segments:
                    if self._arena.owns(segment.array):
                        self._arena.give_back(segment.array)
            self.states = {key: buffer for key, buffer in self.states.items() if key[0] != layer}

    # ------------------------------------------------------------------------------------------- the intakes' support

    def state_buffer(self, layer: int, number: int, tokens: int) -> StateBuffer | None:
        """Memory for a state that is about to arrive; None if it is there already. Call with the lock held."""
        key = (layer, number, tokens)
        if key in self.states:
            return None
        array = self.plan.layer(layer).states[number]
        self.states[key] = StateBuffer(np.empty(array.shape, DTYPES[array.dtype].array), [False])
        return self.states[key]

    def prune_states(self, tokens: int) -> None:
        """If all states after `tokens` tokens are here, drop those of checkpoints that are useless now. Call with the
        lock held."""
        if all(self._states_at(index, tokens) for index in self.plan.layers):
            complete = self._complete_through()
            self.states = {key: buffer for key, buffer in self.states.items() if key[2] >= complete}


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view
