"""Which cluster this machine is in, as `tandem up` and `tandem cluster show` say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tandem.cli.output import command_name

if TYPE_CHECKING:
    from tandem.config import Settings
    from tandem.types.facts import NodeFacts

Reach: TypeAlias = Literal["secret", "open", "machine"]
"""Whom the cluster serves: holders of the secret, everyone, or processes of this machine alone."""
OPEN_WARNING = "OPEN: everyone on this network can join, read prompts and answers, and use this machine."


@dataclass(frozen=True, slots=True)
class Membership:
    """This machine's place in a cluster.

    Attributes:
        node: this machine's name.
        others: names of the other nodes that are there.
    """

    cluster: str
    reach: Reach
    node: str
    others: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"name": self.cluster, "reach": self.reach, "node": self.node, "others": list(self.others)}

    def line(self) -> str:
        """Which cluster, and who is there."""
        return f"{self.cluster}, as {self.node}; {_company(self.others)}"

    def advice(self) -> str:
        """How other machines get in; the warning where everybody does."""
        if self.reach == "open":
            return OPEN_WARNING
        command = command_name()
        if self.reach == "secret":
            return f"others join with the words of `{command} cluster secret`: `tandem cluster join WORDS` there"
        return (
            "of this machine alone. For others: "
            f"`{command} cluster secret` here, `tandem cluster join WORDS` there, then start both again"
        )


def reach_of(settings: Settings, secret: str) -> Reach:
    """Whom a node with these settings serves. `secret` as `cluster_secret` found it."""
    if secret:
        return "secret"
    return "open" if settings.cluster_open else "machine"


def membership(settings: Settings, secret: str, node_id: str, nodes: Mapping[str, NodeFacts]) -> Membership:
    """The place of `node_id` among `nodes`, which are those that are there now."""
    own = nodes.get(node_id)
    others = sorted(facts.name or facts.node_id[:8] for facts in nodes.values() if facts.node_id != node_id)
    name = own.name if own is not None and own.name else settings.node_name or node_id[:8]
    return Membership(settings.cluster_name, reach_of(settings, secret), name, tuple(others))


def _company(others: tuple[str, ...]) -> str:
    if not others:
        return "nobody else is there yet"
    shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
    return f"with {shown}"
