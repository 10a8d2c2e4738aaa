"""The picture of a run as SVG: tokens a second and requests under way over time, pushes as bands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

_WIDTH, _HEIGHT = 900, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 60, 50, 50
_STEPS = (1, 2, 5, 10)

Scale = Callable[[float], float]
Band = tuple[float, float, str, bool]
"""Begin and end in seconds, label, whether it went well."""


def draw(points: Sequence[tuple[float, float, int]], bands: Sequence[Band], seconds: float, title: str) -> str:
    """The file's text.

    :param points: of ``bench_numbers.timeline``.
    """
    rate_top = _nice(max((rate for _, rate, _ in points), default=1.0))
    run_top = _nice(max((running for _, _, running in points), default=1))

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * at / seconds

    def y(share: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
        *(_band(x(start), x(min(end, seconds)), label, good) for start, end, label, good in bands),
        *_grid(x, y, seconds, rate_top, run_top),
        _line([(x(at), y(running / run_top)) for at, _, running in points], "#b36b00", "4 3"),
        _line([(x(at), y(rate / rate_top)) for at, rate, _ in points], "#0b5fa5", ""),
        f'<text x="{_LEFT}" y="40" fill="#0b5fa5">output tokens/s</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="40" text-anchor="end" fill="#b36b00">requests under way</text>',
        f'<text x="{(_WIDTH + _LEFT - _RIGHT) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">seconds</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _nice(value: float) -> float:
    """The next round number that is not below."""
    if value <= 0:
        return 1.0
    unit = 10 ** math.floor(math.log10(value))
    return float(next(step * unit for step in _STEPS if step * unit >= value * 0.999999))


def _band(left: float, right: float, label: str, good: bool) -> str:
    colour = "#d7eedd" if good else "#f7d4d4"
    return (
        f'<rect x="{left:.1f}" y="{_TOP}" width="{max(1.0, right - left):.1f}" height="{_HEIGHT - _TOP - _BOTTOM}" '
        f'fill="{colour}"/><text x="{left + 3:.1f}" y="{_TOP + 13}" font-size="10">{escape(label)}</text>'
    )


def _line(points: Sequence[tuple[float, float]], colour: str, dashes: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashed}/>'


def _grid(x: Scale, y: Scale, seconds: float, rate_top: float, run_top: float) -> list[str]:
    parts = []
    for quarter in range(5):
        share, at = quarter / 4, seconds * quarter / 4
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(share):.1f}" y2="{y(share):.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{y(share) + 4:.1f}" text-anchor="end" fill="#0b5fa5">{rate_top * share:g}</text>'
            f'<text x="{_WIDTH - _RIGHT + 6}" y="{y(share) + 4:.1f}" fill="#b36b00">{run_top * share:g}</text>'
            f'<text x="{x(at):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{at:.3g}</text>'
        )
    return parts
