"""Clusters to plan for."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.models.cards import ModelCard, plain_card
from tandem.placement.world import World
from tandem.types.description import EngineLoad, ModelInfo
from tandem.types.facts import (
    Accelerator,
    Backend,
    Device,
    DownloadFact,
    EngineFact,
    Interface,
    LinkRate,
    NodeFacts,
    Resources,
    RunnerFact,
)
from tandem.types.intents import InstanceIntent, LinkIntent, Shard

GB = 10**9


def card(**changes: Any) -> ModelCard:
    """An 8B model at 4 bits, like Llama 3.1's."""
    values: dict[str, Any] = {
        "model_id": "org/Llama-8B-4bit",
        "storage_size": 4_500_000_000,
        "n_layers": 32,
        "hidden_size": 4096,
        "num_key_value_heads": 8,
        "supports_tensor": True,
        "family": "llama",
        "quantization": "4bit",
        "base_model": "Llama 8B",
        "context_length": 131_072,
    }
    return ModelCard(**{**values, **changes})


WHOLE = card(model_id="org/Llama-8B", storage_size=16 * GB, quantization="bf16")
"""The same in 16 bits, as vLLM loads it, too."""
BIG = card(model_id="org/Llama-70B-4bit", storage_size=40 * GB, n_layers=80, hidden_size=8192, base_model="Llama 70B")


def ethernet(host: int, speed: int | None = None) -> Interface:
    return Interface("en0", f"10.0.0.{host}", "ethernet", speed)


def node(
    number: int,
    free: float = 32,
    *,
    total: float | None = None,
    backends: tuple[Backend, ...] = ("MlxMetal",),
    unified: bool = True,
    vram: float | None = None,
    interfaces: tuple[Interface, ...] | None = None,
    **changes: Any,
) -> NodeFacts:
    """A Mac with `free` GB, on wired ethernet."""
    whole = int((total if total is not None else max(4 * free, 1)) * GB)
    accelerators = () if vram is None else (Accelerator("gpu", int(vram * GB), int(vram * GB)),)
    facts = NodeFacts(
        node_id=f"n{number:02}",
        life="life",
        sequence=1,
        name=f"mac-{number}",
        resources=Resources(
            memory_total=whole, memory_available=int(free * GB), unified=unified, accelerators=accelerators
        ),
        interfaces=interfaces if interfaces is not None else (ethernet(number + 1),),
        engines=tuple(EngineFact(backend) for backend in backends),
        device=Device("mac_studio"),
    )
    return msgspec.structs.replace(facts, **changes)


def world(*nodes: NodeFacts, instances: tuple[InstanceIntent, ...] = (), links: tuple[LinkIntent, ...] = ()) -> World:
    return World(
        {facts.node_id: facts for facts in nodes},
        {instance.instance_id: instance for instance in instances},
        {link.link_id: link for link in links},
    )


def instance(instance_id: str, node_id: str, model: ModelCard | None = None, **changes: Any) -> InstanceIntent:
    """An instance on one node, whose runner is `r-<id>`."""
    model = model or card()
    intent = InstanceIntent(
        instance_id,
        model.model_id,
        model.model_id,
        "MlxRing",
        "Pipeline",
        (Shard(node_id, f"r-{instance_id}", 0, 1, 0, model.n_layers),),
        plain_card(model),
    )
    return msgspec.structs.replace(intent, **changes)


def runner(instance_id: str, state: str = "ready", prefill: float = 0, decode: float = 0, **changes: Any) -> RunnerFact:
    """The runner of `instance(instance_id, ...)`; with speeds, one that has answered."""
    fact = RunnerFact(
        f"r-{instance_id}",
        instance_id,
        "org/Llama-8B-4bit",
        state,  # type: ignore[arg-type]
        load=EngineLoad(prefill_tps=prefill, decode_tps=decode),
        info=ModelInfo("org/Llama-8B-4bit", "mlx", "llama", 8192, 32000, "bfloat16", weight_bytes=4_500_000_000),
    )
    return msgspec.structs.replace(fact, **changes)


def downloaded(model: ModelCard) -> DownloadFact:
    return DownloadFact(model.model_id, "completed", 1, 1)


def rate(other: int, address: str, bandwidth: float | None = None) -> LinkRate:
    return LinkRate(f"n{other:02}", address, bandwidth, 0.001)
