"""The decision against a simulated pipeline, over a grid of lengths, speeds, links and queues."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.placement.handoff import RAW, CodecCost, Decision, Here, Peer, PromptSize, cheapest_codec, decide
from tandem.placement.rates import RateTable

CHUNK = 512
BYTES_PER_TOKEN = 131_072


def table(rate: float) -> RateTable:
    rates = RateTable()
    for length in (16, 256, 4096, 65_536):
        rates.observe(length, length / rate)
    return rates


def simulate(tokens: int, rate: float, bandwidth: float) -> float:
    """Chunk by chunk: a chunk leaves when it is computed and the link is free."""
    computed = sent = 0.0
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        computed += count / rate
        sent = max(sent, computed) + count * BYTES_PER_TOKEN / bandwidth
    return sent


LENGTHS = (1, 100, 511, 512, 513, 2000, 8192, 32_768)
RATIOS = (0.5, 1.0, 2.0, 4.0, 10.0)
BANDWIDTHS = (0.118e9, 1.187e9, 3.5e9, 20e9)
QUEUES = (0.0, 0.5, 5.0)
GRID: dict[str, Sequence[float]] = {
    "prompt length": LENGTHS,
    "speed ratio": RATIOS,
    "bytes per second": BANDWIDTHS,
    "own queue": QUEUES,
    "the peer's queue": QUEUES,
}


def test_within_five_percent_of_the_better_choice_over_the_grid() -> None:
    worst = 0.0
    remote = 0
    chosen_remote: Counter[str] = Counter()
    cases = list(itertools.product(*GRID.values()))
    for tokens, ratio, bandwidth, queue_here, queue_there in cases:
        here = Here(table(1500.0), queue_here)
        peer = Peer("peer", table(1500.0 * ratio), bandwidth, round_trip=0.001, queue=queue_there, fixed=0.01)
        decision = decide(PromptSize(tokens, 0, BYTES_PER_TOKEN, chunk=CHUNK), here, [peer])
        truth_local = queue_here + tokens / 1500.0
        truth_remote = queue_there + 0.011 + simulate(tokens, 1500.0 * ratio, bandwidth)
        chosen = truth_remote if decision.choice == "remote" else truth_local
        best = min(truth_local, truth_remote)
        worst = max(worst, chosen / best - 1)
        remote += decision.choice == "remote"
        for name, value in zip(GRID, (tokens, ratio, bandwidth, queue_here, queue_there), strict=True):
            chosen_remote[f"{name} {value:g}"] += decision.choice == "remote"
    for name, values in GRID.items():
        shares = (f"{value:g}: {chosen_remote[f'{name} {value:g}'] * len(values) / len(cases):.0%}" for value in values)
        print(f"remote by {name}: {', '.join(shares)}")
    print(f"{len(cases)} cases, {remote} remote, worst choice {worst:.2%} over the better one")
    assert worst <= 0.05
    assert 0.2 < remote / len(cases) < 0.8


def test_the_blog_pair() -> None:
    """DGX Spark and M3 Ultra over 10GbE, Llama 3.1 8B, 8192 tokens: 5573 and 1471 tokens per second."""
    size = PromptSize(8192, 0, BYTES_PER_TOKEN, chunk=CHUNK)
    decision = decide(size, Here(table(1471)), [Peer("spark", table(5573), 1.187e9)])
    assert decision.choice == "remote"
    assert decision.local_seconds == pytest.approx(5.57, abs=0.05)
    assert decision.remote_seconds == pytest.approx(1.47 + 0.905 / 16, abs=0.05)


def test_break_even_moves_with_the_fixed_cost() -> None:
    def first_remote(fixed: float) -> int:
        for tokens in range(1, 5000):
            peer = Peer("peer", table(5573), 1.187e9, fixed=fixed)
            if (
                decide(PromptSize(tokens, 0, BYTES_PER_TOKEN, chunk=CHUNK), Here(table(1471)), [peer]).choice
                == "remote"
            ):
                return tokens
        return 5000

    assert first_remote(0.0) == 1
    assert 90 <= first_remote(0.05) <= 140
    assert first_remote(0.5) > 900


def choice(size: PromptSize, here: Here, *peers: Peer) -> Decision:
    return decide(size, here, list(peers))


def test_reasons() -> None:
    size = PromptSize(1000, 0, 1000)
    fast = Peer("fast", table(1e6), 1e9)
    assert choice(size, Here(RateTable()), fast).reason == "This node's own speed is not measured yet."
    assert choice(size, Here(table(100))).reason == "No prefill peer is linked."
    assert choice(size, Here(table(100)), Peer("new", RateTable(), 1e9)).reason == "No peer's speed is measured yet."
    assert choice(PromptSize(1000, 1000, 1000), Here(table(100)), fast).choice == "local"
    assert choice(size, Here(table(100)), fast).peer == "fast"


def test_the_best_of_several_peers() -> None:
    size = PromptSize(10_000, 0, 1000)
    peers = [Peer("busy", table(1e6), 1e9, queue=50), Peer("slow", table(200), 1e9), Peer("good", table(1e4), 1e9)]
    assert decide(size, Here(table(100)), peers).peer == "good"


def test_a_peer_that_holds_the_prefix_needs_less() -> None:
    size = PromptSize(10_000, 0, 1000)
    cold, warm = Peer("cold", table(150), 1e9), Peer("warm", table(100), 1e9, held=9000)
    assert decide(size, Here(table(100)), [cold, warm]).peer == "warm"


def test_codecs_pay_on_slow_links_only() -> None:
    int8 = CodecCost("int8", ratio=0.27, encode_rate=1e9, decode_rate=2e9)
    assert cheapest_codec([RAW, int8], 1e9, 0.118e9) is int8
    assert cheapest_codec([RAW, int8], 1e9, 3.5e9) is RAW


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(1e-4, 1e4)), min_size=1), st.integers(1, 200_000))
def test_rates_stay_between_what_was_seen(seen: list[tuple[int, float]], tokens: int) -> None:
    rates = RateTable()
    for count, seconds in seen:
        rates.observe(count, seconds)
    observed = [count / seconds for count, seconds in seen]
    assert min(observed) * (1 - 1e-9) <= rates.rate(tokens) <= max(observed) * (1 + 1e-9)


def test_nothing_is_learnt_from_nothing() -> None:
    rates = RateTable()
    rates.observe(0, 1.0)
    rates.observe(5, 0.0)
    assert not rates.known
    with pytest.raises(ValueError, match="no rate"):
        rates.rate(1)
