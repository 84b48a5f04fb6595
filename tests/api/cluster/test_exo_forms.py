"""exo's forms of what simulated nodes never are: other kinds, other states, other machines."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.api.exo_instance import InstanceBody, card_json, instance_json, read_card, read_instance
from tandem.api.exo_names import ById, camel, snake
from tandem.api.exo_state import SECTIONS, View, runner_json, state_at, state_json
from tandem.errors import NotFoundError
from tandem.models.cards import builtin_cards, plain_card
from tandem.placement.world import World
from tandem.types.facts import (
    Accelerator,
    Device,
    DownloadFact,
    EngineFact,
    Interface,
    LinkRate,
    NodeFacts,
    Resources,
    RunnerFact,
)
from tandem.types.intents import InstanceIntent, InstanceMeta, LinkIntent, Shard

CARD = builtin_cards()[0]


def intent(meta: InstanceMeta = "MlxRing", nodes: int = 1, name: str = "I") -> InstanceIntent:
    size = CARD.n_layers // nodes
    ends = [*(size * (rank + 1) for rank in range(nodes - 1)), CARD.n_layers]
    shards = tuple(Shard(f"N{rank}", f"{name}-{rank}", rank, nodes, size * rank, ends[rank]) for rank in range(nodes))
    plain = plain_card(CARD)
    return InstanceIntent(name, CARD.model_id, CARD.model_id, meta, "Pipeline", shards, plain)


def runner(state: str, **more: Any) -> RunnerFact:
    return RunnerFact("I-0", "I", CARD.model_id, state, **more)  # type: ignore[arg-type]


def view(*runners: RunnerFact, **facts: Any) -> View:
    node = NodeFacts("N0", "life", 1, name="studio", runners=runners, api_port=52415, **facts)
    return View(World({"N0": node}, {"I": intent()}))


@pytest.mark.parametrize("meta", ["MlxRing", "MlxJaccl", "Vllm", "Sim"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_an_instance_survives_the_way_there_and_back(meta: InstanceMeta, nodes: int) -> None:
    there = intent(meta, nodes)
    for form in (camel(instance_json(there)), instance_json(there)):
        back, card = read_instance(InstanceBody.model_validate(form))
        assert back == there
        assert card == CARD


@pytest.mark.parametrize("card", builtin_cards(), ids=lambda card: str(card.model_id))
def test_every_card_survives_the_way_there_and_back(card: Any) -> None:
    assert read_card(camel(card_json(card))) == card
    assert read_card(card_json(card)) == card


@pytest.mark.parametrize(
    ("fact", "expected"),
    [
        (runner("starting"), {"RunnerIdle": {"errorMessage": None, "restarts": 0}}),
        (runner("restarting", error="killed", restarts=2), {"RunnerIdle": {"errorMessage": "killed", "restarts": 2}}),
        (
            runner("loading", layers_loaded=3, layers_total=9),
            {"RunnerLoading": {"layersLoaded": 3, "totalLayers": 9, "restarts": 0}},
        ),
        (runner("warming"), {"RunnerWarmingUp": {"restarts": 0}}),
        (runner("ready", kv_port=50000), {"RunnerReady": {"prefillServerPort": 50000, "restarts": 0}}),
        (runner("ready"), {"RunnerReady": {"prefillServerPort": None, "restarts": 0}}),
        (runner("ready", running=2), {"RunnerRunning": {"running": 2, "restarts": 0}}),
        (
            runner("failed", error="no memory"),
            {"RunnerFailed": {"errorMessage": "no memory", "diagnostics": None, "restarts": 0}},
        ),
        (runner("stopped"), {"RunnerShutdown": {"restarts": 0}}),
    ],
    ids=lambda value: value.state if isinstance(value, RunnerFact) else "",
)
def test_states_of_a_runner(fact: RunnerFact, expected: dict[str, Any]) -> None:
    assert camel(runner_json(fact)) == expected


def test_downloads() -> None:
    downloads = (
        DownloadFact(CARD.model_id, "ongoing", 40, 100, 20.0),
        DownloadFact("org/pending", "pending", 0, 100),
        DownloadFact("org/failed", "failed", 10, 100, error="the hub is gone"),
        DownloadFact("org/done", "completed", 100, 100),
        DownloadFact("org/stopped", "cancelled", 30, 100),
    )
    ongoing, pending, failed, done, stopped = state_json(view(downloads=downloads))["downloads"]["N0"]
    progress = ongoing["DownloadOngoing"]["downloadProgress"]
    assert (progress["total"], progress["downloaded"]) == ({"inBytes": 100}, {"inBytes": 40})
    assert (progress["speed"], progress["etaMs"]) == (20.0, 3000)
    shard = ongoing["DownloadOngoing"]["shardMetadata"]["PipelineShardMetadata"]
    assert (shard["modelCard"]["modelId"], shard["endLayer"]) == (CARD.model_id, CARD.n_layers)
    assert pending["DownloadPending"]["downloaded"] == {"inBytes": 0}
    assert stopped["DownloadPending"]["downloaded"] == {"inBytes": 30}
    assert failed["DownloadFailed"]["errorMessage"] == "the hub is gone"
    unknown = done["DownloadCompleted"]["shardMetadata"]["PipelineShardMetadata"]["modelCard"]
    assert unknown == {"modelId": "org/done", "storageSize": {"inBytes": 100}}, "nobody knows more of it"
    assert done["DownloadCompleted"]["readOnly"] is False


def test_a_machine() -> None:
    found = state_json(
        view(
            device=Device("mac_studio", "Mac15,14", "Apple M3 Ultra", "macOS", "15.5"),
            resources=Resources(
                memory_total=100,
                memory_available=60,
                disk_total=10,
                disk_available=5,
                cpu_usage=0.25,
                power=80.0,
                accelerators=(Accelerator("M3 Ultra", usage=0.5), Accelerator("other", usage=0.75)),
            ),
            interfaces=(Interface("en0", "10.0.0.1", "ethernet"), Interface("docker0", "172.17.0.1", "virtual")),
            engines=(EngineFact("MlxMetal"), EngineFact("Vllm", available=False)),
        )
    )
    identity = found["nodeIdentities"]["N0"]
    assert (identity["modelId"], identity["chipId"]) == ("Mac15,14", "Apple M3 Ultra")
    assert (identity["friendlyName"], identity["osVersion"]) == ("studio", "macOS 15.5")
    assert found["nodeMemory"]["N0"]["ramAvailable"] == {"inBytes": 60}
    assert found["nodeDisk"]["N0"] == {"total": {"inBytes": 10}, "available": {"inBytes": 5}}
    system = found["nodeSystem"]["N0"]
    assert (system["gpuUsage"], system["pcpuUsage"], system["sysPower"], system["temp"]) == (0.75, 0.25, 80.0, 0.0)
    assert system["unknown"] == ["temp", "ecpuUsage"]
    kinds = [one["interfaceType"] for one in found["nodeNetwork"]["N0"]["interfaces"]]
    assert kinds == ["ethernet", "unknown"]
    assert found["nodeBackends"]["N0"] == ["MlxMetal"]


def test_topology_tells_what_was_measured() -> None:
    here = NodeFacts(
        "A",
        "1",
        1,
        interfaces=(Interface("en0", "10.0.0.1", "ethernet"),),
        links=(LinkRate("B", "10.0.0.2", 1e9, 0.001),),
    )
    there = NodeFacts("B", "1", 1, interfaces=(Interface("en0", "10.0.0.2", "ethernet"),), node_port=7)
    topology = state_json(View(World({"A": here, "B": there})))["topology"]
    assert topology["nodes"] == ["A", "B"]
    [connection] = topology["connections"]["A"]["B"]
    assert connection == {
        "sinkMultiaddr": {
            "address": "/ip4/10.0.0.2/tcp/7", "address_type": "ip4", "ip_address": "10.0.0.2", "port": 7
        },
        "bandwidth": 1e9,
        "roundTrip": 0.001,
    }  # fmt: skip


def test_what_outlives_its_instance_is_not_shown() -> None:
    stale = RunnerFact("old-0", "old", "m", "ready", kv_port=1)
    loading = runner("loading", kv_port=2)
    found = state_json(view(stale, loading))
    assert list(found["runners"]) == ["I-0"]
    assert found["prefillServerPorts"] == {}, "a port counts once the runner is ready"
    ready = state_json(view(stale, runner("ready", kv_port=3)))
    assert ready["prefillServerPorts"] == {"I-0": 3}
    gone = state_json(View(World({}, {"I": intent()})))
    assert gone["runners"] == {}
    assert gone["instanceHealth"]["I"] == {"health": "dead", "reason": "its node 'N0' is gone"}


def test_links_and_sections() -> None:
    link = LinkIntent("L", ("I",), ("J",), automatic=True)
    seen = View(World({}, {}, {"L": link}))
    assert state_at(seen, "instanceLinks/L/prefillInstances/0") == "I"
    assert state_json(seen).keys() == SECTIONS.keys()
    assert state_at(seen, "lastEventAppliedIdx") == -1
    assert state_at(seen, "tasks/") == {}
    for path in ("instanceLinks/L/automatic/0", "instanceLinks/L/prefillInstances/1", "tasks/x"):
        with pytest.raises(NotFoundError):
            state_at(seen, path)


def test_names() -> None:
    value = {"runner_to_shard": ById({"my_runner": {"in_bytes": 1}}), "MlxRingInstance": [{"n_layers": 2}]}
    assert camel(value) == {"runnerToShard": {"my_runner": {"inBytes": 1}}, "MlxRingInstance": [{"nLayers": 2}]}
    assert snake({"topP": {"minP": [{"inBytes": 1}]}, "Tag": 1}) == {"top_p": {"min_p": [{"in_bytes": 1}]}, "Tag": 1}
