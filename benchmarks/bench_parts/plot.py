"""Pictures as SVG: bars with their spread, and curves on logarithmic axes.  No library, no script, one font."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from bench_parts.numbers import Spread, significant

_COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#65a30d", "#6b7280")
_ROW, _LEFT, _WIDTH = 22, 210, 760


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One measurement."""

    label: str
    value: Spread
    ours: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Bars of one kind, and the machine's limit for them."""

    title: str
    bars: Sequence[Bar]
    limit: float | None = None


def draw_bars(title: str, panels: Sequence[Panel]) -> str:
    """Panels below one another; a thin line on each bar goes from its lowest to its highest value."""
    parts: list[str] = []
    top = 40
    for panel in panels:
        parts.append(_text(10, top + 14, panel.title, bold=True))
        top += 24
        longest = max([bar.value.high for bar in panel.bars] + [panel.limit or 0.0]) or 1.0
        scale = (_WIDTH - _LEFT - 90) / longest
        for bar in panel.bars:
            parts += _bar(bar, top, scale)
            top += _ROW
        if panel.limit is not None:
            parts += _limit(panel, top, scale)
            top += 18
        top += 14
    return _svg(_WIDTH, top, title, parts)


def _bar(bar: Bar, top: int, scale: float) -> list[str]:
    value, middle = bar.value, top + _ROW / 2 - 2
    colour = _COLOURS[0] if bar.ours else _COLOURS[-1]
    low, high = _LEFT + value.low * scale, _LEFT + value.high * scale
    return [
        _text(_LEFT - 8, middle + 4, bar.label, anchor="end"),
        f'<rect x="{_LEFT}" y="{top}" width="{value.median * scale:.1f}" height="{_ROW - 5}" fill="{colour}"/>',
        f'<line x1="{low:.1f}" y1="{middle:.1f}" x2="{high:.1f}" y2="{middle:.1f}" stroke="currentColor"/>',
        _text(max(high, _LEFT + value.median * scale) + 6, middle + 4, significant(value.median)),
    ]


def _limit(panel: Panel, bottom: int, scale: float) -> list[str]:
    at = _LEFT + (panel.limit or 0.0) * scale
    first = bottom - _ROW * len(panel.bars)
    dashes = 'stroke="#dc2626" stroke-dasharray="4 3"'
    words = f"the machine's limit {significant(panel.limit or 0.0)}"
    return [
        f'<line x1="{at:.1f}" y1="{first}" x2="{at:.1f}" y2="{bottom}" {dashes}/>',
        _text(at, bottom + 12, words, anchor="end"),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Points of one series."""

    label: str
    points: Sequence[tuple[float, float]]


def draw_curves(title: str, across: str, up: str, curves: Sequence[Curve]) -> str:
    """Both axes logarithmic, with a line at each power of ten.

    :raises ValueError: a value that is not positive, or no point.
    """
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    if not xs or min(*xs, *ys, 1.0) <= 0:
        raise ValueError("logarithmic axes need positive values")
    left, right, top, bottom = 70.0, 560.0, 40.0, 330.0
    place_x, place_y = _axis(min(xs), max(xs), left, right), _axis(min(ys), max(ys), bottom, top)
    parts = [_text((left + right) / 2, bottom + 38, across, anchor="middle"), _text(10, top - 8, up)]
    for power in _powers(min(xs), max(xs)):
        at = place_x(power)
        parts += [_grid(at, top, at, bottom), _text(at, bottom + 16, f"{power:g}", anchor="middle")]
    for power in _powers(min(ys), max(ys)):
        at = place_y(power)
        parts += [_grid(left, at, right, at), _text(left - 6, at + 4, f"{power:g}", anchor="end")]
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in curve.points)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="3" fill="{colour}"/>' for x, y in curve.points
        ]
        parts.append(_text(right + 12, top + 18 * number + 10, curve.label, colour=colour))
    return _svg(_WIDTH, 380, title, parts)


class _Axis:
    """From values to places."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low = math.log10(low)
        self._span = (math.log10(high) - self._low) or 1.0
        self._start, self._length = start, end - start

    def __call__(self, value: float) -> float:
        return self._start + (math.log10(value) - self._low) / self._span * self._length


def _axis(low: float, high: float, start: float, end: float) -> _Axis:
    return _Axis(low, high, start, end)


def _powers(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="currentColor" stroke-opacity="0.15"/>'
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False, colour: str = "") -> str:
    more = (' font-weight="bold"' if bold else "") + (f' fill="{colour}"' if colour else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """White behind it: the documentation shows it on a dark page too."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
            ' font-family="sans-serif" font-size="12" color="#222" fill="#222">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            _text(10, 20, title, bold=True),
            *parts,
            "</svg>",
            "",
        ]
    )
