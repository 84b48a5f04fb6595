"""Groups of commands that list when no command is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from tandem.cli.flags import ApiKeyFlag, HostFlag, JsonFlag, PortFlag, load_settings, options_of_list

if TYPE_CHECKING:
    from tandem.cli.cluster_view import ClusterView


def add_list(app: typer.Typer, *, group: str, command: str, show: Callable[[ClusterView, bool], None]) -> None:
    """Give `app` the command `list`, which it also does when none is named.

    Args:
        group, command: help texts.
        show: prints the cluster's part that the group is about, as JSON if the second argument says so.
    """

    @app.command("list", help=command)
    def list_(
        host: HostFlag = None, port: PortFlag = None, api_key: ApiKeyFlag = None, as_json: JsonFlag = False
    ) -> None:
        from tandem.cli.cluster_client import cluster_client

        show(cluster_client(load_settings(host=host, port=port, api_key=api_key)).view(), as_json)

    @app.callback(help=group)
    def _group(
        context: typer.Context,
        host: HostFlag = None,
        port: PortFlag = None,
        api_key: ApiKeyFlag = None,
        as_json: JsonFlag = False,
    ) -> None:
        if options_of_list(context, host=host, port=port, api_key=api_key, as_json=as_json):
            list_(host, port, api_key, as_json)
