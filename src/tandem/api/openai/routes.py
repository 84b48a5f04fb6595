"""OpenAI's inference routes, exo's bench route, and its Ollama alias."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.api.body import parse_body
from tandem.api.context import context_of
from tandem.api.openai.convert import chat_requests, completion_requests
from tandem.api.openai.respond import respond_chat, respond_completion
from tandem.api.openai.schema_chat import BenchChatRequest, ChatRequest
from tandem.api.openai.schema_completions import CompletionRequest
from tandem.api.openai.schema_responses import BenchChatCompletion, ChatCompletion, Completion
from tandem.api.openapi import body_of, generation_responses

router = APIRouter(tags=["inference"])


@router.post(
    "/v1/chat/completions",
    summary="Answer a chat",
    openapi_extra=body_of(ChatRequest),
    responses=generation_responses(ChatCompletion),
)
@router.post(
    "/ollama/v1/chat/completions",
    summary="The same, where Ollama's clients look for it",
    openapi_extra=body_of(ChatRequest),
    responses=generation_responses(ChatCompletion),
)
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions: one JSON object, or server-sent events with `stream`."""
    context = context_of(request)
    body, requests = await parse_body(request, context.settings.max_body_bytes, ChatRequest, chat_requests)
    return await respond_chat(request, context, body, requests, bench=False)


@router.post(
    "/bench/chat/completions",
    summary="Answer a chat, measured",
    openapi_extra=body_of(BenchChatRequest),
    responses=generation_responses(BenchChatCompletion),
)
async def bench_chat_completions(request: Request) -> Response:
    """Chat completions with an exact number of tokens, a cold prefix cache, and `generation_stats` in the answer."""
    context = context_of(request)
    body, requests = await parse_body(request, context.settings.max_body_bytes, BenchChatRequest, chat_requests)
    return await respond_chat(request, context, body, requests, bench=True)


@router.post(
    "/v1/completions",
    summary="Continue a text",
    openapi_extra=body_of(CompletionRequest),
    responses=generation_responses(Completion),
)
async def completions(request: Request) -> Response:
    """OpenAI's text completions, also over token ids and over lists of prompts."""
    context = context_of(request)
    body, requests = await parse_body(request, context.settings.max_body_bytes, CompletionRequest, completion_requests)
    return await respond_completion(request, context, body, requests)
