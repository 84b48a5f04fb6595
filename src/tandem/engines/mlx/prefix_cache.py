"""Cache entries of earlier prompts and answers, reused for later prompts that begin alike.

Everything is stored in blocks of tokens (see `tandem.kv.prefix_tree`). *Tokens* and *window* layers store each
block's own keys and values, so that a hit may end at any token, as long as the window before it is there. *State*
layers cannot be cut: a hit must end where a state was taken, which is at the ends of prefill chunks and of answers.
What is put back is a copy, bit for bit, of what the model computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from tandem.engines.mlx.cache_kinds import (
    Entries,
    arrays_in,
    kind_of,
    leaves,
    put_entries,
    put_state,
    take_entries,
    take_state,
    tree_bytes,
)
from tandem.kv.prefix_tree import Block, Match, PrefixTree

BLOCK_TOKENS = 64


@dataclass(slots=True)
class BlockEntries:
    """One block's share of a model's cache.

    Attributes:
        entries: per leaf cache, its keys and values for the block's tokens; None for *state* leaves, and for
            *window* leaves that no longer held them.
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


class PrefixCache:
    """The prefix cache of one loaded model.

    Args:
        make_cache: makes an empty cache for the model.
        budget: bytes that may be kept; 0 keeps nothing.
    """

    def __init__(self, make_cache: Callable[[], list[Any]], budget: int) -> None:
        self._make_cache = make_cache
        self._tree: PrefixTree[BlockEntries] = PrefixTree(BLOCK_TOKENS, budget)
        self._kinds = [kind_of(leaf) for leaf in leaves(make_cache())]
        self._window = max((leaf.max_size for leaf in leaves(make_cache()) if kind_of(leaf) == "window"), default=0)
        self._has_state = "state" in self._kinds

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._tree.nbytes

    def shrink(self, target: int) -> None:
        """Drop what was used least recently until at most `target` bytes are held."""
        if self._tree.shrink(target):
            mx.clear_cache()

    def clear(self) -> None:
        """Drop everything."""
        self._tree.clear()

    def check(self) -> None:
        """Assert the tree's invariants."""
        self._tree.check()

    # --------------------------------------------------------------------------------------------------------- reading

    def find(self, tokens: Sequence[int]) -> Hit | None:
        """A cache for as many leading `tokens` as are kept and usable.

        The hit shares no memory with what is kept, nor with other hits.
        """
        match = self._tree.match(tokens)
        for blocks, length in self._candidates(match):
            if self._usable(blocks, length):
                cache = self._restore(blocks, length)
                self._tree.touch(blocks)
                return Hit(length, cache)
        return None

    def _candidates(self, match: Match[BlockEntries]) -> list[tuple[list[Block[BlockEntries]], int]]:
        """(path, tokens of it to use), longest first."""
        full = match.path
        found: list[tuple[list[Block[BlockEntries]], int]] = []
        if match.partial is not None:
            found.append(([*full, match.partial], match.length))
            if self._has_state:
                # Another block may agree for fewer tokens, but to its very end.
                parent = full[-1] if full else None
                ends = {
                    len(child.tokens): child
                    for child in self._tree.children_of(parent)
                    if len(child.tokens) < match.partial_length
                    and child.tokens == match.partial.tokens[: len(child.tokens)]
                }
                found.extend(
                    ([*full, ends[size]], len(full) * BLOCK_TOKENS + size) for size in sorted(ends, reverse=True)
                )
        found.extend((full[:count], count * BLOCK_TOKENS) for count in range(len(full), 0, -1))
        return found

    def _usable(self, blocks: list[Block[BlockEntries]], length: int) -> bool:
        last = blocks[-1]
        if self._has_state:
            ends_there = (len(blocks) - 1) * BLOCK_TOKENS + len(last.tokens) == length
            if not ends_there or last.payload.states is None:
                return False
        if self._window:
            first = max(0, length - self._window) // BLOCK_TOKENS
            for index, kind in enumerate(self._kinds):
                if kind == "window" and any(block.payload.entries[index] is None for block in blocks[first:]):
                    return False
        return True

    def _restore(self, blocks: list[Block[BlockEntries]], length: int) -> list[Any]:
        cache = self._make_cache()
        cut = length - (len(blocks) - 1) * BLOCK_TOKENS
        states = iter(blocks[-1].payload.states or ())
        for index, leaf in enumerate(leaves(cache)):
            if self._kinds[index] == "state":
                put_state(leaf, next(states))
                continue
            first = max(0, length - leaf.max_size) // BLOCK_TOKENS if self._kinds[index] == "window" else 0
            parts = [block.payload.entries[index] for block in blocks[first:]]
            parts[-1] = tree_map(lambda part: part[..., :cut, :], parts[-1])
            put_entries(leaf, parts, length)
        mx.eval([leaf.state for leaf in leaves(cache)])
        return cache

    # --------------------------------------------------------------------------------------------------------- writing

    def store(self, tokens: Sequence[int], cache: Sequence[Any], *, tail: bool) -> None:
        """Keep what `cache` holds for exactly these `tokens`.

        Args:
            tail: also keep the last, incomplete block. Without it only full blocks are kept.
        """
        if self._tree.budget <= 0:
            return
        parts = leaves(cache)
        match = self._tree.match(tokens)
        parent = match.path[-1] if match.path else None
        position = len(match.path) * BLOCK_TOKENS
        if position == len(tokens):
            if parent is not None and self._has_state and parent.payload.states is None:
                self._insert(parent.parent, parent.tokens, BlockEntries(parent.payload.entries, self._states(parts)))
            return
        while position < len(tokens):
            end = min(position + BLOCK_TOKENS, len(tokens))
            if end - position < BLOCK_TOKENS and not (tail and self._tail_is_new(parent, tuple(tokens[position:end]))):
                break
            entries = [
                None if kind == "state" else take_entries(leaf, position, end)
                for kind, leaf in zip(self._kinds, parts, strict=True)
            ]
            states = self._states(parts) if self._has_state and end == len(tokens) else None
            block = self._insert(parent, tuple(tokens[position:end]), BlockEntries(entries, states))
            if block is None:
                break
            parent = block
            position = end

    def _states(self, parts: Sequence[Any]) -> list[Any]:
        return [take_state(leaf) for kind, leaf in zip(self._kinds, parts, strict=True) if kind == "state"]

    def _tail_is_new(self, parent: Block[BlockEntries] | None, tokens: tuple[int, ...]) -> bool:
        # Where a hit may end anywhere, a longer block makes a tail superfluous; where states count, each end is of use.
        siblings = self._tree.children_of(parent)
        if self._has_state:
            return all(block.tokens != tokens or block.payload.states is None for block in siblings)
        return not any(block.tokens[: len(tokens)] == tokens for block in siblings)

    def _insert(
        self, parent: Block[BlockEntries] | None, tokens: tuple[int, ...], payload: BlockEntries
    ) -> Block[BlockEntries] | None:
        mx.eval(arrays_in(payload.entries), arrays_in(payload.states))
        block = self._tree.insert(parent, tokens, payload)
        if block is not None and not self._has_state:
            for sibling in self._tree.children_of(parent):
                covers = len(sibling.tokens) < len(tokens) and tokens[: len(sibling.tokens)] == sibling.tokens
                if covers and not sibling.children and None not in payload.entries:
                    self._tree.remove(sibling)
        return block
