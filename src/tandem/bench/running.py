"""Running a bench from the command line: a scratch folder, progress, and an orderly end."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import typer
from rich.console import Console

T = TypeVar("T")

TERMINATED = 143
"""128 + SIGTERM, as shells count."""


def run_bench(bench: Callable[[Path, Callable[[str], None]], Awaitable[T]]) -> T:
    """Run a bench, which gets a scratch folder and something to tell what happens next.

    Raises:
        Exit: SIGTERM or SIGHUP came; the bench ended its processes first.
    """
    console = Console(stderr=True)

    async def run(work: Path) -> T:
        # An orderly end, whoever asks for it: the servers are ours to stop.
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with console.status("") as status:
            # A log has no use for a spinner, but a reader of it wants to know where the minutes go.
            say = status.update if console.is_terminal else console.print
            return await bench(work, say)

    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as work:
        try:
            return asyncio.run(run(Path(work)))
        except asyncio.CancelledError:
            raise typer.Exit(TERMINATED) from None


class Result(Protocol):
    """What a bench found."""

    @property
    def missed(self) -> dict[str, Any]:
        """Bounds that a figure missed."""

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain data."""


R = TypeVar("R", bound=Result)


def tell(report: R, show: Callable[[R, Console], None], *, as_json: bool, check: bool) -> None:
    """Print a report, as a table or as JSON.

    Raises:
        Exit: status 1, if `check` and a bound was missed.
    """
    if as_json:
        typer.echo(msgspec.json.encode(report.to_json()).decode())
    else:
        show(report, Console())
    if check and report.missed:
        raise typer.Exit(1)
