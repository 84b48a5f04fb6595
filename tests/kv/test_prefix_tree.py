"""The tree of token blocks: what it finds, what it forgets, and that it never loses count."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.kv.prefix_tree import Block, PrefixTree, common_length


@dataclass(eq=False)
class Sized:
    """A payload that knows what it was stored for."""

    nbytes: int
    tokens: tuple[int, ...] = ()


def store(tree: PrefixTree[Sized], tokens: list[int], size: int = 10) -> list[Block[Sized]]:
    """Insert `tokens` in blocks, as an engine does: what is there already is not inserted again."""
    path = tree.walk(tokens)
    position = len(path) * tree.block_size
    while position < len(tokens):
        part = tuple(tokens[position : position + tree.block_size])
        end = position + len(part)
        block = tree.insert(path[-1] if path else None, part, Sized(size, tuple(tokens[:end])))
        if block is None:
            break
        path.append(block)
        position = end
    return path


def test_common_length() -> None:
    assert common_length([], [1]) == 0
    assert common_length([1, 2, 3], [1, 2]) == 2
    assert common_length([1, 2, 3], [1, 9, 3]) == 1
    assert common_length((1, 2), [1, 2]) == 2


def test_walks_full_blocks_only() -> None:
    tree: PrefixTree[Sized] = PrefixTree(4, 1000)
    path = store(tree, [*range(10)])
    assert [block.tokens for block in path] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert tree.walk([*range(10)]) == path[:2]
    assert tree.walk([*range(7)]) == path[:1]
    assert tree.walk([*range(3)]) == []
    assert tree.walk([]) == []
    assert tree.walk([0, 1, 2, 9, 4, 5, 6, 7]) == []
    tree.check()


def test_agreeing_blocks_longest_first() -> None:
    tree: PrefixTree[Sized] = PrefixTree(4, 1000)
    long = store(tree, [1, 2, 3, 4])[0]
    short = store(tree, [1, 2])[0]
    other = store(tree, [1, 9, 9, 9])[0]
    store(tree, [7, 7])
    assert tree.agreeing(None, [1, 2, 3, 5, 6]) == [(long, 3), (short, 2), (other, 1)]
    # Among equals, the one that is used up to its end comes first.
    assert tree.agreeing(None, [1, 2]) == [(short, 2), (long, 2), (other, 1)]
    assert tree.agreeing(None, [8]) == []
    assert tree.agreeing(long, [1]) == []


def test_branches_share_their_beginning() -> None:
    tree: PrefixTree[Sized] = PrefixTree(2, 1000)
    one = store(tree, [1, 2, 3, 4])
    two = store(tree, [1, 2, 5, 6])
    assert one[0] is two[0]
    assert one[1] is not two[1]
    assert tree.nbytes == 30
    assert len(tree) == 3
    assert set(tree) == {*one, *two}
    assert tree.children_of(one[0]) == [one[1], two[1]]
    assert tree.path_to(two[1]) == two


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree: PrefixTree[Sized] = PrefixTree(2, 50)
    first = store(tree, [1, 2, 3, 4])
    second = store(tree, [1, 2, 5, 6])
    third = store(tree, [7, 8, 9, 9])
    assert tree.nbytes == 50
    tree.touch(first)
    store(tree, [6, 6])
    assert second[1] not in set(tree)
    assert {*first, *third} <= set(tree)
    store(tree, [6, 6, 7, 7])
    # Of the third path the end went, and its beginning stayed.
    assert third[1] not in set(tree)
    assert third[0] in set(tree)
    tree.check()


def test_a_payload_larger_than_the_budget_is_not_kept() -> None:
    tree: PrefixTree[Sized] = PrefixTree(2, 50)
    kept = store(tree, [1, 2])
    assert tree.insert(None, (3, 4), Sized(51)) is None
    assert set(tree) == set(kept)


def test_the_budget_may_be_nothing() -> None:
    tree: PrefixTree[Sized] = PrefixTree(2, 0)
    assert store(tree, [1, 2, 3]) == []
    assert len(tree) == 0


def test_a_payload_is_replaced() -> None:
    tree: PrefixTree[Sized] = PrefixTree(2, 50)
    (block,) = store(tree, [1, 2])
    replaced = tree.insert(None, (1, 2), Sized(25))
    assert replaced is block
    assert block.payload.nbytes == tree.nbytes == 25
    store(tree, [3, 4])
    # One that grows beyond the budget pushes everything out, itself at last.
    assert tree.insert(None, (1, 2), Sized(60)) is None
    assert len(tree) == tree.nbytes == 0
    tree.check()


def test_nothing_follows_an_evicted_or_incomplete_block() -> None:
    tree: PrefixTree[Sized] = PrefixTree(2, 50)
    (whole,) = store(tree, [1, 2])
    (part,) = store(tree, [3])
    assert tree.insert(part, (4, 5), Sized(1)) is None
    tree.remove(whole)
    assert tree.insert(whole, (3, 4), Sized(1)) is None
    tree.check()


def test_blocks_of_a_wrong_size_are_refused() -> None:
    tree: PrefixTree[Sized] = PrefixTree(2, 50)
    for tokens in ((), (1, 2, 3)):
        with pytest.raises(ValueError, match="1 to 2 tokens"):
            tree.insert(None, tokens, Sized(1))


def test_only_leaves_are_removed() -> None:
    tree: PrefixTree[Sized] = PrefixTree(2, 50)
    path = store(tree, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="others follow"):
        tree.remove(path[0])
    tree.remove(path[1])
    tree.remove(path[0])
    assert tree.nbytes == 0


def test_shrink_says_what_it_freed() -> None:
    tree: PrefixTree[Sized] = PrefixTree(2, 100)
    store(tree, [*range(10)])
    assert tree.shrink(100) == 0
    assert tree.shrink(25) == 30
    assert tree.shrink(-5) == 20
    assert len(tree) == 0


def test_clear() -> None:
    tree: PrefixTree[Sized] = PrefixTree(2, 100)
    store(tree, [*range(10)])
    tree.clear()
    assert tree.walk([*range(10)]) == []
    assert len(tree) == tree.nbytes == 0
    tree.check()


def test_check_finds_a_wrong_count() -> None:
    tree: PrefixTree[Sized] = PrefixTree(2, 100)
    (block,) = store(tree, [1, 2])
    block.payload.nbytes += 1
    with pytest.raises(AssertionError, match="are counted"):
        tree.check()


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=20), st.integers(0, 120))
def test_what_is_found_was_stored(sequences: list[list[int]], budget: int) -> None:
    tree: PrefixTree[Sized] = PrefixTree(3, budget)
    for tokens in sequences:
        store(tree, tokens)
        assert tree.nbytes <= budget
    tree.check()
    for tokens in sequences:
        path = tree.walk(tokens)
        spelled = [token for block in path for token in block.tokens]
        assert spelled == tokens[: len(spelled)]
        assert all(block.payload.tokens == tuple(tokens[: 3 * (at + 1)]) for at, block in enumerate(path))
        for block, agreed in tree.agreeing(path[-1] if path else None, tokens[len(spelled) :]):
            assert block.tokens[:agreed] == tuple(tokens[len(spelled) : len(spelled) + agreed])


class TreeMachine(RuleBasedStateMachine):
    """The tree against a list of paths in order of use."""

    @initialize(seed=st.integers(0, 1 << 20), budget=st.integers(1, 200))
    def begin(self, seed: int, budget: int) -> None:
        self.random = random.Random(seed)
        self.tree: PrefixTree[Sized] = PrefixTree(3, budget)

    def spelled(self, block: Block[Sized]) -> tuple[int, ...]:
        return tuple(token for part in self.tree.path_to(block) for token in part.tokens)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=11), size=st.integers(0, 60))
    def keep(self, tokens: list[int], size: int) -> None:
        store(self.tree, tokens, size)

    @rule(tokens=st.lists(st.integers(0, 1), max_size=11))
    def use(self, tokens: list[int]) -> None:
        path = self.tree.walk(tokens)
        self.tree.touch(path)
        if path:
            newest = list(self.tree)[-len(path) :]
            assert newest == path[::-1]

    @rule(size=st.integers(0, 100))
    def shrink(self, size: int) -> None:
        order = list(self.tree)
        freed = self.tree.shrink(size)
        left = list(self.tree)
        # What went was the oldest, and no more of it than had to.
        assert left == order[len(order) - len(left) :]
        gone = order[: len(order) - len(left)]
        assert sum(block.payload.nbytes for block in gone) == freed
        if gone:
            assert self.tree.nbytes + gone[-1].payload.nbytes > size

    @rule()
    def remove_a_leaf(self) -> None:
        leaves = [block for block in self.tree if not block.children]
        if leaves:
            self.tree.remove(self.random.choice(leaves))

    @invariant()
    def holds(self) -> None:
        self.tree.check()
        assert self.tree.nbytes <= self.tree.budget
        for block in self.tree:
            assert self.spelled(block) == block.payload.tokens


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
