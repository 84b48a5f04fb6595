"""A model in this process, one step at a time: for comparing caches with another's, and for looking at them.

It does what the engine does for one prompt, with the engine's own parts, and shows everything in between. Caches go in
and out as they are; entries, states and logits come out as numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tandem.engines.base import EngineOptions, LoadProgress
from tandem.engines.handoff.handoffs import CHECKPOINT_TOKENS
from tandem.engines.handoff.identity import fingerprint_of
from tandem.engines.mlx.cache_kinds import leaves, take_entries
from tandem.engines.mlx.exchange import commit
from tandem.engines.mlx.landing import land
from tandem.engines.mlx.layout import layout_of, named_parts, state_arrays
from tandem.engines.mlx.load import load, on_accelerator
from tandem.engines.mlx.pace import CPU_PREFILL_CHUNK, GPU_PREFILL_CHUNK
from tandem.engines.mlx.prefill import Prefill, chunk_end
from tandem.engines.mlx.prefix_cache import PrefixCache
from tandem.kv.dtypes import Array
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.intervals import Span
from tandem.kv.layout import Layout
from tandem.kv.plan import Wanted
from tandem.kv.staging import Staging
from tandem.models.text import TextModel

UNBOUNDED = 1 << 62


class Held(NamedTuple):
    """A cache that has seen `length` tokens."""

    length: int
    cache: list[Any]


class Answer(NamedTuple):
    """Greedy tokens, and the logits each of them was chosen from, `[vocabulary]` in float32."""

    tokens: list[int]
    logits: list[npt.NDArray[np.float32]]


class Workbench:
    """The model in `options.path`, loaded.

    Args:
        options: as a runner gets them. `prefill_chunk` 0 takes what a runner on this machine would.

    Raises:
        ModelError: the model cannot be loaded.

    Attributes:
        checkpoint: how often a hand-off asks for windows and states.
    """

    checkpoint = CHECKPOINT_TOKENS

    def __init__(self, options: EngineOptions, report: Callable[[LoadProgress], None]) -> None:
        self._folder = options.folder
        self._loaded = load(options, report)
        self._seen = self._loaded.seen_cache()
        self.chunk = options.prefill_chunk or (GPU_PREFILL_CHUNK if on_accelerator() else CPU_PREFILL_CHUNK)

    @cached_property
    def layout(self) -> Layout:
        """What the cache looks like, read off a real one."""
        return layout_of(self._seen)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What a peer's model has to agree with. Reads the model's files."""
        return fingerprint_of(self.layout, self._folder)

    @cached_property
    def text(self) -> TextModel:
        """The tokenizer."""
        return TextModel.load(self._folder)

    @property
    def context_length(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self._loaded.context_length

    @property
    def dtype(self) -> str:
        """Of the weights, e.g. `float32`."""
        return str(self._loaded.dtype).removeprefix("mlx.core.")

    # ----------------------------------------------------------------------------------------------------- computing

    def spans(self, start: int, end: int, points: Sequence[int]) -> list[Span]:
        """In which pieces a prefill side computes the tokens `[start, end)` when `points` are due on the way."""
        spans: list[Span] = []
        while start < end:
            due = next(point for point in points if point > start)
            spans.append(Span(start, chunk_end(start, end, min(self.chunk, due - start))))
            start = spans[-1].end
        return spans

    def prefill(self, context: Sequence[int], keep: PrefixCache | None = None) -> tuple[list[Any], list[Span]]:
        """Compute a cache that has seen all of `context`, from nothing, as the engine does.

        Args:
            keep: gets what was computed, chunk by chunk.

        Returns:
            The cache, and the pieces it was computed in.
        """
        # `Prefill` leaves the last token out.
        prefill = Prefill(self._loaded.model, [*context, 0], self._loaded.make_cache(), 0)
        spans: list[Span] = []
        while not prefill.done:
            before = prefill.position
            prefill.step(self.chunk)
            spans.append(Span(before, prefill.position))
            if keep is not None:
                keep.store(prefill.tokens[: prefill.position], prefill.cache, tail=prefill.done)
        return prefill.cache, spans

    def stage(self, held: Held, end: int) -> Staging:
        """Where the entries of the tokens from `held.length` to `end` may arrive, as in an engine."""
        landing = land(self.layout, self._loaded.make_cache, held.length, end)
        return Staging(self.layout, Wanted(held.length, end, checkpoint=self.checkpoint), landing=landing)

    def commit(self, held: Held, staging: Staging, end: int) -> list[Any]:
        """A cache that has seen `end` tokens, from `held` and what was received.

        Raises:
            HandoffError: something was not received.
        """
        make_cache = self._loaded.make_cache
        return commit(make_cache, self.layout, held.cache, held.length, staging, end, self._seen)

    def answer(self, cache: list[Any], token: int, count: int) -> Answer:
        """Feed `token`, then `count - 1` greedy tokens after it. The cache has seen `count` more tokens afterwards."""
        answer = Answer([], [])
        for _ in range(count):
            logits = self._loaded.model(mx.array([[token]], mx.uint32), cache=cache)[0, -1].astype(mx.float32)
            answer.logits.append(np.array(logits))
            token = int(mx.argmax(logits))
            answer.tokens.append(token)
        return answer

    # ------------------------------------------------------------------------------------------------- prefix caches

    def prefix_cache(self) -> PrefixCache:
        """An empty prefix cache as an engine has one."""
        return PrefixCache(self._loaded.make_cache, UNBOUNDED)

    def find(self, prefixes: PrefixCache, context: Sequence[int]) -> Held:
        """What a prefix cache has of a context; an empty cache where it has nothing."""
        hit = prefixes.find(context)
        return Held(hit.length, hit.cache) if hit else Held(0, self._loaded.make_cache())

    # ------------------------------------------------------------------------------------------------------- looking

    def entries(self, cache: list[Any], layer: int, span: Span) -> list[Array]:
        """The entries `[heads, tokens, dim]` that a `tokens` or `window` layer has of the tokens `span`, part by part;
        bfloat16 as float32, which holds the same values."""
        taken = take_entries(leaves(cache)[layer], span.start, span.end)
        return [_to_numpy(array)[0] for _, array in named_parts(taken)]

    def states(self, cache: list[Any], layer: int) -> list[Array]:
        """The arrays of a `state` layer."""
        return [_to_numpy(array) for _, array in state_arrays(leaves(cache)[layer])]


def _to_numpy(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
