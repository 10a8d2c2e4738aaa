"""Buckets: what travels from which trainer rank to which engine ranks, in which order.  No torch.

Every participant computes the same ``Exchange`` from the same shard lists, so nothing but bytes is sent.  A row
that several engine ranks want goes to the first of a bucket's receivers, which passes the bucket on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

import xxhash

from gtp_serve.errors import LayoutMismatch, UsageError
from gtp_serve.layout.spans import Box, Shape, Shard, intersect
from gtp_serve.refit.collector import collector_paused
from gtp_serve.refit.plan import Copy, Fill, RefitPlan, build_plan, item_bytes
from gtp_serve.refit.transports.shares import sole_owners

DIGEST_BYTES = 16
"""xxh3-128 of a bucket's payload, in front of it."""
LEAST_BUCKET_BYTES = 1 << 10

Placed = tuple[int, int, Box]
"""Engine rank, index of its shard, and where in that shard a piece goes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a trainer's shard, row-major in its bucket."""

    shard: int
    box: Box
    size: int
    """Bytes."""
    places: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces that travel together from one trainer rank; the first receiver passes the bucket on to the others."""

    trainer: int
    receivers: tuple[int, ...]
    pieces: tuple[Piece, ...]
    size: int
    """Payload bytes, without the digest."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The whole transfer.  ``buckets`` are in the order in which everyone works through those that concern him:
    the first unfinished one can always go on, so nobody waits in a circle."""

    have: tuple[tuple[Shard, ...], ...]
    """Each trainer rank's shards with the spans that it sends."""
    want: tuple[tuple[Shard, ...], ...]
    """Each engine rank's shards."""
    buckets: tuple[Bucket, ...]
    fills: tuple[tuple[Fill, ...], ...]
    """Padding of each engine rank's shards."""

    @property
    def payload_bytes(self) -> int:
        """Bytes that leave the trainer ranks, digests apart."""
        return sum(bucket.size for bucket in self.buckets)

    def digest(self) -> str:
        """The same on all participants, or they must not begin."""
        state = xxhash.xxh3_128()
        for bucket in self.buckets:
            state.update(repr(bucket).encode())
        return state.hexdigest()

    def bucket_plan(self, bucket: Bucket, engine: int) -> RefitPlan:
        """Copies from a received bucket (one flat shard for each piece) into an engine rank's shards."""
        shards, copies = [], []
        for index, piece in enumerate(bucket.pieces):
            source = self.have[bucket.trainer][piece.shard]
            shards.append(replace(source, shape=piece.box.shape, spans=()))
            copies += [
                Copy(index, Box.whole(piece.box.shape), target, box)
                for rank, target, box in piece.places
                if rank == engine
            ]
        return RefitPlan(tuple(shards), self.want[engine], tuple(copies), ())

    def padding_plan(self, engine: int) -> RefitPlan:
        """An engine rank's padding, to be zeroed."""
        return RefitPlan((), self.want[engine], (), self.fills[engine])


def plan_exchange(
    trainers: Sequence[Sequence[Shard]],
    engines: Sequence[Sequence[Shard]],
    shapes: Mapping[str, Shape],
    bucket_bytes: int,
) -> Exchange:
    """Decide the whole transfer.

    :param shapes: each logical tensor of the served model.
    :param bucket_bytes: most payload of one bucket; a larger piece is cut.
    :raises LayoutMismatch: unless every logical element is held by a trainer rank and every wanted element is
        filled exactly once.
    :raises UsageError: for buckets that are too small to be useful.
    """
    if bucket_bytes < LEAST_BUCKET_BYTES:
        raise UsageError(f"buckets of {bucket_bytes} bytes; at least {LEAST_BUCKET_BYTES} are needed")
    with collector_paused():
        return _decide(trainers, engines, shapes, bucket_bytes)


def _decide(
    trainers: Sequence[Sequence[Shard]],
    engines: Sequence[Sequence[Shard]],
    shapes: Mapping[str, Shape],
    bucket_bytes: int,
) -> Exchange:
    have = sole_owners(trainers, shapes)
    plan = _plan(have, [shard for shards in engines for shard in shards], shapes)
    homes = [(rank, index) for rank, shards in enumerate(have) for index in range(len(shards))]
    rooms = [(rank, index) for rank, shards in enumerate(engines) for index in range(len(shards))]
    fills: list[list[Fill]] = [[] for _ in engines]
    for fill in plan.fills:
        rank, index = rooms[fill.target]
        fills[rank].append(Fill(index, fill.box))
    streams: list[list[Piece]] = [[] for _ in have]
    for source, copies in _by_source(plan.copies):
        trainer, index = homes[source]
        item = item_bytes(plan.have[source])
        streams[trainer] += [
            small
            for box, found in _disjoint(copies)
            for small in _cut(Piece(index, box, box.volume * item, _places(box, found, rooms)), item, bucket_bytes)
        ]
    packed = [_pack(trainer, pieces, bucket_bytes) for trainer, pieces in enumerate(streams)]
    order = tuple(bucket for row in zip_longest(*packed) for bucket in row if bucket is not None)
    return Exchange(tuple(have), tuple(map(tuple, engines)), order, tuple(map(tuple, fills)))


def _plan(have: Sequence[Sequence[Shard]], want: Sequence[Shard], shapes: Mapping[str, Shape]) -> RefitPlan:
    try:
        return build_plan([shard for shards in have for shard in shards], want, shapes)
    except LayoutMismatch:
        # Once more, for a message that says whose shards they are: ranks call them by the same names.
        named = [
            replace(shard, key=f"{shard.key} of trainer rank {rank}")
            for rank, shards in enumerate(have)
            for shard in shards
        ]
        return build_plan(named, want, shapes)


def _by_source(copies: Sequence[Copy]) -> Iterator[tuple[int, list[Copy]]]:
    """The plan's copies are sorted by their source."""
    group: list[Copy] = []
    for copy in copies:
        if group and group[0].source != copy.source:
            yield group[0].source, group
            group = []
        group.append(copy)
    if group:
        yield group[0].source, group


def _disjoint(copies: Sequence[Copy]) -> list[tuple[Box, list[Copy]]]:
    """Disjoint source boxes, each with all the copies that read it; boxes that meet in part are cut."""
    groups: dict[Box, list[Copy]] = {}
    for copy in copies:
        groups.setdefault(copy.source_box, []).append(copy)
    if len(groups) == 1 or not copies[0].source_box.shape:
        return list(groups.items())
    done: list[tuple[Box, list[Copy]]] = []
    active: list[tuple[Box, list[Copy]]] = []
    for box in sorted(groups, key=lambda box: box.start):
        first = box.start[0]
        done += [one for one in active if one[0].stop[0] <= first]
        active = [one for one in active if one[0].stop[0] > first]
        active = _overlay(active, box, groups[box])
    return sorted(done + active, key=lambda one: one[0].start)


def _overlay(active: list[tuple[Box, list[Copy]]], box: Box, copies: list[Copy]) -> list[tuple[Box, list[Copy]]]:
    out: list[tuple[Box, list[Copy]]] = []
    left = [box]
    for other, others in active:
        common = intersect(other, box)
        if common is None:
            out.append((other, others))
            continue
        out.append((common, [*others, *copies]))
        out += [(rest, others) for rest in _minus(other, common)]
        left = [rest for piece in left for rest in _minus(piece, common)]
    return out + [(rest, copies) for rest in left]


def _minus(box: Box, other: Box) -> list[Box]:
    common = intersect(box, other)
    if common is None:
        return [box]
    left: list[Box] = []
    start, stop = list(box.start), list(box.stop)
    for axis in range(len(start)):
        for lo, hi in ((start[axis], common.start[axis]), (common.stop[axis], stop[axis])):
            if lo < hi:
                first, last = [*start], [*stop]
                first[axis], last[axis] = lo, hi
                left.append(Box(tuple(first), tuple(b - a for a, b in zip(first, last, strict=True))))
        start[axis], stop[axis] = common.start[axis], common.stop[axis]
    return left


def _places(box: Box, copies: Sequence[Copy], rooms: Sequence[tuple[int, int]]) -> tuple[Placed, ...]:
    found: list[Placed] = []
    for copy in copies:
        if box == copy.source_box:
            found.append((*rooms[copy.target], copy.target_box))
            continue
        by = tuple(t - s for t, s in zip(copy.target_box.start, copy.source_box.start, strict=True))
        found.append((*rooms[copy.target], box.shifted(by)))
    if len(found) == 1:
        return tuple(found)
    return tuple(sorted(found, key=lambda place: (place[0], place[1], place[2].start)))


def _cut(piece: Piece, item: int, most: int) -> Iterator[Piece]:
    """The piece in parts of at most ``most`` bytes, along the first axis that is longer than one."""
    if piece.size <= most:
        yield piece
        return
    axis = next(axis for axis, count in enumerate(piece.box.shape) if count > 1)
    row = piece.size // piece.box.shape[axis]
    step = max(1, most // row)
    for first in range(0, piece.box.shape[axis], step):
        count = min(step, piece.box.shape[axis] - first)
        part = Piece(
            piece.shard,
            _part(piece.box, axis, first, count),
            count * row,
            tuple((rank, index, _part(box, axis, first, count)) for rank, index, box in piece.places),
        )
        yield from _cut(part, item, most)


def _part(box: Box, axis: int, first: int, count: int) -> Box:
    start, shape = list(box.start), list(box.shape)
    start[axis], shape[axis] = start[axis] + first, count
    return Box(tuple(start), tuple(shape))


def _pack(trainer: int, pieces: Sequence[Piece], most: int) -> list[Bucket]:
    """One trainer's pieces in buckets, one open bucket for each set of receivers."""
    buckets: list[Bucket] = []
    filling: dict[tuple[int, ...], tuple[list[Piece], int]] = {}
    turns: Counter[tuple[int, ...]] = Counter()

    def close(receivers: tuple[int, ...]) -> None:
        held, size = filling.pop(receivers)
        first = (trainer + turns[receivers]) % len(receivers)  # each of a set passes on its part of the set's buckets
        turns[receivers] += 1
        buckets.append(Bucket(trainer, receivers[first:] + receivers[:first], tuple(held), size))

    for piece in pieces:
        receivers = tuple(sorted({rank for rank, _, _ in piece.places}))
        if filling.get(receivers, ([], 0))[1] + piece.size > most:
            close(receivers)
        held, size = filling.get(receivers, ([], 0))
        held.append(piece)
        filling[receivers] = (held, size + piece.size)
    for receivers in list(filling):
        close(receivers)
    return buckets


def offsets(bucket: Bucket) -> list[int]:
    """Where each piece begins in the payload."""
    return [0, *accumulate(piece.size for piece in bucket.pieces)][:-1]


class KeptExchange:
    """The last exchange, with what it was decided from: a trainer pushes from the same layout again and again."""

    def __init__(self) -> None:
        self._key = ""
        self._exchange: Exchange | None = None

    def get(self, told: Sequence[bytes], bucket_bytes: int, decide: Callable[[], Exchange]) -> Exchange:
        """The exchange for these manifests, decided now unless they are the last ones again."""
        state = xxhash.xxh3_128(str(bucket_bytes).encode())
        for one in told:
            state.update(len(one).to_bytes(8, "little") + one)
        key = state.hexdigest()
        if self._exchange is None or self._key != key:
            self._exchange, self._key = decide(), key
        return self._exchange


def check_digests(mine: str, others: Mapping[str, str]) -> None:
    """Refuse to begin unless all participants have decided the same transfer.

    :param others: each participant with the digest of its ``Exchange``.
    :raises LayoutMismatch: naming those that differ.
    """
    odd = [who for who, digest in others.items() if digest != mine]
    if odd:
        raise LayoutMismatch(
            f"{', '.join(odd)} would transfer something else than this process",
            [("needed", "the same release of gtp-serve on both sides")],
            code="update-plan",
        )
