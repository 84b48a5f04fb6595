"""`tandem verify` and random histories on every kind of cache, against a runner in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.engines.base import EngineOptions
from tandem.engines.mlx.workbench import Workbench
from tandem.kv.client import Handoff
from tandem.verify.cases import Case
from tandem.verify.check import Verifier
from tandem.verify.prompts import PromptSource
from tandem.verify.side import Address

from .conftest import Command


@dataclass
class Place:
    """A tiny model, loaded here and in a prefill runner."""

    kind: str
    folder: Path
    address: Address
    bench: Workbench


@pytest.fixture(scope="module", params=tiny.ALL_KINDS)
def place(
    request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path], start_runner: Callable[..., Address]
) -> Place:
    folder = tiny_folder(request.param)
    bench = Workbench(EngineOptions(engine="mlx", model_id=request.param, path=str(folder)), lambda progress: None)
    return Place(request.param, folder, start_runner(folder), bench)


def test_every_kind_passes(tandem: Command, place: Place) -> None:
    """The whole command; every bit is equal wherever both sides cut the prompt into the same chunks."""
    peer = f"{place.address[0]}:{place.address[1]}"
    ran = tandem("verify", str(place.folder), "--peer", peer, "--seed", "1", "--tokens", "6", "--json")
    report = ran.report
    assert ran.status == 0, [case for case in report["cases"] if not case["passed"]]
    assert report["passed"] is True
    cases: dict[str, dict[str, Any]] = {case["name"]: case for case in report["cases"]}
    assert all(case["tokens"]["equal"] for case in cases.values())
    cold = [case for name, case in cases.items() if name.startswith("cold")]
    assert {1, 2, 3, 255, 256, 257, 258, 511, 514, 1023, 1026} <= {case["prompt_tokens"] for case in cold}
    assert all(case["exact"] and case["logits"]["bit_equal"] for case in cold)
    assert all(layer["bit_equal"] for case in cold for layer in case["layers"])
    layers = len(place.bench.layout.layers)
    assert all(len(case["layers"]) == layers for case in cold if case["prompt_tokens"] > 1)
    assert all(case["handoff"]["bytes"] > 0 and case["handoff"]["seconds"] > 0 for case in cold[1:])
    _check_warm(cases)
    if place.kind in ("gemma3", "gpt_oss"):
        around = {tiny.WINDOW * times + offset for times in (1, 2) for offset in (-1, 0, 1, 2)}
        assert around <= {case["prompt_tokens"] for case in cold}


def _check_warm(cases: dict[str, dict[str, Any]]) -> None:
    """The warm cases are what their names say."""
    assert cases["warm server 293"]["handoff"]["cached"] == 293
    assert cases["warm server 256"]["handoff"]["cached"] == 256
    assert cases["warm server 256"]["exact"]
    assert cases["warm client 256"]["start"] == 256
    assert cases["warm client 256"]["exact"]
    assert cases["warm client 293"]["start"] == 293
    both = cases["warm server 293, client 256"]
    assert (both["start"], both["handoff"]["cached"]) == (256, 293)
    other = cases["warm server 256, client 293"]
    assert (other["start"], other["handoff"]["cached"]) == (293, 256)
    same = cases["warm server, same prompt"]
    assert same["handoff"]["cached"] == same["prompt_tokens"] - 1
    assert same["exact"]
    for name in ("second turn, short", "second turn, long"):
        assert cases[name]["start"] > cases[name]["handoff"]["cached"] > 0


@dataclass(frozen=True)
class Drawn:
    """A random history: lengths, and what each side has read before."""

    seed: int
    length: int
    server: int | None
    server_tail: int
    client: int | None
    client_tail: int
    follow: int


around = st.sampled_from([1, 2, 23, 24, 25, 48, 63, 64, 65, 128, 192, 255, 256, 257, 300, 320])
lengths = st.one_of(around, st.integers(1, 400))
tails = st.one_of(st.just(0), st.integers(1, 100))
histories = st.builds(
    Drawn,
    seed=st.integers(0, 1 << 20),
    length=lengths,
    server=st.none() | lengths,
    server_tail=tails,
    client=st.none() | lengths,
    client_tail=tails,
    follow=st.one_of(st.just(0), st.integers(1, 120)),
)


def case_of(drawn: Drawn) -> Case:
    source = PromptSource(lambda text: [3 + byte for byte in text.encode()], range(3, tiny.VOCABULARY - 8), drawn.seed)
    tokens = source.prompt(drawn.length)

    def before(shared: int | None, tail: int) -> tuple[int, ...]:
        return () if shared is None else (*tokens[:shared], *source.words(tail))

    return Case(
        repr(drawn),
        tuple(tokens),
        server=before(drawn.server, drawn.server_tail),
        client=before(drawn.client, drawn.client_tail),
        shared=min(drawn.server or 0, drawn.length),
        follow=tuple(source.words(drawn.follow)),
    )


def test_random_histories(place: Place) -> None:
    handoff = Handoff(place.address, place.bench.fingerprint)
    verifier = Verifier(place.bench, handoff, answer_tokens=4)
    exact: set[bool] = set()

    @settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    @given(histories)
    def check(drawn: Drawn) -> None:
        result = verifier.run(case_of(drawn))
        assert result.passed, (result.reason, result.first_divergence)
        assert result.tokens is not None
        assert result.tokens.equal
        exact.add(result.exact)

    try:
        check()
    finally:
        handoff.close()
    assert exact == {True, False}
