"""The cluster's state with exo's fields. One function a section, each of what a view of one moment holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from tandem.api.exo_instance import card_json, instance_json, shard_json
from tandem.api.exo_names import ById, camel, memory
from tandem.errors import NotFoundError
from tandem.models.cards import ModelCard
from tandem.placement.addresses import addresses
from tandem.placement.roles import health, trouble
from tandem.placement.world import World, card_of
from tandem.types.facts import DownloadFact, InterfaceKind, NodeFacts, RunnerFact
from tandem.types.intents import LinkIntent, Shard

MOST_ADDRESSES = 8
"""Connections that are listed between two nodes."""
_INTERFACES: dict[InterfaceKind, str] = {"wifi": "wifi", "ethernet": "ethernet", "thunderbolt": "thunderbolt"}
_HAS_MODEL = ("loading", "warming", "ready")


@dataclass(frozen=True, slots=True)
class View:
    """What the sections are made of.

    Attributes:
        custom: the cluster's custom cards, by id.
        cards: the built-in ones, by id.
        last_index: of the newest event; -1 before the first.
        heard: unix seconds at which each node was heard last.
    """

    world: World
    custom: Mapping[str, ModelCard] = field(default_factory=dict)
    cards: Mapping[str, ModelCard] = field(default_factory=dict)
    last_index: int = -1
    heard: Mapping[str, float] = field(default_factory=dict)

    def card(self, model_id: str) -> ModelCard | None:
        """What is known of a model."""
        known = self.custom.get(model_id) or self.cards.get(model_id)
        if known is not None:
            return known
        same = (intent for intent in self.world.instances.values() if intent.model_id == model_id)
        return next((card for card in map(card_of, same) if card is not None), None)

    def runners(self) -> dict[str, RunnerFact]:
        """Runners of instances that exist, on nodes that are there. What outlives either is no runner any more."""
        return {
            runner.runner_id: runner
            for facts in self.world.nodes.values()
            for runner in facts.runners
            if runner.instance_id in self.world.instances
        }


def state_json(view: View) -> dict[str, Any]:
    """The whole state, in camelCase."""
    return {name: camel(section(view)) for name, section in SECTIONS.items()}


def state_at(view: View, path: str) -> Any:
    """The part of the state at `path`: keys and list indices between slashes. Keys may hold slashes themselves.

    Raises:
        NotFoundError: there is none.
    """
    parts = [part for part in path.split("/") if part]
    value: Any = state_json(view) if not parts or parts[0] not in SECTIONS else None
    if value is None:
        value = {parts[0]: camel(SECTIONS[parts[0]](view))}
    place = 0
    while place < len(parts):
        if isinstance(value, dict):
            ends = range(place + 1, len(parts) + 1)
            end = next((end for end in ends if "/".join(parts[place:end]) in value), None)
            if end is None:
                raise _missing(parts)
            value, place = value["/".join(parts[place:end])], end
        elif isinstance(value, list) and parts[place].isdecimal() and int(parts[place]) < len(value):
            value, place = value[int(parts[place])], place + 1
        else:
            raise _missing(parts)
    return value


def _missing(parts: list[str]) -> NotFoundError:
    return NotFoundError(f"unable to find path '{'.'.join(parts)}' in state json", param="path")


def _instances(view: View) -> Any:
    return ById({instance_id: instance_json(intent) for instance_id, intent in view.world.instances.items()})


def _runners(view: View) -> Any:
    return ById({runner_id: runner_json(runner) for runner_id, runner in view.runners().items()})


def runner_json(runner: RunnerFact) -> dict[str, Any]:
    """A runner's status as exo tags it. `restarts` and, while it restarts, `error_message` are ours."""
    more = {"restarts": runner.restarts}
    if runner.state == "ready" and runner.running:
        return {"RunnerRunning": {"running": runner.running, **more}}
    if runner.state == "ready":
        return {"RunnerReady": {"prefill_server_port": runner.kv_port, **more}}
    if runner.state == "loading":
        return {"RunnerLoading": {"layers_loaded": runner.layers_loaded, "total_layers": runner.layers_total, **more}}
    if runner.state == "warming":
        return {"RunnerWarmingUp": more}
    if runner.state == "failed":
        return {"RunnerFailed": {"error_message": runner.error or "unknown", "diagnostics": None, **more}}
    if runner.state == "stopped":
        return {"RunnerShutdown": more}
    return {"RunnerIdle": {"error_message": runner.error, **more}}


def _downloads(view: View) -> Any:
    found = ById()
    for node_id, facts in view.world.nodes.items():
        known = {download.model_id: download for download in facts.downloads}
        for runner in facts.runners:
            # Whoever loads a model has it: simulated ones are never downloaded, and still are there.
            if runner.state in _HAS_MODEL and runner.model_id not in known:
                card = view.card(runner.model_id)
                size = card.storage_size if card is not None else 0
                known[runner.model_id] = DownloadFact(runner.model_id, "completed", size, size)
        found[node_id] = [download_json(view, node_id, download) for download in known.values()]
    return found


def download_json(view: View, node_id: str, download: DownloadFact) -> dict[str, Any]:
    """One model on its way to a node, or there."""
    card = view.card(download.model_id)
    described = {"model_id": download.model_id, "storage_size": memory(download.total)}
    layers = card.n_layers if card is not None else 0
    shard = Shard(node_id, "", 0, 1, 0, layers)
    common = {
        "node_id": node_id,
        "shard_metadata": shard_json(card_json(card) if card else described, shard, "Pipeline", layers),
        "model_directory": "",
    }
    done, total = memory(download.done), memory(download.total)
    if download.state == "completed":
        return {"DownloadCompleted": {**common, "total": total, "read_only": False}}
    if download.state == "failed":
        return {"DownloadFailed": {**common, "error_message": download.error or "unknown"}}
    if download.state == "ongoing":
        left = (download.total - download.done) / download.speed if download.speed > 0 else 0.0
        progress = {
            "total": total,
            "downloaded": done,
            "downloaded_this_session": done,
            "completed_files": 0,
            "total_files": 0,
            "speed": download.speed,
            "eta_ms": round(left * 1000),
            "files": ById(),
        }
        return {"DownloadOngoing": {**common, "download_progress": progress}}
    return {"DownloadPending": {**common, "downloaded": done, "total": total}}


def _last_seen(view: View) -> Any:
    return ById(
        {
            node_id: datetime.fromtimestamp(view.heard[node_id], UTC).isoformat()
            for node_id in view.world.nodes
            if node_id in view.heard
        }
    )


def _topology(view: View) -> Any:
    nodes = view.world.nodes
    connections = ById()
    for source, here in nodes.items():
        ways = {sink: _connections(here, there) for sink, there in nodes.items() if sink != source}
        connections[source] = ById({sink: found for sink, found in ways.items() if found})
    return {"nodes": list(nodes), "connections": connections}


def _connections(here: NodeFacts, there: NodeFacts) -> list[dict[str, Any]]:
    port = there.api_port or there.node_port or 0
    rates = {rate.address: rate for rate in here.links if rate.node_id == there.node_id}
    found = []
    for address in addresses(there, here, here.links)[:MOST_ADDRESSES]:
        kind = "ip6" if ":" in address else "ip4"
        # exo computes these fields, and so they keep their spelling.
        sink = ById(address=f"/{kind}/{address}/tcp/{port}", address_type=kind, ip_address=address, port=port)
        rate = rates.get(address)
        measured = {"bandwidth": rate.bandwidth, "round_trip": rate.round_trip} if rate is not None else {}
        found.append({"sink_multiaddr": sink, **measured})
    return found


def _each_node(describe: Callable[[NodeFacts], Any]) -> Callable[[View], Any]:
    return lambda view: ById({node_id: describe(facts) for node_id, facts in view.world.nodes.items()})


def _identity(facts: NodeFacts) -> dict[str, Any]:
    device = facts.device
    return {
        "model_id": device.model or "Unknown",
        "chip_id": device.chip or "Unknown",
        "friendly_name": facts.name or facts.node_id,
        "os_version": f"{device.os} {device.os_version}".strip() or "Unknown",
        "os_build_version": "Unknown",
        "kind": device.kind,
        "version": facts.version,
        "started": facts.started,
        "api_port": facts.api_port,
        "node_port": facts.node_port,
    }


def _memory(facts: NodeFacts) -> dict[str, Any]:
    resources = facts.resources
    return {
        "ram_total": memory(resources.memory_total),
        "ram_available": memory(resources.memory_available),
        "swap_total": memory(resources.swap_total),
        "swap_available": memory(resources.swap_available),
        "unified": resources.unified,
    }


def _disk(facts: NodeFacts) -> dict[str, Any]:
    return {"total": memory(facts.resources.disk_total), "available": memory(facts.resources.disk_available)}


def _system(facts: NodeFacts) -> dict[str, Any]:
    resources = facts.resources
    usages = [one.usage for one in resources.accelerators if one.usage is not None]
    figures: dict[str, float | None] = {
        "gpu_usage": max(usages, default=None),
        "temp": resources.temperature,
        "sys_power": resources.power,
        "pcpu_usage": resources.cpu_usage,
        "ecpu_usage": None,
    }
    # exo writes 0 for what it does not know, and its benches count on numbers.
    known: dict[str, Any] = {name: value or 0.0 for name, value in figures.items()}
    return {
        **known,
        "unknown": [name for name, value in camel(figures).items() if value is None],
        "accelerators": msgspec.to_builtins(resources.accelerators),
    }


def _network(facts: NodeFacts) -> dict[str, Any]:
    return {
        "interfaces": [
            {
                "name": one.name,
                "ip_address": one.address,
                "interface_type": _INTERFACES.get(one.kind, "unknown"),
                "speed": one.speed,
            }
            for one in facts.interfaces
        ]
    }


def _backends(facts: NodeFacts) -> list[str]:
    return [engine.backend for engine in facts.engines if engine.available]


def link_json(link: LinkIntent) -> dict[str, Any]:
    """A link. `allow_quantisation` and `automatic` are ours."""
    return {
        "link_id": link.link_id,
        "prefill_instances": list(link.prefill_instances),
        "decode_instances": list(link.decode_instances),
        "allow_quantisation": link.allow_quantisation,
        "automatic": link.automatic,
    }


def _links(view: View) -> Any:
    return ById({link_id: link_json(link) for link_id, link in view.world.links.items()})


def _ports(view: View) -> Any:
    return ById(
        {name: runner.kv_port for name, runner in view.runners().items() if runner.state == "ready" and runner.kv_port}
    )


def _health(view: View) -> Any:
    found = ById()
    for instance_id, intent in view.world.instances.items():
        state = health(intent, view.world)
        found[instance_id] = {"health": state, "reason": trouble(intent, view.world) if state == "dead" else None}
    return found


SECTIONS: dict[str, Callable[[View], Any]] = {
    "instances": _instances,
    "runners": _runners,
    "downloads": _downloads,
    "tasks": lambda view: ById(),
    "lastSeen": _last_seen,
    "topology": _topology,
    "lastEventAppliedIdx": lambda view: view.last_index,
    "nodeIdentities": _each_node(_identity),
    "nodeMemory": _each_node(_memory),
    "nodeDisk": _each_node(_disk),
    "nodeSystem": _each_node(_system),
    "nodeNetwork": _each_node(_network),
    "nodeThunderbolt": lambda view: ById(),
    "nodeThunderboltBridge": lambda view: ById(),
    "nodeRdmaCtl": lambda view: ById(),
    "nodeBackends": _each_node(_backends),
    "thunderboltBridgeCycles": lambda view: [],
    "instanceLinks": _links,
    "prefillServerPorts": _ports,
    "customModelCards": lambda view: ById({name: card_json(card) for name, card in view.custom.items()}),
    "instanceHealth": _health,
}
"""By their names in the state. Requests never pass through it, so `tasks` is empty; what exo knows of Thunderbolt
bridges and RDMA has no counterpart. `instanceHealth` is ours."""
