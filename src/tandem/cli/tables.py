"""Nodes, instances and links as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.cli.output import human_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tandem.cli.cluster_view import ClusterView

_COLOURS = {"ready": "green", "failed": "red", "stopped": "red", "restarting": "yellow"}


def nodes_table(view: ClusterView) -> Table:
    """Each node: name, id, machine, free memory, engines, and how many instances are placed on it."""
    table = _table("NODE", "ID", "MACHINE", "MEMORY FREE", "ENGINES", "INSTANCES")
    for node in view.nodes:
        placed = sum(node.node_id in one.nodes for one in view.instances)
        table.add_row(
            _plain(node.name),
            node.node_id[:8],
            _plain(node.machine or "?"),
            _share(node.memory_available, node.memory_total),
            ", ".join(node.engines) or "?",
            str(placed),
        )
    return table


def instances_table(view: ClusterView) -> Table:
    """Each instance: model, id, nodes, kind, state, and what is wrong."""
    table = _table("MODEL", "ID", "ON", "KIND", "STATE", "")
    for one in view.instances:
        colour = _COLOURS.get(one.state, "")
        table.add_row(
            _plain(one.model_id),
            one.instance_id[:8],
            _plain(", ".join(view.name(node) for node in one.nodes)),
            one.kind,
            f"[{colour}]{one.state}[/{colour}]" if colour else one.state,
            _plain(one.error or ""),
        )
    return table


def links_table(view: ClusterView) -> Table:
    """Each link: id, who prefills for whom, and who made it."""
    table = _table("LINK", "PREFILLS", "FOR", "MADE BY")
    for link in view.links:
        table.add_row(
            _plain(link.link_id if link.automatic else link.link_id[:8]),
            _plain(", ".join(_where(view, one) for one in link.prefill)),
            _plain(", ".join(_where(view, one) for one in link.decode)),
            "the cluster" if link.automatic else "you, any quantisation" if link.allow_quantisation else "you",
        )
    return table


def overview(view: ClusterView) -> RenderableType:
    """All three, one below the other; what there is none of is said in a line."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [nodes_table(view), Text()]
    parts.append(instances_table(view) if view.instances else Text("No instance. `tandem place MODEL` starts one."))
    parts.append(Text())
    parts.append(links_table(view) if view.links else Text("No link: every instance reads its own prompts.", "dim"))
    return Group(*parts)


def _where(view: ClusterView, instance_id: str) -> str:
    found = next((one for one in view.instances if one.instance_id == instance_id), None)
    if found is None:
        return instance_id[:8]
    return f"{instance_id[:8]} on {', '.join(view.name(node) for node in found.nodes)}"


def _share(available: int | None, total: int | None) -> str:
    if available is None or total is None:
        return "?"
    return f"{human_bytes(available)} of {human_bytes(total)}"


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _table(*headers: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold")
    return table
