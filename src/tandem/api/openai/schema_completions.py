"""The body of `POST /v1/completions`, as clients send it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from tandem.api.openai.schema_common import MAX_CHOICES, GenerationFields, TokenId

MAX_PROMPTS = 2048

TokenIds = Annotated[list[TokenId], Field(min_length=1)]


def _kind(prompt: Any) -> str:
    # The first element decides. A plain union would try every form on the whole prompt, and complain of each.
    if not isinstance(prompt, list):
        return "a string"
    first = prompt[0] if prompt else ""
    if isinstance(first, list):
        return "a list of token lists"
    return "a list of strings" if isinstance(first, str) else "a list of tokens"


class CompletionRequest(GenerationFields):
    """A text completion request."""

    prompt: Annotated[
        Annotated[str, Tag("a string")]
        | Annotated[TokenIds, Tag("a list of tokens")]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("a list of strings")]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag("a list of token lists")],
        Discriminator(_kind),
    ] = Field(description="Text or token ids, or a list of either.")
    max_tokens: int | None = Field(16, ge=0, lt=2**31, description="0 needs `echo`.")
    echo: bool | None = Field(None, description="Repeat the prompt before the answer.")
    logprobs: int | None = Field(None, ge=0, le=20, description="Alternatives to report per token.")
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Must equal `n`.")
    suffix: str | None = Field(None, description="Must be empty: filling in the middle is not supported.")
