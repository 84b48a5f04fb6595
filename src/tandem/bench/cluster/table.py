"""The cluster report as tables for a person."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table

from tandem.bench.cluster.messages import Traffic
from tandem.bench.cluster.report import ClusterReport, Forming, Idle
from tandem.bench.report import Series
from tandem.bench.table import detail_table, machine_notes, verdict

LABELS = {
    "form_seconds_3": "3 nodes: seconds to form",
    "form_seconds_3_quic": "3 nodes with a secret: seconds to form",
    "kill_noticed_seconds_3": "3 nodes: seconds until a kill is noticed",
    "kill_noticed_seconds_3_quic": "3 nodes with a secret: seconds until a kill is noticed",
    "form_seconds": "all nodes: seconds to form",
    "kill_noticed_seconds": "all nodes: seconds until kills are noticed",
    "idle_cpu_percent": "idle: percent of a core a node",
    "idle_cpu_percent_after": "idle, after the requests: percent of a core a node",
    "placement_ms": "placement and previews of a model, ms",
    "requests_per_second": "requests per second",
    "request_errors": "requests that failed",
    "never_ended": "nodes killed: requests that never ended",
    "errors_before_a_token": "nodes killed: requests that failed before a token",
    "false_departures": "nodes taken for gone that were not killed",
}


def show(report: ClusterReport, console: Console) -> None:
    """Print the figures with their bounds, what they come from, and where they were measured."""
    console.print(Group(_headline(report), _clusters(report), _costs(report), _requests(report)))
    for line in machine_notes(report.environment):
        console.print(line, highlight=False)
    errors = report.traffic.errors | (report.kill.traffic.errors if report.kill is not None else {})
    for text, count in errors.items():
        console.print(f"{count} x {text}", highlight=False, markup=False)


def _headline(report: ClusterReport) -> Table:
    table = Table(title=f"tandem bench cluster: {report.plan.nodes} nodes", title_justify="left")
    table.add_column("figure")
    table.add_column("result", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("")
    bounds = report.bounds
    for name, value in report.figures.items():
        bound = bounds.get(name)
        table.add_row(
            LABELS[name],
            f"{value:.0f}" if value == int(value) else f"{value:.3f}",
            str(bound or ""),
            verdict(bound, value),
        )
    return table


def _clusters(report: ClusterReport) -> Table:
    table = detail_table(
        "Clusters", "", "nodes", "processes", "own start s", "formed s", "killed", "noticed s", "load before"
    )
    rows: list[tuple[str, Forming]] = [*report.small.items(), ("large", report.large)]
    for name, forming in rows:
        table.add_row(
            name,
            str(forming.nodes),
            str(forming.processes),
            f"{forming.start_seconds:.2f}",
            f"{forming.form_seconds:.2f}",
            str(forming.killed),
            f"{forming.kill_noticed_seconds:.2f}",
            f"{forming.load:.2f}",
        )
    return table


def _costs(report: ClusterReport) -> Table:
    table = detail_table("Idle and placing", "median (lowest to highest)", "", "load")

    def idle(name: str, one: Idle) -> None:
        table.add_row(f"% of a core, {name}, a process of its own", _value(one.alone, 2), f"{one.load:.2f}")
        if one.shared is not None:
            table.add_row(f"% of a core a node, {name}, shared process", _value(one.shared, 2), "")

    idle("before the requests", report.idle)
    idle("after them", report.idle_after)
    table.add_row(f"ms, placement at {report.placing.nodes} nodes", _value(report.placing.place_ms), "")
    table.add_row(f"ms, {report.placing.previews} previews", _value(report.placing.previews_ms), "")
    return table


def _requests(report: ClusterReport) -> Table:
    table = detail_table(
        "Requests", "", "answered", "tokens", "retried", "failed before a token", "failed after one", "longest s"
    )

    def row(name: str, traffic: Traffic) -> None:
        table.add_row(
            name,
            str(traffic.answered),
            str(traffic.tokens),
            str(traffic.retried),
            str(traffic.failed_before),
            str(traffic.failed_after),
            f"{traffic.longest:.2f}",
        )

    row("all nodes alive", report.traffic)
    if (kill := report.kill) is not None:
        row(f"{kill.nodes} killed, {kill.instances} of {kill.of_instances} instances with them", kill.traffic)
        table.add_row("once more afterwards", str(kill.answered_after), "", "", "", "", "")
        table.caption = f"Noticed by all others after {kill.noticed_seconds:.2f} s, under load."
    return table


def _value(series: Series, digits: int = 1) -> str:
    low, median, high = (f"{one:.{digits}f}" for one in (series.low, series.median, series.high))
    return f"{median} ({low} to {high})"
