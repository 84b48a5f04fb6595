"""What a step of vLLM's means to the reader of one request: its prompt's progress, and the answer's next tokens."""

from __future__ import annotations

from vllm.outputs import RequestOutput

from tandem.engines.answer import score_prompt
from tandem.engines.vllm.scores import prompt_scores, score
from tandem.engines.vllm.sequence import Sequence
from tandem.errors import EngineError
from tandem.models.text import TextModel
from tandem.types import Event, PrefillProgress


def read(sequence: Sequence, position: int, cached: int, begun: float, events: list[Event]) -> None:
    """So many of the prompt's tokens are in the cache now.

    Args:
        cached: of them, those that were there before.
        begun: when the step began, by the monotonic clock.
        events: is added to.
    """
    if sequence.decoding:
        return
    if not sequence.accepted:
        sequence.accepted = True
        sequence.cached = cached
        sequence.position = cached
        events.append(sequence.answer.accept(cached, begun))
    total = len(sequence.tokens)
    sequence.spared = cached
    # A sequence that was put aside begins anew; its reader is told of nothing twice.
    if position > sequence.position:
        if position > sequence.told and (position < total or sequence.position > sequence.cached):
            events.append(PrefillProgress(min(position, total), total))
        sequence.position = position


def write(text: TextModel, sequence: Sequence, result: RequestOutput, events: list[Event]) -> None:
    """The answer's next tokens; before the first, what becomes of the prompt.

    Args:
        events: is added to.
    """
    answer = sequence.answer
    request = answer.request
    if not sequence.decoding:
        sequence.decoding = True
        answer.prefilled()
        if request.echo or request.prompt_logprobs is not None:
            scores = prompt_scores(sequence.tokens, result.prompt_logprobs, request.prompt_logprobs or 0)
            events.append(score_prompt(text, request, sequence.tokens, scores))
        if answer.max_tokens == 0:
            events.extend(answer.finish("length"))
            return
    (completion,) = result.outputs
    for index, token in enumerate(completion.token_ids):
        told = None
        if request.logprobs is not None and completion.logprobs is not None:
            told = score(token, completion.logprobs[index], request.logprobs)
        events.extend(answer.add(token, told))
        if answer.finished:
            return
    if completion.finish_reason == "length":
        events.extend(answer.finish("length"))
    elif completion.finish_reason is not None and sequence.broken is None:
        sequence.broken = EngineError(f"vLLM ended the answer: {completion.finish_reason}.")
