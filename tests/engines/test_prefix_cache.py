"""The prefix cache on every kind of cache: what it gives back is what was computed, and it keeps to its budget.

Two sides: caches filled by a hash of the tokens, where every entry is known exactly, so that thousands of cases cost
little; and tiny models, whose caches and logits after a hit are compared with cold ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from tandem.engines.mlx.cache_kinds import arrays_in, leaves
from tandem.engines.mlx.prefill import chunk_end
from tandem.engines.mlx.prefix_cache import BLOCK_TOKENS, PrefixCache

from . import tiny
from .drive import Reference

WINDOWS = (1, 7, 64, 100)
KINDS_OF_CACHE: dict[str, Callable[[], list[Any]]] = {
    "tokens": lambda: [KVCache(), KVCache()],
    "windows": lambda: [KVCache(), *(RotatingKVCache(max_size=size) for size in WINDOWS)],
    "states": lambda: [ArraysCache(size=2)],
    "hybrid": lambda: [ArraysCache(size=1), KVCache()],
    "everything": lambda: [CacheList(KVCache(), RotatingKVCache(max_size=33)), ArraysCache(size=1), KVCache()],
    "kept beginning": lambda: [RotatingKVCache(max_size=40, keep=4), KVCache()],
    "quantised": lambda: [KVCache().to_quantized(32, 8), RotatingKVCache(max_size=9)],
}
WIDTH = 32


def row(tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """The entry of the last of `tokens`: 32 small whole numbers that depend on all of them."""
    return np.frombuffer(blake2b(np.array(tokens, np.int32).tobytes(), digest_size=WIDTH).digest(), np.uint8)


def rows(tokens: Sequence[int], start: int, end: int) -> mx.array:
    """Entries of tokens `[start, end)`: `[1, 1, tokens, WIDTH]`."""
    found = np.stack([row(tokens[: index + 1]) for index in range(start, end)])
    return mx.array(found.astype(np.float32))[None, None]


def feed(cache: Sequence[Any], tokens: Sequence[int], start: int, end: int) -> None:
    """Do to a cache what a model does that reads tokens `[start, end)`."""
    entries = rows(tokens, start, end)
    for number, leaf in enumerate(leaves(cache)):
        if isinstance(leaf, ArraysCache):
            for part in range(len(leaf.cache)):
                leaf[part] = entries[:, 0, -1:] + part
        else:
            leaf.update_and_fetch(entries + number, entries - number)
    mx.eval([leaf.state for leaf in leaves(cache)])


def held(leaf: Any) -> list[mx.array]:
    """A cache's keys and values in the order of the tokens, or its states."""
    if isinstance(leaf, ArraysCache):
        return list(leaf.cache)
    if isinstance(leaf, RotatingKVCache):
        return [leaf._temporal_order(leaf.keys), leaf._temporal_order(leaf.values)]
    return [part[..., : leaf.offset, :] for part in arrays_in((leaf.keys, leaf.values))]


def assert_equal_caches(found: Sequence[Any], expected: Sequence[Any], length: int) -> None:
    """Bit for bit, for as much as the model will look at."""
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        assert type(one) is type(other)
        if not isinstance(one, ArraysCache):
            assert one.offset == other.offset == length
        for array, reference in zip(held(one), held(other), strict=True):
            count = array.shape[-2]
            if isinstance(one, RotatingKVCache):
                count = min(length, one.max_size)
                assert array.shape[-2] >= count
                assert mx.array_equal(array[..., : one.keep, :], reference[..., : one.keep, :])
                count -= min(count - 1, one.keep)
            assert mx.array_equal(array[..., -count:, :], reference[..., -count:, :]), type(one).__name__


class Session:
    """An engine's dealings with its prefix cache, without the model."""

    def __init__(self, kind: str, budget: int, seed: int) -> None:
        self.make_cache = KINDS_OF_CACHE[kind]
        self.prefix = PrefixCache(self.make_cache, budget)
        self.budget = budget
        self.random = random.Random(seed)

    def cold(self, tokens: Sequence[int], length: int) -> list[Any]:
        cache = self.make_cache()
        if length:
            feed(cache, tokens, 0, length)
        return cache

    def answer(self, prompt: list[int], count: int, chunk: int) -> tuple[list[int], int]:
        """Prefill, and write `count` tokens.

        Returns:
            Prompt and answer, and how much of the prompt came from the prefix cache.
        """
        hit = self.prefix.find(prompt[:-1])
        position = hit.length if hit else 0
        cache = hit.cache if hit else self.make_cache()
        if hit:
            assert position <= len(prompt) - 1
            assert_equal_caches(cache, self.cold(prompt, position), position)
        total = len(prompt) - 1
        while position < total:
            end = chunk_end(position, total, chunk)
            feed(cache, prompt, position, end)
            position = end
            self.prefix.store(prompt[:position], cache, tail=position == total)
            self.check()
        tokens = list(prompt)
        for _ in range(count):
            feed(cache, tokens, len(tokens) - 1, len(tokens))
            tokens.append(self.random.randrange(3))
        if count:
            self.prefix.store(tokens[:-1], cache, tail=True)
            self.check()
            assert_equal_caches(cache, self.cold(tokens, len(tokens) - 1), len(tokens) - 1)
        return tokens, hit.length if hit else 0

    def check(self) -> None:
        self.prefix.check()
        assert self.prefix.nbytes <= self.budget


def bytes_of_blocks(kind: str, blocks: float) -> int:
    cache = KINDS_OF_CACHE[kind]()
    feed(cache, [1] * BLOCK_TOKENS, 0, BLOCK_TOKENS)
    return int(blocks * sum(array.nbytes for leaf in leaves(cache) for array in held(leaf)))


@pytest.mark.parametrize("kind", KINDS_OF_CACHE)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 32), blocks=st.sampled_from([0.5, 1.5, 4, 9, 1000]))
def test_random_prompts(kind: str, seed: int, blocks: float) -> None:
    session = Session(kind, bytes_of_blocks(kind, blocks), seed)
    choose = session.random
    known: list[list[int]] = [[]]
    for _ in range(choose.randrange(4, 14)):
        base = choose.choice(known)
        start = base[: choose.randrange(len(base) + 1)] if choose.random() < 0.5 else base
        new = choose.choice([1, 2, 5, 30, 63, 64, 65, 90, 130])
        prompt = start + [choose.randrange(3) for _ in range(new)]
        tokens, _ = session.answer(prompt, choose.choice([0, 1, 2, 30, 70]), choose.choice([16, 64, 100, 256]))
        known.append(tokens)
        if choose.random() < 0.2:
            room = choose.randrange(session.budget + 1)
            session.prefix.limit(room)
            assert session.prefix.nbytes <= room
            session.check()
            if choose.random() < 0.7:
                session.prefix.limit(session.budget)


@pytest.mark.parametrize("kind", KINDS_OF_CACHE)
@pytest.mark.parametrize("count", [1, 9, 80, 150])
def test_the_next_turn_needs_nothing_but_the_question(kind: str, count: int) -> None:
    """Whatever the answer's length, and wherever the window is by then."""
    session = Session(kind, 1 << 30, count)
    tokens = [session.random.randrange(3) for _ in range(90)]
    for _ in range(3):
        tokens, _ = session.answer(tokens, count, 64)
        stored = len(tokens) - 1
        tokens = [*tokens, *(session.random.randrange(3) for _ in range(20))]
        hit = session.prefix.find(tokens)
        assert hit is not None
        assert hit.length == stored


@pytest.mark.parametrize("kind", ["tokens", "windows", "quantised"])
def test_hits_end_at_any_token(kind: str) -> None:
    session = Session(kind, 1 << 30, 0)
    prompt = [session.random.randrange(3) for _ in range(200)]
    session.answer(prompt, 0, 64)
    for length in [*range(1, 5), *range(62, 67), *range(126, 131), 190, 199]:
        other = [*prompt[:length], 7, 7]
        _, cached = session.answer(other, 0, 64)
        assert cached == length


@pytest.mark.parametrize("kind", ["states", "hybrid", "everything", "kept beginning"])
def test_hits_end_where_a_state_was_taken(kind: str) -> None:
    session = Session(kind, 1 << 30, 0)
    prompt = [session.random.randrange(3) for _ in range(200)]
    session.answer(prompt, 0, 64)
    for length, expected in ((63, 0), (64, 64), (127, 64), (128, 128), (150, 128), (198, 192), (199, 199)):
        hit = session.prefix.find([*prompt[:length], 7, 7])
        assert (hit.length if hit else 0) == expected


def test_a_shorter_block_that_ends_in_a_state_beats_a_longer_one_without() -> None:
    session = Session("states", 1 << 30, 0)
    prompt = [session.random.randrange(3) for _ in range(40)]
    session.answer([*prompt[:30], 5, 5, 5, 5], 0, 64)
    session.answer(prompt[:21], 0, 64)
    hit = session.prefix.find(prompt)
    assert hit is not None
    assert hit.length == 20


def test_branching_off_within_an_answer() -> None:
    """The answer's old window is gone; the first to compute it again leaves it for the others."""
    session = Session("windows", 1 << 30, 3)
    tokens, _ = session.answer([1] * 70, 200, 64)
    branch = tokens[:170]
    first = session.answer([*branch, 8, 8], 0, 64)[1]
    second = session.answer([*branch, 9, 9, 9], 0, 64)[1]
    assert first < 170
    assert second == 170


def test_branches_do_not_overwrite_one_another() -> None:
    session = Session("windows", 1 << 30, 1)
    shared = [session.random.randrange(3) for _ in range(100)]
    branches = [[*shared, 3 + number, *([4] * 50)] for number in range(5)]
    for branch in branches:
        session.answer(branch, 30, 64)
    for branch in branches:
        _, cached = session.answer(branch, 0, 64)  # compares with the branch's own entries
        assert cached == len(branch) - 1


def test_hits_are_copies() -> None:
    session = Session("hybrid", 1 << 30, 1)
    prompt = [1, 2] * 40
    session.answer(prompt, 0, 64)
    one, other = session.prefix.find(prompt), session.prefix.find(prompt)
    assert one is not None
    assert other is not None
    feed(one.cache, [*prompt[: one.length], 9, 9], one.length, one.length + 2)
    one.cache[0][0] *= 0
    assert_equal_caches(other.cache, session.cold(prompt, other.length), other.length)
    again = session.prefix.find(prompt)
    assert again is not None
    assert_equal_caches(again.cache, session.cold(prompt, again.length), again.length)


def test_no_budget_keeps_nothing() -> None:
    session = Session("tokens", 0, 0)
    session.answer([1] * 100, 10, 64)
    assert session.prefix.find([1] * 100) is None
    assert session.prefix.nbytes == 0


def test_the_budget_comes_back_when_there_is_room() -> None:
    session = Session("tokens", bytes_of_blocks("tokens", 4), 0)
    prompt = [session.random.randrange(3) for _ in range(260)]
    session.answer(prompt, 0, 64)
    session.prefix.limit(bytes_of_blocks("tokens", 2))
    assert 0 < session.prefix.nbytes <= bytes_of_blocks("tokens", 2)
    session.answer(prompt, 0, 64)
    assert session.prefix.nbytes <= bytes_of_blocks("tokens", 2)
    session.prefix.limit(-5)
    assert session.prefix.nbytes == 0
    session.prefix.limit(1 << 40)
    session.answer(prompt, 0, 64)
    assert session.prefix.nbytes == bytes_of_blocks("tokens", 4)


# ---------------------------------------------------------------------------------------------------- with real models


def prefill(reference: Reference, cache: list[Any], tokens: Sequence[int], start: int, cuts: Sequence[int]) -> mx.array:
    """Feed `tokens` from `start` on, cut at `cuts`; the last chunk's logits."""
    logits = mx.array(0)
    for end in cuts:
        logits = reference.model(mx.array(tokens[start:end])[None], cache=cache)
        mx.eval(logits, [leaf.state for leaf in leaves(cache)])
        start = end
    return logits


@pytest.mark.parametrize("kind", tiny.ALL_KINDS)
def test_logits_after_a_hit(kind: str, tiny_reference: Callable[[str], Reference]) -> None:
    """Cut in the same places, a prompt has the same cache and the same logits, bit for bit, with or without a hit."""
    reference = tiny_reference(kind)
    generator = random.Random(kind)
    tokens = [generator.randrange(2, tiny.VOCABULARY) for _ in range(300)]
    cuts = [64, 128, 192, 256, 290]
    prefix = PrefixCache(lambda: make_prompt_cache(reference.model), 1 << 30)
    cache = prefix._make_cache()
    for start, end in zip([0, *cuts], cuts, strict=False):
        prefill(reference, cache, tokens, start, [end])
        prefix.store(tokens[:end], cache, tail=end == cuts[-1])
    for index, length in enumerate(cuts):
        rest = [*cuts[index + 1 :], 299, 300]
        cold = prefix._make_cache()
        prefill(reference, cold, tokens, 0, cuts[: index + 1])
        hit = prefix.find([*tokens[:length], 0])
        assert hit is not None
        assert hit.length == length
        assert_equal_caches(hit.cache, cold, length)
        warm_logits = prefill(reference, hit.cache, tokens, length, rest)
        cold_logits = prefill(reference, cold, tokens, length, rest)
        assert mx.array_equal(warm_logits, cold_logits)
        assert_equal_caches(hit.cache, cold, 300)


@pytest.mark.parametrize("kind", [kind for kind in tiny.ALL_KINDS if kind not in tiny.STATEFUL])
def test_logits_after_a_hit_within_a_block(kind: str, tiny_reference: Callable[[str], Reference]) -> None:
    """A hit that cuts a chunk in two changes no logit beyond what the cut itself changes."""
    reference = tiny_reference(kind)
    generator = random.Random(kind)
    tokens = [generator.randrange(2, tiny.VOCABULARY) for _ in range(200)]
    prefix = PrefixCache(lambda: make_prompt_cache(reference.model), 1 << 30)
    cache = prefix._make_cache()
    for end in (64, 128, 192):
        prefill(reference, cache, tokens, end - 64, [end])
        prefix.store(tokens[:end], cache, tail=False)
    for length in (1, 23, 24, 25, 63, 65, 100, 127, 129, 170):
        hit = prefix.find([*tokens[:length], 0])
        assert hit is not None
        assert hit.length == length
        cold = prefix._make_cache()
        prefill(reference, cold, tokens, 0, [cut for cut in (64, 128) if cut < length] + [length])
        warm = prefill(reference, hit.cache, tokens, length, [199, 200])
        expected = prefill(reference, cold, tokens, length, [199, 200])
        assert mx.allclose(warm, expected, rtol=0, atol=1e-5 * float(mx.abs(expected).max()))


def test_what_is_stored_later_is_found_at_once(tiny_reference: Callable[[str], Reference]) -> None:
    reference = tiny_reference("llama")
    tokens = [2 + index % 97 for index in range(300)]
    caches = []
    for _ in range(2):
        caches.append(make_prompt_cache(reference.model))
        prefill(reference, caches[-1], tokens, 0, [300])
    now, later = (PrefixCache(lambda: make_prompt_cache(reference.model), 1 << 30) for _ in range(2))
    now.store(tokens, caches[0], tail=True)
    later.store_later(tokens, caches[1])
    assert later.nbytes == 0
    later.store_some(0.0)
    assert 0 < later.nbytes < now.nbytes
    hit, expected = later.find([*tokens, 0]), now.find([*tokens, 0])
    assert hit is not None
    assert expected is not None
    assert hit.length == expected.length == 300
    assert_equal_caches(hit.cache, expected.cache, 300)
    assert later.nbytes == now.nbytes


def test_one_cache_waits_at_most(tiny_reference: Callable[[str], Reference]) -> None:
    reference = tiny_reference("llama")
    prefix = PrefixCache(lambda: make_prompt_cache(reference.model), 1 << 30)
    for first in (2, 3):
        tokens = [first] * 130
        cache = make_prompt_cache(reference.model)
        prefill(reference, cache, tokens, 0, [130])
        prefix.store_later(tokens, cache)
    assert prefix.nbytes > 0
    prefix.store_rest()
    for first in (2, 3):
        hit = prefix.find([first] * 131)
        assert hit is not None
        assert hit.length == 130
