"""How to reach another node's port."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.errors import NodeLostError, NotFoundError
from tandem.placement.addresses import addresses, with_port
from tandem.types.facts import NodeFacts


def ways_to(node_id: str, nodes: Mapping[str, NodeFacts], here: str) -> list[str]:
    """`host:port` of a node's port, the one to try first in front.

    Args:
        nodes: what is known of all nodes.
        here: id of this node.

    Raises:
        NotFoundError: there is no such node.
        NodeLostError: it has not said yet where it can be reached.
    """
    there, me = nodes.get(node_id), nodes.get(here)
    if there is None:
        raise NotFoundError(f"There is no node {node_id}. GET /state lists the nodes.")
    if there.node_port is None or me is None:
        raise NodeLostError(f"Node {node_id} has not said where it can be reached. Try again in a second.")
    return [with_port(address, there.node_port) for address in addresses(there, me, me.links)]
