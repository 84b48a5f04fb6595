"""Custom cards, searches, and downloads."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from api.helpers import error_of
from tandem.api.cluster import models
from tandem.cluster.bus.config import free_port
from tandem.models.cards import ModelCard, builtin_cards

from .nodes import Served, serving, settings_for

sys.path.append(str(Path(__file__).parents[2] / "models"))
from hub_server import Fault, Hub, Repository

pytestmark = pytest.mark.anyio

CONFIG = b'{"model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 64, "num_key_value_heads": 2}'


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        files = {"config.json": CONFIG, "model.safetensors": bytes(5000), "chat_template.jinja": b"{{ tools }}"}
        server.repositories["org/tiny"] = Repository(files)
        server.repositories["org/other"] = Repository(files)
        server.repositories["org/odd"] = Repository({"model.safetensors": bytes(5000), "config.json": b"{}"})
        server.repositories["org/gguf"] = Repository({"model.gguf": bytes(10)})
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent/token")
        yield server


@pytest.fixture
async def online(hub: Hub, tmp_path: Path) -> AsyncIterator[Served]:
    settings = settings_for(tmp_path / "online", free_port("tcp")).model_copy(update={"offline": False})
    async with serving(settings) as served:
        yield served


async def test_a_card_from_the_hub(online: Served) -> None:
    added = await online.http.post("/models/add", json={"model_id": "org/tiny"})
    assert added.status_code == 200, added.text
    model = added.json()
    assert (model["id"], model["name"], model["hugging_face_id"]) == ("org/tiny", "tiny", "org/tiny")
    assert model["is_custom"] is True
    assert "tools" in model["capabilities"]
    card = (await online.http.get("/state/customModelCards/org/tiny")).json()
    assert (card["nLayers"], card["storageSize"]) == (3, {"inBytes": 5000})
    listed = (await online.http.get("/models")).json()["data"]
    assert [one["state"] for one in listed if one["id"] == "org/tiny"] == ["known"]
    planned = await online.http.get("/instance/previews", params={"model_id": "ORG/tiny"})
    assert planned.status_code == 200
    assert (await online.http.delete("/models/custom/org/tiny")).json()["model_id"] == "org/tiny"
    gone = await online.http.delete("/models/custom/org/tiny")
    assert gone.status_code == 404
    assert "org/tiny" in error_of(gone)["message"]


@pytest.mark.parametrize(
    ("model_id", "status"), [("org/nothing", 400), ("org/odd", 422), ("org/gguf", 422), ("plain", 404), ("", 400)]
)
async def test_cards_that_cannot_be_made(online: Served, model_id: str, status: int) -> None:
    answer = await online.http.post("/models/add", json={"model_id": model_id})
    assert answer.status_code == status, answer.text
    assert error_of(answer)["message"]
    assert online.node.state.cards == {}


async def test_a_model_with_a_card_needs_no_hub(left: Served) -> None:
    card = builtin_cards()[0]
    added = await left.http.post("/models/add", json={"model_id": card.model_id.upper()})
    assert added.json()["id"] == card.model_id
    assert card.model_id not in left.node.state.cards, "nothing had to be added"
    offline = await left.http.post("/models/add", json={"model_id": "org/unheard-of"})
    assert offline.status_code == 400
    assert "offline" in error_of(offline)["message"]


async def test_a_card_is_known_on_every_node(left: Served, right: Served) -> None:
    card = ModelCard(
        model_id="shared/card", storage_size=9, n_layers=1, hidden_size=1, supports_tensor=False, aliases=("mine",)
    )
    await left.node.commands.add_card(card)
    await right.until(lambda: "shared/card" in right.node.state.cards)
    planned = await right.http.get("/instance/previews", params={"model_id": "mine"})
    assert {preview["model_id"] for preview in planned.json()["previews"]} == {"shared/card"}
    assert (await right.http.delete("/models/custom/Shared/Card")).status_code == 200
    await left.until(lambda: "shared/card" not in left.node.state.cards)


async def test_cards_outlive_the_node_that_they_came_through(hub: Hub, tmp_path: Path) -> None:
    """A node that only heard of a card still knows it when it starts alone; and of a removal, too."""
    ports = [free_port("tcp"), free_port("tcp")]
    asked = settings_for(tmp_path / "asked", *ports).model_copy(update={"offline": False})
    heard = settings_for(tmp_path / "heard", *reversed(ports))
    async with serving(asked) as left, serving(heard) as right:
        for model_id in ("org/tiny", "org/other"):
            assert (await left.http.post("/models/add", json={"model_id": model_id})).status_code == 200
        await right.until(lambda: set(right.node.state.cards) == {"org/tiny", "org/other"})
        assert (await left.http.delete("/models/custom/org/other")).status_code == 200
        await right.until(lambda: set(right.node.state.cards) == {"org/tiny"})
    async with serving(heard) as alone:
        assert set(alone.node.state.cards) == {"org/tiny"}
        card = (await alone.http.get("/state/customModelCards/org/tiny")).json()
        assert (card["nLayers"], card["storageSize"]) == (3, {"inBytes": 5000})
        listed = (await alone.http.get("/models")).json()["data"]
        assert [(one["state"], one["is_custom"]) for one in listed if one["id"] == "org/tiny"] == [("known", True)]
        planned = await alone.http.get("/instance/previews", params={"model_id": "org/tiny"})
        assert planned.status_code == 200


async def test_a_search_of_this_machine(left: Served) -> None:
    answer = await left.http.get("/models/search", params={"query": "qwen", "limit": 3})
    found = answer.json()
    assert len(found) == 3
    assert answer.headers["x-tandem-hub"] == "offline"
    for model in found:
        assert "qwen" in model["id"].lower() or "known" in model["tags"]
        assert model.keys() == {"id", "author", "downloads", "likes", "last_modified", "tags"}
    assert (await left.http.get("/models/search", params={"limit": 0})).status_code == 400


async def test_a_search_of_the_hub(online: Served, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await online.http.get("/models/search", params={"query": "tiny"})
    assert answer.headers["x-tandem-hub"] == "asked"
    [found] = [model for model in answer.json() if model["id"] == "org/tiny"]
    assert (found["author"], found["downloads"], found["likes"]) == ("org", 5, 2)
    hub.repositories.clear()
    hub.everything = Fault(status=403)
    refused = await online.http.get("/models/search", params={"query": "qwen"})
    assert refused.status_code == 200
    assert "403" in refused.headers["x-tandem-hub"]
    # The hub's client tries again and again, longer than anybody waits for a search.
    hub.everything = Fault(status=500)
    monkeypatch.setattr(models, "SEARCH_SECONDS", 0.2)
    late = await online.http.get("/models/search", params={"query": "qwen"})
    assert late.status_code == 200
    assert "0.2 s" in late.headers["x-tandem-hub"]
    assert late.json() == refused.json() != []
    hub.everything = None


DOWNLOADS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/download/start", {"targetNodeId": "{node}", "modelId": "org/absent"}),
    ("POST", "/download/cancel", {"targetNodeId": "{node}", "modelId": "org/absent"}),
    ("DELETE", "/download/{node}/org/absent", {}),
]


@pytest.mark.parametrize(("method", "path", "body"), DOWNLOADS, ids=["start", "cancel", "delete"])
async def test_downloads_on_a_node_that_is_not_there(
    left: Served, method: str, path: str, body: dict[str, Any]
) -> None:
    filled = {name: value.format(node="nobody") for name, value in body.items()}
    answer = await left.http.request(method, path.format(node="nobody"), json=filled or None)
    assert answer.status_code == 404
    assert "no node nobody" in error_of(answer)["message"]


async def test_downloads_need_a_model(left: Served) -> None:
    node_id = left.node.node_id
    for body, words in (
        ({"targetNodeId": node_id}, "modelId"),
        ({"targetNodeId": node_id, "shardMetadata": {"PipelineShardMetadata": {}}}, "model"),
        ({"targetNodeId": node_id, "shardMetadata": {"Strange": {}}}, "Strange"),
        ({"modelId": "x"}, "target"),
    ):
        answer = await left.http.post("/download/start", json=body)
        assert answer.status_code == 400, answer.text
        assert words in error_of(answer)["message"]


@pytest.mark.parametrize("where", [0, 1], ids=["here", "elsewhere"])
async def test_downloads_answer_with_their_outcome(left: Served, two: tuple[Served, Served], where: int) -> None:
    """Against the real thing: a simulated model is everywhere, an absent one nowhere."""
    node_id = two[where].node.node_id
    preview = await left.http.get("/instance/previews", params={"model_id": "sim:model_id=fetched"})
    [instance] = preview.json()["previews"][0]["instance"].values()
    [shard] = instance["shardAssignments"]["runnerToShard"].values()
    await left.place(model_id="sim:model_id=fetched")
    started = await left.http.post("/download/start", json={"targetNodeId": node_id, "shardMetadata": shard})
    assert started.status_code == 200, started.text
    assert started.json()["outcome"]["state"] == "completed"
    assert started.json()["commandId"]
    for method, path, body in DOWNLOADS:
        filled = {name: value.format(node=node_id) for name, value in body.items()}
        answer = await left.http.request(method, path.format(node=node_id), json=filled or None)
        assert answer.status_code in ((503, 404) if "start" in path else (404,)), answer.text
        assert "org/absent" in error_of(answer)["message"]
