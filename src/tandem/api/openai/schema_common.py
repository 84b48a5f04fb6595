"""Fields that chat and text completions share, as clients send them.

Types are strict (`"5"` is not a number) and NaN is refused; fields that we do not know are ignored, except those whose
silent loss would change the answer: `REFUSED` names them.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

MAX_STOPS = 16
MAX_CHOICES = 128
_MAX_DEPTH = 64

REFUSED = {
    "functions": "Send `tools` in place of the older `functions`.",
    "function_call": "Send `tool_choice` in place of the older `function_call`.",
    "audio": "Audio is not supported: ask for text.",
    "web_search_options": "This server does not search the web: offer a search function in `tools`.",
    "grammar": "Grammars are not supported: use `response_format` with a JSON schema.",
    "guided_json": "Use `response_format` with type `json_schema`.",
    "guided_regex": "Regular expressions are not supported: use `response_format` with a JSON schema.",
    "guided_choice": "Use `response_format` with a JSON schema that has an `enum`.",
    "guided_grammar": "Grammars are not supported: use `response_format` with a JSON schema.",
    "structured_outputs": "Use `response_format` with type `json_schema`.",
    "min_tokens": "A minimum length is not supported: `ignore_eos` with `max_tokens` gives an exact length.",
    "continue_final_message": "Continuing an assistant message is not supported: end with a user message.",
    "use_beam_search": "Beam search is not supported.",
}


def plain_json(value: dict[str, Any]) -> dict[str, Any]:
    """Check that a free-form object can travel to the engine: bounded depth, finite numbers, integers of 64 bits."""
    pending: list[tuple[Any, int]] = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
        if isinstance(item, dict):
            pending.extend((inner, depth + 1) for inner in item.values())
        elif isinstance(item, list):
            pending.extend((inner, depth + 1) for inner in item)
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise ValueError("contains a number that is too large")
        elif isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise ValueError("contains an integer of more than 64 bits")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(plain_json)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
BiasKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class RequestModel(BaseModel):
    """How every request body is validated."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(RequestModel):
    """`include_usage` adds a last chunk that carries the usage and no choice."""

    include_usage: bool | None = None


class GenerationFields(RequestModel):
    """What is the same for chat and text completions. None is as good as absent."""

    # Unknown fields are kept, so that `convert` can see the refused ones among them.
    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1, max_length=512, description="Id or alias of a served model.")
    max_tokens: int | None = Field(None, ge=0, lt=2**31, description="At most this many generated tokens.")
    temperature: float | None = Field(None, ge=0, description="0 is greedy.")
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 and -1 switch it off.")
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.001, le=100, description="1 switches it off.")
    repetition_context_size: int | None = Field(None, ge=1, lt=2**31)
    logit_bias: dict[BiasKey, Bias] | None = Field(None, description="Added to the logits, by token id.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = Field(
        None, description="The answer ends before the first of these."
    )
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Answers to generate.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted and ignored.")
    ignore_eos: bool | None = Field(None, description="Never end before `max_tokens`. Tandem's own field.")
    use_prefix_cache: bool | None = Field(None, description="False bypasses the prefix cache. Tandem's own field.")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple, each once."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(dict.fromkeys(self.stop))

    @property
    def include_usage(self) -> bool:
        """Whether the client asked for the usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)
