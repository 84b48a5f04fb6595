"""The answers that run: decoded together, one token each a step, and what they leave for the prefix cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from tandem.engines.base import Output
from tandem.engines.mlx.decode import Decoder
from tandem.engines.mlx.load import LoadedModel
from tandem.engines.mlx.prefix_cache import BLOCK_TOKENS, PrefixCache
from tandem.engines.mlx.reading import read_token
from tandem.engines.mlx.request import Sequence
from tandem.engines.mlx.sampling import Sampler, make_processors
from tandem.engines.pace import Pace
from tandem.engines.sampling import GREEDY
from tandem.types import Failure, Finished

STORE_SHARE = 0.1
"""Of a decode step's time, what storing an ended answer's cache may take beside it."""


class Running:
    """Sequences that are past their prompt.

    Args:
        vocabulary: how many tokens there are.
    """

    def __init__(self, loaded: LoadedModel, prefix: PrefixCache, pace: Pace, vocabulary: int) -> None:
        self._decoder = Decoder(loaded.model)
        self._prefix = prefix
        self._pace = pace
        self._vocabulary = vocabulary
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def nbytes(self) -> int:
        """Memory held by their caches."""
        return self._decoder.nbytes

    def start(self, sequence: Sequence, cache: list[Any]) -> None:
        """Begin to decode. `cache` holds all of the prompt but its last token."""
        processors = [
            sequence.guard(processor)
            for processor in make_processors(
                sequence.sampling, len(sequence.tokens), self._vocabulary, sequence.constraint
            )
        ]
        wants_logprobs = sequence.answer.request.logprobs is not None
        sampler = Sampler(sequence.sampling, self._vocabulary, wants_logprobs=wants_logprobs)
        self._decoder.add(sequence.number, sequence.tokens, cache, sampler, processors)
        self._sequences[sequence.number] = sequence

    def step(self, outputs: list[Output]) -> None:
        """One token for each, then a little of what ended answers left to be stored."""
        if self._sequences:
            self._decode(outputs)
            self._prefix.store_some(STORE_SHARE * self._pace.decode_seconds)
        if not self._sequences:
            self._prefix.store_rest()

    def _decode(self, outputs: list[Output]) -> None:
        begun = time.monotonic()
        decoded = self._decoder.step()
        self._pace.decoded(len(decoded), time.monotonic() - begun)
        for number, token, logprobs in decoded:
            sequence = self._sequences[number]
            events = read_token(sequence, token, logprobs)
            if sequence.answer.finished and sequence.keeps_prefix:
                self._prefix.store_later(*self._decoder.extract(number))
            if events and isinstance(events[-1], Finished | Failure):
                self._leave(sequence)
            if events:
                outputs.append(Output(sequence.request_id, events))

    def cancel(self, request_id: str) -> bool:
        """End one without a last word; whether it was here."""
        for sequence in self._sequences.values():
            if sequence.request_id == request_id:
                self._keep_prompt(sequence)
                self._leave(sequence)
                if not self._sequences:
                    self._prefix.store_rest()
                return True
        return False

    def keep_prompts_like(self, tokens: list[int]) -> None:
        """Store now what was left for later, where it begins as `tokens` do."""
        for sequence in self._sequences.values():
            if sequence.tokens[:BLOCK_TOKENS] == tokens[:BLOCK_TOKENS]:
                self._keep_prompt(sequence)

    def _keep_prompt(self, sequence: Sequence) -> None:
        if sequence.unstored:
            sequence.unstored = False
            self._prefix.store(*self._decoder.extract(sequence.number), tail=True)

    def _leave(self, sequence: Sequence) -> None:
        self._decoder.remove(sequence.number)
        del self._sequences[sequence.number]

    def warm_up(self, tokens: list[int], cache: list[Any]) -> None:
        """A step that belongs to no request."""
        self._decoder.add(0, tokens, cache, Sampler(GREEDY, self._vocabulary), [])
        self._decoder.step()
        self._decoder.remove(0)

    def check_idle(self) -> None:
        """Assert that nothing is left of requests that have ended."""
        assert not self._sequences
        assert len(self._decoder) == 0
        assert self._decoder.nbytes == 0
