"""What is verified: prompts, and what either side knows of them before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.kv.layout import Layout
from tandem.verify.prompts import PromptSource

CACHE_STEP = 256
"""mlx-lm's caches grow by so many tokens at a time."""
AROUND = (-1, 0, 1, 2)
"""Offsets from a boundary. A prompt of N tokens leaves N - 1 in the cache: both counts come one short, on, and over."""
SHORTEST = (1, 2, 3)
BEYOND_BLOCK = 37
"""Tokens over a boundary that fit no block, chunk or cache step."""
MORE = 45
TAIL = 40
LONGEST_WARM = 4096
"""Prompts of the warm cases go around windows up to this long; the cold ones around every window."""


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt, and what was in the two prefix caches before it came.

    Attributes:
        tokens: the prompt.
        server: a prompt that the prefill side has read before; empty for none.
        client: one that the decode side has read before.
        shared: leading tokens that `server` has in common with `tokens`.
        follow: what a person says to the answer: then the second turn is what is verified.
    """

    name: str
    tokens: tuple[int, ...]
    server: tuple[int, ...] = ()
    client: tuple[int, ...] = ()
    shared: int = 0
    follow: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the boundaries come from.

    Attributes:
        chunk: tokens that a prefill computes together.
        windows: of the layers that have one.
        checkpoint: how often a hand-off asks for windows and states.
        longest: the longest prompt that the model's context has room for.
    """

    chunk: int
    windows: tuple[int, ...]
    checkpoint: int
    longest: int

    @classmethod
    def of(cls, layout: Layout, chunk: int, checkpoint: int, longest: int) -> Sizes:
        """The sizes of a model with this layout."""
        windows = sorted({layer.window for layer in layout.layers if layer.kind == "window"})
        return cls(chunk, tuple(windows), checkpoint, longest)

    def boundaries(self) -> list[int]:
        """Token counts at which something changes: once and twice every chunk, window and cache step, and the first
        checkpoint."""
        steps = (self.chunk, CACHE_STEP, *self.windows)
        return sorted({step * times for step in steps for times in (1, 2)} | {self.checkpoint})

    def lengths(self) -> list[int]:
        """Prompt lengths around every boundary."""
        found = set(SHORTEST) | {boundary + offset for boundary in self.boundaries() for offset in AROUND}
        return sorted(length for length in found if 0 < length <= self.longest)

    def quick_lengths(self) -> list[int]:
        """A few of these: the shortest, and one around the chunk."""
        return sorted({min(length, self.longest) for length in (*SHORTEST, self.chunk, self.chunk + 2)})


def plan_cases(
    sizes: Sizes,
    source: PromptSource,
    *,
    own: Sequence[Sequence[int]] = (),
    lengths: Sequence[int] = (),
    quick: bool = False,
    answer: int = 16,
) -> list[Case]:
    """All cases, the user's own prompts first.

    Args:
        own: the user's prompts.
        lengths: of the cold prompts, instead of those around boundaries.
        quick: a small set.
        answer: tokens of an answer.
    """
    chosen = lengths or (sizes.quick_lengths() if quick else sizes.lengths())
    cases = [Case(f"your prompt {number}, {len(tokens)} tokens", tuple(tokens)) for number, tokens in enumerate(own, 1)]
    cases += [Case(f"cold, {length} tokens", tuple(source.prompt(length))) for length in chosen]
    return cases + _warm(sizes, source, answer, quick=quick)


def _warm(sizes: Sizes, source: PromptSource, answer: int, *, quick: bool) -> list[Case]:
    # A chunk that the context has no room for twice gives way to half of the context.
    aligned = min(sizes.chunk, max(1, sizes.longest // 2 - MORE))
    odd = min(aligned + BEYOND_BLOCK, sizes.longest - 2)
    window = max([aligned, *(window for window in sizes.windows if window <= LONGEST_WARM)])
    total = min(sizes.longest, aligned + window + MORE)

    def case(name: str, server: int | None = None, client: int | None = None) -> Case:
        """Each side knows so many leading tokens; then, where they end a chunk, other ones."""
        tokens = source.prompt(total)
        server_first = [*tokens[:server], *(source.words(TAIL) if server == aligned else [])] if server else []
        client_first = [*tokens[:client], *(source.words(TAIL) if client == aligned else [])] if client else []
        return Case(name, tuple(tokens), tuple(server_first), tuple(client_first), server or 0)

    def turn(name: str, first: int, more: int) -> Case:
        first, more = max(2, first), max(1, more)
        return Case(name, tuple(source.prompt(first)), follow=tuple(source.words(more)))

    cases = [
        case(f"warm server {odd}", server=odd),
        case(f"warm client {odd}", client=odd),
        case(f"warm server {odd}, client {aligned}", server=odd, client=aligned),
        turn("second turn, short", min(70, sizes.longest // 3), min(TAIL, sizes.longest // 3 - answer)),
    ]
    if quick:
        return cases
    return [
        *cases,
        case(f"warm server {aligned}", server=aligned),
        case("warm server, same prompt", server=total - 1),
        case(f"warm client {aligned}", client=aligned),
        case("warm client, all but one", client=total - 2),
        case("warm client, same prompt", client=total - 1),
        case(f"warm server {aligned}, client {odd}", server=aligned, client=odd),
        case(f"warm server {aligned}, client {aligned}", server=aligned, client=aligned),
        turn("second turn, long", (total - answer) // 2, (total - answer) // 2),
    ]
