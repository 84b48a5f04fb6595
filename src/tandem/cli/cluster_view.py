"""The cluster as a node's HTTP routes tell of it, in the form that commands print; `docs/api.md` describes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from tandem.errors import InvalidRequestError, NotFoundError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node that is there. Bytes; None where it did not say."""

    node_id: str
    name: str
    machine: str = ""
    memory_total: int | None = None
    memory_available: int | None = None
    disk_available: int | None = None
    engines: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance that should run. `nodes` are ids, `kind` is e.g. `MlxRing`."""

    instance_id: str
    model_id: str
    kind: str
    nodes: tuple[str, ...]
    state: str
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LinkView:
    """Instances that prefill, and those they do it for."""

    link_id: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    automatic: bool = False
    allow_quantisation: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Everything, as one node knows it."""

    nodes: tuple[NodeView, ...]
    instances: tuple[InstanceView, ...]
    links: tuple[LinkView, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def name(self, node_id: str) -> str:
        """What people call a node."""
        return next((node.name for node in self.nodes if node.node_id == node_id), node_id[:8])

    def node(self, wanted: str) -> NodeView:
        """The node with this name, id, or beginning of an id.

        Raises:
            NotFoundError: there is none.
            InvalidRequestError: there are several.
        """
        named = [node for node in self.nodes if node.name.casefold() == wanted.casefold()]
        found = named or [node for node in self.nodes if node.node_id.startswith(wanted)]
        there = ", ".join(sorted(node.name for node in self.nodes)) or "none"
        return _only(found, "node", wanted, f"Nodes: {there}.")

    def instance(self, wanted: str) -> InstanceView:
        """The instance with this id or beginning of an id.

        Raises:
            NotFoundError: there is none.
            InvalidRequestError: there are several.
        """
        found = [one for one in self.instances if one.instance_id.startswith(wanted)]
        return _only(found, "instance", wanted, "`tandem instances` lists them.")

    def link(self, wanted: str) -> LinkView:
        """The link with this id or beginning of an id.

        Raises:
            NotFoundError: there is none.
            InvalidRequestError: there are several.
        """
        found = [one for one in self.links if one.link_id.startswith(wanted)]
        return _only(found, "link", wanted, "`tandem links` lists them.")


def _only(found: list[T], what: str, wanted: str, hint: str) -> T:
    if not found:
        raise NotFoundError(f"There is no {what} {wanted!r}. {hint}")
    if len(found) > 1:
        raise InvalidRequestError(f"{wanted!r} names {len(found)} {what}s. Say more of the id. {hint}")
    return found[0]


def view_of(state: Mapping[str, Any], health: Iterable[Mapping[str, Any]]) -> ClusterView:
    """The cluster from `/state` and the `instances` of `/health`."""
    ids = state.get("topology", {}).get("nodes") or list(state.get("nodeIdentities", {}))
    known = {str(one["instance_id"]): one for one in health}
    nodes = sorted((_node(node_id, state) for node_id in ids), key=lambda node: (node.name, node.node_id))
    tagged = (pair for wrapped in state["instances"].values() for pair in wrapped.items())
    instances = sorted(
        (_instance(tag, one, known) for tag, one in tagged), key=lambda one: (one.model_id, one.instance_id)
    )
    return ClusterView(tuple(nodes), tuple(instances), links_of(state["instanceLinks"].values()))


def links_of(links: Iterable[Mapping[str, Any]]) -> tuple[LinkView, ...]:
    """Links as `/v1/instance-links` lists them."""
    return tuple(
        LinkView(
            str(link["linkId"]),
            tuple(link["prefillInstances"]),
            tuple(link["decodeInstances"]),
            bool(link.get("automatic", False)),
            bool(link.get("allowQuantisation", False)),
        )
        for link in links
    )


def _node(node_id: str, state: Mapping[str, Any]) -> NodeView:
    identity = state.get("nodeIdentities", {}).get(node_id, {})
    memory = state.get("nodeMemory", {}).get(node_id, {})
    disk = state.get("nodeDisk", {}).get(node_id, {})
    parts = (identity.get("modelId"), identity.get("chipId"))
    machine = ", ".join(part for part in parts if part and part != "Unknown")
    return NodeView(
        node_id,
        identity.get("friendlyName") or node_id[:8],
        machine,
        _bytes(memory.get("ramTotal")),
        _bytes(memory.get("ramAvailable")),
        _bytes(disk.get("available")),
        tuple(str(name) for name in state.get("nodeBackends", {}).get(node_id) or ()),
    )


def _bytes(value: Any) -> int | None:
    return int(value["inBytes"]) if value else None


def _instance(tag: str, instance: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> InstanceView:
    instance_id = str(instance["instanceId"])
    assignments = instance["shardAssignments"]
    seen = known.get(instance_id, {})
    return InstanceView(
        instance_id,
        str(assignments["modelId"]),
        tag.removesuffix("Instance"),
        tuple(assignments["nodeToRunner"]),
        str(seen.get("state", "unknown")),
        seen.get("error"),
    )
