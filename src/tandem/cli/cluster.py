"""`tandem cluster`: the secret that makes several machines one cluster."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.flags import HostFlag, JsonFlag, PortFlag, load_settings

if TYPE_CHECKING:
    from tandem.config import Settings

app = typer.Typer(help="Make several machines one cluster.", no_args_is_help=True)


@app.command()
def secret(as_json: JsonFlag = False) -> None:
    """Print the cluster's secret; make one if there is none.

    Whoever has it can join, and everything between nodes is encrypted with keys that come from it. It is kept in the
    data folder, readable by you alone.
    """
    from tandem.cli.output import print_json
    from tandem.cluster.bus.secret import cluster_secret, keep_secret, new_secret

    settings = load_settings()
    words = cluster_secret(settings)
    created = not words
    if created:
        words = new_secret()
        keep_secret(settings.home, words)
    if as_json:
        print_json({"secret": words, "created": created, "source": _source(settings)})
        return
    print(words, flush=True)
    _explain(settings, words, created)


def _explain(settings: Settings, words: str, created: bool) -> None:
    from tandem.cli.output import command_name, note

    if created:
        note(f"A new secret, kept in {_source(settings)}.")
    note(f"On every other machine: tandem cluster join {words}")
    note(f"Then start them (again): {command_name()} up")


@app.command()
def join(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORDS]...", help="What `tandem cluster secret` printed there; asked for if left out."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Keep the secret of another machine's cluster, so that this machine joins it at its next start.

    Replaces the secret that was kept here. A wrong word is noticed and named. Without words it is read from standard
    input, so that it stays out of the shell's history.
    """
    from tandem.cli.output import command_name, note, print_json
    from tandem.cluster.bus.secret import keep_secret

    settings = load_settings()
    path = keep_secret(settings.home, " ".join(words) if words else _typed())
    if as_json:
        print_json({"source": str(path), "cluster": settings.cluster_name, "overridden": _overridden(settings)})
        return
    print(f"The secret is kept in {path}.", flush=True)
    if _overridden(settings):
        note("TANDEM_CLUSTER_SECRET is set and counts instead: unset it.")
    note(f"Start this machine (again): {command_name()} up")


def _typed() -> str:
    if sys.stdin.isatty():
        return str(typer.prompt("The cluster's secret"))
    return sys.stdin.readline()


@app.command()
def leave(as_json: JsonFlag = False) -> None:
    """Forget the secret. From its next start on this machine is on its own."""
    from tandem.cli.output import note, print_json
    from tandem.cluster.bus.secret import FILE
    from tandem.errors import ConfigError

    settings = load_settings()
    path = settings.home / FILE
    try:
        path.unlink()
        left = True
    except FileNotFoundError:
        left = False
    except OSError as error:
        raise ConfigError(f"The secret in {path} cannot be removed: {error}.") from error
    if as_json:
        print_json({"left": left, "overridden": _overridden(settings)})
        return
    print(f"The secret in {path} is forgotten." if left else "There was no secret here.", flush=True)
    if _overridden(settings):
        note("TANDEM_CLUSTER_SECRET is set and goes on counting: unset it.")
    elif left:
        note("A node that runs now stays in the cluster until it stops.")


@app.command()
def show(host: HostFlag = None, port: PortFlag = None, as_json: JsonFlag = False) -> None:
    """Say which cluster this machine is in, who else is there, and how to go further."""
    from tandem.cli.cluster_client import ClusterClient
    from tandem.cli.membership import Membership, reach_of
    from tandem.cli.output import print_json
    from tandem.cli.remote import find_server
    from tandem.cluster.bus.secret import cluster_secret

    settings = load_settings(host=host, port=port)
    server = find_server(settings)
    reach = reach_of(settings, cluster_secret(settings))
    name = settings.node_name or "this machine"
    others: tuple[str, ...] = ()
    if server is not None:
        own = server.call("GET", "/node_id")
        view = ClusterClient(server).view()
        name = view.name(own)
        others = tuple(node.name for node in view.nodes if node.node_id != own)
    place = Membership(settings.cluster_name, reach, name, others)
    listens = _listens(settings, reach)
    if as_json:
        print_json(place.to_dict() | {"listens": listens, "running": server is not None, "secret": _source(settings)})
        return
    for label, text in (
        ("cluster", settings.cluster_name),
        ("secret", f"yes, in {_source(settings)}" if reach == "secret" else "none"),
        ("nodes", f"{place.node} with {', '.join(others) or 'nobody else'}" if server else "no node runs here now"),
        ("listens", listens),
        ("further", place.advice()),
    ):
        print(f"{label:<9}{text}", flush=True)


def _listens(settings: Settings, reach: str) -> str:
    """Where the cluster's port is, and how others find it."""
    where = "this machine only" if reach == "machine" else "every address"
    port = f"port {settings.cluster_port}" if settings.cluster_port else "a free port"
    found = "by multicast" if settings.cluster_discovery else "without multicast"
    dialled = f", and dials {settings.cluster_peers}" if settings.cluster_peers else ""
    return f"{port} ({'UDP' if reach == 'secret' else 'TCP'}), {where}, {found}{dialled}"


def _overridden(settings: Settings) -> bool:
    return bool(settings.cluster_secret)


def _source(settings: Settings) -> str:
    """Where the secret in use lies; empty if there is none."""
    from tandem.cluster.bus.secret import FILE

    if settings.cluster_secret:
        return "TANDEM_CLUSTER_SECRET"
    path = settings.home / FILE
    return str(path) if path.exists() else ""
