"""Planning and comparing, without a model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tandem.kv.describe import Group, groups
from tandem.kv.intervals import Span
from tandem.kv.layout import Layer, Layout, Part
from tandem.verify.cases import Sizes, plan_cases
from tandem.verify.check import _same_pieces
from tandem.verify.compare import Bounds, compare_arrays, compare_logits
from tandem.verify.prompts import PromptSource
from tandem.verify.report import compare_answers

BITS = Bounds(exact=True, entries=0.0, logits=0.0)
ROUNDED = Bounds(exact=False, entries=1e-3, logits=1e-3)


def source(seed: int = 0) -> PromptSource:
    return PromptSource(lambda text: list(text.encode()), range(256), seed)


def test_prompts_are_varied_and_repeatable() -> None:
    one, same, other = source(1), source(1), source(2)
    prompts = [one.prompt(length) for length in range(1, 60)]
    assert prompts == [same.prompt(length) for length in range(1, 60)]
    assert prompts != [other.prompt(length) for length in range(1, 60)]
    assert [len(prompt) for prompt in prompts] == list(range(1, 60))
    assert len({prompt[0] for prompt in prompts}) == len(prompts), "no prompt begins like another"
    assert all(0 <= token < 256 for prompt in prompts for token in prompt)


def test_lengths_go_around_every_boundary() -> None:
    sizes = Sizes(chunk=256, windows=(512,), checkpoint=1024, longest=8000)
    lengths = set(sizes.lengths())
    assert {1, 2, 3} <= lengths
    for boundary in (256, 512, 1024):
        assert {boundary - 1, boundary, boundary + 1, boundary + 2} <= lengths
    assert max(Sizes(256, (), 1024, longest=300).lengths()) <= 300


@pytest.mark.parametrize(
    "sizes", [Sizes(256, (24,), 1024, 4000), Sizes(2048, (4096,), 1024, 300), Sizes(8, (), 64, 40)]
)
@pytest.mark.parametrize("quick", [True, False])
def test_cases_fit_and_are_what_they_say(sizes: Sizes, quick: bool) -> None:
    cases = plan_cases(sizes, source(), own=[[1, 2, 3]], quick=quick, answer=4)
    assert len({case.name for case in cases}) == len(cases)
    assert cases[0].tokens == (1, 2, 3)
    for case in cases:
        assert 0 < len(case.tokens) <= sizes.longest
        assert case.server[: case.shared] == case.tokens[: case.shared]
        assert len(case.tokens) + (4 + len(case.follow) if case.follow else 0) <= sizes.longest
    assert any(case.follow for case in cases)
    assert any(case.server and case.client for case in cases)


def test_the_first_wrong_token_is_named() -> None:
    ours = np.random.default_rng(0).normal(size=(2, 10, 4)).astype(np.float32)
    theirs = ours.copy()
    assert compare_arrays("keys", ours, theirs, BITS, start=30, axis=1).bit_equal
    theirs[1, 7, 2] = np.nextafter(theirs[1, 7, 2], np.float32(9))
    found = compare_arrays("keys", ours, theirs, BITS, start=30, axis=1)
    assert found.first == 37
    assert 0 < found.max_abs < 1e-6
    assert found.cosine == pytest.approx(1.0)
    assert compare_arrays("keys", ours, theirs, ROUNDED, start=30, axis=1).first is None
    theirs[0, 3] += 0.01
    assert compare_arrays("keys", ours, theirs, ROUNDED, start=30, axis=1).first == 33
    state = compare_arrays("0", ours, theirs, BITS, start=55, axis=None)
    assert state.first == 55


def test_what_is_no_number_is_wrong() -> None:
    ours = np.ones((1, 3, 2), np.float32)
    theirs = ours.copy()
    theirs[0, 1, 0] = math.nan
    for bounds in (BITS, ROUNDED):
        found = compare_arrays("keys", ours, theirs, bounds, start=0, axis=1)
        assert found.first == 1
        assert found.max_abs == math.inf
    assert compare_arrays("keys", ours, ours[:, :2], BITS, start=0, axis=1).first == 0
    assert compare_logits(ours[0, 0], theirs[0, 1]) == (math.inf, False)


def test_packed_entries_are_compared_in_steps() -> None:
    ours = np.full((1, 3, 2), 0x04030201, np.uint32)
    theirs = ours.copy()
    theirs[0, 2, 1] += 2 << 16
    found = compare_arrays("keys.packed", ours, theirs, BITS, start=0, axis=1, bits=8)
    assert (found.first, found.max_abs) == (2, 2.0)
    assert compare_arrays("keys.packed", ours, theirs, ROUNDED, start=0, axis=1, bits=8).first is None


def test_answers() -> None:
    assert compare_answers([1, 2, 3], [1, 2, 3]) is None
    assert compare_answers([1, 2, 3], [1, 9, 3]) == 1


def test_which_pieces_make_equal_bits() -> None:
    local = [Span(0, 256), Span(256, 512), Span(512, 600)]
    assert _same_pieces(local, local, [], 0)
    assert not _same_pieces(local, [Span(0, 256), Span(256, 600)], [], 0)
    assert not _same_pieces(local, None, [], 0)
    assert _same_pieces(local, local, [Span(0, 256), Span(256, 300)], 256)
    assert not _same_pieces(local, local, [Span(0, 256), Span(256, 300)], 300)
    assert not _same_pieces(local, local, None, 256)
    assert _same_pieces(local, [], local, 600)


def test_equal_layers_are_grouped() -> None:
    window = Layer("window", parts=(Part("keys", 1, 8, "float16"),), window=4)
    full = Layer("tokens", parts=(Part("keys", 1, 8, "float16"),))
    found = groups(Layout((window, window, window, full, window, full)))
    assert found == [Group((0, 1, 2, 4), window), Group((3, 5), full)]
    assert [group.numbers for group in found] == ["0-2, 4", "3, 5"]
