"""The report for a person."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.verify.compare import Difference
from tandem.verify.report import CaseResult, Report

EQUAL = "equal"


def show(report: Report, console: Console) -> None:
    """Print one line a case, the worst of each layer that differs, and the verdict."""
    console.print(_cases(report))
    for case in report.cases:
        if case.reason:
            style = "dim" if case.passed else "red"
            console.print(f"{case.name}: {case.reason}.", style=style, markup=False, highlight=False, soft_wrap=True)
    _layers(report, console)
    _verdict(report, console)


def _cases(report: Report) -> Table:
    title = f"tandem verify: {report.model}, prefill by {report.peer}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("case", overflow="fold")
    for name in ("held", "cached", "MB", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("cache", "logits", "answer", ""):
        table.add_column(name, no_wrap=True)
    for case in report.cases:
        figures = case.handoff
        table.add_row(
            escape(case.name),
            str(case.start),
            str(figures.cached),
            f"{figures.bytes / 1e6:.2f}",
            f"{figures.seconds * 1e3:.0f}",
            _cache(case),
            _logits(case),
            _answer(case),
            "[green]ok" if case.passed else "[red]FAILED",
        )
    return table


def _cache(case: CaseResult) -> str:
    if case.worst is None:
        return EQUAL if case.layers else ""
    layer, part = case.worst
    return f"layer {layer}: {part.max_abs:.1e}"


def _logits(case: CaseResult) -> str:
    if case.logits is None:
        return ""
    return EQUAL if case.logits.bit_equal else f"{case.logits.max_abs:.1e}"


def _answer(case: CaseResult) -> str:
    if case.tokens is None:
        return ""
    if case.tokens.equal:
        return EQUAL
    return f"{'tie' if case.tokens.tie else 'differs'} at {case.tokens.first_divergence}"


def _layers(report: Report, console: Console) -> None:
    worst = report.worst_layers()
    if not worst:
        return
    table = Table(title="The largest difference of each layer", title_justify="left", box=None, pad_edge=False)
    for name in ("layer", "part", "largest", "mean", "cosine"):
        table.add_column(name, justify="left" if name == "part" else "right")
    table.add_column("in", overflow="fold")
    for layer, part, name in worst:
        table.add_row(str(layer), *_figures(part), escape(name))
    console.print(table)


def _figures(part: Difference) -> tuple[str, str, str, str]:
    return part.part, f"{part.max_abs:.1e}", f"{part.mean_abs:.1e}", f"{part.cosine:.9f}"


def _verdict(report: Report, console: Console) -> None:
    cases, failed = len(report.cases), report.failed
    exact = [case for case in report.cases if case.exact]
    equal = f"{sum(case.exact and case.passed for case in report.cases)} of {len(exact)} to the last bit"
    if failed:
        first = failed[0]
        console.print(
            f"FAILED: {len(failed)} of {cases} cases. First: {first.name}, {first.first_divergence}.",
            style="bold red",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return
    text = (
        f"PASSED: {cases} cases, {equal}, the others within rounding. Answers are the same with and without hand-off."
    )
    console.print(text, style="bold green", markup=False, highlight=False, soft_wrap=True)
