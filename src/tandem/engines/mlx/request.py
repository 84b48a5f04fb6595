"""From a request to a sequence that the engine can run. Runs on worker threads: no MLX arrays here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tandem.engines.answer import Answer
from tandem.engines.handoff.sequence import RemoteSequence
from tandem.engines.mlx.load import LoadedModel
from tandem.engines.mlx.memory import MemoryBudget
from tandem.engines.mlx.sampling import Processor
from tandem.engines.prompts import render
from tandem.engines.sampling import ResolvedSampling, defaults_for, resolve
from tandem.errors import ContextTooLongError, EngineError, TandemError
from tandem.models.constraint import Constraint, constraint_for
from tandem.models.output.processor import OutputProcessor
from tandem.models.text import TextModel
from tandem.types import GenerationRequest

if TYPE_CHECKING:
    import mlx.core as mx

    from tandem.engines.mlx.prefill import Prefill

RESERVE_TOKENS = 512
"""Of an answer of unknown length, the part that memory is set aside for before it begins."""


class Sequence(RemoteSequence):
    """A request on its way through the engine.

    Attributes:
        number: the engine's own, unique.
        reserved: bytes set aside for its cache.
        prefill: while the prompt is processed.
        unstored: its prompt is not in the prefix cache yet, though it could be.
        offered: whether it has been considered for another node while it waited for its turn.
        broken: set when a processor of this sequence failed.
        sound_tokens: generated tokens that were chosen before that.
    """

    def __init__(
        self,
        request_id: str,
        answer: Answer,
        sampling: ResolvedSampling,
        constraint: Constraint | None,
        reserved: int,
    ) -> None:
        super().__init__(request_id, answer)
        self.sampling = sampling
        self.constraint = constraint
        self.reserved = reserved
        self.number = 0
        self.prefill: Prefill | None = None
        self.unstored = False
        self.offered = False
        self.broken: TandemError | None = None
        self.sound_tokens = 0

    @property
    def position(self) -> int:
        """Prompt tokens processed so far."""
        return self.prefill.position if self.prefill is not None else 0

    def guard(self, processor: Processor) -> Processor:
        """A processor whose failure ends this sequence instead of the batch it runs in."""

        def guarded(tokens: mx.array, logits: mx.array) -> mx.array:
            if self.broken is not None:
                return logits
            try:
                return processor(tokens, logits)
            except TandemError as error:
                self.broken = error
            except Exception as error:  # noqa: BLE001 - see above; the reader is told
                self.broken = EngineError(f"The next token could not be chosen: {error}")
            self.sound_tokens = tokens.size - len(self.tokens)
            return logits

        return guarded


def prepare(
    request_id: str, request: GenerationRequest, text: TextModel, loaded: LoadedModel, memory: MemoryBudget
) -> Sequence:
    """Render, tokenise, check and compile.

    Raises:
        InvalidRequestError: the template, a sampling value or the schema is at fault.
        ContextTooLongError: the prompt leaves no room for an answer.
    """
    arrived = time.monotonic()
    sampling = resolve(request.sampling, defaults_for(request, loaded.defaults), text.vocabulary_size)
    prompt, max_tokens = render(text, request, loaded.context_length)
    length = len(prompt.token_ids)
    reserved = memory.needed(length + min(max_tokens, RESERVE_TOKENS))
    if not memory.fits(reserved):
        raise ContextTooLongError(
            f"A prompt of {length} tokens needs {reserved >> 20} MiB of cache; this machine has "
            f"{memory.total >> 20} MiB for it. Shorten the prompt, or set TANDEM_KV_BITS=8.",
            param="messages",
        )
    constraint = constraint_for(text, prompt, request)
    output = OutputProcessor(text, prompt, stop=request.stop, logprobs=request.logprobs is not None)
    answer = Answer(request_id, request, prompt, output, text.eos_ids, max_tokens, arrived, peak_memory=_peak_memory)
    return Sequence(request_id, answer, sampling, constraint, reserved)


def _peak_memory() -> int:
    import mlx.core as mx

    return int(mx.get_peak_memory())
