"""`tandem instances` and `tandem place`: what the cluster runs, and asking it for more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.flags import ApiKeyFlag, HostFlag, JsonFlag, PortFlag, complete_model, load_settings
from tandem.cli.listing import add_list

if TYPE_CHECKING:
    from tandem.cli.cluster_client import ClusterClient
    from tandem.cli.cluster_view import ClusterView

LOAD_SECONDS = 1800.0
"""For a download and the loading of a large model."""

app = typer.Typer(help="List the cluster's instances, and remove them.", invoke_without_command=True)


def _show(view: ClusterView, as_json: bool) -> None:
    from tandem.cli.output import note, print_json, stdout
    from tandem.cli.tables import instances_table

    if as_json:
        print_json([one.to_dict() for one in view.instances])
    elif view.instances:
        stdout().print(instances_table(view))
    else:
        note("The cluster runs no instance. `tandem place MODEL` starts one.")


add_list(
    app,
    group="List the cluster's instances, and remove them. Without a command: list.",
    command="List the instances of the cluster.",
    show=_show,
)


@app.command()
def rm(
    instance: Annotated[str, typer.Argument(metavar="ID", help="The instance's id, or the beginning of it.")],
    host: HostFlag = None,
    port: PortFlag = None,
    api_key: ApiKeyFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Have the cluster stop an instance, wherever it runs."""
    from tandem.cli.cluster_client import cluster_client
    from tandem.cli.output import print_json, stdout

    client = cluster_client(load_settings(host=host, port=port, api_key=api_key))
    found = client.view().instance(instance)
    client.remove_instance(found.instance_id)
    if as_json:
        print_json(found.to_dict())
    else:
        stdout().print(f"{found.model_id} ({found.instance_id}) stops.", markup=False, highlight=False)


def place(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Model id, alias, or sim:KEY=VALUE,...", autocompletion=complete_model),
    ],
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="NODE", help="A node that has to take part: name or id. Repeat."),
    ] = None,
    min_nodes: Annotated[int, typer.Option("--min-nodes", min=1, help="At least so many nodes.")] = 1,
    engine: Annotated[
        str | None, typer.Option("--engine", help="mlx or vllm. [default: whichever can, mlx first]")
    ] = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Only show every way in which it could be placed.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it answers.")] = True,
    host: HostFlag = None,
    port: PortFlag = None,
    api_key: ApiKeyFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Have the cluster run one more instance of a model, on the node where it fits best.

    The node fetches the model if it does not have it.
    """
    from tandem.cli.cluster_client import cluster_client
    from tandem.cli.output import print_json

    client = cluster_client(load_settings(host=host, port=port, api_key=api_key, engine=engine))
    view = client.view()
    ways = client.previews(model, [view.node(wanted).node_id for wanted in node or ()])
    ways = [way for way in ways if way["instance"] is None or len(_nodes(way)) >= min_nodes]
    if engine is not None:
        ways = [way for way in ways if (way["instance_meta"] == "Vllm") == (engine == "vllm")]
    if preview:
        if as_json:
            print_json(ways)
        else:
            _print_ways(view, ways)
        return
    chosen = _chosen(model, ways)
    client.create(chosen["instance"])
    _report(client, view, chosen, wait, as_json)


def _nodes(way: dict[str, Any]) -> list[str]:
    (instance,) = way["instance"].values()
    return list(instance["shardAssignments"]["nodeToRunner"])


def _chosen(model: str, ways: list[dict[str, Any]]) -> dict[str, Any]:
    """The way with the fewest nodes.

    Raises:
        PlacementError: there is none; the message says why not.
    """
    from tandem.errors import PlacementError

    possible = [way for way in ways if way["instance"] is not None]
    if not possible:
        reasons = list(dict.fromkeys(way["error"] for way in ways if way["error"]))
        raise PlacementError(reasons[0] if reasons else f"There is no way to place {model} on so many nodes.")
    return min(possible, key=lambda way: len(_nodes(way)))


def _report(client: ClusterClient, view: ClusterView, way: dict[str, Any], wait: bool, as_json: bool) -> None:
    from tandem.cli.output import note, print_json, stdout

    (instance,) = way["instance"].values()
    names = [view.name(node) for node in _nodes(way)]
    if wait:
        note(f"{way['model_id']} is being loaded on {', '.join(names)} ...")
        client.wait_ready([instance["instanceId"]], LOAD_SECONDS)
    if as_json:
        print_json({"instance_id": instance["instanceId"], "model_id": way["model_id"], "nodes": _nodes(way)})
    else:
        state = "is ready" if wait else "is asked for"
        line = f"{way['model_id']} {state} on {', '.join(names)}: instance {instance['instanceId']}"
        stdout().print(line, markup=False, highlight=False, soft_wrap=True)


def _print_ways(view: ClusterView, ways: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from tandem.cli.output import human_bytes, stdout

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("KIND", "SHARDING", "NODES", "MEMORY, OR WHY NOT"):
        table.add_column(header, overflow="fold")
    for way in sorted(ways, key=lambda way: way["instance"] is None):
        if way["instance"] is None:
            table.add_row(way["instance_meta"], way["sharding"], "-", escape(str(way["error"])), style="dim")
            continue
        needs = way["memory_delta_by_node"] or {}
        nodes = ", ".join(escape(view.name(node)) for node in _nodes(way))
        memory = ", ".join(human_bytes(needs[node]) for node in _nodes(way) if node in needs)
        table.add_row(way["instance_meta"], way["sharding"], nodes, memory)
    stdout().print(table)
