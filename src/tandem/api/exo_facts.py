"""What nodes say of themselves, with exo's fields."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.api.exo_names import ById, camel, memory
from tandem.placement.addresses import addresses
from tandem.types.facts import InterfaceKind, NodeFacts

MOST_ADDRESSES = 8
"""Connections that are listed between two nodes."""
_INTERFACES: dict[InterfaceKind, str] = {"wifi": "wifi", "ethernet": "ethernet", "thunderbolt": "thunderbolt"}


def connections_json(here: NodeFacts, there: NodeFacts) -> list[dict[str, Any]]:
    """How one node reaches another. `bandwidth` and `round_trip` are ours."""
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


def identity_json(facts: NodeFacts) -> dict[str, Any]:
    """Who a node is; from `kind` on the fields are ours."""
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


def memory_json(facts: NodeFacts) -> dict[str, Any]:
    """Its memory."""
    resources = facts.resources
    return {
        "ram_total": memory(resources.memory_total),
        "ram_available": memory(resources.memory_available),
        "swap_total": memory(resources.swap_total),
        "swap_available": memory(resources.swap_available),
        "unified": resources.unified,
    }


def disk_json(facts: NodeFacts) -> dict[str, Any]:
    """Its disk."""
    return {"total": memory(facts.resources.disk_total), "available": memory(facts.resources.disk_available)}


def system_json(facts: NodeFacts) -> dict[str, Any]:
    """Its load. `unknown` and `accelerators` are ours."""
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


def network_json(facts: NodeFacts) -> dict[str, Any]:
    """Its interfaces."""
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


def backends_json(facts: NodeFacts) -> list[str]:
    """Engines that work on it."""
    return [engine.backend for engine in facts.engines if engine.available]
