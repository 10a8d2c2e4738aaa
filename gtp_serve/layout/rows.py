"""Maps between row numberings.  Every rearrangement that Megatron makes (interleave, halves, padding, permutation)
is on axis 0, so each is a list of row ranges, and a chain of them is one composition."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gtp_serve.layout.spans import Box, Span


@dataclass(frozen=True, slots=True)
class Rows:
    """``length`` rows from ``start`` on here are the rows from ``target`` on of ``name``."""

    start: int
    length: int
    name: str
    target: int


RowMap = tuple[Rows, ...]


def whole(name: str, length: int) -> RowMap:
    """All rows are the rows of ``name``."""
    return (Rows(0, length, name, 0),)


def merge(rows: Iterable[Rows]) -> RowMap:
    """Sorted by start, empty ranges dropped and neighbours joined."""
    merged: list[Rows] = []
    for r in sorted((r for r in rows if r.length > 0), key=lambda r: r.start):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.name == r.name
            and last.start + last.length == r.start
            and last.target + last.length == r.target
        ):
            merged[-1] = Rows(last.start, last.length + r.length, last.name, last.target)
        else:
            merged.append(r)
    return tuple(merged)


def clip(rows: RowMap, start: int, length: int) -> RowMap:
    """The map of rows ``start .. start + length``, renumbered from 0."""
    stop = start + length
    clipped = []
    for r in rows:
        lo, hi = max(start, r.start), min(stop, r.start + r.length)
        if lo < hi:
            clipped.append(Rows(lo - start, hi - lo, r.name, r.target + lo - r.start))
    return tuple(clipped)


def compose(outer: RowMap, inner: RowMap) -> RowMap:
    """Rows through a middle numbering: ``outer`` leads from here to the middle (its names do not matter), ``inner``
    from the middle to named tensors.  Middle rows that ``inner`` does not name are dropped (they are padding)."""
    return merge(
        Rows(o.start + piece.start, piece.length, piece.name, piece.target)
        for o in outer
        for piece in clip(inner, o.target, o.length)
    )


def spans(rows: RowMap, columns: tuple[int, int] | None) -> tuple[Span, ...]:
    """Spans of a shard whose rows are mapped so.

    :param columns: (first logical column, number of columns) of a matrix shard; None for a vector.
    """
    if columns is None:
        return tuple([Span(r.name, Box((r.start,), (r.length,)), Box((r.target,), (r.length,))) for r in rows])
    first, count = columns
    return tuple(
        [Span(r.name, Box((r.start, 0), (r.length, count)), Box((r.target, first), (r.length, count))) for r in rows]
    )
