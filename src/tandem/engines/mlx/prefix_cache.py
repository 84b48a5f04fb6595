"""Cache entries of earlier prompts and answers, reused for later prompts that begin alike.

Everything is stored in blocks of tokens (see `tandem.kv.prefix_tree`). *Tokens* and *window* layers store each
block's own keys and values, so that a hit may end at any token, as long as the window before it is there. *State*
layers cannot be cut: a hit must end where a state was taken, which is at the ends of prefill chunks and of answers.
What is put back is a copy, bit for bit, of what the model computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from tandem.engines.mlx.cache_kinds import (
    Entries,
    arrays_in,
    entry_count,
    kind_of,
    leaves,
    put_entries,
    put_state,
    take_entries,
    take_state,
    tree_bytes,
)
from tandem.kv.prefix_tree import Block, PrefixTree

BLOCK_TOKENS = 64


@dataclass(slots=True)
class BlockEntries:
    """One block's share of a model's cache.

    Attributes:
        entries: per leaf cache, its keys and values for the block's tokens; None for *state* leaves. *Window* leaves
            that no longer held all of them have the last ones, or None.
        states: per *state* leaf, the state after the block's last token; None where none was taken.
    """

    entries: list[Entries]
    states: list[Any] | None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = tree_bytes(self.entries) + (tree_bytes(self.states) if self.states is not None else 0)


@dataclass(frozen=True, slots=True)
class Hit:
    """A cache that already holds the first `length` tokens."""

    length: int
    cache: list[Any]


@dataclass(slots=True)
class _Later:
    """A cache that is stored step by step, up to `position` so far."""

    tokens: list[int]
    cache: Sequence[Any]
    position: int = 0


class PrefixCache:
    """The prefix cache of one loaded model.

    Args:
        make_cache: makes an empty cache for the model.
        budget: bytes that may be kept; 0 keeps nothing.
    """

    def __init__(self, make_cache: Callable[[], list[Any]], budget: int) -> None:
        self._make_cache = make_cache
        self._budget = budget
        self._tree: PrefixTree[BlockEntries] = PrefixTree(BLOCK_TOKENS, budget)
        parts = leaves(make_cache())
        self._kinds = [kind_of(leaf) for leaf in parts]
        self._windows = {index: leaf.max_size for index, leaf in enumerate(parts) if self._kinds[index] == "window"}
        self._has_state = "state" in self._kinds
        self._later: _Later | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._tree.nbytes

    @property
    def can_wait(self) -> bool:
        """Whether a cache still has all there is to keep of its prompt when more tokens follow it."""
        return not self._windows and not self._has_state

    def limit(self, room: int) -> None:
        """Keep to `room` bytes from now on, or to the budget if that is less; the least recently used goes first."""
        self._tree.budget = max(0, min(self._budget, room))
        if self._tree.shrink(self._tree.budget):
            mx.clear_cache()

    def clear(self) -> None:
        """Drop everything."""
        self._later = None
        self._tree.clear()

    def check(self) -> None:
        """Assert the tree's invariants."""
        self._tree.check()

    # --------------------------------------------------------------------------------------------------------- reading

    def find(self, tokens: Sequence[int]) -> Hit | None:
        """A cache for as many leading `tokens` as are kept and usable.

        The hit shares no memory with what is kept, nor with other hits.
        """
        self.store_rest()
        path = self._tree.walk(tokens)
        for blocks, length in self._candidates(path, tokens):
            if self._usable(blocks, length):
                cache = self._restore(blocks, length)
                self._tree.touch(blocks)
                return Hit(length, cache)
        return None

    def _candidates(
        self, path: list[Block[BlockEntries]], tokens: Sequence[int]
    ) -> Iterator[tuple[list[Block[BlockEntries]], int]]:
        """(path, tokens of it to use), longest first."""
        position = len(path) * BLOCK_TOKENS
        for block, agreed in self._tree.agreeing(path[-1] if path else None, tokens[position:]):
            yield [*path, block], position + agreed
        for count in range(len(path), 0, -1):
            yield path[:count], count * BLOCK_TOKENS

    def _usable(self, blocks: list[Block[BlockEntries]], length: int) -> bool:
        last = blocks[-1]
        if self._has_state:
            ends_there = (len(blocks) - 1) * BLOCK_TOKENS + len(last.tokens) == length
            if not ends_there or last.payload.states is None:
                return False
        for index, window in self._windows.items():
            needed = max(0, length - window)
            for number in range(needed // BLOCK_TOKENS, len(blocks)):
                block = blocks[number]
                missing = len(block.tokens) - entry_count(block.payload.entries[index])
                if missing > max(0, needed - number * BLOCK_TOKENS):
                    return False
        return True

    def _restore(self, blocks: list[Block[BlockEntries]], length: int) -> list[Any]:
        cache = self._make_cache()
        surplus = (len(blocks) - 1) * BLOCK_TOKENS + len(blocks[-1].tokens) - length
        states = iter(blocks[-1].payload.states or ())
        for index, leaf in enumerate(leaves(cache)):
            if self._kinds[index] == "state":
                put_state(leaf, next(states))
                continue
            first = max(0, length - self._windows.get(index, length)) // BLOCK_TOKENS
            parts = [block.payload.entries[index] for block in blocks[first:]]
            if surplus:
                parts[-1] = tree_map(lambda part: part[..., :-surplus, :], parts[-1])
            put_entries(leaf, parts, length)
        mx.eval([leaf.state for leaf in leaves(cache)])
        return cache

    # --------------------------------------------------------------------------------------------------------- writing

    def store(self, tokens: Sequence[int], cache: Sequence[Any], *, tail: bool) -> None:
        """Keep what `cache` holds for exactly these `tokens`, or, where the cache `can_wait`, for these and more.

        Args:
            tail: also keep the last, incomplete block. Without it only full blocks are kept.
        """
        if self._tree.budget <= 0:
            return
        parts = leaves(cache)
        path = self._tree.walk(tokens)
        self._complete(path, parts)
        parent = path[-1] if path else None
        position = len(path) * BLOCK_TOKENS
        if position == len(tokens):
            if parent is not None and self._has_state and parent.payload.states is None:
                self._insert(parent.parent, parent.tokens, BlockEntries(parent.payload.entries, self._states(parts)))
            return
        while position < len(tokens):
            end = min(position + BLOCK_TOKENS, len(tokens))
            if end - position < BLOCK_TOKENS and not (tail and self._tail_is_new(parent, tuple(tokens[position:end]))):
                break
            states = self._states(parts) if self._has_state and end == len(tokens) else None
            payload = BlockEntries(self._entries(parts, position, end), states)
            block = self._insert(parent, tuple(tokens[position:end]), payload)
            if block is None:
                break
            parent = block
            position = end

    def store_later(self, tokens: list[int], cache: Sequence[Any]) -> None:
        """As `store` with its tail, but in the steps that `store_some` is given; `find` does not miss it either way.

        Args:
            cache: not used by anything else from now on.
        """
        # One cache beside those that run is memory enough.
        self.store_rest()
        self._later = _Later(tokens, cache)
        if not self.can_wait:
            self.store_rest()

    def store_some(self, seconds: float) -> None:
        """Go on storing for about so long."""
        until = time.monotonic() + seconds
        while (later := self._later) is not None:
            later.position += BLOCK_TOKENS
            if later.position >= len(later.tokens):
                self.store_rest()
                return
            self.store(later.tokens[: later.position], later.cache, tail=False)
            if time.monotonic() >= until:
                return

    def store_rest(self) -> None:
        """Store all that is left."""
        later, self._later = self._later, None
        if later is not None:
            self.store(later.tokens, later.cache, tail=True)

    def _complete(self, path: list[Block[BlockEntries]], parts: Sequence[Any]) -> None:
        """Add window entries that blocks lack and `parts` hold.

        A block that was stored after its window had moved on is of no use to prompts that branch off near it.
        """
        if not self._windows:
            return
        held = max(0, min(parts[index].offset - parts[index].keys.shape[2] for index in self._windows))
        for number in range(len(path) - 1, held // BLOCK_TOKENS - 1, -1):
            block = path[number]
            if self._is_whole(block):
                continue
            entries = self._entries(parts, number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
            for index in self._windows:
                if entry_count(entries[index]) < entry_count(block.payload.entries[index]):
                    entries[index] = block.payload.entries[index]
            self._insert(block.parent, block.tokens, BlockEntries(entries, block.payload.states))

    def _is_whole(self, block: Block[BlockEntries]) -> bool:
        """Whether a hit may end at any of the block's tokens, as far as the block is concerned."""
        return all(entry_count(block.payload.entries[index]) == len(block.tokens) for index in self._windows)

    def _entries(self, parts: Sequence[Any], start: int, end: int) -> list[Entries]:
        return [
            None if kind == "state" else take_entries(leaf, start, end)
            for kind, leaf in zip(self._kinds, parts, strict=True)
        ]

    def _states(self, parts: Sequence[Any]) -> list[Any]:
        return [take_state(leaf) for kind, leaf in zip(self._kinds, parts, strict=True) if kind == "state"]

    def _tail_is_new(self, parent: Block[BlockEntries] | None, tokens: tuple[int, ...]) -> bool:
        # Where a hit may end anywhere, a longer block makes a tail superfluous; where states count, each end is of use.
        siblings = self._tree.children_of(parent)
        if self._has_state:
            return all(block.tokens != tokens or block.payload.states is None for block in siblings)
        return not any(block.tokens[: len(tokens)] == tokens and self._is_whole(block) for block in siblings)

    def _insert(
        self, parent: Block[BlockEntries] | None, tokens: tuple[int, ...], payload: BlockEntries
    ) -> Block[BlockEntries] | None:
        mx.eval(arrays_in(payload.entries), arrays_in(payload.states))
        block = self._tree.insert(parent, tokens, payload)
        if block is not None and not self._has_state and self._is_whole(block):
            for sibling in self._tree.children_of(parent):
                if len(sibling.tokens) < len(tokens) and tokens[: len(sibling.tokens)] == sibling.tokens:
                    self._tree.remove(sibling)
        return block
