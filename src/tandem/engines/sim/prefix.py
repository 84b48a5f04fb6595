"""Which prompts' beginnings the simulated cache still has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tandem.engines.sim.cache import chain
from tandem.kv.prefix_tree import PrefixTree

BLOCK_TOKENS = 64


class SimBlock(NamedTuple):
    """A block's payload: the hash of everything up to its last token, and the bytes that its entries would take."""

    state: int
    nbytes: int


class Prefix(NamedTuple):
    """`length` leading tokens are kept; `state` is their hash."""

    length: int
    state: int


NOTHING = Prefix(0, 0)


class SimPrefixCache:
    """Exact: a hit is never longer than what was stored and is equal.

    Entries follow from the tokens, so only these are kept.

    Args:
        entries: tokens that may be kept; 0 keeps nothing.
        bytes_per_token: of the simulated cache.
    """

    def __init__(self, entries: int, bytes_per_token: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._tree: PrefixTree[SimBlock] = PrefixTree(BLOCK_TOKENS, entries * bytes_per_token)

    @property
    def nbytes(self) -> int:
        """Bytes that the kept entries would take."""
        return self._tree.nbytes

    def find(self, tokens: Sequence[int]) -> Prefix:
        """As many leading `tokens` as are kept."""
        path = self._tree.walk(tokens)
        state = path[-1].payload.state if path else 0
        length = len(path) * BLOCK_TOKENS
        agreeing = self._tree.agreeing(path[-1] if path else None, tokens[length:])
        if agreeing:
            block, agreed = agreeing[0]
            state = chain(state, tokens[length : length + agreed])
            length += agreed
            path.append(block)
        self._tree.touch(path)
        return Prefix(length, state)

    def store(self, tokens: Sequence[int], *, tail: bool) -> None:
        """Keep `tokens`; without `tail` only their full blocks."""
        if not self._tree.budget:
            return
        path = self._tree.walk(tokens)
        parent = path[-1] if path else None
        state = parent.payload.state if parent else 0
        for start in range(len(path) * BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
            block = tuple(tokens[start : start + BLOCK_TOKENS])
            if len(block) < BLOCK_TOKENS and not tail:
                return
            state = chain(state, block)
            parent = self._tree.insert(parent, block, SimBlock(state, len(block) * self._bytes_per_token))
            if parent is None:
                return

    def clear(self) -> None:
        """Drop everything."""
        self._tree.clear()

    def check(self) -> None:
        """Assert the tree's invariants."""
        self._tree.check()
