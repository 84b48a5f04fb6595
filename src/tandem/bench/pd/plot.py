"""Time to the first text against the prompt's length, as an SVG picture."""

from __future__ import annotations

from tandem.bench.pd.bench import LABELS
from tandem.bench.pd.report import ARRANGEMENTS, Arrangement, PdReport
from tandem.bench.picture import LEFT, TOP, Axes, picture

COLORS: dict[Arrangement, str] = {"disaggregated": "#06c", "decode_alone": "#c33", "prefill_alone": "#999"}


def svg(report: PdReport) -> str:
    """The picture: every answer as a point, medians over all answers to prompts of one length joined by a line. Points
    of cases that were not compared are hollow."""
    highest = max(getattr(case, name).ttft_seconds.high for case in report.cases for name in ARRANGEMENTS)
    axes = Axes(1.05 * report.plan.longest, 1.1 * highest)
    sides = f"{report.plan.prefill.engine} reads, {report.plan.decode.engine} writes"
    parts: list[str] = []
    for number, name in enumerate(ARRANGEMENTS):
        parts += _arrangement(report, axes, name)
        y = TOP + 16 * number + 8
        parts.append(f'<line x1="{LEFT + 12}" y1="{y}" x2="{LEFT + 37}" y2="{y}" stroke="{COLORS[name]}"/>')
        parts.append(f'<text x="{LEFT + 42}" y="{y + 4}">{LABELS[name]}</text>')
    return picture(f"Time to first text: {sides}", axes, "prompt tokens", "{:.0f}".format, parts)


def _arrangement(report: PdReport, axes: Axes, name: Arrangement) -> list[str]:
    color = COLORS[name]
    parts = []
    medians: dict[int, list[float]] = {}
    for case in report.cases:
        series = getattr(case, name).ttft_seconds
        medians.setdefault(case.prompt_tokens, []).append(series.median)
        fill = "white" if case.not_compared else color
        for seconds in series.rounds:
            place = f'cx="{axes.x(case.prompt_tokens):.1f}" cy="{axes.y(seconds):.1f}"'
            parts.append(f'<circle {place} r="3" fill="{fill}" stroke="{color}"/>')
    line = " ".join(
        f"{axes.x(tokens):.1f},{axes.y(sum(values) / len(values)):.1f}" for tokens, values in sorted(medians.items())
    )
    return [f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>', *parts]
