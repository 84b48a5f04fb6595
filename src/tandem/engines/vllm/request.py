"""From a request to what vLLM is asked for. Runs on worker threads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tandem.engines.answer import Answer
from tandem.engines.prompts import render
from tandem.engines.sampling import ResolvedSampling, defaults_for, resolve
from tandem.engines.vllm.repetition import REPETITION
from tandem.engines.vllm.sequence import Sequence
from tandem.errors import UnsupportedError
from tandem.models.constraint import constraint_for
from tandem.models.output.processor import OutputProcessor
from tandem.models.text import TextModel
from tandem.types import GenerationRequest

MOST_TEMPERATURE = 2.0
MOST_PENALTY = 2.0
"""vLLM's own limits, either way for penalties."""


def prepare(
    request_id: str, request: GenerationRequest, text: TextModel, defaults: Mapping[str, Any], context_length: int
) -> Sequence:
    """Render, tokenise, check and compile.

    Raises:
        InvalidRequestError: the template, a sampling value or the schema is at fault.
        ContextTooLongError: the prompt leaves no room for an answer.
        UnsupportedError: vLLM cannot do it.
    """
    arrived = time.monotonic()
    given = request.sampling
    sampling = resolve(given, defaults_for(request, defaults), text.vocabulary_size)
    prompt, max_tokens = render(text, request, context_length)
    constraint = constraint_for(text, prompt, request) if max_tokens else None
    output = OutputProcessor(text, prompt, stop=request.stop, logprobs=request.logprobs is not None)
    answer = Answer(request_id, request, prompt, output, text.eos_ids, max_tokens, arrived)
    params = sampling_params(request, sampling, max_tokens, sorted(text.eos_ids))
    return Sequence(request_id, answer, params, constraint)


def sampling_params(
    request: GenerationRequest, sampling: ResolvedSampling, max_tokens: int, eos_ids: list[int]
) -> SamplingParams:
    """vLLM's parameters for a request.

    Stop strings are not among them: the answer's own text side finds those, in what a reader sees.

    Raises:
        UnsupportedError: a value is beyond what vLLM takes.
    """
    if sampling.temperature > MOST_TEMPERATURE:
        raise UnsupportedError(
            f"vLLM takes temperatures up to {MOST_TEMPERATURE:g}, not {sampling.temperature:g}.", param="temperature"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if abs(value) > MOST_PENALTY:
            raise UnsupportedError(
                f"vLLM takes a {name} between {-MOST_PENALTY:g} and {MOST_PENALTY:g}, not {value:g}.", param=name
            )
    repeats = sampling.repetition_penalty != 1
    extra: dict[str, Any] = {}
    bias: dict[int, float] | None = dict(sampling.logit_bias) or None
    if repeats:
        # The bias comes after the penalty, in every engine.
        extra[REPETITION] = [
            sampling.repetition_penalty,
            sampling.repetition_context_size,
            sorted(sampling.logit_bias.items()),
        ]
        bias = None
    # A nucleus of no probability holds the likeliest token alone; vLLM takes no zero.
    single = sampling.top_p == 0
    return SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=1.0 if single else sampling.top_p,
        top_k=1 if single else max(0, sampling.top_k),
        min_p=sampling.min_p,
        # Without a seed of its own a request shares the engine's random numbers: that is faster.
        seed=None if request.sampling.seed is None else sampling.seed & (2**63 - 1),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=bias,
        max_tokens=max(1, max_tokens),
        # The model's text side knows which tokens end an answer; vLLM's own idea of it takes no part.
        ignore_eos=True,
        stop_token_ids=[] if request.ignore_eos else eos_ids,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_reading_prefix_cache=not request.use_prefix_cache or request.prompt_logprobs is not None,
        extra_args=extra or None,
    )
