"""Who sends what when several ranks hold the same rows: every logical element has one owner.  No torch.

Data-parallel replicas, norms held by every tensor-parallel rank and a tied head beside its embedding are all the
same case: spans of several shards that name the same elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gtp_serve.errors import LayoutMismatch
from gtp_serve.layout.spans import Box, Shape, Shard, Span, holes, intersect
from gtp_serve.refit.plan import ITEM_BYTES, item_bytes

Held = tuple[int, int, Span]
"""Rank, index of its shard, and a span of it."""


@dataclass(slots=True)
class _Owners:
    """Spans given out so far, with each rank's bytes: a replica goes to the rank that has the least."""

    kept: list[list[list[Span]]]
    loads: list[int]

    def give(self, holders: Sequence[Held], shards: Sequence[Sequence[Shard]], free: Sequence[Box]) -> None:
        """Give the parts ``free`` (logical boxes) of a span that all ``holders`` hold to one of them."""
        rank, index, span = min(holders, key=lambda held: (self.loads[held[0]], held[0], held[1]))
        item = item_bytes(shards[rank][index])
        if len(free) == 1 and free[0] is span.logical:
            self.kept[rank][index].append(span)
            self.loads[rank] += span.logical.volume * item
            return
        by = tuple(a - b for a, b in zip(span.local.start, span.logical.start, strict=True))
        for box in free:
            self.kept[rank][index].append(Span(span.name, box.shifted(by), box))
            self.loads[rank] += box.volume * item


def sole_owners(ranks: Sequence[Sequence[Shard]], shapes: Mapping[str, Shape]) -> list[tuple[Shard, ...]]:
    """Each rank's shards with only those spans that this rank is to send.

    The same input gives the same answer in every process.  Nothing is said about what is missing.

    :raises LayoutMismatch: when a span names a tensor that is not in ``shapes``, leaves it or leaves its shard,
        or when a dtype is not known or copies of one tensor differ in it.
    """
    groups: dict[str, list[Held]] = {}
    for rank, shards in enumerate(ranks):
        for index, shard in enumerate(shards):
            _check(rank, shard, shapes)
            for span in shard.spans:
                if span.logical.volume:
                    groups.setdefault(span.name, []).append((rank, index, span))
    owners = _Owners([[[] for _ in shards] for shards in ranks], [0] * len(ranks))
    for name in sorted(groups):
        _one_dtype(name, groups[name], ranks)
        _share_out(groups[name], ranks, owners)
    return [
        tuple(_trimmed(shard, spans) for shard, spans in zip(shards, kept, strict=True))
        for shards, kept in zip(ranks, owners.kept, strict=True)
    ]


def _trimmed(shard: Shard, spans: Sequence[Span]) -> Shard:
    kept = tuple(spans)
    return shard if kept == shard.spans else replace(shard, spans=kept)


def _check(rank: int, shard: Shard, shapes: Mapping[str, Shape]) -> None:
    where = f"{shard.key} of trainer rank {rank}"
    if shard.dtype not in ITEM_BYTES:
        raise LayoutMismatch(f"{where}: dtype {shard.dtype} is not known", [("known", ", ".join(ITEM_BYTES))])
    for span in shard.spans:
        shape = shapes.get(span.name)
        if shape is None:
            raise LayoutMismatch(f"{where}: it holds {span.name}, which the served model does not have")
        if not span.logical.inside(shape):
            raise LayoutMismatch(f"{where}: {span.logical} lies outside {span.name}", [("its shape", str(list(shape)))])
        if not span.local.inside(shard.shape):
            raise LayoutMismatch(
                f"{where}: {span.local} of {span.name} lies outside the shard", [("its shape", str(list(shard.shape)))]
            )


def _one_dtype(name: str, held: Sequence[Held], ranks: Sequence[Sequence[Shard]]) -> None:
    dtypes = sorted({ranks[rank][index].dtype for rank, index, _ in held})
    if len(dtypes) > 1:
        raise LayoutMismatch(f"{name}: trainer ranks hold it as {' and as '.join(dtypes)}")


def _share_out(held: Sequence[Held], ranks: Sequence[Sequence[Shard]], owners: _Owners) -> None:
    """Share one logical tensor's spans out among those that hold them."""
    if len(held) == 1:
        owners.give(held, ranks, [held[0][2].logical])
        return
    copies: dict[Box, list[Held]] = {}
    for one in held:
        copies.setdefault(one[2].logical, []).append(one)
    axis = max(range(len(held[0][2].logical.shape)), key=lambda a: len({box.start[a] for box in copies}), default=None)
    if axis is None:  # a scalar: one box
        owners.give(held, ranks, [held[0][2].logical])
        return
    active: list[Box] = []
    for box in sorted(copies, key=lambda box: (box.start[axis], -box.volume, box.start, box.shape)):
        active = [other for other in active if other.stop[axis] > box.start[axis]]
        holders = copies[box]
        free = _free(box, active)
        owners.give(holders, ranks, [holders[0][2].logical] if free == [box] and len(holders) == 1 else free)
        active.append(box)


def _free(box: Box, taken: Sequence[Box]) -> list[Box]:
    """The parts of a box that the boxes before it do not cover."""
    met = [common for common in (intersect(box, other) for other in taken) if common is not None]
    if not met:
        return [box]
    back = tuple(-a for a in box.start)
    return [hole.shifted(box.start) for hole in holes(box.shape, [common.shifted(back) for common in met])]
