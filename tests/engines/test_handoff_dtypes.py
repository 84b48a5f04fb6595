"""Hand-offs between the same weights computed in two float types: entries arrive in the decode side's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tandem.engines.base import PrefillPort
from tandem.engines.mlx.cache_kinds import arrays_in, leaves
from tandem.kv.server import PrefillServer

from .drive import Answered, collect, greedy, make_engine, run, submit
from .test_handoff import always_remote, words

DEADLINE = 60.0
KINDS = ("llama", "gemma3", "mamba2")
"""MLX's CPU multiplies the matrices of experts in float32 alone."""


@pytest.fixture(autouse=True)
def _remote_whenever_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engines.handoff.remote.decide", always_remote)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("theirs", "ours"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")])
def test_entries_arrive_in_the_decode_sides_type(
    tiny_folder: Callable[[str], Path], kind: str, theirs: str, ours: str
) -> None:
    folder = tiny_folder(kind)
    prefill, decode = (
        make_engine(folder, dtype=dtype, prefix_cache_bytes=64 << 20, prefill_chunk=64) for dtype in (theirs, ours)
    )
    plane, tokens = prefill.kv_plane(), words(7, 200)
    own = decode.kv_plane()
    assert plane.fingerprint.digest() == own.fingerprint.digest()
    assert (plane.fingerprint.dtype, plane.layout) != (own.fingerprint.dtype, own.layout)
    answers: dict[str, Answered] = {}
    with PrefillServer(plane.producer, plane.layout, plane.fingerprint) as port:
        decode.name_peers((PrefillPort(f"127.0.0.1:{port.address[1]}"),))
        request_id = submit(decode, greedy(tokens, 4))
        deadline = time.monotonic() + DEADLINE
        while decode.has_work or decode._handoffs.receiving:
            assert time.monotonic() < deadline
            for engine in (prefill, decode):
                if engine.has_work:
                    collect(engine.step(), answers)
    finished = answers[request_id].finished
    assert (finished.statistics.handoff.prefill, finished.statistics.handoff.remote_tokens) == ("remote", 199)
    assert finished.usage.completion_tokens == 4
    compare(prefill, decode, tokens[:-1], ours)
    # The same weights computed it, so it is kept.
    decode.name_peers(())
    assert run(decode, greedy(tokens, 4))[0].finished.usage.cached_tokens == 199
    for engine in (prefill, decode):
        engine.close()


def compare(prefill: Any, decode: Any, tokens: list[int], dtype: str) -> None:
    """What the decode side holds is what the other computed, in the decode side's type."""
    hits = [engine._prefix.find(tokens) for engine in (prefill, decode)]
    for theirs, ours in zip(leaves(hits[0].cache), leaves(hits[1].cache), strict=True):
        for one, other in zip(arrays_in(theirs.state), arrays_in(ours.state), strict=True):
            if not mx.issubdtype(one.dtype, mx.floating):
                continue
            assert other.dtype == one.dtype or str(other.dtype).endswith(dtype)
            expected = np.array(one.astype(other.dtype).astype(mx.float32))
            assert np.array_equal(np.array(other.astype(mx.float32)), expected)
