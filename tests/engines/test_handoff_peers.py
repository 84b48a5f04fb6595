"""Several prefill peers: the rest from the next one, peers named while the engine runs, queues, codecs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tandem.engines.base import PrefillPort
from tandem.engines.handoff.codecs import codec_costs
from tandem.kv.server import PrefillServer
from tandem.placement.handoff import RAW, Decision, Here, Peer, PromptSize, decide

from .drive import Answered, collect, greedy, run, submit
from .test_handoff import DEADLINE, words

Made = Callable[..., Any]


class Cluster:
    """Prefill engines with a KV port each, a decode engine that knows them, and one that is alone."""

    def __init__(self, make: Made, count: int, **options: Any) -> None:
        self.prefills = [make("llama", prefill_chunk=64) for _ in range(count)]
        planes = [engine.kv_plane() for engine in self.prefills]
        self.ports = [PrefillServer(plane.producer, plane.layout, plane.fingerprint) for plane in planes]
        self.addresses = tuple(f"127.0.0.1:{port.address[1]}" for port in self.ports)
        self.peers = tuple(PrefillPort(address) for address in self.addresses)
        self.decode = make("llama", prefill_chunk=64, **options)
        self.alone = make("llama", prefill_chunk=64)

    def ask(
        self, *prompts: list[int], max_tokens: int = 6, between: Callable[[], None] = lambda: None
    ) -> list[Answered]:
        answers: dict[str, Answered] = {}
        for prompt in prompts:
            answers[submit(self.decode, greedy(prompt, max_tokens))] = Answered()
        deadline = time.monotonic() + DEADLINE
        while self.decode.has_work or self.decode._handoffs.receiving:
            assert time.monotonic() < deadline, "the hand-off hangs"
            between()
            for engine in self.prefills:
                if engine.has_work:
                    engine.step()
            if self.decode.has_work:
                collect(self.decode.step(), answers)
            else:
                time.sleep(0)
        return list(answers.values())

    def check(self, answer: Answered, prompt: list[int], max_tokens: int = 6) -> None:
        assert answer.text == run(self.alone, greedy(prompt, max_tokens))[0].text
        handoff = answer.finished.statistics.handoff
        cached = answer.finished.statistics.cached_tokens
        assert handoff.remote_tokens + handoff.local_tokens + cached == len(prompt)


@pytest.fixture
def cluster(tiny_engine: Made) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(count: int = 1, **options: Any) -> Cluster:
        made.append(Cluster(tiny_engine, count, **options))
        return made[-1]

    yield make
    for one in made:
        for port in one.ports:
            port.close()


def remote_to(*order: int) -> Callable[[PromptSize, Here, Sequence[Peer]], Decision]:
    """Remote whenever possible; of the usable peers the first in this order of their being named."""

    def choose(size: PromptSize, here: Here, peers: Sequence[Peer]) -> Decision:
        if not peers:
            return Decision("local", None, "raw", None, None, "no peer")
        codec = peers[0].codecs[0].name
        return Decision("remote", peers[0].name, codec, None, None, "the test says so")

    return choose


@pytest.fixture
def always_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engines.handoff.remote.decide", remote_to())


@pytest.mark.usefixtures("always_remote")
@pytest.mark.parametrize("after", [1, 4])
def test_the_next_peer_does_the_rest(cluster: Callable[..., Cluster], after: int) -> None:
    both = cluster(2)
    both.decode.name_peers(both.peers)
    prompt = words(51, 600)

    def cut() -> None:
        if both.prefills[0]._steps >= after and both.decode._handoffs.receiving:
            both.ports[0].close()

    (answer,) = both.ask(prompt, between=cut)
    both.check(answer, prompt)
    handoff = answer.finished.statistics.handoff
    assert handoff.prefill == "remote"
    assert handoff.remote_tokens == len(prompt) - 1
    assert both.addresses[0] in handoff.reason
    assert f"{both.addresses[1]} did the rest" in handoff.reason
    assert both.prefills[1]._steps > 0


@pytest.mark.usefixtures("always_remote")
def test_all_peers_gone_leaves_the_rest_to_this_node(cluster: Callable[..., Cluster]) -> None:
    both = cluster(2)
    both.decode.name_peers(both.peers)
    prompt = words(52, 600)

    def cut() -> None:
        for engine, port in zip(both.prefills, both.ports, strict=True):
            if engine._steps >= 2 and both.decode._handoffs.receiving:
                port.close()

    (answer,) = both.ask(prompt, between=cut)
    both.check(answer, prompt)
    progress = [event.processed_tokens for event in answer.progress]
    assert progress == sorted(progress)
    assert progress[-1] == len(prompt)
    assert answer.finished.statistics.handoff.prefill == "partial"
    assert 0 < answer.finished.statistics.handoff.remote_tokens < len(prompt) - 1


@pytest.mark.usefixtures("always_remote")
def test_peers_are_named_and_forgotten_while_it_runs(cluster: Callable[..., Cluster]) -> None:
    both = cluster(1)
    for number, (peers, expected) in enumerate([((), "local"), (both.peers, "remote"), ((), "local")]):
        both.decode.name_peers(peers)
        prompt = words(60 + number, 200)
        (answer,) = both.ask(prompt)
        both.check(answer, prompt)
        assert answer.finished.statistics.handoff.prefill == expected


@pytest.mark.usefixtures("always_remote")
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_codec_is_used_and_said(cluster: Callable[..., Cluster], codec: str) -> None:
    both = cluster(1, kv_codec=codec)
    both.decode.name_peers(both.peers)
    prompt = words(70, 300)
    (answer,) = both.ask(prompt)
    handoff = answer.finished.statistics.handoff
    assert (handoff.prefill, handoff.codec) == ("remote", codec)
    layout = both.decode.kv_plane().layout
    assert 0 < handoff.bytes < layout.bytes_between(0, len(prompt) - 1) / 3


def test_auto_uses_codecs_on_slow_links_only(cluster: Callable[..., Cluster]) -> None:
    layout = cluster(1).decode.kv_plane().layout
    assert codec_costs("raw", layout) == (RAW,)
    costs = codec_costs("auto", layout)
    assert [cost.name for cost in costs] == ["raw", "int8", "int4"]
    here = Here(_rates(10.0))
    size = PromptSize(1000, 0, 1 << 16)
    chosen = {
        bandwidth: decide(size, here, [Peer("peer", _rates(1e6), bandwidth, codecs=costs)]).codec
        for bandwidth in (1e6, 1e13)
    }
    assert chosen[1e6] != "raw"
    assert chosen[1e13] == "raw"


def test_a_prompt_that_would_wait_goes_to_the_idle_peer(cluster: Callable[..., Cluster]) -> None:
    """Two long prompts at once: this node reads one, and has the other read elsewhere instead of queueing it."""
    both = cluster(1)
    both.decode.name_peers(both.peers)
    link = both.decode._handoffs._remotes._peers[0]
    for tokens in (64, 1024):
        both.decode._pace.rates.observe(tokens, tokens / 1000.0)
        link.rates.observe(tokens, tokens / 900.0)  # a little slower than this node, and therefore worth a queue only
    prompts = [words(80, 700), words(81, 700)]
    answers = both.ask(*prompts)
    for answer, prompt in zip(answers, prompts, strict=True):
        both.check(answer, prompt)
    assert [answer.finished.statistics.handoff.prefill for answer in answers] == ["local", "remote"]


def test_a_peer_with_a_long_queue_is_left_at_once(cluster: Callable[..., Cluster]) -> None:
    """The server says how long its queue takes; if that is more than was to gain, the prompt is read here."""
    both = cluster(1)
    both.decode.name_peers(both.peers)
    link = both.decode._handoffs._remotes._peers[0]
    both.decode._pace.rates.observe(512, 512 / 100.0)
    link.rates.observe(512, 512 / 1000.0)
    desk = both.prefills[0]._handoffs.desk
    desk._seconds_for = lambda tokens: 3600.0
    prompt = words(90, 500)
    desk._running.append(_Busy())
    (answer,) = both.ask(prompt)
    both.check(answer, prompt)
    handoff = answer.finished.statistics.handoff
    assert handoff.prefill == "local"
    assert "would begin in 3600.0 s only" in handoff.reason
    assert link.estimate((RAW,)).queue > 3000
    assert link.usable


class _Busy:
    """Stands for a job that a peer is working on."""

    class plan:
        class wanted:
            end = 1000

    class latest_progress:
        processed = 0


def _rates(speed: float) -> Any:
    from tandem.placement.rates import RateTable

    rates = RateTable()
    rates.observe(512, 512 / speed)
    return rates
