"""Cache entries out of a cache into a prefill job, and out of a staging into a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from tandem.engines.mlx.cache_kinds import entry_count, kind_of, leaves, put_entries, take_entries
from tandem.engines.mlx.landing import CacheLanding
from tandem.engines.mlx.layout import (
    entries_of,
    named_parts,
    set_state_arrays,
    state_arrays,
    to_mlx,
    to_numpy,
)
from tandem.kv.job import PrefillJob
from tandem.kv.layout import Layout
from tandem.kv.staging import Staging


class Taken(NamedTuple):
    """Entries of one part of a layer from `token` on, or a state as it is after `token` tokens; evaluated."""

    layer: int
    part: int
    token: int
    array: mx.array
    is_state: bool


def take(job: PrefillJob, cache: list[Any], start: int, end: int) -> list[Taken]:
    """What a cache that has seen `end` tokens holds, and `job` wants, of the tokens `[start, end)`, and states that are
    due."""
    taken: list[Taken] = []
    for index, leaf in enumerate(leaves(cache)):
        if kind_of(leaf) == "state":
            if index in job.plan.layers and end in job.plan.checkpoints:
                taken.extend(
                    Taken(index, number, end, mx.contiguous(array), True)
                    for number, (_, array) in enumerate(state_arrays(leaf))
                )
            continue
        for span in job.needs(index, start, end):
            entries = take_entries(leaf, span.start, span.end)
            first = span.end - entry_count(entries)
            if entries is not None:
                taken.extend(
                    Taken(index, number, first, array, False) for number, (_, array) in enumerate(named_parts(entries))
                )
    mx.eval([one.array for one in taken])
    return taken


def hand_over(job: PrefillJob, one: Taken) -> None:
    """Queue it for the client. Blocks while the job is congested.

    Raises:
        CancelledError: nobody wants it any more.
    """
    if one.is_state:
        job.emit_state(one.layer, one.part, one.token, to_numpy(one.array))
    else:
        job.emit(one.layer, one.part, one.token, to_numpy(one.array)[0])


def commit(
    make_cache: Callable[[], list[Any]],
    layout: Layout,
    held: list[Any],
    start: int,
    staging: Staging,
    end: int,
    template: list[Any],
) -> list[Any]:
    """A fresh cache that has seen `end` tokens: the first `start` from `held`, the rest from `staging`.

    `held` is not changed. `staging` is empty afterwards: entries that landed in the cache's own arrays stay there, of
    others each layer's memory is given back once it is copied, so that both together never take more than the cache and
    one layer. `end` must not be beyond `staging.complete_through()`.

    Args:
        template: a cache of the same model that has seen tokens, for the parts of a state that are no arrays.

    Raises:
        HandoffError: something is not in the staging.
    """
    cache = make_cache()
    parts = zip(leaves(cache), leaves(held), leaves(template), layout.layers, strict=True)
    for index, (leaf, source, shape, layer) in enumerate(parts):
        if layer.kind == "state":
            arrays = [
                to_mlx(staging.state(index, number, end), state.dtype) for number, state in enumerate(layer.states)
            ]
            set_state_arrays(leaf, shape, arrays)
            mx.eval(leaf.state)
            staging.release(index)
            continue
        landed = _take_landed(staging, index, end)
        if landed is not None:
            leaf.keys, leaf.values = landed
            leaf.offset = end
            continue
        pieces: list[Any] = []
        needed = layer.held(end)
        kept = needed[0].start if needed else 0
        if start > kept:
            pieces.append(take_entries(source, kept, start))
        for span in layer.needed(start, end):
            received = [
                to_mlx(staging.entries(index, number, span.start, span.end), part.dtype)[None]
                for number, part in enumerate(layer.parts)
            ]
            pieces.append(entries_of(received))
        put_entries(leaf, pieces, end)
        mx.eval(leaf.state)
        staging.release(index)
        # Or the allocator keeps what copying took, beside all that is still staged.
        del pieces
        mx.clear_cache()
    return cache


def _take_landed(staging: Staging, layer: int, end: int) -> tuple[Any, Any] | None:
    """A layer's (keys, values) where its entries arrived in arrays of the cache.

    Raises:
        HandoffError: not all of them arrived.
    """
    landing = staging.landing
    if not isinstance(landing, CacheLanding) or not landing.holds(layer):
        return None
    for number in range(len(staging.plan.layer(layer).parts)):
        staging.entries(layer, number, 0, end)
    staging.release(layer)
    return landing.take(layer)
