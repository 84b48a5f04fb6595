"""Hand-offs between simulated engines: real sockets, real threads, entries of which each one is checked."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tandem.engines.base import PrefillPort
from tandem.engines.sim.cache import chain, first_wrong
from tandem.engines.sim.prefix import BLOCK_TOKENS, SimPrefixCache
from tandem.errors import IncompatiblePeerError
from tandem.kv.client import Handoff
from tandem.kv.dtypes import Array
from tandem.kv.job import PrefillJob
from tandem.kv.layout import Layout
from tandem.kv.plan import Plan, Wanted
from tandem.kv.server import PrefillServer, ServerOptions
from tandem.kv.staging import Staging
from tandem.kv.synthetic import SyntheticCache, SyntheticProducer
from tandem.placement.handoff import Decision, Here, Peer, PromptSize

from .drive import Answered, greedy, run
from .simulated import Running, sim_engine

SMALL: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8}
BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4
Make = Callable[..., Running]


def always_remote(size: PromptSize, here: Here, peers: Sequence[Peer]) -> Decision:
    if not peers or not size.missing:
        return Decision("local", None, "raw", None, None, "no peer")
    return Decision("remote", peers[0].name, "raw", None, None, "the test says so")


@pytest.fixture
def remote_whenever_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engines.handoff.remote.decide", always_remote)


@pytest.fixture
def running() -> Iterator[Make]:
    made: list[Running] = []

    def make(**fields: Any) -> Running:
        made.append(Running(**SMALL | fields))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def expected(tokens: list[int], max_tokens: int = 8) -> str:
    """The text that an engine without peers gives."""
    return run(sim_engine(**SMALL), greedy(tokens, max_tokens))[0].text


def check(answer: Answered, tokens: list[int]) -> Any:
    """The text is right and the figures add up; the hand-off's statistics."""
    finished = answer.finished
    handoff = finished.statistics.handoff
    assert answer.text == expected(tokens, finished.usage.completion_tokens)
    assert handoff.remote_tokens + handoff.local_tokens + finished.usage.cached_tokens == len(tokens)
    return handoff


@pytest.mark.usefixtures("remote_whenever_possible")
def test_cold_at_every_boundary(running: Make) -> None:
    prefill = running(serve=True)
    decode = running(prefill_peers=(prefill.peer,))
    for length in sorted({1, 2, 3} | {n + d for n in (64, 256, 512, 1024, 4096) for d in (-1, 0, 1, 2)}):
        tokens = words(length, length)
        handoff = check(decode.ask(greedy(tokens, 6))[0], tokens)
        assert handoff.prefill == ("remote" if length > 1 else "local")
        assert handoff.remote_tokens == length - 1
        assert handoff.bytes == (length - 1) * BYTES_PER_TOKEN
    decode.idle()
    prefill.idle()


def test_who_may_prefill_for_whom(running: Make) -> None:
    prefill = running(serve=True, prefill_tps=1000.0)
    assert prefill.port is not None

    def connect(**fields: Any) -> None:
        handoff = Handoff(prefill.port.address, sim_engine(**SMALL | fields).kv_plane().fingerprint)  # type: ignore[union-attr]
        try:
            handoff.connect()
        finally:
            handoff.close()

    connect(prefill_tps=7.0, decode_tps=3.0, script="Other words.", prefix_hits=True)
    with pytest.raises(IncompatiblePeerError, match=r"weights: simulated other here, simulated sim there"):
        connect(model_id="other")
    for fields, name in (({"layers": 3}, "layers"), ({"kv_heads": 4}, "heads"), ({"head_dim": 16}, "dims")):
        with pytest.raises(IncompatiblePeerError, match=name):
            connect(**fields)


@pytest.mark.usefixtures("remote_whenever_possible")
def test_a_second_turn_asks_for_what_is_new(running: Make) -> None:
    prefill = running(serve=True, prefix_hits=True)
    decode = running(prefill_peers=(prefill.peer,), prefix_hits=True)
    first = words(1, 700)
    answer = decode.ask(greedy(first, 10))[0]
    assert check(answer, first).remote_tokens == 699
    second = [*first, *answer.tokens, *words(2, 300)]
    again = decode.ask(greedy(second, 10))[0]
    # The last token of an answer was chosen and never read.
    assert again.finished.usage.cached_tokens == 709
    assert check(again, second).remote_tokens == 300
    assert decode.ask(greedy(second, 10))[0].finished.usage.cached_tokens == len(second) - 1


@pytest.mark.usefixtures("remote_whenever_possible")
def test_what_the_peer_has_costs_no_time(running: Make) -> None:
    prefill = running(serve=True, prefix_hits=True, prefill_tps=8000.0)
    decode = running(prefill_peers=(prefill.peer,))
    shared = words(3, 4000)
    prefill.ask(greedy([*shared, *words(4, 40)], 2))
    handoff = check(decode.ask(greedy([*shared, *words(5, 40)], 4))[0], [*shared, *words(5, 40)])
    assert handoff.remote_tokens == 4039
    # 0.5 s without the peer's prefix cache.
    assert handoff.computing_seconds < 0.3


@pytest.mark.usefixtures("remote_whenever_possible")
@pytest.mark.parametrize("seed", range(4))
def test_random_histories(running: Make, seed: int) -> None:
    """Prompts that share beginnings, prefix caches that are too small for them, on either side."""
    chance = random.Random(seed)
    prefill = running(serve=True, prefix_hits=True, prefix_entries=1500)
    decode = running(prefill_peers=(prefill.peer,), prefix_hits=True, prefix_entries=1000)
    trunk = words(100 + seed, 900)
    for step in range(30):
        tokens = trunk[: chance.choice((0, 1, 63, 64, 65, 300, 512, 900))] + words(step, chance.randrange(1, 400))
        if chance.random() < 0.3:
            prefill.ask(greedy(tokens[: chance.randrange(1, len(tokens) + 1)], 2))
        check(decode.ask(greedy(tokens, chance.randrange(1, 6)))[0], tokens)
    for one in (prefill, decode):
        one.idle()
    assert decode.engine.load_now().prefix_cache_bytes <= 1000 * BYTES_PER_TOKEN


def test_the_prefix_cache_is_exact() -> None:
    cache, chance = SimPrefixCache(1 << 20, 4), random.Random(0)
    stored: list[list[int]] = []
    for _ in range(200):
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 200))]
        found = cache.find(tokens)
        assert found.state == chain(0, tokens[: found.length])
        shared = max(
            (
                next(
                    (i for i, (a, b) in enumerate(zip(tokens, one, strict=False)) if a != b), min(len(tokens), len(one))
                )
                for one in stored
            ),
            default=0,
        )
        assert found.length == shared
        cache.store(tokens, tail=True)
        stored.append(tokens)
        cache.check()
    assert SimPrefixCache(0, 4).find([1] * BLOCK_TOKENS) == (0, 0)


# ------------------------------------------------------------------------------------------------------------- faults


class Tampering(SyntheticCache):
    """Right entries, but for one value of one token."""

    def __init__(self, layout: Layout, token: int, value: float) -> None:
        super().__init__(layout)
        self._token, self._value = token, value

    def entries(self, tokens: Any, layer: int, part: int, start: int, end: int) -> Array:
        array = super().entries(tokens, layer, part, start, end)
        if layer == 1 and part == 1 and start <= self._token < end:
            array[1, self._token - start, 5] = self._value
        return array


class OtherContext(SyntheticCache):
    """The entries of a prompt with another token in it."""

    def __init__(self, layout: Layout, token: int) -> None:
        super().__init__(layout)
        self._token = token

    def entries(self, tokens: Any, layer: int, part: int, start: int, end: int) -> Array:
        changed = np.array(tokens)
        changed[self._token] ^= 1
        return super().entries(changed, layer, part, start, end)


@pytest.mark.usefixtures("remote_whenever_possible")
@pytest.mark.parametrize("token", [0, 1, 255, 256, 700, 998])
@pytest.mark.parametrize("kind", ["value", "nan", "context"])
def test_a_tampering_server_is_noticed(running: Make, token: int, kind: str) -> None:
    plane = sim_engine(**SMALL).kv_plane()
    producer = SyntheticProducer(plane.layout, chunk=300)
    producer.cache = (
        OtherContext(plane.layout, token)
        if kind == "context"
        else Tampering(plane.layout, token, 0.123 if kind == "value" else float("nan"))
    )
    tokens = words(6, 1000)
    with PrefillServer(producer, plane.layout, plane.fingerprint) as port:
        decode = running(prefill_peers=(PrefillPort(f"127.0.0.1:{port.address[1]}"),))
        handoff = check(decode.ask(greedy(tokens, 6))[0], tokens)
        assert handoff.prefill == ("partial" if token else "local")
        assert handoff.remote_tokens == token
        assert f"token {token} are wrong" in handoff.reason
        # Nobody asks such a peer again at once.
        assert check(decode.ask(greedy(words(7, 500), 2))[0], words(7, 500)).peer is None
        decode.idle()
    producer.close()


def test_entries_in_a_lossy_codec_are_recognised(running: Make) -> None:
    prefill = running(serve=True, head_dim=64)
    assert prefill.port is not None
    plane = prefill.engine.kv_plane()
    tokens = np.asarray(words(8, 600), np.uint32)
    for codec in ("int8", "int4"):
        handoff = Handoff(prefill.port.address, plane.fingerprint)
        staging = Staging(plane.layout, Wanted(0, 600))
        outcome = handoff.transfer(tokens.tolist(), staging, codecs=(codec,)).run()
        handoff.close()
        assert (outcome.error, outcome.codec) == (None, codec)
        cache = SyntheticCache(plane.layout)
        assert first_wrong(cache, tokens, staging, codec, 0, 600) is None
        assert first_wrong(cache, tokens, staging, "raw", 0, 600) == 0
        assert first_wrong(OtherContext(plane.layout, 200), tokens, staging, codec, 100, 600) == 200


@pytest.mark.usefixtures("remote_whenever_possible")
def test_a_port_that_closes_costs_only_the_rest(running: Make) -> None:
    prefill = running(serve=True, prefill_tps=4000.0, prefill_chunk=100)
    decode = running(prefill_peers=(prefill.peer,))
    tokens = words(9, 2000)
    (request,) = decode.submit(greedy(tokens, 6))
    prefill.until(lambda engine: engine._steps >= 6)
    assert prefill.port is not None
    prefill.port.close()
    handoff = check(decode.answer(request), tokens)
    assert handoff.prefill == "partial"
    assert 0 < handoff.remote_tokens < 1999
    prefill.idle()


@pytest.mark.usefixtures("remote_whenever_possible")
def test_nobody_there(running: Make) -> None:
    decode = running(prefill_peers=(PrefillPort("127.0.0.1:9"),))
    handoff = check(decode.ask(greedy(words(10, 300), 4))[0], words(10, 300))
    assert (handoff.prefill, handoff.remote_tokens) == ("local", 0)
    assert "127.0.0.1:9" in handoff.reason


# ------------------------------------------------------------------------------------------------- cancelling, company


@pytest.mark.usefixtures("remote_whenever_possible")
def test_cancelling_stops_both_sides(running: Make) -> None:
    prefill = running(serve=True, prefill_tps=1000.0, prefill_chunk=50)
    decode = running(prefill_peers=(prefill.peer,))
    begun, queued = decode.submit(greedy(words(11, 30_000), 4), greedy(words(12, 30_000), 4))
    prefill.until(lambda engine: engine._steps >= 3 and len(engine._handoffs.desk) == 1)
    started = time.monotonic()
    for request in (queued, begun):
        assert decode.do(lambda engine, request=request: engine.cancel(request))
        assert not decode.do(lambda engine, request=request: engine.cancel(request))
    prefill.idle()
    decode.idle()
    # 60 seconds of work, given up at once.
    assert time.monotonic() - started < 10
    tokens = words(13, 300)
    assert check(decode.ask(greedy(tokens, 4))[0], tokens).prefill == "remote"
    for request in (begun, queued):
        assert not decode.so_far(request).text


@pytest.mark.usefixtures("remote_whenever_possible")
def test_answers_go_on_while_a_hand_off_is_under_way(running: Make) -> None:
    prefill = running(serve=True, prefill_tps=2000.0)
    decode = running(prefill_peers=(prefill.peer,), decode_tps=100.0)
    (answering,) = decode.submit(greedy([1], 1000))
    decode.until(lambda engine: bool(decode.so_far(answering).scores))
    before = len(decode.so_far(answering).scores)
    tokens = words(14, 2001)
    began = time.monotonic()
    assert check(decode.ask(greedy(tokens, 1))[0], tokens).prefill == "remote"
    spent = time.monotonic() - began
    written = len(decode.so_far(answering).scores) - before
    assert spent >= 1.0
    assert 0.4 * 100 * spent <= written <= 1.1 * 100 * spent
    assert decode.do(lambda engine: engine.cancel(answering))


@pytest.mark.usefixtures("remote_whenever_possible")
def test_one_device_for_own_prompts_and_those_of_peers(running: Make) -> None:
    prefill = running(serve=True, prefill_tps=5000.0, prefill_chunk=100)
    decode = running(prefill_peers=(prefill.peer,))
    own, other = words(15, 2000), words(16, 2001)
    began = time.monotonic()
    (here,) = prefill.submit(greedy(own, 1))
    (there,) = decode.submit(greedy(other, 1))
    mine, theirs = check(prefill.answer(here), own), check(decode.answer(there), other)
    # 0.8 s of work for one device, however it takes turns.
    assert time.monotonic() - began >= 0.8
    assert (mine.prefill, theirs.prefill) == ("local", "remote")
    assert theirs.computing_seconds > 0.6, "the own prompt had no turns"
    assert prefill.so_far(here).finished.statistics.ttft_seconds > 0.6, "the peer's prompt had no turns"


def test_a_client_that_takes_nothing_holds_nobody_up() -> None:
    engine = sim_engine(**SMALL)
    plane = engine.kv_plane()
    tokens = np.asarray(words(17, 2000), np.uint32)
    job = PrefillJob(Plan(plane.layout, Wanted(0, 2000)), tokens, backlog_bytes=1)
    plane.producer.submit(job)
    while not job.congested:
        engine.step()
    assert run_until_done(engine, greedy(words(18, 1500), 4)) == expected(words(18, 1500), 4)
    assert job.latest_progress.processed == 0
    while job.end is None or job.congested:
        while job.take() is not None:
            pass
        engine.step()
    assert job.latest_progress.processed == 2000
    assert not engine.has_work


def run_until_done(engine: Any, request: Any) -> str:
    """An answer of an engine that has other work, too."""
    from .drive import collect, submit

    answers: dict[str, Answered] = {}
    request_id = submit(engine, request)
    answers[request_id] = Answered()
    while not answers[request_id].events or not hasattr(answers[request_id].events[-1], "usage"):
        collect(engine.step(), answers)
    return answers[request_id].text


@pytest.mark.usefixtures("remote_whenever_possible")
def test_backlogs_of_a_byte(running: Make) -> None:
    prefill = running(serve=ServerOptions(backlog_bytes=1), prefill_chunk=64)
    decode = running(prefill_peers=(prefill.peer,))
    tokens = words(19, 1000)
    assert check(decode.ask(greedy(tokens, 4))[0], tokens).prefill == "remote"
    prefill.idle()


@pytest.mark.usefixtures("remote_whenever_possible")
@pytest.mark.parametrize("peer_queue", [2, 64])
def test_many_at_once(running: Make, peer_queue: int) -> None:
    """32 prompts, four decode instances, one prefill instance."""
    # All connections are opened at the same moment.
    prefill = running(
        serve=ServerOptions(max_handshakes=32), prefill_tps=50_000.0, peer_queue=peer_queue, prefix_hits=True
    )
    decodes = [running(prefill_peers=(prefill.peer,), decode_tps=500.0) for _ in range(4)]
    shared = words(20, 300)
    prompts = [shared[: 100 * (number % 4)] + words(30 + number, 300 + 13 * number) for number in range(32)]
    asked = [
        (decodes[number % 4], decodes[number % 4].submit(greedy(tokens, 5))[0], tokens)
        for number, tokens in enumerate(prompts)
    ]
    handoffs = [check(decode.answer(request), tokens) for decode, request, tokens in asked]
    kinds = [handoff.prefill for handoff in handoffs]
    print(f"queue of {peer_queue}: {kinds.count('remote')} remote, {kinds.count('local')} local")
    if peer_queue == 64:
        assert kinds == ["remote"] * 32
    else:
        assert kinds.count("remote") >= 3
        assert any("is full" in handoff.reason for handoff in handoffs)
    for one in (prefill, *decodes):
        one.idle()


# ------------------------------------------------------------------------------------------------------- the decision

HERE_TPS = 4000.0
LENGTHS = (300, 1000, 2500)
RATIOS = (0.25, 1.0, 4.0)
FILLERS = (0, 2000)


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_better_choice_is_made_and_comes_true(running: Make, ratio: float) -> None:
    """The engine's choice, from what it has measured, against the times that the set speeds come to."""
    there_tps = HERE_TPS * ratio
    prefill = running(serve=True, prefill_tps=there_tps)
    decode = running(prefill_peers=(prefill.peer,), prefill_tps=HERE_TPS)
    trial, own = decode.ask(greedy(words(40, 400), 1))[0], decode.ask(greedy(words(41, 200), 1))[0]
    assert "to learn its speed" in trial.finished.statistics.handoff.reason
    assert "own speed is not measured" in own.finished.statistics.handoff.reason
    rows, judged = [], 0
    for length in LENGTHS:
        for filler in FILLERS:
            local, remote = (filler + length) / HERE_TPS, (length - 1) / there_tps
            # A prompt whose own tokens are scored is always read at home, and is first in the line here.
            before = [greedy(words(42, filler), 0, prompt_logprobs=0)] if filler else []
            tokens = words(length, length)
            answer = decode.ask(*before, greedy(tokens, 1))[-1]
            choice = check(answer, tokens).prefill
            ttft, best = answer.finished.statistics.ttft_seconds, min(local, remote)
            rows.append(f"{length:>6} {ratio:>6} {filler:>6} {local:8.3f} {remote:8.3f} {choice:>7} {ttft:8.3f}")
            worse = max(local, remote)
            # Closer than that, what a busy machine makes of the speeds decides.
            if worse > 1.5 * best:
                judged += 1
                assert choice == ("remote" if remote < local else "local"), rows[-1]
            if worse > best + 0.4:
                assert ttft < worse, rows[-1]
    print("\n" + "\n".join(["length  ratio  queue    local   remote  choice     ttft", *rows]))
    assert judged >= len(rows) / 2
