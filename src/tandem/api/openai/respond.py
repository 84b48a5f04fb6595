"""The way from a validated request to its response, the same for every OpenAI route."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tandem.api.context import Context
from tandem.api.generation import Generation
from tandem.api.openai.collect import ChatChoice, CompletionChoice, response_body
from tandem.api.openai.reply import Reply, new_id
from tandem.api.openai.schema_chat import ChatRequest
from tandem.api.openai.schema_completions import CompletionRequest
from tandem.api.openai.stream import ChatWriter, CompletionWriter
from tandem.api.sse import EventStream
from tandem.types import GenerationRequest


async def respond_chat(
    request: Request, context: Context, body: ChatRequest, requests: list[GenerationRequest], *, bench: bool
) -> Response:
    """Answer a chat completion request, in one piece or as a stream.

    Raises:
        TandemError: it failed before there was anything to send.
    """
    generation = Generation(context, request.receive, new_id("chatcmpl"), body.model, requests)
    reply = Reply(generation.request_id, generation.model_id, body.n or 1, body.include_usage)
    if body.stream:
        return EventStream(generation, ChatWriter(reply))
    choices = [ChatChoice(bool(body.logprobs)) for _ in requests]
    await _collect(generation, choices)
    return _json(generation, response_body(reply, "chat.completion", choices, bench))


async def respond_completion(
    request: Request, context: Context, body: CompletionRequest, requests: list[GenerationRequest]
) -> Response:
    """Answer a text completion request, in one piece or as a stream.

    Raises:
        TandemError: it failed before there was anything to send.
    """
    generation = Generation(context, request.receive, new_id("cmpl"), body.model, requests)
    reply = Reply(generation.request_id, generation.model_id, body.n or 1, body.include_usage)
    logprobs = body.logprobs is not None
    if body.stream:
        return EventStream(generation, CompletionWriter(reply, logprobs))
    choices = [CompletionChoice(logprobs) for _ in requests]
    await _collect(generation, choices)
    return _json(generation, response_body(reply, "text_completion", choices, False))


async def _collect(generation: Generation, choices: list[Any]) -> None:
    async with generation:
        async for number, events in generation:
            choices[number].add(events)


def _json(generation: Generation, body: bytes) -> Response:
    return Response(body, headers={"x-request-id": generation.request_id}, media_type="application/json")
