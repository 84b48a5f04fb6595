"""`tandem links`: which instances prefill for which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.flags import ApiKeyFlag, HostFlag, JsonFlag, PortFlag, load_settings
from tandem.cli.listing import add_list

if TYPE_CHECKING:
    from tandem.cli.cluster_view import ClusterView

app = typer.Typer(help="Let instances read prompts for others.", invoke_without_command=True)


def _show(view: ClusterView, as_json: bool) -> None:
    from tandem.cli.output import note, print_json, stdout
    from tandem.cli.tables import links_table

    if as_json:
        print_json([link.to_dict() for link in view.links])
    elif view.links:
        stdout().print(links_table(view))
    else:
        note("There is no link: every instance reads its own prompts. `tandem links add` makes one.")


add_list(
    app,
    group="Let instances read prompts for others. Without a command: list.",
    command="List the links, those that the cluster made by itself included.",
    show=_show,
)


@app.command()
def add(
    prefill: Annotated[
        list[str],
        typer.Option("--prefill", metavar="ID", help="An instance that reads prompts for the others. Repeat."),
    ],
    decode: Annotated[
        list[str], typer.Option("--decode", metavar="ID", help="An instance that answers with their help. Repeat.")
    ],
    allow_quantisation: Annotated[
        bool,
        typer.Option(
            "--allow-quantisation",
            help="Also where the two sides' weights are quantised differently; answers are then those of neither.",
        ),
    ] = False,
    host: HostFlag = None,
    port: PortFlag = None,
    api_key: ApiKeyFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Let instances read prompts for others. From then on they only do that.

    Ids may be shortened to their beginning; `tandem instances list` shows them.
    """
    from tandem.cli.cluster_client import cluster_client
    from tandem.cli.output import print_json, stdout

    client = cluster_client(load_settings(host=host, port=port, api_key=api_key))
    view = client.view()
    sides = [[view.instance(wanted).instance_id for wanted in side] for side in (prefill, decode)]
    link = client.link(*sides, allow_quantisation=allow_quantisation)
    if as_json:
        print_json(link.to_dict())
    else:
        stdout().print(f"Linked: {link.link_id}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def rm(
    link: Annotated[str, typer.Argument(metavar="ID", help="The link's id, or the beginning of it.")],
    host: HostFlag = None,
    port: PortFlag = None,
    api_key: ApiKeyFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove a link."""
    from tandem.cli.cluster_client import cluster_client
    from tandem.cli.output import print_json, stdout

    client = cluster_client(load_settings(host=host, port=port, api_key=api_key))
    found = client.view().link(link)
    client.unlink(found.link_id)
    if as_json:
        print_json(found.to_dict())
    else:
        stdout().print(f"Removed: {found.link_id}", markup=False, highlight=False, soft_wrap=True)
