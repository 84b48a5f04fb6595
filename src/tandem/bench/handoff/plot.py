"""Time to the first token against the link's rate, as an SVG picture."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.bench.handoff.report import FirstToken
from tandem.bench.picture import TOP, WIDTH, Axes, picture

CURVE_POINTS = 60


def svg(result: FirstToken) -> str:
    """The picture: every hand-off as a point, medians joined by a line, and the bound as a dashed curve."""
    links = result.links
    axes = Axes(
        1.1 * max(link.link_bytes_per_second.high for link in links), 1.15 * max(link.ttft.high for link in links)
    )
    slowest = min(link.link_bytes_per_second.low for link in links)
    prefill = sorted(link.prefill.median for link in links)[len(links) // 2]
    rates = [slowest + (axes.across - slowest) * number / CURVE_POINTS for number in range(CURVE_POINTS + 1)]
    bound = [(rate, max(prefill, result.payload_bytes / rate)) for rate in rates]
    serial = [(rate, prefill + result.payload_bytes / rate) for rate in rates]
    measured = sorted((link.link_bytes_per_second.median, link.ttft.median) for link in links)
    parts = [
        _line(axes, bound, "#c33", 'stroke-dasharray="6 4"'),
        _line(axes, serial, "#999", 'stroke-dasharray="2 3"'),
        _line(axes, measured, "#06c", ""),
    ]
    for link in links:
        for rate, seconds in zip(link.link_bytes_per_second.rounds, link.ttft.rounds, strict=True):
            parts.append(f'<circle cx="{axes.x(rate):.1f}" cy="{axes.y(seconds):.1f}" r="3" fill="#06c"/>')
    for number, (color, label) in enumerate(
        (("#06c", "measured"), ("#c33", "max(prefill, transfer)"), ("#999", "prefill + transfer"))
    ):
        y = TOP + 16 * number
        parts.append(f'<line x1="{WIDTH - 190}" y1="{y}" x2="{WIDTH - 165}" y2="{y}" stroke="{color}"/>')
        parts.append(f'<text x="{WIDTH - 160}" y="{y + 4}">{label}</text>')
    title = f"Time to first token, {result.payload_bytes / 1e6:.0f} MB of KV"
    return picture(title, axes, "link, MB/s", lambda rate: f"{rate / 1e6:.1f}", parts)


def _line(axes: Axes, points: Sequence[tuple[float, float]], color: str, style: str) -> str:
    inside = [(rate, min(seconds, axes.seconds)) for rate, seconds in points]
    path = " ".join(f"{axes.x(rate):.1f},{axes.y(seconds):.1f}" for rate, seconds in inside)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5" {style}/>'
