"""What the planner looks at: facts and intents of one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from tandem.models.cards import ModelCard, card_from
from tandem.types.facts import Backend, NodeFacts, RunnerFact
from tandem.types.intents import InstanceIntent, InstanceMeta, LinkIntent, Shard

META_BACKENDS: dict[InstanceMeta, tuple[Backend, ...]] = {
    "MlxRing": ("MlxMetal", "MlxCuda", "MlxCpu"),
    "MlxJaccl": ("MlxMetal",),
    "Vllm": ("Vllm",),
    "Sim": (),
}
"""Engines that can run an instance of each kind, best first. `Sim` needs none: every node has it."""
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@dataclass(frozen=True, slots=True)
class World:
    """Live nodes by id, and the instances and links that should exist, by theirs."""

    nodes: Mapping[str, NodeFacts]
    instances: Mapping[str, InstanceIntent] = field(default_factory=dict)
    links: Mapping[str, LinkIntent] = field(default_factory=dict)

    def runner(self, shard: Shard) -> RunnerFact | None:
        """The shard's runner, as its node reports it; None if the node is gone or has not started it."""
        facts = self.nodes.get(shard.node_id)
        if facts is None:
            return None
        return next((runner for runner in facts.runners if runner.runner_id == shard.runner_id), None)


def display_name(facts: NodeFacts) -> str:
    """What people call the node."""
    return facts.name or facts.node_id


def card_of(instance: InstanceIntent) -> ModelCard | None:
    """The card that an intent carries; None if this version cannot read it."""
    return card_from(instance.card)


def leader(instance: InstanceIntent) -> Shard | None:
    """The shard that takes an instance's requests: rank 0."""
    return min(instance.shards, key=lambda shard: shard.rank, default=None)


def has_backend(facts: NodeFacts, backend: Backend) -> bool:
    """Whether this engine really imports on the node."""
    return any(engine.backend == backend and engine.available for engine in facts.engines)


def on_accelerator(facts: NodeFacts, backend: Backend | None) -> bool:
    """Whether this engine computes on a GPU there. vLLM does where there is one, and on the processor elsewhere."""
    if backend == "Vllm":
        return facts.resources.unified or bool(facts.resources.accelerators)
    return backend in ("MlxMetal", "MlxCuda")


def backend_of(meta: InstanceMeta, facts: NodeFacts) -> Backend | None:
    """The engine that an instance of this kind uses on the node; None for `Sim`, or if there is none."""
    return next((backend for backend in META_BACKENDS[meta] if has_backend(facts, backend)), None)


def node_speed(facts: NodeFacts) -> float | None:
    """Bytes of weights that the node reads per second while it decodes: the best of its runners; None if none answered
    yet. Decoding reads every weight once a token, so that this compares nodes that run different models."""
    speeds = [
        runner.load.decode_tps * runner.info.weight_bytes
        for runner in facts.runners
        if runner.load is not None and runner.info is not None
    ]
    best = max(speeds, default=0.0)
    return best if best > 0 else None


def gigabytes(size: float) -> str:
    """`1.2 GB`, as people read it."""
    return f"{size / 1e9:.1f} GB"
