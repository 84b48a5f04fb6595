"""A request's sampling with every gap filled: the same numbers whichever engine draws."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from tandem.errors import InvalidRequestError
from tandem.types import ChatPrompt, GenerationRequest, Sampling

FALLBACK: Mapping[str, float] = {
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "repetition_context_size": 20,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


COLDEST = 1e-5
"""Below this temperature the likeliest token is taken: divided by less, logits overflow."""


class ResolvedSampling(NamedTuple):
    """A `Sampling` with every gap filled."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    repetition_context_size: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < COLDEST


GREEDY = ResolvedSampling(0.0, 1.0, 0, 0.0, 0, 1.0, 1, 0.0, 0.0, {})
"""The likeliest token, always."""


def resolve(sampling: Sampling, defaults: Mapping[str, Any], vocabulary_size: int) -> ResolvedSampling:
    """Fill the gaps from `defaults` (the model's), then from `FALLBACK`, and check the ranges.

    Raises:
        InvalidRequestError: a value is out of range, or a biased token is not in the vocabulary.
    """

    def value(name: str) -> Any:
        given = getattr(sampling, name)
        if given is not None:
            return given
        default = defaults.get(name)
        return FALLBACK[name] if default is None else default

    def bounded(name: str, low: float, high: float) -> Any:
        number = value(name)
        if not low <= number <= high:
            raise InvalidRequestError(f"{name} must be between {low:g} and {high:g}, not {number:g}.", param=name)
        return number

    for token in sampling.logit_bias:
        if not 0 <= token < vocabulary_size:
            raise InvalidRequestError(
                f"logit_bias names token {token}, but the vocabulary ends at {vocabulary_size - 1}.", param="logit_bias"
            )
    return ResolvedSampling(
        temperature=float(bounded("temperature", 0, 100)),
        top_p=float(bounded("top_p", 0, 1)),
        top_k=int(bounded("top_k", -1, 1 << 31)),
        min_p=float(bounded("min_p", 0, 1)),
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed & (2**64 - 1),
        repetition_penalty=float(bounded("repetition_penalty", 1e-3, 100)),
        repetition_context_size=int(bounded("repetition_context_size", 1, 1 << 31)),
        presence_penalty=float(bounded("presence_penalty", -10, 10)),
        frequency_penalty=float(bounded("frequency_penalty", -10, 10)),
        logit_bias=sampling.logit_bias,
    )


def defaults_for(request: GenerationRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The model's sampling values, those of the mode that the request chose first.

    Args:
        defaults: by name; those of `thinking` and `non_thinking` are mappings of their own.
    """
    thinking = request.prompt.thinking if isinstance(request.prompt, ChatPrompt) else None
    mode = {True: "thinking", False: "non_thinking", None: ""}[thinking]
    return {**defaults, **(defaults.get(mode) or {})}
