"""Medians with their spread, and the exponent of a curve."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    low: float
    high: float
    count: int

    def __truediv__(self, other: Spread | float) -> float:
        """The ratio of the medians."""
        return self.median / (other.median if isinstance(other, Spread) else other)

    def words(self, digits: int = 3) -> str:
        """``median (low to high)``, or the value alone when there is one or all are equal."""
        if self.low == self.high:
            return significant(self.median, digits)
        return (
            f"{significant(self.median, digits)} ({significant(self.low, digits)} to {significant(self.high, digits)})"
        )


def spread(values: Iterable[float]) -> Spread | None:
    """Of finite measurements; None when there is none.

    :raises ValueError: one is infinite or no number.
    """
    found = sorted(values)
    if not found:
        return None
    if not all(math.isfinite(value) for value in found):
        raise ValueError(f"not every measurement is a finite number: {found}")
    return Spread(median=statistics.median(found), low=found[0], high=found[-1], count=len(found))


def significant(value: float, digits: int = 3) -> str:
    """With so many significant digits, thousands separated, never in scientific notation."""
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    return f"{rounded:,.{max(0, places)}f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Power:
    """``y = factor * x ** exponent``, and how well it fits."""

    factor: float
    exponent: float
    r_squared: float
    """Share of the variance of log y that the fit explains; 1 when y does not vary."""

    def words(self) -> str:
        """The exponent as it stands in a table."""
        return f"{self.exponent:.2f} (r² {self.r_squared:.3f})"


def fit_power(xs: Sequence[float], ys: Sequence[float]) -> Power:
    """Least squares in logarithms.

    :raises ValueError: fewer than two different x, or a value that is not positive.
    """
    if len(xs) != len(ys) or len(set(xs)) < 2:
        raise ValueError(f"a fit needs two different x and as many y, not {list(xs)} and {list(ys)}")
    if min(*xs, *ys) <= 0:
        raise ValueError("a power law needs positive values")
    logs = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True)]
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*logs, strict=True))
    exponent = sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)
    offset = mean_y - exponent * mean_x
    varied = sum((y - mean_y) ** 2 for _, y in logs)
    missed = sum((y - offset - exponent * x) ** 2 for x, y in logs)
    explained = 1.0 if varied < 1e-18 else 1 - missed / varied
    return Power(factor=math.exp(offset), exponent=exponent, r_squared=explained)


def same_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """How many elements are equal before the first that differs."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
