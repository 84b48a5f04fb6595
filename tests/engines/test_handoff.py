"""Prefill in one engine, decode in another, over a real socket: the same bits, the same tokens.

Both engines run in this process and this thread, in turns; the KV port and the transfer have threads of their own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tandem.engines.base import PrefillPort
from tandem.engines.mlx.cache_kinds import leaves
from tandem.errors import IncompatiblePeerError
from tandem.kv.client import Handoff
from tandem.kv.server import PrefillServer
from tandem.placement.handoff import Decision, Here, Peer, PromptSize

from . import tiny
from .drive import Answered, collect, greedy, make_engine, run, submit

DEADLINE = 60.0


def always_remote(size: PromptSize, here: Here, peers: Sequence[Peer]) -> Decision:
    if not peers:
        return Decision("local", None, "raw", None, None, "no peer")
    return Decision("remote", peers[0].name, "raw", None, None, "the test says so")


@pytest.fixture(autouse=True)
def _remote_whenever_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engines.handoff.remote.decide", always_remote)


class Pair:
    """A prefill engine with a KV port, a decode engine that uses it, and one that does everything by itself."""

    def __init__(self, make: Callable[..., Any], kind: str, **options: Any) -> None:
        self.prefill = make(kind, **options)
        plane = self.prefill.kv_plane()
        self.port = PrefillServer(plane.producer, plane.layout, plane.fingerprint)
        self.decode = make(kind, prefill_peers=(PrefillPort(f"127.0.0.1:{self.port.address[1]}"),), **options)
        self.alone = make(kind, **options)

    def ask(self, tokens: list[int], max_tokens: int = 8, *, until: Callable[[], bool] | None = None) -> Answered:
        """One answer through the hand-off."""
        answers: dict[str, Answered] = {}
        request_id = submit(self.decode, greedy(tokens, max_tokens))
        answers[request_id] = Answered()
        deadline = time.monotonic() + DEADLINE
        while self.decode.has_work or self.decode._handoffs.receiving:
            assert time.monotonic() < deadline, "the hand-off hangs"
            if until is not None and until():
                until = None
            if self.prefill.has_work:
                self.prefill.step()
            if self.decode.has_work:
                collect(self.decode.step(), answers)
            else:
                time.sleep(0)
        return answers[request_id]

    def check(self, tokens: list[int], max_tokens: int = 8, *, exact: bool = True) -> Answered:
        """Through the hand-off and alone: equal tokens, and in every cache equal bits.

        Without `exact` only nearly equal numbers: a prefix hit on one side cuts the prompt into other chunks, and sums
        over other chunks are rounded in another order.
        """
        remote = self.ask(tokens, max_tokens)
        local = run(self.alone, greedy(tokens, max_tokens))[0]
        assert remote.text == local.text
        assert remote.finished.usage.completion_tokens == local.finished.usage.completion_tokens
        if len(tokens) > 1:
            same_cache(self.decode, self.alone, tokens[:-1], exact=exact)
        return remote

    def close(self) -> None:
        self.port.close()


def same_cache(one: Any, other: Any, tokens: list[int], *, exact: bool = True) -> None:
    """What both prefix caches hold of a prompt is equal, if `exact` to the last bit."""
    hits = [engine._prefix.find(tokens) for engine in (one, other)]
    assert all(hit is not None and hit.length == len(tokens) for hit in hits), hits
    pairs = zip(leaves(hits[0].cache), leaves(hits[1].cache), strict=True)
    for number, (left, right) in enumerate(pairs):
        flat = [[value for _, value in tree_flatten(leaf.state)] for leaf in (left, right)]
        for mine, theirs in zip(*flat, strict=True):
            if isinstance(mine, mx.array):
                left_values, right_values = np.array(mine), np.array(theirs)
                if exact or left_values.dtype.kind != "f":
                    assert np.array_equal(left_values, right_values), f"leaf {number}"
                else:
                    assert np.allclose(left_values, right_values, rtol=1e-3, atol=1e-4), f"leaf {number}"
            else:
                assert mine == theirs


@pytest.fixture
def pair(tiny_engine: Callable[..., Any]) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(kind: str = "llama", **options: Any) -> Pair:
        made.append(Pair(tiny_engine, kind, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def words(seed: int, count: int) -> list[int]:
    return [random.Random(seed * 1000 + index).randrange(3, tiny.VOCABULARY - 8) for index in range(count)]


BOUNDARIES = sorted({1, 2, 3} | {n + d for n in (tiny.WINDOW, 64, 128, 256, 300) for d in (-1, 0, 1, 2)})


@pytest.mark.parametrize("kind", tiny.ALL_KINDS)
def test_cold_at_every_boundary(pair: Callable[..., Pair], kind: str) -> None:
    both = pair(kind)
    for length in BOUNDARIES:
        answer = both.check(words(length, length), 4)
        handoff = answer.finished.statistics.handoff
        if length > 1:
            assert handoff.prefill == "remote"
            assert handoff.remote_tokens == length - 1
            assert handoff.bytes > 0
        else:
            assert handoff.prefill == "local"


@pytest.mark.parametrize("kind", tiny.ALL_KINDS)
def test_warm_server_warm_client_and_both(pair: Callable[..., Pair], kind: str) -> None:
    both = pair(kind)
    shared, tail = words(1, 200), words(2, 150)
    run(both.prefill, greedy([*shared, *words(3, 40)], 4))
    both.check([*shared, *tail], exact=False)
    run(both.decode, greedy([*words(4, 130), 5], 4))
    run(both.alone, greedy([*words(4, 130), 5], 4))
    both.check([*words(4, 130), *words(5, 90)], exact=False)
    run(both.prefill, greedy([*words(6, 100), *words(7, 30)], 4))
    for engine in (both.decode, both.alone):
        run(engine, greedy([*words(6, 64), *words(8, 64)], 4))
    both.check([*words(6, 100), *words(9, 100)], exact=False)


@pytest.mark.parametrize("kind", tiny.ALL_KINDS)
def test_second_turn(pair: Callable[..., Pair], kind: str) -> None:
    both = pair(kind)
    first = words(11, 150)
    answer = both.check(first, 12)
    again = both.check([*first, *words(12, 12), *words(13, 100)], exact=False)
    assert again.finished.usage.cached_tokens > 0 or kind in tiny.STATEFUL
    assert answer.finished.usage.completion_tokens == 12


@pytest.mark.parametrize("kind", tiny.ALL_KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_random_histories(pair: Callable[..., Pair], kind: str, seed: int) -> None:
    """Prompts that share beginnings, in random order, on random engines first."""
    both = pair(kind)
    chance = random.Random(seed)
    trunk = words(100 + seed, 400)
    for step in range(6):
        prompt = trunk[: chance.choice((0, 1, 63, 64, 65, 130, 255, 256, 257))] + words(step, chance.randrange(2, 300))
        if chance.random() < 0.3:
            run(both.prefill, greedy(prompt[: chance.randrange(1, len(prompt))], 2))
        both.check(prompt, chance.randrange(1, 6), exact=False)


def test_quantised_entries_travel(tmp_path: Path) -> None:
    folder = tiny.build("llama", tmp_path / "wide", head_dim=64)
    made: list[Any] = []

    def make(kind: str, **options: Any) -> Any:
        made.append(make_engine(folder, prefix_cache_bytes=64 << 20, **options))
        return made[-1]

    both = Pair(make, "llama", kv_bits=8)
    for length in (2, 65, 200, 300):
        answer = both.check(words(length, length))
        assert answer.finished.statistics.handoff.prefill == "remote"
    both.close()
    for engine in made:
        engine.close()


@pytest.mark.parametrize("kind", tiny.ALL_KINDS)
@pytest.mark.parametrize("after", [1, 3, 6])
def test_a_server_that_goes_away_costs_only_the_rest(pair: Callable[..., Pair], kind: str, after: int) -> None:
    both = pair(kind, prefill_chunk=64)
    prompt = words(21, 500)
    steps = 0

    def cut() -> bool:
        nonlocal steps
        steps = both.prefill._steps
        if steps < after or not both.decode._handoffs.receiving:
            return False
        both.port.close()
        return True

    answer = both.ask(prompt, 6, until=cut)
    local = run(both.alone, greedy(prompt, 6))[0]
    assert answer.text == local.text
    handoff = answer.finished.statistics.handoff
    assert handoff.prefill in ("partial", "local", "remote")
    assert handoff.remote_tokens + handoff.local_tokens == len(prompt)
    if handoff.prefill == "partial":
        assert 0 < handoff.remote_tokens < len(prompt)
    same_cache(both.decode, both.alone, prompt[:-1], exact=False)


def test_nobody_there(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine("llama", prefill_peers=(PrefillPort("127.0.0.1:9"),))
    prompt = words(31, 300)
    answers: dict[str, Answered] = {}
    request_id = submit(engine, greedy(prompt, 4))
    answers[request_id] = Answered()
    deadline = time.monotonic() + DEADLINE
    while engine.has_work or engine._handoffs.receiving:
        assert time.monotonic() < deadline
        if engine.has_work:
            collect(engine.step(), answers)
    finished = answers[request_id].finished
    assert finished.statistics.handoff.prefill == "local"
    assert "127.0.0.1:9" in finished.statistics.handoff.reason


def test_another_model_is_refused_by_name(tiny_engine: Callable[..., Any], tmp_path: Path) -> None:
    one = tiny_engine("llama")
    other = make_engine(tiny.build("llama", tmp_path / "other", seed=7))
    plane = one.kv_plane()
    with PrefillServer(plane.producer, plane.layout, plane.fingerprint) as port:
        handoff = Handoff(port.address, other.kv_plane().fingerprint)
        with pytest.raises(IncompatiblePeerError, match="weights"):
            handoff.connect()
        handoff.close()
    other.close()


def test_cancelling_stops_both_sides(pair: Callable[..., Pair]) -> None:
    both = pair("llama", prefill_chunk=64)
    request_id = submit(both.decode, greedy(words(41, 3000), 4))
    deadline = time.monotonic() + DEADLINE
    while both.prefill._steps < 3:
        assert time.monotonic() < deadline
        if both.decode.has_work:
            both.decode.step()
        if both.prefill.has_work:
            both.prefill.step()
    assert both.decode.cancel(request_id)
    while both.prefill.has_work:
        assert time.monotonic() < deadline
        both.prefill.step()
    assert not both.decode.has_work
    assert not both.decode._handoffs.receiving
    both.check(words(42, 100))
