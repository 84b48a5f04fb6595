"""Instances: sent back, placed, refused, waited for."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from api.helpers import error_of
from tandem.api.cluster import awaiting
from tests.cluster.small_models import write_model

from .nodes import Served, pair

pytestmark = pytest.mark.anyio

MODEL = "sim:model_id=org/placed"


async def preview(left: Served, **query: Any) -> dict[str, Any]:
    answer = await left.http.get("/instance/previews", params={"model_id": MODEL, **query})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = next(one for one in answer.json()["previews"] if one["instance"])
    return found


async def awaited(left: Served, **query: Any) -> list[dict[str, Any]]:
    response = await left.http.get("/instance/await", params=query)
    assert response.status_code == 200
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


async def test_previews_that_cannot_be_created_say_why(left: Served) -> None:
    answer = await left.http.get("/instance/previews", params={"model_id": MODEL})
    found = answer.json()["previews"]
    for one in found:
        assert (one["instance"] is None) == (one["error"] is not None) == (one["memory_delta_by_node"] is None)
    wide = next(one for one in found if len(one["nodes"]) == 2)
    assert "later version" in wide["error"]
    assert len(wide["plan"]["SimInstance"]["shardAssignments"]["nodeToRunner"]) == 2
    refused = await left.http.post("/instance", json={"instance": wide["plan"]})
    assert refused.status_code == 422
    assert "later version" in error_of(refused)["message"]


@pytest.mark.parametrize("form", ["camel", "snake", "bare"])
async def test_a_preview_is_taken_in_either_casing(left: Served, right: Served, form: str) -> None:
    instance = (await preview(left, node_ids=right.node.node_id))["instance"]
    if form == "snake":
        text = json.dumps(instance)
        for camel, snake in (
            ("instanceId", "instance_id"), ("shardAssignments", "shard_assignments"), ("modelId", "model_id"),
            ("runnerToShard", "runner_to_shard"), ("nodeToRunner", "node_to_runner"), ("modelCard", "model_card"),
            ("storageSize", "storage_size"), ("inBytes", "in_bytes"), ("nLayers", "n_layers"),
            ("hiddenSize", "hidden_size"), ("supportsTensor", "supports_tensor"), ("deviceRank", "device_rank"),
            ("worldSize", "world_size"), ("startLayer", "start_layer"), ("endLayer", "end_layer"),
            ("numKeyValueHeads", "num_key_value_heads"), ("contextLength", "context_length"),
        ):  # fmt: skip
            text = text.replace(f'"{camel}"', f'"{snake}"')
        instance = json.loads(text)
    if form == "bare":
        [instance] = instance.values()
        instance.pop("reference")
        # Without a tag there is no telling that it is simulated, but for the model's own card.
    answer = await left.http.post("/instance", json={"instance": instance})
    assert answer.status_code == 200, answer.text
    created = answer.json()
    assert created["message"] == "Command received."
    assert created["command_id"]
    assert list(created["instance"]) == ["SimInstance"]
    shards = created["instance"]["SimInstance"]["shardAssignments"]
    assert list(shards["nodeToRunner"]) == [right.node.node_id]
    assert (await left.http.get(f"/instance/{created['instance_id']}")).json() == created["instance"]
    again = await left.http.post("/instance", json={"instance": instance})
    assert again.status_code == 400
    assert "already" in error_of(again)["message"]


def broken(instance: dict[str, Any], how: str) -> tuple[int, str]:
    """Break an instance; the status and a word of the refusal."""
    fields = instance["SimInstance"]
    shards = fields["shardAssignments"]
    [(runner, shard)] = shards["runnerToShard"].items()
    inner = shard["PipelineShardMetadata"]
    if how == "no node":
        shards["nodeToRunner"] = {"nobody": runner}
        return 404, "no node nobody"
    if how == "path as id":
        fields["instanceId"] = "../../etc/passwd"
        return 400, "cannot be an id"
    if how == "a route as id":
        fields["instanceId"] = "previews"
        return 400, "route"
    if how == "layers missing":
        inner["endLayer"] -= 1
        return 400, "layers"
    if how == "runners differ":
        shards["nodeToRunner"] = {next(iter(shards["nodeToRunner"])): "someone"}
        return 400, "same runners"
    if how == "another model":
        shards["modelId"] = "org/other"
        return 400, "modelId"
    if how == "rank":
        inner["deviceRank"] = 3
        return 400, "deviceRanks"
    if how == "card":
        inner["modelCard"]["nLayers"] = 0
        return 400, "n_layers"
    if how == "secret options":
        fields["options"] = {"cluster_secret": "mine"}
        return 400, "cluster_secret"
    if how == "another reference":
        fields["reference"] = "sim:model_id=org/elsewhere"
        return 400, "reference"
    if how == "tag":
        instance["HaskellInstance"] = instance.pop("SimInstance")
        return 400, "HaskellInstance"
    shards["runnerToShard"] = {}
    return 400, "runnerToShard"


@pytest.mark.parametrize(
    "how",
    [
        "no node", "path as id", "a route as id", "layers missing", "runners differ", "another model", "rank", "card",
        "secret options", "another reference", "tag", "no runners",
    ],
)  # fmt: skip
async def test_instances_that_make_no_sense(left: Served, how: str) -> None:
    instance = copy.deepcopy((await preview(left))["instance"])
    status, words = broken(instance, how)
    answer = await left.http.post("/instance", json={"instance": instance})
    assert (answer.status_code, words in error_of(answer)["message"]) == (status, True), answer.text
    assert left.node.state.instances == {}


async def test_a_path_of_the_clients_choosing_is_never_read(left: Served) -> None:
    instance = (await preview(left))["instance"]["SimInstance"]
    [shard] = instance["shardAssignments"]["runnerToShard"].values()
    shard["PipelineShardMetadata"]["modelCard"]["modelId"] = "org/unknown"
    instance["shardAssignments"]["modelId"] = "org/unknown"
    instance["reference"] = "/etc"
    answer = await left.http.post("/instance", json={"instance": {"MlxRingInstance": instance}})
    assert answer.status_code == 200, answer.text
    [intent] = left.node.state.instances.values()
    assert intent.reference == "org/unknown"


async def test_placement_tells_what_place_would_do(left: Served, right: Served) -> None:
    query = {"model_id": MODEL, "node_ids": right.node.node_id}
    planned = await left.http.get("/instance/placement", params=query)
    assert planned.status_code == 200, planned.text
    assert left.node.state.instances == {}
    placed = await left.place(model_id=MODEL, node_ids=[right.node.node_id])
    for one in (planned.json(), placed["instance"]):
        assert list(one["SimInstance"]["shardAssignments"]["nodeToRunner"]) == [right.node.node_id]
    unknown = await left.http.get("/instance/placement", params={"model_id": "nobody/knows"})
    assert unknown.status_code == 404
    unread = await left.http.get("/instance/placement", params={"model_id": "sim:speed=1"})
    assert unread.status_code == 400


async def test_a_folder_of_one_machine_is_not_read_by_another(tmp_path: Path) -> None:
    """Both may have it; the one that is asked knows only of its own."""
    folder = tmp_path / "models" / "small"
    write_model(folder)
    async with pair(tmp_path, models_dirs=str(folder.parent)) as (left, right):
        body = {"model_id": "small", "node_ids": [right.node.node_id]}
        placed = await left.http.post("/place_instance", json=body)
        planned = await left.http.get("/instance/placement", params=body)
        for answer in (placed, planned):
            assert answer.status_code == 422
            assert f"lie in a folder of node {left.node.node_id}" in error_of(answer)["message"]
            assert error_of(answer)["param"] == "node_ids"
        assert left.node.state.instances == {}


async def test_unknown_instances(left: Served) -> None:
    for method in ("GET", "DELETE"):
        answer = await left.http.request(method, "/instance/nobody")
        assert answer.status_code == 404
        assert error_of(answer)["message"] == "Instance not found"


async def test_health_and_models_know_the_whole_cluster(left: Served, right: Served) -> None:
    placed = await left.place(model_id=MODEL, node_ids=[right.node.node_id])
    await left.ready(placed["instance_id"])
    for served in (left, right):
        await served.ready(placed["instance_id"])
        health = await served.http.get("/health")
        assert health.status_code == 200
        assert [one["instance_id"] for one in health.json()["instances"]] == [placed["instance_id"]]
        [model] = (await served.http.get("/v1/models", params={"status": "ready"})).json()["data"]
        assert model["id"] == "org/placed"
        metrics = (await served.http.get("/metrics")).text
        assert (
            f'tandem_instance_state{{instance="{placed["instance_id"]}",model="org/placed",state="ready"}} 1' in metrics
        )


async def test_await_tells_both_moments(left: Served, right: Served) -> None:
    """exo's `ready` comes when the instance exists. Ours says when it answers."""
    waiting = asyncio.create_task(awaited(left, model_id="ORG/Placed", timeout_seconds=30))
    placed = await left.place(model_id=f"{MODEL},load_seconds=0.5", node_ids=[right.node.node_id])
    events = await waiting
    assert [event["type"] for event in events] == ["ready", "runners_ready"]
    assert events[0]["instance"]["SimInstance"]["instance_id"] == placed["instance_id"]
    assert events[1]["instance_id"] == placed["instance_id"]
    body = {"model": "org/placed", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert (await left.http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_await_has_an_end(left: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    [event] = await awaited(left, model_id="nobody/knows", timeout_seconds=0.2)
    assert event["type"] == "timeout"
    assert "no instance" in event["message"]
    monkeypatch.setattr(awaiting, "LONGEST_WAIT", 0.2)
    [event] = await awaited(left, model_id="nobody/knows", timeout_seconds=0)
    assert event["type"] == "timeout"
    await left.place(model_id=f"{MODEL},load_seconds=600")
    events = await awaited(left, model_id="org/placed", timeout_seconds=0.2)
    assert [event["type"] for event in events] == ["ready", "timeout"]
    for wrong in (-1, 301, "soon"):
        refused = await left.http.get("/instance/await", params={"model_id": "x", "timeout_seconds": wrong})
        assert refused.status_code == 400


async def test_await_says_what_went_wrong(left: Served) -> None:
    await left.place(model_id="sim:model_id=org/failing,fail_at_load=1")
    events = await awaited(left, model_id="org/failing", timeout_seconds=30)
    assert [event["type"] for event in events] == ["ready", "failed"]
    assert "told to fail" in events[1]["message"]


async def test_await_over_a_removal(left: Served) -> None:
    placed = await left.place(model_id=f"{MODEL},load_seconds=600")
    waiting = asyncio.create_task(awaited(left, model_id="org/placed", timeout_seconds=30))
    await left.until(lambda: any(facts.runners for facts in left.node.world().nodes.values()))
    async with asyncio.timeout(10):
        while not left.server.context.followers:  # noqa: ASYNC110 (nothing tells when the request has arrived)
            await asyncio.sleep(0.01)
    await left.http.delete(f"/instance/{placed['instance_id']}")
    await left.place(model_id=MODEL)
    types = [event["type"] for event in await waiting]
    assert types == ["ready", "removed", "ready", "runners_ready"]


async def test_keep_alives_while_waiting(left: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaiting, "KEEP_ALIVE_SECONDS", 0.02)
    text = (await left.http.get("/instance/await", params={"model_id": "never", "timeout_seconds": 0.3})).text
    assert text.count(": keep-alive") > 3


async def test_a_killed_runner_is_not_ready_until_it_is(left: Served) -> None:
    placed = await left.place(model_id=MODEL, node_ids=[left.node.node_id])
    await left.ready(placed["instance_id"])
    pid = left.node.local.get(placed["instance_id"]).supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    supervisor = left.node.local.get(placed["instance_id"]).supervisor
    changed = asyncio.Event()
    forget = left.node.local.on_change(changed.set)
    async with asyncio.timeout(20):
        while supervisor.state == "ready":
            changed.clear()
            await changed.wait()
    forget()
    [runner] = placed["instance"]["SimInstance"]["shardAssignments"]["runnerToShard"]
    status = (await left.http.get(f"/state/runners/{runner}")).json()
    assert not {"RunnerReady", "RunnerRunning"} & status.keys()
    assert (await left.http.get(f"/state/prefillServerPorts/{runner}")).status_code == 404
    events = await awaited(left, model_id="org/placed", timeout_seconds=30)
    assert [event["type"] for event in events] == ["ready", "runners_ready"]
