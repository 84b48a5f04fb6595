"""Exactly which entries a prefill request asks for.

Client and server derive the same plan from the same request: the client's staging expects what it lists, and the
server's job sends what it lists, no more and no less.
"""

from __future__ import annotations

from typing import NamedTuple

from tandem.errors import InvalidRequestError
from tandem.kv.intervals import Span, merge
from tandem.kv.layout import MAX_TOKENS, Layer, Layout, Part

MAX_CHECKPOINTS = 4096


class Wanted(NamedTuple):
    """What a client wants of a prompt's cache.

    Attributes:
        start, end: tokens whose entries are wanted; the context is always `[0, end)`.
        layers: leaf caches; None for all.
        heads: heads of every part; None for all. A part with a single head (an MLA latent, shared by all) and states
            always come whole.
        checkpoint: also send windows and states as they are after every multiple of this many tokens, so that a
            hand-off that breaks off can be continued from there; 0 sends them for `end` only. `tokens` layers can be
            continued anywhere.
    """

    start: int
    end: int
    layers: Span | None = None
    heads: Span | None = None
    checkpoint: int = 0


class Plan:
    """A validated request against a layout.

    Attributes:
        layers: the range of layers.
        checkpoints: token counts, ascending, at which windows and states are complete; the last is `wanted.end`.

    Raises:
        InvalidRequestError: the ranges do not fit the layout or one another.
    """

    def __init__(self, layout: Layout, wanted: Wanted) -> None:
        if not 0 <= wanted.start < wanted.end < MAX_TOKENS:
            raise InvalidRequestError(
                f"Tokens [{wanted.start}, {wanted.end}) are no range. Ask for 0 <= start < end < {MAX_TOKENS}.",
                param="start",
            )
        self.layout = layout
        self.wanted = wanted
        self.layers = _range(wanted.layers, len(layout.layers), "layers", "the cache")
        for index in self.layers:
            for part in layout.layers[index].parts:
                self._check_heads(part)
        self.checkpoints = self._checkpoints()
        self._spans = {index: self._spans_of(layout.layers[index]) for index in self.layers}

    def _check_heads(self, part: Part) -> None:
        if part.heads > 1:
            _range(self.wanted.heads, part.heads, "heads", part.name)

    def _checkpoints(self) -> tuple[int, ...]:
        start, end, step = self.wanted.start, self.wanted.end, self.wanted.checkpoint
        if all(self.layout.layers[index].kind == "tokens" for index in self.layers) or not step:
            return (end,)
        if step < 0 or (end - start) // step > MAX_CHECKPOINTS:
            raise InvalidRequestError(
                f"A checkpoint every {step} tokens of [{start}, {end}) is no use. Ask for at most {MAX_CHECKPOINTS}.",
                param="checkpoint",
            )
        return (*range((start // step + 1) * step, end, step), end)

    def _spans_of(self, layer: Layer) -> tuple[Span, ...]:
        points = self.checkpoints if layer.kind == "window" else self.checkpoints[-1:]
        return merge([span for point in points for span in layer.needed(self.wanted.start, point)])

    def layer(self, index: int) -> Layer:
        """The layout's layer `index`."""
        return self.layout.layers[index]

    def spans(self, index: int) -> tuple[Span, ...]:
        """Token ranges of layer `index` whose entries are sent, ascending, not touching. Empty for a state."""
        return self._spans[index]

    def heads(self, part: Part) -> Span:
        """Which heads of a part are sent."""
        return self.wanted.heads if self.wanted.heads and part.heads > 1 else Span(0, part.heads)

    def count(self, index: int) -> int:
        """What `done` states for layer `index`: tokens sent per part, or states sent for a `state` layer."""
        if self.layer(index).kind == "state":
            return len(self.checkpoints)
        return sum(span.length for span in self._spans[index])

    @property
    def entry_bytes(self) -> int:
        """Uncompressed bytes of all entries that are sent."""
        return sum(
            sum(self.heads(part).length * part.row_bytes for part in self.layer(index).parts)
            * sum(span.length for span in self._spans[index])
            for index in self.layers
        )

    @property
    def nbytes(self) -> int:
        """Uncompressed bytes of everything that is sent."""
        states = sum(self.layer(index).state_bytes for index in self.layers)
        return self.entry_bytes + states * len(self.checkpoints)


def _range(wanted: Span | None, size: int, what: str, whose: str) -> range:
    if wanted is None:
        return range(size)
    if not 0 <= wanted.start < wanted.end <= size:
        raise InvalidRequestError(
            f"{what} [{wanted.start}, {wanted.end}) are not in {whose}, which has {size}. Ask for what it has.",
            param=what,
        )
    return range(wanted.start, wanted.end)
