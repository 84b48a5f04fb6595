"""The report of the bench of disaggregation as tables for a person."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tandem.bench.pd.bench import LABELS
from tandem.bench.pd.plan import PdPlan, SidePlan
from tandem.bench.pd.report import ARRANGEMENTS, CaseResult, PdReport
from tandem.bench.report import Series
from tandem.bench.table import detail_table, machine_notes, verdict

FIGURES = {
    "ttft_speedup_vs_decode_alone": "time to first text, prompt of {longest}: decode alone / disaggregated",
    "ttft_speedup_vs_prefill_alone": "time to first text, prompt of {longest}: prefill alone / disaggregated",
    "remote_token_share": "prompt tokens read by the prefill side",
}
BAR_CELLS = 48


def show(report: PdReport, console: Console) -> None:
    """Print the figures with their bounds, the cases, where their prompts were read, a plot, and the machine."""
    console.print(Group(_headline(report), _times(report), _handoffs(report), bars(report)))
    for case in report.cases:
        for fault in case.not_compared:
            console.print(f"no speedup of {_name(case)}: {fault}", highlight=False, markup=False)
    for line in machine_notes(report.environment):
        console.print(line, highlight=False)


def describe_side(side: SidePlan) -> str:
    """A side in a few words."""
    where = f" at {side.address}" if side.address else ""
    if side.engine == "sim":
        return f"sim{where}"
    dtype = "" if side.dtype == "auto" else f" in {side.dtype}"
    return f"{side.engine} ({Path(side.model).name}{dtype}){where}"


def _title(plan: PdPlan) -> str:
    sides = f"{describe_side(plan.prefill)} reads, {describe_side(plan.decode)} writes"
    return f"tandem bench pd: {sides}, {plan.rounds} rounds"


def _headline(report: PdReport) -> Table:
    table = Table(title=_title(report.plan), title_justify="left")
    table.add_column("figure")
    table.add_column("median", justify="right")
    table.add_column("lowest to highest", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("")
    bounds = report.plan.bounds
    for name, series in report.series.items():
        label = FIGURES[name].format(longest=report.plan.longest)
        bound = bounds.get(name)
        if series is None:
            table.add_row(label, "-", "not all remote", str(bound or ""), "[red]missed" if bound else "")
            continue
        spread = f"{series.low:.3f} to {series.high:.3f}"
        table.add_row(label, f"{series.median:.3f}", spread, str(bound or ""), verdict(bound, series.median))
    return table


def _times(report: PdReport) -> Table:
    table = detail_table(
        "Seconds as a client sees them, median (lowest to highest)",
        "prompt + answer tokens",
        "",
        "first text s",
        "alone /",
        "whole answer s",
        "alone /",
        "tokens/s then",
    )
    table.columns[1].justify, table.columns[1].no_wrap = "left", True
    for case in report.cases:
        for arrangement in ARRANGEMENTS:
            timing = getattr(case, arrangement)
            together = arrangement == "disaggregated"
            table.add_row(
                _name(case) if together else "",
                LABELS[arrangement],
                _value(timing.ttft_seconds),
                "" if together else _ratio(getattr(case, f"ttft_speedup_vs_{arrangement}")),
                _value(timing.total_seconds),
                "" if together else _ratio(getattr(case, f"total_speedup_vs_{arrangement}")),
                f"{timing.decode_tokens_per_second.median:.1f}",
            )
    return table


def _handoffs(report: PdReport) -> Table:
    table = detail_table(
        "Where the prompts were read",
        "prompt + answer tokens",
        "prefill",
        "remote tokens",
        "MB",
        "codec",
        "exposed s",
        "texts equal",
    )
    for case in report.cases:
        rounds = len(case.handoffs)
        equal = (
            "yes" if case.texts_equal else f"{case.equal_to_decode_alone}, {case.equal_to_prefill_alone} of {rounds}"
        )
        table.add_row(
            _name(case),
            case.prefill,
            f"{case.remote_token_share:.1%}",
            f"{case.bytes.median / 1e6:.1f}",
            case.codec or "-",
            f"{case.exposed_seconds.median:.3f}",
            equal,
        )
    return table


def bars(report: PdReport) -> Text:
    """Seconds to the first text by prompt length and arrangement."""
    longest = max(getattr(case, name).ttft_seconds.median for case in report.cases for name in ARRANGEMENTS)
    text = Text("\nseconds to the first text\n")
    for case in {case.prompt_tokens: case for case in report.cases}.values():
        for name in ARRANGEMENTS:
            seconds = getattr(case, name).ttft_seconds.median
            together = name == "disaggregated"
            label = f"{case.prompt_tokens:7d} " if together else " " * 8
            note = f" (read {case.prefill})" if together and case.prefill != "remote" else ""
            bar = ("█" if together else "▒") * max(1, round(seconds / longest * BAR_CELLS))
            text.append(f"{label}{LABELS[name]:<14}{bar} {seconds:.2f} s{note}\n")
    return text


def _name(case: CaseResult) -> str:
    return f"{case.prompt_tokens} + {case.output_tokens}"


def _value(series: Series) -> str:
    return f"{series.median:.2f} ({series.low:.2f} to {series.high:.2f})"


def _ratio(series: Series | None) -> str:
    return "not compared" if series is None else f"{series.median:.2f} ({series.low:.2f} to {series.high:.2f})"
