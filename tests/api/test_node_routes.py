"""Models, health, metrics, identity."""

from __future__ import annotations

import httpx
import pytest
from openai.types import Model as SdkModel

from tandem.api.openai.schema_responses import Health, ModelList, ModelObject
from tandem.api.server import HttpServer
from tandem.errors import EngineError
from tandem.types import TextDelta

from .double import MODEL, DoubleNode, card, finished
from .helpers import error_of

pytestmark = pytest.mark.anyio

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(("path", "known"), [("/v1/models", []), ("/models", [("known/only", "known")])])
async def test_models(client: httpx.AsyncClient, path: str, known: list[tuple[str, str]]) -> None:
    response = await client.get(path)
    models = ModelList.model_validate_json(response.text).data
    assert [(model.id, model.state) for model in models] == [(MODEL, "ready"), ("disk/only", "downloaded"), *known]
    served = models[0]
    assert served.created == 1700000000
    assert served.context_length == 2048, "the loaded instance knows better than the card"
    assert served.storage_size_megabytes == 64
    assert served.name == "model"
    assert served.aliases == ["tiny"]
    for model in response.json()["data"]:
        SdkModel.model_validate(model)


@pytest.mark.parametrize(("status", "expected"), [("ready", [MODEL]), ("downloaded", ["disk/only"])])
async def test_models_by_status(client: httpx.AsyncClient, status: str, expected: list[str]) -> None:
    response = await client.get(f"/v1/models?status={status}")
    assert [model["id"] for model in response.json()["data"]] == expected


async def test_two_instances_of_one_model_are_one_model(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.cards = [card(), card()]
    models = (await client.get("/v1/models?status=ready")).json()["data"]
    assert [model["id"] for model in models] == [MODEL]


@pytest.mark.parametrize("name", [MODEL, MODEL.upper(), "tiny", "disk/only"])
async def test_one_model(client: httpx.AsyncClient, name: str) -> None:
    response = await client.get(f"/v1/models/{name}")
    assert response.status_code == 200
    ModelObject.model_validate_json(response.text)


async def test_one_unknown_model(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/models/no/such/thing")
    assert response.status_code == 404
    assert MODEL in error_of(response)["message"]


async def test_healthy(client: httpx.AsyncClient) -> None:
    response = await client.get("/health")
    assert response.status_code == 200
    assert Health.model_validate_json(response.text).status == "green"


@pytest.mark.parametrize("state", ["starting", "loading", "warming", "restarting", "failed", "stopped"])
async def test_unhealthy(client: httpx.AsyncClient, node: DoubleNode, state: str) -> None:
    node.runner_state, node.error = state, "The files are damaged."
    response = await client.get("/health")
    assert response.status_code == 503
    health = Health.model_validate_json(response.text)
    assert health.status == "red"
    assert health.error is not None
    assert state in health.error["message"]
    assert "The files are damaged." in health.error["message"]
    assert "retry-after" in response.headers


async def test_nothing_served(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.cards = []
    response = await client.get("/health")
    assert response.status_code == 503
    assert "tandem up" in response.json()["error"]["message"]


async def test_node_id(client: httpx.AsyncClient) -> None:
    response = await client.get("/node_id")
    assert response.json() == "node-of-the-double"


def value(text: str, series: str) -> float:
    for line in text.splitlines():
        name, _, number = line.rpartition(" ")
        if name == series:
            return float(number)
    return 0.0


async def test_metrics_count(client: httpx.AsyncClient, node: DoubleNode, server: HttpServer) -> None:
    async def scrape() -> str:
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        return response.text

    stop = f'tandem_answers_total{{model="{MODEL}",outcome="stop"}}'
    broken = f'tandem_answers_total{{model="{MODEL}",outcome="engine_error"}}'
    unknown = 'tandem_answers_total{model="unknown",outcome="not_found"}'
    chats = 'tandem_http_requests_total{method="POST",route="/v1/chat/completions",status="200"}'
    tokens = f'tandem_completion_tokens_total{{model="{MODEL}"}}'
    first = f'tandem_time_to_first_token_seconds_count{{model="{MODEL}"}}'
    before = await scrape()
    await client.post("/v1/chat/completions", json=BODY)
    await client.post("/v1/chat/completions", json={**BODY, "n": 2, "stream": True})
    node.play = lambda request: [TextDelta("x"), EngineError("It broke.")]
    await client.post("/v1/chat/completions", json={**BODY, "stream": True})
    await client.post("/v1/chat/completions", json={**BODY, "model": "someone/else"})
    after = await scrape()
    grown = {
        series: value(after, series) - value(before, series) for series in (stop, broken, unknown, chats, tokens, first)
    }
    assert grown == {stop: 3, broken: 1, unknown: 1, chats: 3, tokens: 6, first: 4}


async def test_metrics_of_instances(client: httpx.AsyncClient, node: DoubleNode) -> None:
    text = (await client.get("/metrics")).text
    labels = f'instance="instance-of-{MODEL}",model="{MODEL}"'
    assert value(text, f"tandem_requests_waiting{{{labels}}}") == 1
    assert value(text, f"tandem_requests_prefilling{{{labels}}}") == 2
    assert value(text, f"tandem_runner_restarts_total{{{labels}}}") == 3
    assert value(text, f"tandem_engine_steps_total{{{labels}}}") == 17
    assert value(text, f'tandem_instance_state{{{labels},state="ready"}}') == 1
    assert value(text, f'tandem_instance_state{{{labels},state="failed"}}') == 0


async def test_no_client_can_make_up_series(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = lambda request: [finished()]
    for number in range(5):
        await client.post("/v1/chat/completions", json={**BODY, "model": f"made-up-{number}"})
        await client.get(f"/made-up-{number}")
        await client.request(f"MADEUP{number}", "/v1/models")
        await client.get(f"/v1/models/made-up-{number}")
    await client.post("/v1/chat/completions", json={**BODY, "model": "TINY"})
    text = (await client.get("/metrics")).text
    assert "made-up" not in text.lower()
    assert "madeup" not in text.lower()
    assert "TINY" not in text
