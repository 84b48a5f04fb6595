"""vLLM in this process with our connector, a tap that keeps what it gets, and what mlx-lm computes for the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not importable here: run these tests with the interpreter that has it")

import mlx.core as mx
import numpy as np
from vllm import SamplingParams
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from tandem.engines.mlx.cache_kinds import kind_of, leaves, take_entries
from tandem.engines.mlx.layout import named_parts, state_arrays, to_numpy
from tandem.engines.vllm.connector import transfer_config
from tandem.engines.vllm.exchange import KEYS, VALUES, close_registry, open_registry
from tandem.errors import HandoffError
from tandem.kv.dtypes import Array
from tandem.kv.intervals import Intervals, Span
from tests.engines.drive import Reference

TOLERANCE = 1e-3


class Vllm:
    """A loaded model. Small by default: prompts are computed in chunks of 64 tokens."""

    def __init__(self, folder: Path, *, memory: int = 64 << 20, chunk: int = 64, **options: Any) -> None:
        self.registry = open_registry()
        arguments = {
            "model": str(folder),
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": 2048,
            "max_num_batched_tokens": chunk,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": memory,
            "enable_prefix_caching": True,
            "kv_transfer_config": transfer_config(self.registry),
            "disable_log_stats": True,
            "skip_tokenizer_init": True,
        }
        self.engine = LLMEngine.from_engine_args(EngineArgs(**(arguments | options)))
        self._number = 0
        self.preemptions = 0
        self._count_preemptions()

    def _count_preemptions(self) -> None:
        preempt = self.scheduler._preempt_request

        def counted(*arguments: Any, **options: Any) -> Any:
            self.preemptions += 1
            return preempt(*arguments, **options)

        self.scheduler._preempt_request = counted

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        # One connector a process: the next engine would get this one's.
        ensure_kv_transfer_shutdown()
        close_registry(self.registry)

    def forget(self) -> None:
        """As if it had just been started."""
        assert self.engine.reset_prefix_cache()

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        taps: Sequence[Any] = (),
        sources: Sequence[Any] = (),
        tokens: int = 1,
        starts: Sequence[int] = (),
    ) -> list[list[int]]:
        """Greedy answers of some prompts, all at once. `scores` has their tokens' log-probabilities afterwards."""
        answers: dict[str, list[int]] = {}
        self.scores: dict[str, list[float]] = {}
        for number, prompt in enumerate(prompts):
            name = f"request-{self._number}"
            self._number += 1
            answers[name] = []
            if number < len(taps) and taps[number] is not None:
                self.registry.tap(name, taps[number], starts[number] if starts else 0)
            if number < len(sources) and sources[number] is not None:
                self.registry.source(name, sources[number])
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    answer = output.outputs[0]
                    answers[output.request_id] = list(answer.token_ids)
                    self.scores[output.request_id] = [
                        row[token].logprob for token, row in zip(answer.token_ids, answer.logprobs, strict=True)
                    ]
        for name in answers:
            self.registry.drop(name)
        return list(answers.values())


class Kept:
    """A tap that keeps everything. A token that comes twice is an error."""

    def __init__(self) -> None:
        self.pieces: dict[tuple[int, int], dict[int, Array]] = {}
        self.spans: dict[tuple[int, int], Intervals] = {}
        self.states: dict[tuple[int, int, int], Array] = {}
        self.steps: list[tuple[int, int]] = []
        self.error: Exception | None = None

    def needs(self, layer: int, start: int, end: int) -> Sequence[Span]:
        return [Span(start, end)]

    def entries(self, layer: int, part: int, start: int, array: Array) -> None:
        self.spans.setdefault((layer, part), Intervals()).add(start, start + array.shape[1])
        self.pieces.setdefault((layer, part), {})[start] = array

    def needs_state(self, layer: int, tokens: int) -> bool:
        return True

    def state(self, layer: int, number: int, tokens: int, array: Array) -> None:
        assert (layer, number, tokens) not in self.states
        self.states[layer, number, tokens] = array

    def computed(self, tokens: int, cached: int) -> None:
        self.steps.append((tokens, cached))

    def failed(self, error: Exception) -> None:
        self.error = error

    def whole(self, layer: int, part: int, start: int, end: int) -> Array:
        """The entries of `[start, end)`, all of which must be there."""
        assert self.spans[layer, part].covers(start, end)
        pieces = self.pieces[layer, part]
        first = min(pieces)
        joined = np.concatenate([pieces[key] for key in sorted(pieces)], axis=1)
        if self.spans[layer, part].spans()[0].start != first or len(self.spans[layer, part].spans()) > 1:
            raise AssertionError("there are holes")
        return joined[:, start - first : end - first]

    def first(self, layer: int) -> int:
        """First token that there are entries of."""
        return self.spans[layer, KEYS].spans()[0].start


class Computed:
    """A source made from what another engine computed.

    Args:
        entries: (keys, values) by layer, of the last tokens before `length`.
    """

    def __init__(
        self,
        length: int,
        entries: dict[int, tuple[Array, Array]],
        states: dict[tuple[int, int], Array] | None = None,
        start: int = 0,
    ) -> None:
        self.start = start
        self.length = length
        self._entries = entries
        self._states = states or {}
        self.used: list[tuple[int, int]] = []
        self.refusals: list[str] = []

    def entries(self, layer: int, part: int, start: int, end: int) -> Array:
        array = self._entries[layer][part]
        first = self.length - array.shape[1]
        if start < first:
            raise HandoffError(f"tokens [{start}, {first}) of layer {layer} are not here")
        return array[:, start - first : end - first]

    def state(self, layer: int, number: int, tokens: int) -> Array:
        assert tokens == self.length
        return self._states[layer, number]

    def loaded(self, start: int, end: int) -> None:
        self.used.append((start, end))

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)


def mlx_cache(model: Any, tokens: Sequence[int], chunk: int = 512) -> list[Any]:
    """What mlx-lm's model has in its caches after `tokens`: one leaf a layer."""
    cache = model.make_cache() if hasattr(model, "make_cache") else _plain_cache(model)
    for start in range(0, len(tokens), chunk):
        model(mx.array(tokens[start : start + chunk])[None], cache=cache)
        mx.eval([leaf.state for leaf in leaves(cache)])
    return leaves(cache)


def _plain_cache(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def mlx_entries(leaf: Any, start: int, end: int) -> tuple[Array, Array]:
    """Keys and values of `[start, end)`, of which a window gives what it has."""
    found = [to_numpy(array)[0] for _, array in named_parts(_evaluated(take_entries(leaf, start, end)))]
    return found[KEYS], found[VALUES]


def mlx_states(leaf: Any) -> list[Array]:
    """A state leaf's arrays."""
    return [to_numpy(array) for _, array in state_arrays(leaf)]


def _evaluated(entries: Any) -> Any:
    mx.eval(entries)
    return entries


def source_of_mlx(cache: list[Any], length: int) -> Computed:
    """Everything in mlx-lm's cache, which has seen `length` tokens."""
    entries, states = {}, {}
    for number, leaf in enumerate(cache):
        if kind_of(leaf) == "state":
            states |= {(number, index): array for index, array in enumerate(mlx_states(leaf))}
        else:
            entries[number] = mlx_entries(leaf, 0, length)
    return Computed(length, entries, states)


def source_of_tap(kept: Kept, length: int) -> Computed:
    """Everything that vLLM handed over."""
    entries = {
        layer: (
            kept.whole(layer, KEYS, kept.first(layer), length),
            kept.whole(layer, VALUES, kept.first(layer), length),
        )
        for layer, part in kept.spans
        if part == KEYS
    }
    states = {(layer, number): array for (layer, number, tokens), array in kept.states.items() if tokens == length}
    return Computed(length, entries, states)


def prompt_of(length: int, seed: int = 0, vocabulary: int = 384) -> list[int]:
    """Random tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(2, vocabulary, length)]


def check(kept: Kept, reference: Reference, prompt: Sequence[int], start: int = 0) -> None:
    """That all that mlx-lm has in its caches after a prompt was handed over, with the same values."""
    assert kept.error is None
    cache = mlx_cache(reference.model, prompt)
    for layer, leaf in enumerate(cache):
        if kind_of(leaf) == "state":
            for number, expected in enumerate(mlx_states(leaf)):
                np.testing.assert_allclose(kept.states[layer, number, len(prompt)], expected, atol=TOLERANCE)
            continue
        for part, expected in enumerate(mlx_entries(leaf, start, len(prompt))):
            if kind_of(leaf) == "window":
                expected = expected[:, -leaf.max_size :]
            found = kept.whole(layer, part, len(prompt) - expected.shape[1], len(prompt))
            np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert len(kept.spans) == 2 * sum(kind_of(leaf) != "state" for leaf in cache)


def loads_what_mlx_computed(vllm: Vllm, reference: Reference, prompt: list[int], length: int) -> list[list[int]]:
    """With the first `length` tokens from mlx-lm's cache vLLM answers as it does alone. Returns the answer."""
    expected = vllm.run([prompt], tokens=24)
    vllm.forget()
    source = source_of_mlx(mlx_cache(reference.model, prompt[:length]), length)
    assert vllm.run([prompt], sources=[source], tokens=24) == expected
    assert source.used == [(0, length)]
    return expected


def loads_what_vllm_computed(vllm: Vllm, prompt: list[int]) -> None:
    """With all but its last token from vLLM's own cache it answers as it does alone."""
    kept, length = Kept(), len(prompt) - 1
    expected = vllm.run([prompt], tokens=24)
    vllm.forget()
    vllm.run([prompt[:-1]], taps=[kept])
    vllm.forget()
    source = source_of_tap(kept, length)
    assert vllm.run([prompt], sources=[source], tokens=24) == expected
    assert source.used == [(0, length)]
