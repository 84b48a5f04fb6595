"""A request's prompt as tokens, and how long its answer may get."""

from __future__ import annotations

from tandem.errors import ContextTooLongError, InvalidRequestError
from tandem.models.chat import prepare as render_prompt
from tandem.models.prompt import RenderedPrompt
from tandem.models.text import TextModel
from tandem.types import GenerationRequest


def render(text: TextModel, request: GenerationRequest, context_length: int) -> tuple[RenderedPrompt, int]:
    """The prompt, and the most tokens that its answer may have.

    Args:
        context_length: prompt plus answer, in tokens.

    Raises:
        InvalidRequestError: the template refuses the messages, or there is no token.
        ContextTooLongError: the prompt leaves no room for an answer.
    """
    prompt = render_prompt(text, request.prompt)
    length = len(prompt.token_ids)
    if length == 0:
        raise InvalidRequestError("The prompt is empty: there is no token to continue from.", param="prompt")
    room = context_length - length
    if room < (0 if request.max_tokens == 0 else 1):
        raise ContextTooLongError(
            f"The prompt has {length} tokens; this model's context holds {context_length}, answer included. "
            "Shorten the prompt.",
            param="messages",
        )
    return prompt, room if request.max_tokens is None else min(request.max_tokens, room)
