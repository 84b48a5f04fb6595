"""Every field that exo's benches and their client read, from two real nodes with simulated instances.

The fields are those of `exo_bench.py`, `prefill_decode_bench.py`, and the harness and client that they share.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from api.helpers import parse_sse

from .nodes import Served

pytestmark = pytest.mark.anyio

MODEL = "sim:model_id=bench/tiny,decode_tps=2000,answer_tokens=500"
SYSTEM = ("gpuUsage", "temp", "sysPower", "pcpuUsage", "ecpuUsage")


def inner(tagged: dict[str, Any]) -> dict[str, Any]:
    [(tag, fields)] = tagged.items()
    assert tag[0].isupper()
    assert isinstance(fields, dict)
    return fields


def check_instance(tagged: dict[str, Any]) -> tuple[str, list[str], list[str]]:
    """Id, nodes and runners."""
    fields = inner(tagged)
    shards = fields["shardAssignments"]
    nodes, runners = list(shards["nodeToRunner"]), list(shards["runnerToShard"])
    assert sorted(shards["nodeToRunner"].values()) == sorted(runners)
    for shard in shards["runnerToShard"].values():
        card = inner(shard)["modelCard"]
        assert card["modelId"] == shards["modelId"]
        assert card["storageSize"]["inBytes"] >= 1
    return fields["instanceId"], nodes, runners


async def state(http: httpx.AsyncClient, path: str) -> Any:
    answer = await http.get(f"/state/{path}", headers={"accept": "application/json"})
    return None if answer.status_code == 404 else answer.json()


async def previews(http: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    answer = await http.get("/instance/previews", params={"model_id": MODEL, **query})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["previews"]
    return [preview for preview in found if preview["error"] is None]


async def test_models(left: Served) -> None:
    models = (await left.http.get("/models")).json()["data"]
    assert {"mlx-community/Qwen3-0.6B-4bit"} <= {model["id"] for model in models}
    for model in models:
        assert model["name"].lower()
        assert model["hugging_face_id"] == model["id"]
        assert isinstance(model["storage_size_megabytes"], int)
        assert model["tasks"]
    narrow = (await left.http.get("/v1/models")).json()["data"]
    assert not any(model["state"] == "known" for model in narrow), "clients of OpenAI's API see what they can use"


async def test_a_whole_bench(left: Served, right: Served) -> None:
    """Previews sent back, waited for by runners, measured, linked, and removed: what the two benches do."""
    http = left.http
    found = await previews(http)
    assert len({tuple(preview["nodes"]) for preview in found}) == 2, "the bench needs two placements on distinct nodes"
    identities = await state(http, "nodeIdentities")
    names = {identity["friendlyName"]: node_id for node_id, identity in identities.items()}
    assert names == {"left": left.node.node_id, "right": right.node.node_id}
    [prefill] = await previews(http, node_ids=names["left"])
    [decode] = await previews(http, node_ids=names["right"])
    ids = []
    for preview in (prefill, decode):
        assert preview["sharding"] == "Pipeline"
        assert preview["instance_meta"] == "Sim"
        assert set(preview["memory_delta_by_node"]) == set(preview["nodes"])
        instance_id, nodes, runners = check_instance(preview["instance"])
        ids.append(instance_id)
        for node_id in nodes:
            disk = await state(http, f"nodeDisk/{node_id}")
            assert disk["available"]["inBytes"] > 0
            assert isinstance(await state(http, f"downloads/{node_id}"), list)
        created = await http.post("/instance", json={"instance": preview["instance"]})
        assert created.status_code == 200, created.text
        assert created.json()["instance_id"] == instance_id
        assert created.json()["model_card"]["modelId"] == "bench/tiny"
        await left.ready(instance_id)
        assert check_instance(await state(http, f"instances/{instance_id}"))[2] == runners
        assert check_instance((await http.get("/state")).json()["instances"][instance_id])[0] == instance_id
        for runner in runners:
            status = await state(http, f"runners/{runner}")
            assert status["RunnerReady"]["prefillServerPort"] > 0
        for node_id in nodes:
            await left.until(lambda node_id=node_id: any(one.info for one in left.node.world().nodes[node_id].runners))
            downloads = await state(http, f"downloads/{node_id}")
            complete = [one["DownloadCompleted"] for one in downloads if "DownloadCompleted" in one]
            assert {inner(one["shardMetadata"])["modelCard"]["modelId"] for one in complete} == {"bench/tiny"}
            assert all(one["total"]["inBytes"] >= 1 and one["readOnly"] is False for one in complete)
    await linked_and_measured(left, *ids)
    for instance_id in ids:
        assert (await http.delete(f"/instance/{instance_id}")).status_code == 200
        assert (await http.get(f"/instance/{instance_id}")).status_code == 404
        assert await state(http, f"instances/{instance_id}") is None


async def linked_and_measured(left: Served, prefill: str, decode: str) -> None:
    http = left.http
    link = await http.post("/v1/instance-links", json={"prefill_instances": [prefill], "decode_instances": [decode]})
    assert link.status_code == 200, link.text
    last = (await http.get("/v1/instance-links")).json()[-1]
    assert last["linkId"] == link.json()["linkId"] == link.json()["link_id"]
    assert (last["prefillInstances"], last["decodeInstances"]) == ([prefill], [decode])
    body = {
        "model": "bench/tiny",
        "messages": [{"role": "user", "content": "a " * 600}],
        "max_tokens": 16,
        "logprobs": False,
        "use_prefix_cache": False,
        "temperature": 0.0,
    }
    answer = await http.post("/bench/chat/completions", json={**body, "stream": False})
    assert answer.status_code == 200, answer.text
    check_statistics(answer.json()["generation_stats"], "inBytes")
    assert answer.json()["choices"][0]["message"]["content"]
    sse = parse_sse((await http.post("/bench/chat/completions", json={**body, "stream": True})).text)
    assert sse.done
    [comment] = [text for text in sse.comments if text.startswith("generation_stats ")]
    check_statistics(json.loads(comment.removeprefix("generation_stats ")), "in_bytes")
    assert sse.text()
    removed = await http.delete(f"/v1/instance-links/{last['linkId']}")
    assert removed.status_code == 200
    assert removed.json()["linkId"] == last["linkId"]
    mine = [one for one in (await http.get("/v1/instance-links")).json() if not one["automatic"]]
    assert mine == []


def check_statistics(statistics: dict[str, Any], size: str) -> None:
    for name in ("prompt_tps", "generation_tps", "prompt_tokens", "generation_tokens"):
        assert isinstance(statistics[name], int | float), name
    assert statistics["generation_tokens"] == 16
    assert statistics["prefix_cache_hit"] in ("none", "partial", "exact")
    assert statistics["peak_memory_usage"][size] >= 0


async def test_a_snapshot_of_the_cluster(left: Served, right: Served) -> None:
    ids = {left.node.node_id, right.node.node_id}
    topology = await state(left.http, "topology")
    assert set(topology["nodes"]) == ids
    sinks = topology["connections"][left.node.node_id][right.node.node_id]
    sink = sinks[0]["sinkMultiaddr"]
    kind = sink["address_type"]
    assert sink["address"] == f"/{kind}/{sink['ip_address']}/tcp/{sink['port']}"
    for node_id in ids:
        memory = await state(left.http, f"nodeMemory/{node_id}")
        assert memory["ramTotal"]["inBytes"] >= memory["ramAvailable"]["inBytes"] > 0
        assert {"swapTotal", "swapAvailable"} <= memory.keys()
        system = await state(left.http, f"nodeSystem/{node_id}")
        assert all(isinstance(system[name], float) for name in SYSTEM)
        identity = await state(left.http, f"nodeIdentities/{node_id}")
        assert {"modelId", "chipId", "friendlyName", "osVersion", "osBuildVersion"} <= identity.keys()
        network = await state(left.http, f"nodeNetwork/{node_id}")
        assert {"name", "ipAddress", "interfaceType"} <= network["interfaces"][0].keys()
        assert isinstance(await state(left.http, f"nodeBackends/{node_id}"), list)


async def test_every_section_of_the_state(left: Served) -> None:
    whole = (await left.http.get("/state")).json()
    assert {
        "instances", "runners", "downloads", "tasks", "lastSeen", "topology", "lastEventAppliedIdx", "nodeIdentities",
        "nodeMemory", "nodeDisk", "nodeSystem", "nodeNetwork", "nodeThunderbolt", "nodeThunderboltBridge",
        "nodeRdmaCtl", "nodeBackends", "thunderboltBridgeCycles", "instanceLinks", "prefillServerPorts",
        "customModelCards",
    } <= whole.keys()  # fmt: skip
    assert whole["lastEventAppliedIdx"] >= 0
    assert whole["lastSeen"].keys() == whole["nodeIdentities"].keys()
    for section in whole:
        assert (await left.http.get(f"/state/{section}")).status_code == 200


async def test_the_states_of_a_runner_that_loads(left: Served) -> None:
    placed = await left.place(model_id="sim:model_id=slow,load_seconds=600,layers=4")
    instance_id = placed["instance_id"]
    _, _, [runner] = check_instance(placed["instance"])
    await left.until(lambda: any(one.state == "loading" for one in runners_of(left)))
    status = await state(left.http, f"runners/{runner}")
    assert status["RunnerLoading"]["totalLayers"] >= status["RunnerLoading"]["layersLoaded"] >= 0
    assert await state(left.http, f"prefillServerPorts/{runner}") is None
    health = await state(left.http, f"instanceHealth/{instance_id}")
    assert health["health"] == "loading"


async def test_a_runner_that_failed_says_why(left: Served) -> None:
    placed = await left.place(model_id="sim:model_id=broken,fail_at_load=1")
    _, _, [runner] = check_instance(placed["instance"])
    await left.until(lambda: any(one.state == "failed" for one in runners_of(left)))
    status = await state(left.http, f"runners/{runner}")
    assert "told to fail" in status["RunnerFailed"]["errorMessage"]


def runners_of(served: Served) -> list[Any]:
    return [runner for facts in served.node.world().nodes.values() for runner in facts.runners]
