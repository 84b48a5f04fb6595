"""Our constraints in the place of vLLM's structured output back ends.

The same grammar as in every engine masks the answer: a schema that one engine enforces, the other does, too, token for
token. vLLM asks for the mask while the device computes, and applies it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from vllm import LLMEngine
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

from tandem.engines.vllm.sequence import Sequence
from tandem.errors import EngineError, TandemError

_ALL = np.uint32(0xFFFFFFFF)


class _Grammar(StructuredOutputGrammar):
    """One sequence's constraint. What fails here ends that sequence instead of the batch it runs in."""

    def __init__(self, sequence: Sequence) -> None:
        assert sequence.constraint is not None
        self._sequence = sequence
        self._constraint = sequence.constraint

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        if self._sequence.broken is None:
            try:
                for token in tokens:
                    self._constraint.accept(token)
            except TandemError as error:
                self._sequence.broken = error
        return True

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        row = bitmask[batch_index].numpy().view(np.uint32)
        if self._sequence.broken is not None:
            row[:] = _ALL
            return
        try:
            self._constraint.mask(row)
        except TandemError as error:
            self._sequence.broken = error
            row[:] = _ALL

    def is_terminated(self) -> bool:
        return self._constraint.is_finished or self._sequence.broken is not None

    # Guesses ahead would need these; there are none.

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        raise EngineError("Constrained answers cannot be guessed ahead. Load the model without speculative decoding.")

    def rollback(self, num_tokens: int) -> None:
        raise EngineError("Constrained answers cannot be guessed ahead. Load the model without speculative decoding.")

    def reset(self) -> None:
        raise EngineError("A constraint serves one answer.")


class Constraints(StructuredOutputBackend):
    """vLLM's door to the constraints of the sequences that run.

    Args:
        engine: its structured output manager uses this back end from now on.
    """

    def __init__(self, engine: LLMEngine) -> None:
        config = engine.vllm_config
        super().__init__(config, None, config.model_config.get_vocab_size())
        self._keys = itertools.count()
        self._sequences: dict[str, Sequence] = {}
        manager = engine.engine_core.engine_core.structured_output_manager
        manager.backend = self
        # Without a tokenizer of its own vLLM makes no threads to compile grammars on; ours are compiled already.
        manager.executor = _Inline()

    def attach(self, sequence: Sequence) -> StructuredOutputsParams:
        """What makes vLLM ask for this sequence's masks. To be used at once: vLLM's first question takes it."""
        key = str(next(self._keys))
        self._sequences[key] = sequence
        return StructuredOutputsParams(grammar=key)

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> StructuredOutputGrammar:
        return _Grammar(self._sequences.pop(grammar_spec))

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return torch.full((max_num_seqs, (self.vocab_size + 31) // 32), -1, dtype=torch.int32)

    def destroy(self) -> None:
        self._sequences.clear()


class _Inline:
    """The part of an executor that vLLM uses, without threads."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing to end."""
