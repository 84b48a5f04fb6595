"""From a request's `Sampling` to the functions that mlx-lm's batch calls per sequence.

Order: penalties and biases on the logits, then the constraint's mask, then temperature, top-k, top-p and min-p on the
log-probabilities (the order of transformers' `generate`), then a draw with the request's own random key: the stream of
random numbers belongs to the request, so that neither its neighbours in the batch nor the order of arrival matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_top_k, make_logits_processors, make_repetition_penalty

from tandem.engines.sampling import ResolvedSampling

if TYPE_CHECKING:
    from tandem.models.constraint import Constraint

Processor: TypeAlias = Callable[[mx.array, mx.array], mx.array]
"""(tokens so far `[n]`, logits `[1, vocabulary]`) to new logits."""


class Sampler:
    """Chooses a sequence's tokens.

    Args:
        wants_logprobs: the sequence reports log-probabilities; without a reader the batch does not compute them.
    """

    def __init__(self, sampling: ResolvedSampling, vocabulary_size: int, *, wants_logprobs: bool = False) -> None:
        self.greedy = sampling.greedy
        self.wants_logprobs = wants_logprobs
        self._sampling = sampling
        self._top_k = sampling.top_k if 0 < sampling.top_k < vocabulary_size else 0
        self._key = mx.random.key(sampling.seed)

    def __call__(self, logits: mx.array) -> mx.array:
        """Logits `[1, vocabulary]` to a token `[1]`."""
        if self.greedy:
            return mx.argmax(logits, axis=-1)
        sampling = self._sampling
        # In half precision the random numbers themselves would be coarse.
        scores = logits.astype(mx.float32) * (1.0 / sampling.temperature)
        if self._top_k:
            scores = apply_top_k(scores, self._top_k)
        if sampling.top_p < 1:
            scores = _keep_top_p(scores, sampling.top_p)
        if sampling.min_p > 0:
            scores = _drop_below(scores, mx.max(scores, axis=-1, keepdims=True) + math.log(sampling.min_p))
        self._key, draw = mx.random.split(self._key)
        return mx.random.categorical(scores, key=draw)


# mlx-lm compiles its own versions of these two, and on a CPU that runs a C++ compiler for each new value of `top_p`
# or `min_p`: a second in which nobody gets a token.


def _keep_top_p(scores: mx.array, top_p: float) -> mx.array:
    """Keep the likeliest tokens up to the one with which their probabilities reach `top_p`; always the first."""
    ranked = -mx.sort(-scores, axis=-1)
    chances = mx.softmax(ranked, axis=-1)
    is_needed = mx.cumsum(chances, axis=-1) - chances < top_p
    last = mx.maximum(is_needed.sum(axis=-1, keepdims=True) - 1, 0)
    return _drop_below(scores, mx.take_along_axis(ranked, last, axis=-1))


def _drop_below(scores: mx.array, threshold: mx.array) -> mx.array:
    return mx.where(scores < threshold, -float("inf"), scores)


def make_processors(
    sampling: ResolvedSampling, prompt_length: int, vocabulary_size: int, constraint: Constraint | None
) -> list[Processor]:
    """What changes the logits before sampling.

    Args:
        prompt_length: tokens before the first generated one.
        constraint: restricts the answer; it is advanced by the processor itself.
    """
    processors: list[Processor] = []
    if sampling.repetition_penalty != 1:
        processors.append(make_repetition_penalty(sampling.repetition_penalty, sampling.repetition_context_size))
    if sampling.presence_penalty or sampling.frequency_penalty:
        processors.append(_answer_penalty(sampling, prompt_length))
    if sampling.logit_bias:
        processors.extend(make_logits_processors(logit_bias=sampling.logit_bias))
    if constraint is not None:
        processors.append(_mask(constraint, prompt_length, vocabulary_size))
    return processors


def _answer_penalty(sampling: ResolvedSampling, prompt_length: int) -> Processor:
    def penalise(tokens: mx.array, logits: mx.array) -> mx.array:
        generated = tokens[prompt_length:]
        if generated.size == 0:
            return logits
        counts = mx.zeros(logits.shape[-1], logits.dtype).at[generated].add(1)
        penalty = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        return logits - penalty.astype(logits.dtype)[None]

    return penalise


def _mask(constraint: Constraint, prompt_length: int, vocabulary_size: int) -> Processor:
    accepted = 0
    words = np.zeros((vocabulary_size + 31) // 32, np.uint32)

    def apply(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal accepted
        generated = tokens.size - prompt_length
        if generated > accepted:
            # The grammar has to see the last token before it can say what may follow: this waits for the device.
            for token in np.array(tokens[prompt_length + accepted :]).tolist():
                constraint.accept(token)
            accepted = generated
        if constraint.is_finished:
            return logits
        constraint.mask(words)
        mask = np.unpackbits(words.view(np.uint8), bitorder="little")[: logits.shape[-1]].astype(bool)
        return mx.where(mx.array(mask)[None], logits, mx.array(-float("inf"), logits.dtype))

    return apply
