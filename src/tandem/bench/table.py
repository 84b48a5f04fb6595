"""The report as tables for a person."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table

from tandem.bench.environment import Environment
from tandem.bench.plan import BOUNDS, Bound
from tandem.bench.report import Comparison, Delay, Report, Series, SimLoad

LABELS = {
    "ttft_ratio": "time to first text, Tandem / mlx-lm",
    "server_cpu_ms_per_token": "server CPU ms a token, simulated engine",
}


def show(report: Report, console: Console) -> None:
    """Print the headline figures with their bounds, what they come from, and where they were measured."""
    console.print(Group(_headline(report), *_details(report)))
    for line in _notes(report):
        console.print(line, highlight=False)


def _headline(report: Report) -> Table:
    plan = report.plan
    table = Table(title=f"tandem bench serve: {plan.model}, {plan.rounds} rounds", title_justify="left")
    table.add_column("figure")
    table.add_column("median", justify="right")
    table.add_column("lowest to highest", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("")
    series = {f"throughput_ratio_{one.streams}": one.ratio for one in report.throughput}
    if report.ttft is not None:
        series["ttft_ratio"] = report.ttft.ratio
    if report.sim is not None:
        series["server_cpu_ms_per_token"] = report.sim.server_cpu_ms_per_token
    for name, values in series.items():
        bound = BOUNDS.get(name)
        label = LABELS.get(name, f"throughput, Tandem / mlx-lm, {name.rpartition('_')[2]} at a time")
        table.add_row(label, f"{values.median:.3f}", _range(values, 3), str(bound or ""), verdict(bound, values.median))
    return table


def _details(report: Report) -> list[Table]:
    tables = []
    if report.throughput:
        table = detail_table("Behind the ratios", "median (lowest to highest)", "Tandem", "mlx-lm")
        for comparison in report.throughput:
            _throughput(table, comparison)
        if report.ttft is not None:
            _delay(table, f"ms to first text, {report.plan.ttft_prompt_tokens} new prompt tokens", report.ttft)
        if report.warm_turn is not None:
            _delay(table, "ms to first text, second turn of a chat", report.warm_turn)
            cached = [f"{sum(counts) / len(counts):.0f}" for counts in _cached(report.warm_turn)]
            table.add_row("… of which prompt tokens from the cache", *cached)
        tables.append(table)
    if report.sim is not None:
        tables.append(_sim(report.sim))
    return tables


def verdict(bound: Bound | None, value: float) -> str:
    """Whether a bound is met, in colour; nothing where there is none."""
    return "" if bound is None else "[green]met" if bound.met_by(value) else "[red]missed"


def detail_table(title: str, *columns: str) -> Table:
    """A table whose first column names its rows; figures are in the others."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _throughput(table: Table, comparison: Comparison) -> None:
    sides = (comparison.tandem, comparison.mlx_lm)
    many = f"{comparison.streams} at a time"
    table.add_row(f"tokens/s, {many}, prompts included", *(_value(side.tokens_per_second) for side in sides))
    table.add_row(f"tokens/s of one answer, {many}", *(_value(side.decode_tokens_per_second) for side in sides))
    table.add_row(f"ms to first text, {many}", *(_value(side.ttft_ms, 0) for side in sides))
    table.add_row(f"CPU ms a token, {many}, all processes", *(_value(side.cpu_ms_per_token) for side in sides))


def _delay(table: Table, label: str, delay: Delay) -> None:
    table.add_row(label, _value(delay.tandem_ms, 0), _value(delay.mlx_lm_ms, 0))


def _cached(delay: Delay) -> tuple[list[int], list[int]]:
    return delay.tandem_cached, delay.mlx_lm_cached


def _sim(sim: SimLoad) -> Table:
    table = detail_table(
        f"{sim.streams} simulated streams of {sim.tokens} tokens", "median (lowest to highest)", "Tandem"
    )
    table.add_row("tokens/s that arrived", _value(sim.tokens_per_second, 0))
    table.add_row("tokens/s of the engine", f"{sim.offered_tokens_per_second:.0f}")
    table.add_row("events a token", _value(sim.events_per_token, 3))
    table.add_row("CPU ms a token: server", _value(sim.server_cpu_ms_per_token, 3))
    table.add_row("CPU ms a token: runner", _value(sim.runner_cpu_ms_per_token, 3))
    table.add_row("CPU ms a token: this client", _value(sim.client_cpu_ms_per_token, 3))
    return table


def machine_notes(machine: Environment) -> list[str]:
    """Where a result was measured, in lines."""
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    lines = [
        f"{machine.cores} cores of {machine.processor}, BLAS {machine.blas}, Python {machine.python}, {versions}",
        f"load average {machine.load_before:.2f} before and {machine.load_after:.2f} after",
    ]
    if machine.thread_variables:
        lines.append("set: " + ", ".join(f"{name}={value}" for name, value in machine.thread_variables.items()))
    return lines


def _notes(report: Report) -> list[str]:
    lines = machine_notes(report.environment)
    if (agreement := report.agreement) is not None:
        lines.append(
            f"{agreement.equal_texts} of {agreement.answers} greedy answers equal to the last character, "
            f"{agreement.short} ended early, {agreement.cached_tokens} prompt tokens came from a cache"
        )
    return lines


def _value(series: Series, digits: int = 1) -> str:
    return f"{series.median:.{digits}f} ({_range(series, digits)})"


def _range(series: Series, digits: int) -> str:
    return f"{series.low:.{digits}f} to {series.high:.{digits}f}"
