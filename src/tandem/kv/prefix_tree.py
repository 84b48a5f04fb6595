"""Which token sequences have their cache entries kept: a tree of token blocks with a byte budget.

A node stands for one block of tokens after its parent's; the path from the root spells a prompt's beginning, so
sequences that begin alike share nodes and can never overwrite one another. Inner blocks are full (`block_size`
tokens); only the last block of a sequence may be shorter. The tree holds payloads without knowing what they are: an
engine's slices of keys and values, a state snapshot, or nothing at all.

Tokens are compared, not only hashed: a collision cannot hand out somebody else's entries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar


class Payload(Protocol):
    """What a block holds."""

    @property
    def nbytes(self) -> int:
        """Memory that dropping it would free."""
        ...


P = TypeVar("P", bound=Payload)


class Block(Generic[P]):
    """A node of the tree. Compared by identity."""

    __slots__ = ("children", "parent", "payload", "tokens")

    def __init__(self, tokens: tuple[int, ...], payload: P, parent: Block[P] | None) -> None:
        self.tokens = tokens
        self.payload = payload
        self.parent = parent
        self.children: dict[tuple[int, ...], Block[P]] = {}


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


class PrefixTree(Generic[P]):
    """The tree and its least-recently-used eviction.

    Args:
        block_size: tokens in a full block.
        budget: bytes that all payloads together may take. A payload larger than the budget is not kept.
    """

    def __init__(self, block_size: int, budget: int) -> None:
        self.block_size = block_size
        self.budget = budget
        self.nbytes = 0
        self._children: dict[tuple[int, ...], Block[P]] = {}
        # Least recently used first. A path is touched from its end to the root, so a parent is never older than its
        # children, and the first entry is always a leaf.
        self._order: OrderedDict[Block[P], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Block[P]]:
        return iter(self._order)

    def walk(self, tokens: Sequence[int]) -> list[Block[P]]:
        """The full blocks, root first, that `tokens` begins with. Does not count as a use."""
        path: list[Block[P]] = []
        children = self._children
        for position in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = children.get(tuple(tokens[position : position + self.block_size]))
            if block is None:
                break
            path.append(block)
            children = block.children
        return path

    def agreeing(self, parent: Block[P] | None, tokens: Sequence[int]) -> list[tuple[Block[P], int]]:
        """The blocks after `parent` (None: at the root) that begin as `tokens` do, and for how many tokens; the
        longest agreement first, the shortest block first among equals."""
        rest = tokens[: self.block_size]
        found = [(block, common_length(block.tokens, rest)) for block in self.children_of(parent)]
        return sorted((one for one in found if one[1]), key=lambda one: (-one[1], len(one[0].tokens)))

    def touch(self, blocks: Sequence[Block[P]]) -> None:
        """Count a path (root first) as used now."""
        for block in reversed(blocks):
            if block in self._order:
                self._order.move_to_end(block)

    def insert(self, parent: Block[P] | None, tokens: tuple[int, ...], payload: P) -> Block[P] | None:
        """Add a block after `parent` (None: at the root), evicting what was used least recently.

        Returns:
            The block, or None if it cannot be kept: it is larger than the budget, or `parent` was evicted meanwhile.
        """
        if not tokens or len(tokens) > self.block_size:
            raise ValueError(f"a block holds 1 to {self.block_size} tokens, not {len(tokens)}")
        if parent is not None and (parent not in self._order or len(parent.tokens) < self.block_size):
            return None
        children = self._children if parent is None else parent.children
        known = children.get(tokens)
        if known is not None:
            self.nbytes += payload.nbytes - known.payload.nbytes
            known.payload = payload
            block = known
        else:
            if payload.nbytes > self.budget:
                return None
            block = Block(tokens, payload, parent)
            children[tokens] = block
            self._order[block] = None
            self.nbytes += payload.nbytes
        self.touch(self.path_to(block))
        self.shrink(self.budget)
        return block if block in self._order else None

    def path_to(self, block: Block[P]) -> list[Block[P]]:
        """The blocks from the root to `block`."""
        path = [block]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        path.reverse()
        return path

    def children_of(self, parent: Block[P] | None) -> list[Block[P]]:
        """The blocks that follow `parent` (None: the first blocks)."""
        return list((self._children if parent is None else parent.children).values())

    def remove(self, block: Block[P]) -> None:
        """Drop a leaf.

        Raises:
            ValueError: other blocks follow it.
        """
        if block.children:
            raise ValueError("a block that others follow cannot be removed")
        siblings = self._children if block.parent is None else block.parent.children
        del siblings[block.tokens]
        del self._order[block]
        self.nbytes -= block.payload.nbytes

    def shrink(self, target: int) -> int:
        """Evict until at most `target` bytes are held.

        Returns:
            Bytes freed.
        """
        before = self.nbytes
        while self.nbytes > max(0, target) and self._order:
            self.remove(next(iter(self._order)))
        return before - self.nbytes

    def clear(self) -> None:
        """Drop everything."""
        self._children.clear()
        self._order.clear()
        self.nbytes = 0

    def check(self) -> None:
        """Assert the invariants; cheap enough for tests and for an idle engine."""
        seen = 0
        total = 0
        position = {block: index for index, block in enumerate(self._order)}
        pending = list(self._children.values())
        while pending:
            block = pending.pop()
            seen += 1
            total += block.payload.nbytes
            assert block in position
            assert block.parent is None or position[block.parent] > position[block]
            assert not block.children or len(block.tokens) == self.block_size
            pending.extend(block.children.values())
        assert seen == len(self._order), "a block is unreachable"
        assert total == self.nbytes, f"{total} bytes are held, {self.nbytes} are counted"
