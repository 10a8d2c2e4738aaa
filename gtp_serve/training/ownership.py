"""Which rank answers for each element of each logical tensor, when several hold it.  No torch.

Ranks along data-parallel axes hold the same rows, as do GTP ranks of a norm and tensor-parallel ranks of a router.
Whatever must happen once for an element (counting its gradient, writing it, sending it) is done by its owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gtp_serve.layout.spans import Box, Shape, Shard, Span, holes, intersect

Everyone = Sequence[Sequence[Shard]]
"""Each rank's shards, in rank order."""


@dataclass(frozen=True, slots=True)
class Owned:
    """What one rank owns of one of its shards; ``shard.spans`` are the owned ones only."""

    rank: int
    index: int
    shard: Shard


def owners(everyone: Everyone) -> list[Owned]:
    """Share every element out to exactly one of the ranks that hold it, evenly by number of elements.

    Every rank that calls this with the same shards gets the same answer.
    """
    holders: dict[tuple[str, Box], dict[int, tuple[int, Span]]] = {}
    for rank, shards in enumerate(everyone):
        for index, shard in enumerate(shards):
            for span in shard.spans:
                if span.logical.volume:
                    holders.setdefault((span.name, span.logical), {}).setdefault(rank, (index, span))
    load = [0] * len(everyone)
    spans: dict[tuple[int, int], list[Span]] = {}
    claimed: dict[str, list[Box]] = {}
    for (name, box), held in sorted(holders.items(), key=_largest_first):
        before = claimed.setdefault(name, [])
        left = _left(box, before)
        before.append(box)
        rank = min(held, key=lambda rank: (load[rank], rank))
        index, span = held[rank]
        load[rank] += sum(piece.volume for piece in left)
        spans.setdefault((rank, index), []).extend(_part(span, piece) for piece in left)
    return [
        Owned(rank, index, replace(everyone[rank][index], spans=tuple(sorted(found, key=_place))))
        for (rank, index), found in sorted(spans.items())
    ]


def owned_boxes(owned: Sequence[Owned], rank: int) -> Mapping[int, list[Box]]:
    """Index of a rank's shard -> boxes of the shard that the rank owns."""
    return {one.index: [span.local for span in one.shard.spans] for one in owned if one.rank == rank}


def shapes_of(everyone: Everyone) -> dict[str, Shape]:
    """The smallest shape of each logical tensor that has room for every span of it."""
    found: dict[str, Shape] = {}
    for shards in everyone:
        for shard in shards:
            for span in shard.spans:
                stop = span.logical.stop
                known = found.get(span.name, stop)
                found[span.name] = tuple(max(a, b) for a, b in zip(known, stop, strict=True))
    return found


def _largest_first(item: tuple[tuple[str, Box], object]) -> tuple[int, str, Shape]:
    (name, box), _ = item
    return -box.volume, name, box.start


def _left(box: Box, before: Sequence[Box]) -> list[Box]:
    """What of a box no earlier one has; boxes overlap without being equal only where key heads are repeated."""
    met = [common for one in before if (common := intersect(box, one)) is not None]
    if not met:
        return [box]
    back = tuple(-a for a in box.start)
    return [hole.shifted(box.start) for hole in holes(box.shape, [common.shifted(back) for common in met])]


def _part(span: Span, logical: Box) -> Span:
    if logical == span.logical:
        return span
    offset = tuple(a - b for a, b in zip(span.local.start, span.logical.start, strict=True))
    return Span(span.name, logical.shifted(offset), logical)


def _place(span: Span) -> tuple[Shape, str]:
    return span.local.start, span.name
