"""The entry point: the tree of commands, and what an error looks like."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from tandem.cli import chat, cluster, demo, doctor, engines, instances, kv, links, models, run, status, up, verify
from tandem.cli.failure import INTERRUPTED, describe_failure
from tandem.cli.lazy import lazy_group

app = typer.Typer(
    name="tandem",
    help="Run one language model across the machines you own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("demo")(demo.demo)
app.command("up")(up.up)
app.command("run")(run.run)
app.command("chat")(chat.chat)
app.add_typer(models.app, name="models")
app.command("status")(status.status)
app.command("nodes")(status.nodes)
app.command("place")(instances.place)
app.add_typer(instances.app, name="instances")
app.add_typer(links.app, name="links")
app.add_typer(cluster.app, name="cluster")
app.add_typer(engines.app, name="engines")
app.command("doctor")(doctor.doctor)
app.command("verify")(verify.verify)
app.add_typer(kv.app, name="kv")
app.add_typer(
    typer.Typer(
        cls=lazy_group("tandem.bench.cli", "app"),
        help="Measure Tandem, beside other servers where that is meaningful.",
        no_args_is_help=True,
    ),
    name="bench",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from tandem import __version__

        typer.echo(f"tandem {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run one language model across the machines you own."""


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        app(prog_name="tandem")
    except KeyboardInterrupt:
        status = INTERRUPTED
    except Exception as error:  # the process's border: a person gets one line, not a traceback
        if os.environ.get("TANDEM_DEBUG"):
            raise
        status = describe_failure(error)
    else:
        status = 0
    sys.stdout.flush()
    sys.exit(status)
