"""The cluster as one node knows it: a value that events change. Pure."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tandem.types.facts import NodeFacts
from tandem.types.intents import CardIntent, Entry, InstanceIntent, LinkIntent


class NodeJoined(msgspec.Struct, frozen=True, tag="NodeJoined"):
    """A node is there."""

    facts: NodeFacts


class NodeChanged(msgspec.Struct, frozen=True, tag="NodeChanged"):
    """A node said something new of itself."""

    facts: NodeFacts


class NodeLeft(msgspec.Struct, frozen=True, tag="NodeLeft"):
    """A node is gone, and its facts with it."""

    node_id: str
    reason: str


class IntentChanged(msgspec.Struct, frozen=True, tag="IntentChanged"):
    """An intent was added, changed or removed."""

    entry: Entry


StateEvent: TypeAlias = NodeJoined | NodeChanged | NodeLeft | IntentChanged


class ClusterState(msgspec.Struct, frozen=True):
    """Facts by node id and intents by key, tombstones included."""

    nodes: dict[str, NodeFacts] = {}
    intents: dict[str, Entry] = {}

    @property
    def instances(self) -> dict[str, InstanceIntent]:
        """Instances that should run, by id."""
        values = (entry.value for entry in self.intents.values())
        return {value.instance_id: value for value in values if isinstance(value, InstanceIntent)}

    @property
    def links(self) -> dict[str, LinkIntent]:
        """Links, by id."""
        values = (entry.value for entry in self.intents.values())
        return {value.link_id: value for value in values if isinstance(value, LinkIntent)}

    @property
    def cards(self) -> dict[str, CardIntent]:
        """Custom cards, by model id."""
        values = (entry.value for entry in self.intents.values())
        return {value.model_id: value for value in values if isinstance(value, CardIntent)}


def apply(state: ClusterState, event: StateEvent) -> ClusterState:
    """The state after `event`. An intent that is older than what is known changes nothing, nor do facts."""
    if isinstance(event, IntentChanged):
        known = state.intents.get(event.entry.key)
        if known is not None and known.stamp >= event.entry.stamp:
            return state
        return msgspec.structs.replace(state, intents={**state.intents, event.entry.key: event.entry})
    nodes = dict(state.nodes)
    if isinstance(event, NodeLeft):
        nodes.pop(event.node_id, None)
    else:
        known_facts = nodes.get(event.facts.node_id)
        if known_facts and known_facts.life == event.facts.life and known_facts.sequence >= event.facts.sequence:
            return state
        nodes[event.facts.node_id] = event.facts
    return msgspec.structs.replace(state, nodes=nodes)
