"""Entries that arrive in the arrays of the cache that will use them."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tandem.engines.base import EngineOptions
from tandem.engines.mlx.cache_kinds import kind_of, leaves
from tandem.engines.mlx.landing import CacheLanding
from tandem.engines.mlx.workbench import Workbench
from tandem.errors import HandoffError
from tandem.kv.staging import Staging
from tests.engines import tiny


def address(array: mx.array) -> int:
    return int(np.array(array.view(mx.uint16), copy=False).ctypes.data)


def fill(staging: Staging, cache: list[mx.array], end: int, bench: Workbench) -> None:
    """As if a peer had sent what `cache` holds."""
    for (layer, number), buffer in staging.parts.items():
        leaf = leaves(cache)[layer]
        array = (leaf.keys, leaf.values)[number]
        plain = np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)[0]
        for segment in buffer.segments:
            span = segment.span
            first = max(0, leaf.offset - plain.shape[1]) if kind_of(leaf) == "window" else 0
            segment.tokens(span.start, span.end)[...] = plain[:, span.start - first : span.end - first]
            buffer.verified.add(buffer.heads, span)
    assert staging.complete_through() == end


@pytest.fixture(params=["float32", "bfloat16"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Workbench:
    folder = tiny.build("llama", tmp_path / "model")
    made = Workbench(
        EngineOptions(engine="mlx", model_id="tiny", path=str(folder), dtype=request.param), lambda _: None
    )
    assert made.dtype == request.param
    return made


def test_the_cache_is_what_arrived_and_grows_in_place(bench: Workbench) -> None:
    prompt = [2 + index % 50 for index in range(300)]
    own, _ = bench.prefill(prompt)
    held = bench.find(bench.prefix_cache(), [])
    staging = bench.stage(held, 300)
    assert isinstance(staging.landing, CacheLanding)
    fill(staging, own, 300, bench)
    arrived = bench.commit(held, staging, 300)
    before = [address(leaf.keys) for leaf in leaves(arrived)]
    ours, theirs = (bench.answer(cache, 5, 3) for cache in (own, arrived))
    assert ours.tokens == theirs.tokens
    for one, other in zip(ours.logits, theirs.logits, strict=True):
        np.testing.assert_array_equal(one, other)
    # A view that is left anywhere would have had the first update copy everything.
    assert [address(leaf.keys) for leaf in leaves(arrived)] == before


def test_what_did_not_arrive_is_not_used(bench: Workbench) -> None:
    held = bench.find(bench.prefix_cache(), [])
    staging = bench.stage(held, 300)
    with pytest.raises(HandoffError, match="not here"):
        bench.commit(held, staging, 300)


def test_a_prompt_that_is_known_in_part_does_not_land(bench: Workbench) -> None:
    prompt = [2 + index % 50 for index in range(300)]
    prefixes = bench.prefix_cache()
    bench.prefill(prompt[:128], prefixes)
    held = bench.find(prefixes, prompt)
    assert held.length == 128
    assert bench.stage(held, 300).landing is None
