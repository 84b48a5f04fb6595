"""`tandem engines`: what this machine can run models with, and installing what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.flags import JsonFlag, load_settings, options_of_list

if TYPE_CHECKING:
    from tandem.types.facts import EngineFact

app = typer.Typer(
    help="List the engines that this machine can run, and install one. Without a command: list.",
    invoke_without_command=True,
)

install_app = typer.Typer(help="Install an engine.", no_args_is_help=True)
app.add_typer(install_app, name="install")


@app.callback()
def _group(context: typer.Context, as_json: JsonFlag = False) -> None:
    if options_of_list(context, as_json=as_json):
        list_(as_json)


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """List the engines that this machine can run, and what the others lack.

    Each is imported and made to compute, in a process of its own, which takes some seconds.
    """
    import asyncio

    from tandem.cli.output import print_json
    from tandem.cluster.facts.engines import EngineProber

    prober = EngineProber(home=load_settings().home)
    found = asyncio.run(prober.engines())
    if as_json:
        print_json(
            [
                {
                    "backend": engine.backend,
                    "available": engine.available,
                    "version": engine.version,
                    "reason": engine.reason,
                    "python": str(prober.interpreter(engine.backend)),
                }
                for engine in found
            ]
        )
    else:
        _print(found, prober.interpreter("Vllm"))


def _print(found: tuple[EngineFact, ...], vllm_python: Path) -> None:
    import sys

    from rich.markup import escape
    from rich.table import Table

    from tandem.cli.output import stdout

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("ENGINE", "VERSION", "HERE", "WHAT IS MISSING"):
        table.add_column(header, overflow="fold")
    for engine in found:
        where = "yes" if engine.available else "no"
        if engine.available and engine.backend == "Vllm" and vllm_python != Path(sys.executable):
            where = f"yes, in {vllm_python.parent.parent}"
        style = "" if engine.available else "dim"
        table.add_row(engine.backend, engine.version or "-", escape(where), escape(engine.reason), style=style)
    stdout().print(table)


@install_app.command("vllm")
def vllm(
    separate: Annotated[
        bool,
        typer.Option("--separate", help="Into an environment of its own, in the data folder, and not into Tandem's."),
    ] = False,
    deadline: Annotated[
        float, typer.Option("--deadline", min=1.0, help="Seconds that all of it may take at most.")
    ] = 3600.0,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Import it afterwards, as a runner would.")] = True,
) -> None:
    """Install vLLM: its build for CPUs, or the one for CUDA where an NVIDIA driver is loaded.

    Does nothing where that is done. It goes into Tandem's own environment; into one of its own with --separate, or if
    its requirements and Tandem's do not agree.
    """
    import asyncio

    from tandem.cli.output import note, stdout
    from tandem.cluster.facts.engines import EngineProber
    from tandem.engines.install.vllm import install_vllm
    from tandem.errors import ConfigError

    settings = load_settings()
    done = install_vllm(settings.home, note, separate=separate, deadline=deadline)
    if check:
        note("importing it ...")
        fact = asyncio.run(EngineProber(home=settings.home).engine("Vllm"))
        if not fact.available:
            raise ConfigError(f"vLLM {done.build.version} is installed and does not work here: {fact.reason}")
    where = f" in {done.python.parent.parent}" if done.separate else ""
    said = "is installed" if done.changed else "was installed already"
    tested = "" if done.build.tested else " Tandem's tests do not run with this build: tell us what you see."
    line = f"{done.build.distribution} {done.build.version} {said}{where}.{tested}"
    stdout().print(line, markup=False, highlight=False, soft_wrap=True)
