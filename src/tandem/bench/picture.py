"""What the benches' SVG pictures share: a frame with a title, two axes that begin at 0, and a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 60
STEPS = 5


class Axes:
    """Maps (what is measured against, seconds) to the picture.

    Args:
        across: the largest value to the right.
        seconds: the largest value upwards.
    """

    def __init__(self, across: float, seconds: float) -> None:
        self.across, self.seconds = across, seconds

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return LEFT + value / self.across * (WIDTH - LEFT - RIGHT)

    def y(self, seconds: float) -> float:
        """Pixels from the top."""
        return HEIGHT - BOTTOM - seconds / self.seconds * (HEIGHT - TOP - BOTTOM)


def picture(title: str, axes: Axes, label: str, write: Callable[[float], str], parts: Iterable[str]) -> str:
    """The whole SVG.

    Args:
        label: what the axis to the right shows.
        write: a value of it, as text.
        parts: what is drawn over the grid.
    """
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{title}</text>',
    ]
    return "\n".join([*head, *_grid(axes, label, write), *parts, "</svg>", ""])


def _grid(axes: Axes, label: str, write: Callable[[float], str]) -> list[str]:
    parts = []
    for step in range(STEPS + 1):
        value, seconds = axes.across * step / STEPS, axes.seconds * step / STEPS
        x, y = axes.x(value), axes.y(seconds)
        parts += [
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{seconds:.2f}</text>',
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{write(value)}</text>',
        ]
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 16}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="16" y="{HEIGHT / 2}" transform="rotate(-90 16 {HEIGHT / 2})">seconds</text>')
    return parts
