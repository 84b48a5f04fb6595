"""Hand-offs between the same weights in two quantisations: where the link allows it, and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.engines.base import PrefillPort
from tandem.kv.server import PrefillServer

from . import tiny
from .drive import Answered, collect, greedy, make_engine, run, submit
from .simulated import Running
from .test_handoff import always_remote, words

DEADLINE = 60.0


@pytest.fixture(autouse=True)
def _remote_whenever_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engines.handoff.remote.decide", always_remote)


class Mixed:
    """A runner of whole weights that prefills, and one of the same in 4 bits that is told of it."""

    def __init__(self, folder: Path) -> None:
        whole = tiny.build("llama", folder / "whole", hidden_size=64)
        small = tiny.quantise(whole, folder / "small")
        self.prefill, self.decode, self.alone = (
            make_engine(path, prefix_cache_bytes=64 << 20) for path in (whole, small, small)
        )
        plane = self.prefill.kv_plane()
        self.port = PrefillServer(plane.producer, plane.layout, plane.fingerprint)
        self.address = f"127.0.0.1:{self.port.address[1]}"

    def ask(self, tokens: list[int]) -> Answered:
        """One answer of the decode runner."""
        answers: dict[str, Answered] = {}
        request_id = submit(self.decode, greedy(tokens, 4))
        answers[request_id] = Answered()
        deadline = time.monotonic() + DEADLINE
        while self.decode.has_work or self.decode._handoffs.receiving:
            assert time.monotonic() < deadline, "the hand-off hangs"
            for engine in (self.prefill, self.decode):
                if engine.has_work:
                    collect(engine.step(), answers)
        return answers[request_id]

    def close(self) -> None:
        self.port.close()
        for engine in (self.prefill, self.decode, self.alone):
            engine.close()


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Mixed]:
    made = Mixed(tmp_path)
    yield made
    made.close()


def test_only_where_the_link_allows_it(mixed: Mixed) -> None:
    tokens = words(1, 200)
    mixed.decode.name_peers((PrefillPort(mixed.address),))
    refused = mixed.ask(tokens).finished.statistics.handoff
    assert refused.prefill == "local"
    assert "quantisation: 4-bit, groups of 32 here, none there" in refused.reason
    mixed.decode.name_peers((PrefillPort(mixed.address, allow_quantisation=True),))
    tokens = words(2, 200)
    allowed = mixed.ask(tokens).finished.statistics.handoff
    assert (allowed.prefill, allowed.remote_tokens) == ("remote", 199)


def test_what_other_weights_computed_is_not_kept(mixed: Mixed) -> None:
    """Or a prompt would read it after the link is gone, and a node would get it whose own link allows no other
    weights."""
    tokens = words(3, 200)
    mixed.decode.name_peers((PrefillPort(mixed.address, allow_quantisation=True),))
    assert mixed.ask(tokens).finished.statistics.handoff.prefill == "remote"
    mixed.decode.name_peers(())
    after = mixed.ask(tokens)
    assert after.finished.usage.cached_tokens == 0
    assert after.text == run(mixed.alone, greedy(tokens, 4))[0].text
    # What it computed itself is.
    assert mixed.ask(tokens).finished.usage.cached_tokens == 199


def test_other_weights_altogether_are_refused_all_the_same(mixed: Mixed, tmp_path: Path) -> None:
    other = make_engine(tiny.build("llama", tmp_path / "other", hidden_size=64, seed=7))
    plane = other.kv_plane()
    with PrefillServer(plane.producer, plane.layout, plane.fingerprint) as port:
        mixed.prefill.name_peers((PrefillPort(f"127.0.0.1:{port.address[1]}", allow_quantisation=True),))
        answers: dict[str, Answered] = {}
        request_id = submit(mixed.prefill, greedy(words(4, 200), 4))
        deadline = time.monotonic() + DEADLINE
        while mixed.prefill.has_work or mixed.prefill._handoffs.receiving:
            assert time.monotonic() < deadline
            if mixed.prefill.has_work:
                collect(mixed.prefill.step(), answers)
        handoff = answers[request_id].finished.statistics.handoff
        assert (handoff.prefill, "weights" in handoff.reason) == ("local", True)
    other.close()


@pytest.fixture
def running() -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def make(**fields: Any) -> Running:
        made.append(Running(layers=2, head_dim=8, prefix_hits=True, **fields))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


def test_simulated_weights_have_quantisations_too(running: Callable[..., Running]) -> None:
    prefill = running(serve=True, quantisation="8bit")
    strict = running(quantisation="4bit", prefill_peers=(PrefillPort(prefill.address),))
    lenient = running(quantisation="4bit", prefill_peers=(PrefillPort(prefill.address, allow_quantisation=True),))
    tokens = [token % 256 for token in words(5, 300)]
    assert "quantisation" in strict.ask(greedy(tokens, 2))[0].finished.statistics.handoff.reason
    for _ in range(2):
        answer = lenient.ask(greedy(tokens, 2))[0].finished
        assert answer.statistics.handoff.remote_tokens == 299
        assert answer.usage.cached_tokens == 0
