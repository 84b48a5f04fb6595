"""Time to the first text against the prompt's length, as an SVG picture."""

from __future__ import annotations

from tandem.bench.pd.bench import LABELS
from tandem.bench.pd.report import ARRANGEMENTS, Arrangement, PdReport

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 60
STEPS = 5
COLORS: dict[Arrangement, str] = {"disaggregated": "#06c", "decode_alone": "#c33", "prefill_alone": "#999"}


class Axes:
    """Maps (prompt tokens, seconds) to the picture; both axes begin at 0."""

    def __init__(self, tokens: float, seconds: float) -> None:
        self.tokens, self.seconds = tokens, seconds

    def x(self, tokens: float) -> float:
        """Pixels from the left."""
        return LEFT + tokens / self.tokens * (WIDTH - LEFT - RIGHT)

    def y(self, seconds: float) -> float:
        """Pixels from the top."""
        return HEIGHT - BOTTOM - seconds / self.seconds * (HEIGHT - TOP - BOTTOM)


def svg(report: PdReport) -> str:
    """The picture: every answer as a point, medians over all answers to prompts of one length joined by a line. Points
    of cases that were not compared are hollow."""
    highest = max(getattr(case, name).ttft_seconds.high for case in report.cases for name in ARRANGEMENTS)
    axes = Axes(1.05 * report.plan.longest, 1.1 * highest)
    sides = f"{report.plan.prefill.engine} reads, {report.plan.decode.engine} writes"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">Time to first text: {sides}</text>',
        *_grid(axes),
    ]
    for number, name in enumerate(ARRANGEMENTS):
        parts += _arrangement(report, axes, name)
        y = TOP + 16 * number + 8
        parts.append(f'<line x1="{LEFT + 12}" y1="{y}" x2="{LEFT + 37}" y2="{y}" stroke="{COLORS[name]}"/>')
        parts.append(f'<text x="{LEFT + 42}" y="{y + 4}">{LABELS[name]}</text>')
    return "\n".join([*parts, "</svg>", ""])


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


def _grid(axes: Axes) -> list[str]:
    parts = []
    for step in range(STEPS + 1):
        tokens, seconds = axes.tokens * step / STEPS, axes.seconds * step / STEPS
        x, y = axes.x(tokens), axes.y(seconds)
        parts += [
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{seconds:.2f}</text>',
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tokens:.0f}</text>',
        ]
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 16}" text-anchor="middle">prompt tokens</text>')
    parts.append(f'<text x="16" y="{HEIGHT / 2}" transform="rotate(-90 16 {HEIGHT / 2})">seconds</text>')
    return parts
