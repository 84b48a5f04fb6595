"""The running answers, decoded together.

mlx-lm's `GenerationBatch` does the work: it keeps one step in flight, so that the device computes the next token while
we look at the last one. Its stop conditions are not used; who leaves, and when, is decided by the caller.

A lone sequence keeps its plain cache, which needs no padding mask; caches are merged when a second one joins. Models
whose caches cannot be merged (quantised or chunked ones) get a batch of one for each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationBatch, StopSequences
from mlx_lm.models.cache import BatchKVCache, KVCache

from tandem.engines.mlx.cache_kinds import cache_bytes, is_batchable
from tandem.engines.mlx.sampling import Processor, Sampler

UNBOUNDED = 1 << 62


class Decoded(NamedTuple):
    """One new token. `logprobs` is the whole vocabulary's, evaluated, `[vocabulary]`; None if nobody reads it."""

    sequence: int
    token: int
    logprobs: mx.array | None


class _Lane(GenerationBatch):  # type: ignore[misc]  # mlx-lm is untyped
    """A batch that may hold a single sequence with a plain, unmerged cache."""

    prompt_cache: list[Any]
    samplers: list[Sampler]
    _next_tokens: mx.array
    _next_logprobs: list[mx.array | None]
    merged = False
    _waits = False

    @classmethod
    def waiting(cls, *arguments: Any) -> _Lane:
        """A lane that has not been stepped: its sequence's last prompt token is the next step's input."""
        lane: _Lane = cls.__new__(cls)
        lane._waits = True
        lane.__init__(*arguments)  # type: ignore[misc]
        lane._waits = False
        lane._next_logprobs = [None] * len(lane.uids)
        return lane

    def merge_cache(self) -> None:
        if not self.merged:
            self.prompt_cache = [_batch_of(cache) for cache in self.prompt_cache]
            self.merged = True

    def cache_of(self, index: int) -> list[Any]:
        if self.merged:
            extracted: list[Any] = self.extract_cache(index)
            return extracted
        return list(self.prompt_cache)

    def _step(self) -> tuple[list[int], list[mx.array | None]]:
        """Launch the next step, then wait for the last one's tokens.

        As in mlx-lm, but log-probabilities are computed only for those who read them: over a whole vocabulary they
        cost a twentieth of a step with eight sequences on a CPU.
        """
        if self._waits:
            return [], []
        self._current_tokens, self._current_logprobs = self._next_tokens, self._next_logprobs
        inputs = self._current_tokens
        logits = self.model(inputs[:, None], cache=self.prompt_cache)[:, -1, :]
        contexts: list[mx.array] = []
        if any(self.logits_processors):
            logits = self._process(logits, inputs, contexts)
        if all(sampler.greedy for sampler in self.samplers):
            self._next_tokens = mx.argmax(logits, axis=-1)
        else:
            rows = [sampler(logits[row : row + 1]) for row, sampler in enumerate(self.samplers)]
            self._next_tokens = mx.concatenate(rows, axis=0)
        self._next_logprobs = [
            _log_softmax(logits[row]) if sampler.wants_logprobs else None for row, sampler in enumerate(self.samplers)
        ]
        mx.async_eval(  # type: ignore[no-untyped-call]
            self._next_tokens, [row for row in self._next_logprobs if row is not None], contexts
        )
        mx.eval(inputs, [row for row in self._current_logprobs if row is not None])
        tokens: list[int] = inputs.tolist()  # type: ignore[assignment]
        for held, token in zip(self.tokens, tokens, strict=True):
            held.append(token)
        return tokens, self._current_logprobs

    def _process(self, logits: mx.array, inputs: mx.array, contexts: list[mx.array]) -> mx.array:
        rows: list[mx.array] = []
        for row, processors in enumerate(self.logits_processors):
            scores = logits[row : row + 1]
            if processors:
                context = self._token_context[row].update_and_fetch(inputs[row : row + 1])
                contexts.append(context)
                for processor in processors:
                    scores = processor(context, scores)
            rows.append(scores)
        return mx.concatenate(rows, axis=0)


def _batch_of(cache: Any) -> Any:
    """A batch of one. mlx-lm's own would copy all entries, and leave no room for the next token: with others in the
    batch by then, all of theirs would be copied once more."""
    if type(cache) is not KVCache or cache.keys is None:
        return cache.merge([cache])
    batch = BatchKVCache([0])
    batch.keys, batch.values = cache.keys, cache.values
    batch.offset = batch.offset + cache.offset
    batch._idx = cache.offset
    return batch


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits)


class Decoder:
    """All sequences that are past their prompt.

    Args:
        model: the loaded model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._lanes: list[_Lane] = []
        self._joining: set[int] = set()

    def __len__(self) -> int:
        return sum(len(lane) for lane in self._lanes)

    @property
    def nbytes(self) -> int:
        """Memory held by the running sequences' caches."""
        return sum(cache_bytes(lane.prompt_cache) for lane in self._lanes)

    def add(
        self,
        sequence: int,
        tokens: list[int],
        cache: list[Any],
        sampler: Sampler,
        processors: Sequence[Processor],
    ) -> None:
        """Begin to decode.

        Args:
            tokens: the whole prompt; `cache` holds all of it but the last token, which is fed first.
        """
        joins = bool(self._lanes) and is_batchable(cache)
        lane = (_Lane.waiting if joins else _Lane)(
            self._model,
            [sequence],
            mx.array(tokens[-1:], mx.uint32),
            cache,
            [list(tokens[:-1])],
            [sampler],
            sampler,
            [tuple(processors)],
            [StopSequences()],
            [UNBOUNDED],
        )
        if joins:
            self._lanes[0].merge_cache()
            lane.merge_cache()
            self._lanes[0].extend(lane)
            # The batch's next step reads its last prompt token, and reports that token as if it were new.
            self._joining.add(sequence)
        else:
            self._lanes.append(lane)

    def step(self) -> list[Decoded]:
        """One token for every sequence."""
        decoded = [
            Decoded(response.uid, response.token, response.logprobs)
            for lane in self._lanes
            for response in lane.next()
            if response.uid not in self._joining
        ]
        self._joining.clear()
        return decoded

    def extract(self, sequence: int) -> tuple[list[int], list[Any]]:
        """The tokens that a sequence's cache holds, and that cache, as its own copy."""
        lane = self._lane_of(sequence)
        index = lane.uids.index(sequence)
        return lane.tokens[index], lane.cache_of(index)

    def remove(self, sequence: int) -> None:
        """Take a sequence out of its batch."""
        self._joining.discard(sequence)
        lane = self._lane_of(sequence)
        lane.filter([index for index, uid in enumerate(lane.uids) if uid != sequence])
        if not lane.uids:
            self._lanes.remove(lane)

    def _lane_of(self, sequence: int) -> _Lane:
        return next(lane for lane in self._lanes if sequence in lane.uids)
