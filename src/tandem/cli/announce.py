"""What `tandem up` says: to a person, or to a script."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from typing import Protocol

from tandem.cli.membership import Membership
from tandem.cli.output import command_name, note, print_event, stdout
from tandem.cluster.node import InstanceStatus
from tandem.config import Settings
from tandem.errors import TandemError


class Announcer(Protocol):
    """The turning points of a server's life."""

    def listening(self, url: str) -> None:
        """The address is taken; models are about to load."""

    def ready(self, url: str, instances: Sequence[InstanceStatus], needs_key: bool, place: Membership) -> None:
        """Every model answers."""

    def stopping(self, running: int, seconds: float) -> None:
        """`running` answers may still take `seconds`."""

    def failed(self, error: TandemError) -> None:
        """It cannot go on; the process will print `error` as its last line."""

    def stopped(self) -> None:
        """Everything has ended."""


class EventAnnouncer:
    """One JSON object a line on standard output."""

    def listening(self, url: str) -> None:
        """`{"event": "listening", "url"}`"""
        print_event({"event": "listening", "url": url})

    def ready(self, url: str, instances: Sequence[InstanceStatus], needs_key: bool, place: Membership) -> None:
        """`{"event": "ready", "url", "models": [...], "cluster": {...}}`"""
        models = [_described(status) for status in instances]
        print_event({"event": "ready", "url": url, "models": models, "cluster": place.to_dict()})

    def stopping(self, running: int, seconds: float) -> None:
        """`{"event": "stopping", "running"}`"""
        print_event({"event": "stopping", "running": running})

    def failed(self, error: TandemError) -> None:
        """`{"event": "error", "code", "message"}`"""
        print_event({"event": "error", "code": error.code, "message": error.message})

    def stopped(self) -> None:
        """`{"event": "stopped"}`"""
        print_event({"event": "stopped"})


def _described(status: InstanceStatus) -> dict[str, object]:
    info = status.info
    return {
        "id": status.model_id,
        "instance_id": status.instance_id,
        "engine": info.engine if info else None,
        "dtype": info.dtype if info else None,
        "context_length": info.context_length if info else None,
        "pid": status.pid,
        "kv_port": _kv_port(status),
    }


def _kv_port(status: InstanceStatus) -> str | None:
    return f"{status.kv_address[0]}:{status.kv_address[1]}" if status.kv_address else None


class HumanAnnouncer:
    """A block that names the address, the models, and lines to try."""

    def __init__(self) -> None:
        self._failed = False

    def listening(self, url: str) -> None:
        """One line."""
        note(f"Listening on {url}; loading ...")

    def ready(self, url: str, instances: Sequence[InstanceStatus], needs_key: bool, place: Membership) -> None:
        """The block."""
        console = stdout()

        def row(label: str, text: str, style: str = "") -> None:
            console.print(f"  [bold]{label:<9}[/bold]", end="", highlight=False)
            console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

        console.print()
        console.print("  [bold green]Tandem is ready.[/bold green]", highlight=False)
        console.print()
        row("address", url, "bold cyan")
        for number, status in enumerate(instances):
            row("" if number else "models" if len(instances) > 1 else "model", _line(status))
            if status.kv_address:
                row("", f"reads prompts for others at {_kv_port(status)}")
        if not instances:
            row("model", "none here; the cluster's are served")
        else:
            row("try", _curl(url, instances[0].model_id, needs_key))
            row("or", f"{command_name()} chat{_port_flag(url)}")
        row("cluster", place.line())
        row("", place.advice(), "bold red" if place.reach == "open" else "dim")
        row("stop", "Ctrl-C")
        console.print()
        sys.stdout.flush()

    def stopping(self, running: int, seconds: float) -> None:
        """One line; says what is waited for."""
        if running:
            answers = "1 answer" if running == 1 else f"{running} answers"
            note(f"Stopping: {answers} may take {seconds:.0f} more seconds (Ctrl-C again to stop at once) ...")
        elif not self._failed:
            note("Stopping ...")

    def failed(self, error: TandemError) -> None:
        """Nothing, now or later: the error's own line says it all."""
        self._failed = True

    def stopped(self) -> None:
        """One line."""
        if not self._failed:
            note("Stopped.")


def _line(status: InstanceStatus) -> str:
    info = status.info
    if info is None:
        return status.model_id
    return f"{status.model_id} ({info.engine}, {info.dtype}, {info.context_length} tokens of context)"


def _curl(url: str, model: str, needs_key: bool) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]})
    key = ' -H "Authorization: Bearer $TANDEM_API_KEY"' if needs_key else ""
    return f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def _port_flag(url: str) -> str:
    port = int(url.rpartition(":")[2])
    return "" if port == Settings().port else f" --port {port}"
