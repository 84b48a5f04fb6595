"""Instances of the whole cluster, in the form in which this machine's own are described."""

from __future__ import annotations

from tandem.cluster.instances import InstanceStatus, LocalInstances
from tandem.cluster.state import ClusterState
from tandem.engines.base import LoadProgress
from tandem.placement.world import card_of, leader
from tandem.runner.messages import CacheIdentity
from tandem.types.facts import RunnerFact
from tandem.types.intents import InstanceIntent


def statuses(state: ClusterState, local: LocalInstances, node_id: str) -> list[InstanceStatus]:
    """Every instance that should run: those of this machine as they are, the others as their nodes report them."""
    running = {status.instance_id: status for status in local.instances()}
    found = []
    for instance_id, intent in state.instances.items():
        if instance_id in running:
            found.append(running[instance_id])
            continue
        described = _remote(intent, state, node_id)
        if described is not None:
            found.append(described)
    return found


def _remote(intent: InstanceIntent, state: ClusterState, node_id: str) -> InstanceStatus | None:
    card, shard = card_of(intent), leader(intent)
    if card is None or shard is None:
        return None  # of a newer version
    facts = state.nodes.get(shard.node_id)
    runner = next((one for one in facts.runners if one.runner_id == shard.runner_id), None) if facts else None
    if runner is None:
        lost = facts is None and shard.node_id != node_id
        runner = RunnerFact(
            runner_id=shard.runner_id,
            instance_id=intent.instance_id,
            model_id=intent.model_id,
            state="stopped" if lost else "starting",
            error=f"Its node {shard.node_id} is not there." if lost else None,
        )
    return InstanceStatus(
        instance_id=intent.instance_id,
        model_id=intent.model_id,
        card=card,
        state=runner.state,
        error=runner.error,
        info=runner.info,
        load=runner.load,
        progress=LoadProgress(runner.layers_loaded, runner.layers_total) if runner.layers_total else None,
        running=runner.running,
        restarts=runner.restarts,
        created=intent.created,
        pid=None,
        kv_address=None,
        identity=_identity(runner),
    )


def _identity(runner: RunnerFact) -> CacheIdentity:
    return CacheIdentity(runner.fingerprint, runner.tokenizer, runner.layout)
