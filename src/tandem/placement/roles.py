"""What instances are there for: who answers, who only prefills, and how each of them is."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tandem.placement.world import World
from tandem.types.facts import NodeFacts, RunnerFact
from tandem.types.intents import InstanceIntent, Shard

Health: TypeAlias = Literal["ready", "loading", "dead"]


def prefill_only(world: World) -> frozenset[str]:
    """Instances that people linked to prefill for others, and to which no link makes others prefill.

    Links that the cluster made by itself do not count: they change nobody's role.
    """
    links = [link for link in world.links.values() if not link.automatic]
    decode = {instance_id for link in links for instance_id in link.decode_instances}
    return frozenset(instance_id for link in links for instance_id in link.prefill_instances) - decode


def health(instance: InstanceIntent, world: World) -> Health:
    """Whether an instance can answer: all of its shards have to be ready."""
    states = {_shard_health(shard, world) for shard in instance.shards}
    if "dead" in states or not states:
        return "dead"
    return "loading" if "loading" in states else "ready"


def _shard_health(shard: Shard, world: World) -> Health:
    if shard.node_id not in world.nodes:
        return "loading" if shard.node_id in world.unmet else "dead"
    runner = world.runner(shard)
    if runner is None:
        return "loading"  # asked for, and not started yet
    if runner.state in ("failed", "stopped"):
        return "dead"
    return "ready" if runner.state == "ready" else "loading"


def trouble(instance: InstanceIntent, world: World) -> str:
    """Why an instance is dead, in words: its node is gone, or its runner's own error."""
    for shard in instance.shards:
        if shard.node_id not in world.nodes:
            return f"its node '{shard.node_id}' is gone"
        runner = world.runner(shard)
        if runner is not None and runner.state in ("failed", "stopped"):
            return runner.error or f"its runner is {runner.state}"
    return "it has no shards" if not instance.shards else "it is well"


def single_runner(instance: InstanceIntent, world: World) -> tuple[NodeFacts, RunnerFact] | None:
    """The node and runner of an instance on one node; None if either is missing, or there are several."""
    if len(instance.shards) != 1:
        return None
    shard = instance.shards[0]
    runner = world.runner(shard)
    return (world.nodes[shard.node_id], runner) if runner is not None else None
