"""Prefill in one engine, decode in another, over a real socket: vLLM and MLX in every pairing.

What is compared is always the decode engine's own answer, greedy, in float32.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.engines.base import PrefillPort
from tandem.kv.client import Handoff
from tandem.kv.intervals import Span
from tandem.kv.plan import Wanted
from tandem.kv.server import PrefillServer, ServerOptions
from tandem.kv.staging import Staging
from tests.engines.drive import Answered, collect, greedy, make_engine, run, submit
from tests.engines.test_handoff import always_remote

from .node import Node

pytestmark = [pytest.mark.vllm, pytest.mark.real_model]

DEADLINE = 120.0
LENGTHS = (1, 2, 3, 127, 128, 129, 300, 700) if "TANDEM_TEST_LONG" in os.environ else (1, 3, 129, 300)
OPTIONS: dict[str, Any] = {"dtype": "float32", "context_length": 2048, "prefill_chunk": 128}
VLLM = OPTIONS | {"cache_bytes": 192 << 20}
DIRECTIONS = {"vllm to mlx": 1, "mlx to vllm": 2}
"""With a number that makes the prompts of each others than the other's."""


@pytest.fixture(autouse=True)
def _remote_whenever_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engines.handoff.remote.decide", always_remote)


@pytest.fixture(scope="module")
def vllm(smollm2_folder: Path) -> Iterator[Any]:
    engine = make_engine(smollm2_folder, engine="vllm", **VLLM)
    yield engine
    engine.check_idle()
    engine.close()


@pytest.fixture(scope="module")
def mlx(smollm2_folder: Path) -> Iterator[Any]:
    engine = make_engine(smollm2_folder, **OPTIONS)
    yield engine
    engine.check_idle()
    engine.close()


@pytest.fixture(scope="module")
def other_mlx(smollm2_folder: Path) -> Iterator[Any]:
    engine = make_engine(smollm2_folder, **OPTIONS)
    yield engine
    engine.check_idle()
    engine.close()


@contextmanager
def serving(engine: Any, options: ServerOptions | None = None) -> Iterator[PrefillServer]:
    """Its KV port."""
    plane = engine.kv_plane()
    with PrefillServer(
        plane.producer, plane.layout, plane.fingerprint, checkpoints=plane.checkpoints, options=options
    ) as port:
        yield port


@contextmanager
def linked(decode: Any, prefill: Any) -> Iterator[PrefillServer]:
    """While it lasts, `prefill` prefills for `decode`."""
    with serving(prefill) as port:
        decode.name_peers((PrefillPort(f"127.0.0.1:{port.address[1]}"),))
        yield port
        decode.name_peers(())


def ask(
    decode: Any,
    prefill: Any | None,
    *prompts: Sequence[int],
    max_tokens: int = 8,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Answered]:
    """Answers through the hand-off, all asked at once."""
    answers: dict[str, Answered] = {}
    ids = [submit(decode, greedy(prompt, max_tokens)) for prompt in prompts]
    deadline = time.monotonic() + DEADLINE
    while decode.has_work or decode._handoffs.receiving:
        assert time.monotonic() < deadline, "the hand-off hangs"
        meanwhile()
        if prefill is not None and prefill.has_work:
            prefill.step()
        if decode.has_work:
            collect(decode.step(), answers)
    return [answers[one] for one in ids]


def own(engine: Any, *prompts: Sequence[int], max_tokens: int = 8) -> list[Answered]:
    """What the engine answers without any help, nor that of its prefix cache."""
    engine.name_peers(())
    return run(engine, *(greedy(prompt, max_tokens, use_prefix_cache=False) for prompt in prompts))


def words(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 40000) for _ in range(count)]


def check_remote(answer: Answered, expected: Answered, length: int, held: int = 0) -> None:
    """A whole hand-off, and the same tokens."""
    assert answer.tokens == expected.tokens
    handoff = answer.finished.statistics.handoff
    if length - 1 > held:
        assert handoff.prefill == "remote", handoff
        assert handoff.remote_tokens == length - 1 - held
        assert handoff.local_tokens == 1
        assert handoff.bytes > 0
    else:
        assert handoff.prefill == "local"
    assert answer.finished.usage.cached_tokens == held


# ----------------------------------------------------------------------------------------------------- every pairing


def test_both_engines_name_the_model_alike(vllm: Any, mlx: Any) -> None:
    ours, theirs = vllm.kv_plane(), mlx.kv_plane()
    assert ours.fingerprint == theirs.fingerprint
    assert ours.layout == theirs.layout


def test_vllm_to_mlx(vllm: Any, mlx: Any, other_mlx: Any) -> None:
    for length in LENGTHS:
        prompt = words(length, length)
        with linked(mlx, vllm):
            (answer,) = ask(mlx, vllm, prompt)
        check_remote(answer, own(other_mlx, prompt)[0], length)


def test_mlx_to_vllm(vllm: Any, mlx: Any) -> None:
    for length in LENGTHS:
        prompt = words(1000 + length, length)
        with linked(vllm, mlx):
            (answer,) = ask(vllm, mlx, prompt)
        check_remote(answer, own(vllm, prompt)[0], length)


@pytest.mark.long
def test_mlx_to_mlx(mlx: Any, other_mlx: Any) -> None:
    for length in LENGTHS:
        prompt = words(2000 + length, length)
        with linked(mlx, other_mlx):
            (answer,) = ask(mlx, other_mlx, prompt)
        check_remote(answer, own(mlx, prompt)[0], length)


def test_vllm_to_vllm(vllm: Any, smollm2_folder: Path) -> None:
    node = Node(smollm2_folder, **VLLM)
    vllm.name_peers((PrefillPort(node.address),))
    prompts = {length: words(3000 + length, length) for length in LENGTHS}
    answers = {length: ask(vllm, None, prompt)[0] for length, prompt in prompts.items()}
    node.close()
    for length, prompt in prompts.items():
        check_remote(answers[length], own(vllm, prompt)[0], length)


# --------------------------------------------------------------------------------------------------- prefix caches


@pytest.mark.long
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_warm_server_and_second_turn(vllm: Any, mlx: Any, direction: str) -> None:
    decode, prefill = (mlx, vllm) if direction == "vllm to mlx" else (vllm, mlx)
    seed = 40 * DIRECTIONS[direction]
    shared = words(seed + 2, 256)
    first = [*shared, *words(seed, 90)]
    run(prefill, greedy([*shared, *words(seed + 3, 20)], 2))
    with linked(decode, prefill):
        (answer,) = ask(decode, prefill, first)
        check_remote(answer, own(decode, first)[0], len(first))
    second = [*first, *answer.tokens, *words(seed + 1, 70)]
    with linked(decode, prefill):
        (again,) = ask(decode, prefill, second)
    held = again.finished.usage.cached_tokens
    assert held >= 256
    check_remote(again, own(decode, second)[0], len(second), held)


@pytest.mark.long
def test_a_prefix_of_vllm_is_used_and_the_rest_received(vllm: Any, mlx: Any) -> None:
    shared = words(51, 384)
    run(vllm, greedy([*shared, 5], 2))
    prompt = [*shared, *words(52, 100)]
    with linked(vllm, mlx):
        (answer,) = ask(vllm, mlx, prompt)
    check_remote(answer, own(vllm, prompt)[0], len(prompt), 384)


@pytest.mark.long
def test_a_prefix_that_is_gone_when_the_entries_arrive(vllm: Any, mlx: Any) -> None:
    """vLLM may need its blocks for others while entries travel. Then it computes the prompt, and says so."""
    shared = words(53, 256)
    run(vllm, greedy([*shared, 5], 2))
    prompt, dropped = [*shared, *words(54, 100)], []

    def drop() -> None:
        if vllm._handoffs.receiving and not dropped:
            dropped.append(vllm._engine.reset_prefix_cache())

    with linked(vllm, mlx):
        (answer,) = ask(vllm, mlx, prompt, meanwhile=drop)
    assert dropped == [True]
    assert answer.tokens == own(vllm, prompt)[0].tokens
    assert answer.finished.statistics.handoff.remote_tokens == 0


@pytest.mark.long
def test_what_was_received_is_kept_for_the_next(vllm: Any, mlx: Any) -> None:
    prompt = words(61, 300)
    with linked(vllm, mlx):
        ask(vllm, mlx, prompt)
    (again,) = run(vllm, greedy(prompt, 8))
    assert again.finished.usage.cached_tokens == 256
    assert again.tokens == own(vllm, prompt)[0].tokens


@pytest.mark.long
def test_without_a_prefix_cache(vllm: Any, mlx: Any) -> None:
    prompt = words(62, 200)
    answers: dict[str, Answered] = {}
    with linked(vllm, mlx):
        request_id = submit(vllm, greedy(prompt, 8, use_prefix_cache=False))
        deadline = time.monotonic() + DEADLINE
        while vllm.has_work or vllm._handoffs.receiving:
            assert time.monotonic() < deadline
            for engine in (mlx, vllm):
                if engine.has_work:
                    collect(engine.step(), answers)
    check_remote(answers[request_id], own(vllm, prompt)[0], 200)
    assert vllm._inside.prefix_length(prompt) == 0


# ------------------------------------------------------------------------------------------------ many, and failures


def test_several_at_once(vllm: Any, mlx: Any, other_mlx: Any) -> None:
    """Peers' prompts and vLLM's own are computed in the same steps."""
    shared = words(71, 140)
    prompts = [[*shared, *words(72 + number, 30 * number + 1)] for number in range(5)]
    mine = [words(80 + number, 150) for number in range(2)]
    answers: dict[str, Answered] = {}
    most = 0

    def meanwhile() -> None:
        nonlocal most
        most = max(most, vllm._handoffs.reading)

    ids = [submit(vllm, greedy(prompt, 12)) for prompt in mine]
    with linked(mlx, vllm):
        original = vllm.step
        vllm.step = lambda: collect(original(), answers)
        try:
            received = ask(mlx, vllm, *prompts, meanwhile=meanwhile)
        finally:
            vllm.step = original
    while vllm.has_work:
        collect(vllm.step(), answers)
    assert most > 1
    for prompt, answer in zip(prompts, received, strict=True):
        assert answer.tokens == own(other_mlx, prompt)[0].tokens
        assert answer.finished.statistics.handoff.remote_tokens + answer.finished.usage.cached_tokens == len(prompt) - 1
    for prompt, request_id in zip(mine, ids, strict=True):
        assert answers[request_id].tokens == own(vllm, prompt, max_tokens=12)[0].tokens
    vllm.check_idle()


@pytest.mark.parametrize("direction", ["vllm to mlx", pytest.param("mlx to vllm", marks=pytest.mark.long)])
def test_a_server_that_goes_away_costs_only_the_rest(vllm: Any, mlx: Any, other_mlx: Any, direction: str) -> None:
    decode, prefill = (mlx, vllm) if direction == "vllm to mlx" else (vllm, mlx)
    prompt, begun = words(91 + DIRECTIONS[direction], 700), prefill._steps
    with serving(prefill) as port:

        def cut() -> None:
            if prefill._steps >= begun + 4:
                port.close()

        decode.name_peers((PrefillPort(f"127.0.0.1:{port.address[1]}"),))
        (answer,) = ask(decode, prefill, prompt, meanwhile=cut)
    handoff = answer.finished.statistics.handoff
    assert handoff.prefill == "partial"
    assert 0 < handoff.remote_tokens < 699
    assert handoff.remote_tokens + handoff.local_tokens == 700
    assert answer.tokens == own(other_mlx if decode is mlx else vllm, prompt)[0].tokens
    while prefill.has_work:
        prefill.step()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_cancelling_stops_both_sides(vllm: Any, mlx: Any, direction: str) -> None:
    decode, prefill = (mlx, vllm) if direction == "vllm to mlx" else (vllm, mlx)
    begun = prefill._steps
    with linked(decode, prefill):
        request_id = submit(decode, greedy(words(95 + DIRECTIONS[direction], 1500), 4))
        deadline = time.monotonic() + DEADLINE
        while prefill._steps < begun + 3:
            assert time.monotonic() < deadline
            for engine in (decode, prefill):
                if engine.has_work:
                    engine.step()
        assert decode.cancel(request_id)
        while prefill.has_work:
            assert time.monotonic() < deadline
            prefill.step()
    assert not decode.has_work
    assert not decode._handoffs.receiving
    vllm.check_idle()


@pytest.mark.long
def test_slow_clients_hold_up_nobody(vllm: Any, mlx: Any) -> None:
    """With room for hardly anything to wait, entries are held back, and answers go on meanwhile."""
    prompt = words(99, 500)
    plane, answers = vllm.kv_plane(), {}
    with serving(vllm, ServerOptions(backlog_bytes=1 << 16)) as port:
        client = Handoff(port.address, plane.fingerprint)
        staging = Staging(plane.layout, Wanted(0, 499))
        transfer = client.transfer(prompt, staging)
        outcomes: list[Any] = []
        thread = threading.Thread(target=lambda: outcomes.append(transfer.run()))
        thread.start()
        request_id = submit(vllm, greedy(words(98, 20), 6))
        deadline = time.monotonic() + DEADLINE
        while vllm.has_work or thread.is_alive():
            assert time.monotonic() < deadline
            if vllm.has_work:
                collect(vllm.step(), answers)
        thread.join()
        client.close()
    assert outcomes[0].error is None
    assert outcomes[0].complete == 499
    assert answers[request_id].finished.usage.completion_tokens == 6
    # The same numbers as MLX's, as near as float32 gets.
    run(mlx, greedy(prompt, 1))
    hit = mlx._prefix.find(prompt[:-1])
    keys = np.array(hit.cache[3].keys)[0, :, :499]
    assert np.allclose(staging.entries(3, 0, *Span(0, 499)), keys, atol=1e-3)
