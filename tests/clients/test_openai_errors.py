"""The official `openai` package: failures become the exceptions that its users know, and retries help."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from .server import Server

pytestmark = pytest.mark.clients

BODY: dict[str, Any] = {"model": "fast", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def test_wrong_values(sim_client: openai.OpenAI) -> None:
    for field, value in (("temperature", -1), ("top_p", 2), ("n", 0), ("messages", []), ("max_tokens", "many")):
        with pytest.raises(openai.BadRequestError) as caught:
            sim_client.chat.completions.create(**{**BODY, field: value})
        assert caught.value.param == field
        assert caught.value.code == "invalid_request"
        assert caught.value.type == "invalid_request_error"
        assert caught.value.request_id or not caught.value.response.headers.get("x-request-id")


def test_an_unknown_model(sim_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9") as caught:
        sim_client.chat.completions.create(**{**BODY, "model": "gpt-9"})
    assert "fast" in caught.value.message, "it says what there is"
    with pytest.raises(openai.NotFoundError):
        sim_client.models.retrieve("gpt-9")


def test_what_we_do_not_serve(sim_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        sim_client.embeddings.create(model="fast", input="hi")


def test_an_image(sim_client: openai.OpenAI) -> None:
    parts: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(openai.BadRequestError, match="text parts") as caught:
        sim_client.chat.completions.create(**{**BODY, "messages": [{"role": "user", "content": parts}]})
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_prompt(sim_client: openai.OpenAI, stream: bool) -> None:
    messages = [{"role": "user", "content": "x" * 100}]
    with pytest.raises(openai.BadRequestError, match="64") as caught:
        sim_client.chat.completions.create(**{**BODY, "model": "small", "messages": messages, "stream": stream})
    assert caught.value.code == "context_length_exceeded"


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts servers for one test."""
    servers: list[Server] = []

    def start(*models: str, **variables: str) -> Server:
        servers.append(Server(tmp_path_factory.mktemp("home"), *models, **variables))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_keys_and_limits(start: Start) -> None:
    server = start("sim:model_id=fast", TANDEM_API_KEY="right", TANDEM_MAX_BODY_BYTES="1000")
    with openai.OpenAI(base_url=server.v1, api_key="wrong", max_retries=0) as client:
        for call in (lambda: client.chat.completions.create(**BODY), client.models.list):
            with pytest.raises(openai.AuthenticationError) as caught:
                call()
            assert caught.value.code == "invalid_api_key"
        allowed = client.with_options(api_key="right")
        assert allowed.chat.completions.create(**BODY).choices[0].message.content
        with pytest.raises(openai.APIStatusError, match="max_body_bytes") as large:
            allowed.chat.completions.create(**{**BODY, "messages": [{"role": "user", "content": "x" * 2000}]})
        assert large.value.status_code == 413


def test_a_full_queue_and_the_retry(start: Start) -> None:
    server = start("sim:model_id=fast,decode_tps=20,answer_tokens=100000", TANDEM_MAX_BATCH="1", TANDEM_MAX_QUEUE="0")
    long = {**BODY, "max_tokens": 30_000, "stream": True}
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=60) as client:
        stream = client.chat.completions.create(**long)
        next(stream)
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(**BODY)
        assert caught.value.status_code == 503
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        # The SDK waits as long as Retry-After says; meanwhile there is room again.
        threading.Timer(0.2, stream.close).start()
        assert client.with_options(max_retries=3).chat.completions.create(**BODY).choices[0].message.content


def test_a_runner_that_dies_in_the_middle(start: Start) -> None:
    server = start("sim:model_id=fast,die_at_token=3,decode_tps=50")
    server.may_complain = True
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=60) as client:
        stream = client.chat.completions.create(**{**BODY, "max_tokens": 8}, stream=True)
        seen: list[str] = []
        with pytest.raises(openai.APIError, match="runner") as caught:
            seen.extend(chunk.choices[0].delta.content or "" for chunk in stream)
        assert len("".join(seen).split()) == 2, "what came before is the client's"
        assert caught.value.code == "runner_died"
        # The next request finds a restarted runner, or waits for it as the SDK does by default.
        patient = client.with_options(max_retries=10)
        assert patient.chat.completions.create(**{**BODY, "max_tokens": 2}).choices[0].message.content
