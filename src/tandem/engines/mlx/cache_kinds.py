"""What can be taken out of, and put back into, each kind of mlx-lm cache.

Three kinds cover all of them:

- *tokens*: one entry per token, addressable for ever (`KVCache`, `QuantizedKVCache`, the MLA latent, which mlx-lm
  keeps in a `KVCache`).
- *window*: one entry per token, of which only the last `max_size` are kept (`RotatingKVCache`).
- *state*: one state for the whole past (`ArraysCache` of recurrent layers), and any cache this module does not know:
  it can be copied at a point and continued from exactly that point.

Composite caches (`CacheList`) are handled leaf by leaf. Shapes: keys and values are `[1, heads, tokens, dim]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

Kind: TypeAlias = Literal["tokens", "window", "state"]
Entries: TypeAlias = Any
"""A tree of arrays: (keys, values), where quantised keys are triples. None stands for entries that are not there."""


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The simple caches inside a model's cache, in a fixed order."""
    found: list[Any] = []
    for cache in caches:
        if isinstance(cache, CacheList):
            found.extend(leaves(cache.caches))
        else:
            found.append(cache)
    return found


def kind_of(cache: Any) -> Kind:
    """Which of the three kinds a simple cache is."""
    if type(cache) in (KVCache, QuantizedKVCache):
        return "tokens"
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return "window"
    return "state"


def is_batchable(caches: Sequence[Any]) -> bool:
    """Whether mlx-lm can decode several sequences with such caches together."""
    return all(hasattr(leaf, "merge") for leaf in leaves(caches))


def cache_bytes(caches: Sequence[Any]) -> int:
    """Memory held by a cache."""
    return sum(int(leaf.nbytes) for leaf in leaves(caches) if not leaf.empty())


def take_entries(cache: Any, start: int, end: int) -> Entries:
    """Copy the entries of tokens `[start, end)` out of a *tokens* or *window* cache.

    Returns:
        (keys, values) as arrays of their own, not evaluated yet. Of a *window* cache, those of them that it still
        holds, which are the last ones; None if it holds none.
    """
    if kind_of(cache) == "tokens":
        if end > cache.offset:
            return None
        return tree_map(lambda part: mx.contiguous(part[..., start:end, :]), (cache.keys, cache.values))
    keys, values = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
    first = cache.offset - keys.shape[2]
    start = max(start, first)
    if start >= end or end > cache.offset:
        return None
    return (
        mx.contiguous(keys[..., start - first : end - first, :]),
        mx.contiguous(values[..., start - first : end - first, :]),
    )


def entry_count(entries: Entries) -> int:
    """For how many tokens there are entries."""
    return 0 if entries is None else int(arrays_in(entries)[0].shape[-2])


def put_entries(cache: Any, entries: Sequence[Entries], end: int) -> None:
    """Fill a fresh *tokens* or *window* cache so that it has seen `end` tokens.

    Args:
        entries: consecutive entries whose last one is token `end - 1`. A *tokens* cache needs all from token 0, a
            *window* cache the last `min(end, max_size)`.
    """
    if kind_of(cache) == "tokens":
        # With room for what comes next, as the cache itself would make it, by copying all of this once more.
        entries = [*entries, _room(entries[-1], cache.step - end % cache.step)]
    keys, values = tree_map(lambda *parts: mx.concatenate(parts, axis=2), *entries)
    if kind_of(cache) == "window":
        kept = min(end, cache.max_size)
        keys, values = keys[..., -kept:, :], values[..., -kept:, :]
        cache._idx = kept
    cache.keys, cache.values = keys, values
    cache.offset = end


def _room(entries: Entries, tokens: int) -> Entries:
    return tree_map(lambda part: mx.zeros((*part.shape[:-2], tokens, part.shape[-1]), part.dtype), entries)


def straighten(cache: Any) -> None:
    """Put what a *window* cache holds into the order of its tokens.

    Single tokens are written round a ring. Attention over a ring that begins elsewhere adds the same numbers up in
    another order, so that its last bits would depend on where the entries came from.
    """
    cache.keys, cache.values = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
    cache._idx = cache.keys.shape[2]


def take_state(cache: Any) -> Any:
    """A copy of a *state* cache's whole state, not evaluated yet."""
    return _copy_state(cache.state)


def put_state(cache: Any, state: Any) -> None:
    """Continue a fresh *state* cache from a state that `take_state` copied."""
    cache.state = _copy_state(state)


def _copy_state(state: Any) -> Any:
    # A new handle for each array: slice updates rebind the handle they are made through, not what others hold.
    if isinstance(state, mx.array):
        return mx.contiguous(state)
    if isinstance(state, list | tuple):
        return type(state)(_copy_state(part) for part in state)
    return state


def arrays_in(tree: Any) -> list[mx.array]:
    """All arrays of a state or entry tree."""
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]


def tree_bytes(tree: Any) -> int:
    """Memory of all arrays of a tree."""
    return sum(int(array.nbytes) for array in arrays_in(tree))
