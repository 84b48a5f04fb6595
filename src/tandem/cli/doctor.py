"""`tandem doctor`: is this machine ready, and if not, which command makes it so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tandem.cli.flags import HostFlag, JsonFlag, PortFlag, load_settings

if TYPE_CHECKING:
    from tandem.cli.checks import Finding

_MARKS = {"ok": ("✓", "green"), "info": ("·", "dim"), "warning": ("!", "yellow"), "failure": ("✗", "red")}


def doctor(host: HostFlag = None, port: PortFlag = None, as_json: JsonFlag = False) -> None:
    """Check this machine: Python, engines, matrix speed, the demo model, memory, disk, ports, multicast, hub.

    Ends with status 1 if something is missing that Tandem cannot run without.
    """
    from tandem.cli.checks import run_checks
    from tandem.cli.output import print_json

    findings = run_checks(load_settings(host=host, port=port))
    failed = any(finding.state == "failure" for finding in findings)
    if as_json:
        print_json({"ok": not failed, "checks": [finding.to_dict() for finding in findings]})
    else:
        _print(findings)
    if failed:
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    from tandem.cli.output import stdout

    console = stdout()
    for finding in findings:
        mark, style = _MARKS[finding.state]
        console.print(f"[{style}]{mark}[/{style}] [bold]{finding.name:<11}[/bold] ", end="", highlight=False)
        console.print(finding.summary, markup=False, highlight=False, soft_wrap=True)
        if finding.advice:
            console.print(f"{'':14}{finding.advice}", style=style, markup=False, highlight=False, soft_wrap=True)
