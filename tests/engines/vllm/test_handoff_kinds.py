"""Hand-offs between vLLM and MLX of every kind of cache that vLLM's CPU build has, on tiny random models in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tandem.engines.base import PrefillPort
from tandem.errors import UnsupportedModelError
from tests.engines import tiny
from tests.engines.drive import greedy, make_engine, run
from tests.engines.test_handoff import always_remote, words

from .test_handoff import ask, linked, own

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHANGES: dict[str, dict[str, Any]] = {
    # mlx-lm rounds the embedding's scale, the root of this, to bfloat16. This one is exact in both engines.
    "gemma3": {"hidden_size": 64},
}

OPTIONS: dict[str, Any] = {"dtype": "float32", "context_length": 2048, "prefill_chunk": 64}
LENGTHS = sorted({1, 2, 3} | {n + d for n in (tiny.WINDOW, 32, 64, 128) for d in (-1, 0, 1, 2)} | {300})


class Both(NamedTuple):
    """A model in both engines."""

    vllm: Any
    mlx: Any
    alone: Any


@pytest.fixture(autouse=True)
def _remote_whenever_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engines.handoff.remote.decide", always_remote)


@pytest.fixture(scope="module", params=[pytest.param("llama", marks=pytest.mark.long), "gemma3", "mamba2"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    changes = CHANGES.get(request.param, {})
    folder = tiny.build_for_vllm(request.param, tmp_path_factory.mktemp("both") / request.param, **changes)
    made = Both(
        make_engine(folder, engine="vllm", cache_bytes=64 << 20, **OPTIONS),
        *(make_engine(folder, prefix_cache_bytes=64 << 20, **OPTIONS) for _ in range(2)),
    )
    yield made
    for engine in made:
        engine.check_idle()
        engine.close()


def test_the_layouts_are_the_same(both: Both) -> None:
    ours, theirs = both.vllm.kv_plane(), both.mlx.kv_plane()
    assert ours.layout == theirs.layout
    assert ours.fingerprint == theirs.fingerprint


def test_vllm_to_mlx_at_every_boundary(both: Both) -> None:
    for length in LENGTHS:
        prompt = words(length, length)
        with linked(both.mlx, both.vllm):
            (answer,) = ask(both.mlx, both.vllm, prompt, max_tokens=6)
        handoff = answer.finished.statistics.handoff
        assert handoff.prefill == ("remote" if length > 1 else "local"), (length, handoff)
        assert handoff.remote_tokens + answer.finished.usage.cached_tokens == length - 1
        assert answer.tokens == own(both.alone, prompt, max_tokens=6)[0].tokens, length


def test_mlx_to_vllm_at_every_boundary(both: Both) -> None:
    for length in LENGTHS:
        prompt = words(500 + length, length)
        with linked(both.vllm, both.mlx):
            (answer,) = ask(both.vllm, both.mlx, prompt, max_tokens=6)
        handoff = answer.finished.statistics.handoff
        assert handoff.prefill == ("remote" if length > 1 else "local"), (length, handoff)
        assert handoff.remote_tokens + answer.finished.usage.cached_tokens == length - 1, (length, handoff)
        assert answer.tokens == own(both.vllm, prompt, max_tokens=6)[0].tokens, length


def test_warm_sides_and_second_turns(both: Both) -> None:
    for number, (decode, prefill, reference) in enumerate(
        ((both.mlx, both.vllm, both.alone), (both.vllm, both.mlx, both.vllm))
    ):
        shared = words(900 + number, 200)
        first = [*shared, *words(910 + number, 70)]
        run(prefill, greedy([*shared, *words(920 + number, 9)], 3))
        with linked(decode, prefill):
            (answer,) = ask(decode, prefill, first, max_tokens=6)
        assert answer.tokens == own(reference, first, max_tokens=6)[0].tokens
        second = [*first, *answer.tokens, *words(930 + number, 60)]
        with linked(decode, prefill):
            (again,) = ask(decode, prefill, second, max_tokens=6)
        assert again.tokens == own(reference, second, max_tokens=6)[0].tokens
        handoff = again.finished.statistics.handoff
        assert handoff.remote_tokens + handoff.local_tokens + again.finished.usage.cached_tokens == len(second)


def test_a_port_that_is_gone(both: Both) -> None:
    prompt = words(950, 100)
    both.vllm.name_peers((PrefillPort("127.0.0.1:9"),))
    (answer,) = ask(both.vllm, None, prompt, max_tokens=6)
    assert answer.finished.statistics.handoff.prefill == "local"
    assert "127.0.0.1:9" in answer.finished.statistics.handoff.reason
    assert answer.tokens == own(both.vllm, prompt, max_tokens=6)[0].tokens


def test_what_vllm_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.build("llama", tmp_path / "llama", architectures=["LlamaForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="heads of 16"):
        make_engine(folder, engine="vllm", **OPTIONS)
