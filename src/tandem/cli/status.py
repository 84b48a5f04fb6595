"""`tandem status` and `tandem nodes`: the cluster as the node of this machine knows it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.flags import ApiKeyFlag, HostFlag, JsonFlag, PortFlag, load_settings

if TYPE_CHECKING:
    from tandem.cli.cluster_client import ClusterClient

REFRESH_SECONDS = 1.0


def status(
    watch: Annotated[
        bool | None,
        typer.Option("--watch/--once", help="Keep it current until Ctrl-C, or print it once. [default: on a terminal]"),
    ] = None,
    host: HostFlag = None,
    port: PortFlag = None,
    api_key: ApiKeyFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the cluster's nodes, instances and links, as the running node knows them."""
    from tandem.cli.cluster_client import cluster_client
    from tandem.cli.output import print_json, stdout
    from tandem.cli.tables import overview

    client = cluster_client(load_settings(host=host, port=port, api_key=api_key))
    if as_json:
        print_json(client.view().to_dict())
    elif watch or (watch is None and stdout().is_terminal):
        _watch(client)
    else:
        stdout().print(overview(client.view()))


def _watch(client: ClusterClient) -> None:
    from rich.live import Live

    from tandem.cli.output import stdout
    from tandem.cli.tables import overview

    try:
        with Live(overview(client.view()), console=stdout(), auto_refresh=False) as live:
            while True:
                time.sleep(REFRESH_SECONDS)
                live.update(overview(client.view()), refresh=True)
    except KeyboardInterrupt:
        return


def nodes(host: HostFlag = None, port: PortFlag = None, api_key: ApiKeyFlag = None, as_json: JsonFlag = False) -> None:
    """List the nodes of the cluster."""
    from tandem.cli.cluster_client import cluster_client
    from tandem.cli.output import print_json, stdout
    from tandem.cli.tables import nodes_table

    view = cluster_client(load_settings(host=host, port=port, api_key=api_key)).view()
    if as_json:
        print_json([node.to_dict() for node in view.nodes])
    else:
        stdout().print(nodes_table(view))
