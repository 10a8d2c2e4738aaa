"""Boxes, spans and exactly-once coverage: the one idea of the project, as integers.  No torch.

A *logical tensor* has the name and shape it has in a Hugging Face checkpoint.  Whatever is stored or wanted
(a chunk of a file, a trainer rank's padded shard, a server's fused parameter) is a ``Shard``: a rectangular
piece with spans that say which of its elements are which elements of which logical tensors.  Padding is what
no span covers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from gtp_serve.errors import LayoutMismatch

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open rectangle: ``start[i] <= index[i] < start[i] + shape[i]``."""

    start: Shape
    shape: Shape

    @staticmethod
    def whole(shape: Shape) -> Box:
        """The box of a whole tensor."""
        return Box((0,) * len(shape), shape)

    @property
    def stop(self) -> Shape:
        """One past the last index on each axis."""
        return tuple([a + n for a, n in zip(self.start, self.shape, strict=True)])

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def shifted(self, by: Shape) -> Box:
        """The same rectangle, moved."""
        return Box(tuple(a + d for a, d in zip(self.start, by, strict=True)), self.shape)

    def inside(self, shape: Shape) -> bool:
        """Whether the box lies in a tensor of this shape."""
        if self.shape == shape and not any(self.start):  # the common case
            return len(self.start) == len(shape) and min(shape, default=0) >= 0
        if len(shape) != len(self.start):
            return False
        for first, count, size in zip(self.start, self.shape, shape, strict=True):
            if first < 0 or count < 0 or first + count > size:
                return False
        return True

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def intersect(a: Box, b: Box) -> Box | None:
    """Elements in both boxes, or None when there are none (an empty box meets nothing)."""
    start = tuple(map(max, a.start, b.start))
    stop = map(min, a.stop, b.stop)
    shape = tuple([hi - lo for lo, hi in zip(start, stop, strict=True)])
    return Box(start, shape) if min(shape, default=1) > 0 else None


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``local`` of a shard are elements ``logical`` of the logical tensor ``name``; both have one shape."""

    name: str
    local: Box
    logical: Box

    def __post_init__(self) -> None:
        if self.local.shape != self.logical.shape:
            raise ValueError(f"span of {self.name}: {self.local.shape} is not {self.logical.shape}")
        # Spans also come from other processes; all that is done with boxes counts on this.
        if not len(self.local.start) == len(self.logical.start) == len(self.local.shape):
            raise ValueError(f"span of {self.name}: {self.local.start} or {self.logical.start} has another rank")


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangular piece of storage and what it holds.

    ``key`` is the name where it lies (for messages); ``shape`` and ``dtype`` (torch's name without the prefix,
    for example ``bfloat16``) describe the piece itself, padding included.  A shard without spans holds only padding.
    """

    key: str
    shape: Shape
    dtype: str
    spans: tuple[Span, ...]


def overlaps(have: Span, want: Span) -> tuple[Box, Box] | None:
    """Where one span's elements lie in the other's shard: (box in the source, box in the destination) or None."""
    if have.name != want.name:
        return None
    if have.logical == want.logical:  # the common case, and no new boxes
        return (have.local, want.local) if have.logical.volume else None
    source: list[int] = []
    target: list[int] = []
    shape: list[int] = []
    # One loop instead of intersect and two shifts: a plan asks this for each pair that may meet.
    a, b, ours, theirs = have.logical, want.logical, have.local.start, want.local.start
    for h, h_count, h_at, w, w_count, w_at in zip(a.start, a.shape, ours, b.start, b.shape, theirs, strict=True):
        first = h if h > w else w
        count = (h + h_count if h + h_count < w + w_count else w + w_count) - first
        if count <= 0:
            return None
        source.append(first - h + h_at)
        target.append(first - w + w_at)
        shape.append(count)
    common = tuple(shape)
    return (
        have.local if common == a.shape else Box(tuple(source), common),
        want.local if common == b.shape else Box(tuple(target), common),
    )


def check_coverage(name: str, shape: Shape, pieces: Sequence[tuple[Box, str]], needed: str = "") -> None:
    """Refuse unless the boxes cover the tensor ``name`` of this shape exactly once.

    :param pieces: each box with the key of the shard it comes from.
    :param needed: a word on what wants the tensor, for the message.
    :raises LayoutMismatch: naming the tensor, the first missing or doubled rectangle and the shards at fault.
    """
    pieces = [(box, key) for box, key in pieces if box.volume]
    for box, key in pieces:
        if not box.inside(shape):
            raise LayoutMismatch(
                f"{name}: {key} claims {box}, outside the tensor's shape {list(shape)}", code="ckpt-coverage"
            )
    doubled = _first_overlap(pieces)
    if doubled is not None:
        box, first, second = doubled
        raise LayoutMismatch(
            f"{name}: elements {box} come twice", [("from", f"{first} and {second}")], code="ckpt-coverage"
        )
    if sum(box.volume for box, _ in pieces) != prod(shape):
        hole = _first_hole(shape, [box for box, _ in pieces])
        where = f"elements {hole}" if pieces else f"the whole tensor {list(shape)}"
        raise LayoutMismatch(
            f"{name}: {where} are missing" if pieces else f"{name}: {where} is missing",
            [("needed by", needed)] if needed else (),
            code="ckpt-coverage",
        )


def _first_overlap(pieces: Sequence[tuple[Box, str]]) -> tuple[Box, str, str] | None:
    """The first pair of boxes with a common element, by a sweep over the axis that separates them best."""
    if len(pieces) < 2:
        return None
    rank = len(pieces[0][0].start)
    axis = max(range(rank), key=lambda a: len({box.start[a] for box, _ in pieces}), default=0)
    if rank == 0:
        return pieces[0][0], pieces[0][1], pieces[1][1]
    active: list[tuple[Box, str]] = []
    for box, key in sorted(pieces, key=lambda piece: piece[0].start[axis]):
        active = [other for other in active if other[0].stop[axis] > box.start[axis]]
        for other, other_key in active:
            common = intersect(other, box)
            if common is not None:
                return common, other_key, key
        active.append((box, key))
    return None


def holes(shape: Shape, boxes: Iterable[Box]) -> list[Box]:
    """Disjoint rectangles that together are what none of the boxes covers, in row-major order of their starts."""
    left = [Box.whole(shape)] if prod(shape) else []
    for box in boxes:
        left = [piece for hole in left for piece in _subtract(hole, box)]
    return sorted(left, key=lambda hole: hole.start)


def _first_hole(shape: Shape, boxes: Iterable[Box]) -> Box:
    """The first rectangle (in row-major order) that none of the disjoint boxes covers; there must be one."""
    return holes(shape, boxes)[0]


def _subtract(hole: Box, box: Box) -> Iterator[Box]:
    common = intersect(hole, box)
    if common is None:
        yield hole
        return
    start, stop = list(hole.start), list(hole.stop)
    for axis in range(len(start)):
        for lo, hi in ((start[axis], common.start[axis]), (common.stop[axis], stop[axis])):
            if lo < hi:
                piece_start, piece_stop = list(start), list(stop)
                piece_start[axis], piece_stop[axis] = lo, hi
                yield Box(tuple(piece_start), tuple(b - a for a, b in zip(piece_start, piece_stop, strict=True)))
        start[axis], stop[axis] = common.start[axis], common.stop[axis]
