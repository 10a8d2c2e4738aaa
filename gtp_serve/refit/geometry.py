"""Copies as integers: cut into pieces, and as rows of bytes between two row-major tensors.  No torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod

from gtp_serve.layout.spans import Box, Shape
from gtp_serve.refit.plan import Copy
from gtp_serve.refit.source import Rows


def cut(copy: Copy, item: int, limit: int) -> Iterator[Copy]:
    """The copy in pieces of at most ``limit`` bytes, along its leading axes; one element is never cut.

    :param item: bytes of one element of the source.
    """
    shape = copy.source_box.shape
    axis, inner = 0, copy.source_box.volume * item
    if inner <= limit:
        yield copy
        return
    while axis < len(shape):
        inner //= shape[axis]
        if inner <= limit:
            break
        axis += 1
    if axis == len(shape):  # even one element is more
        axis -= 1
    step = max(1, limit // max(1, inner))
    for outer in product(*map(range, shape[:axis])):
        for first in range(0, shape[axis], step):
            count = min(step, shape[axis] - first)
            yield Copy(
                copy.source,
                _part(copy.source_box, (*outer, first), count),
                copy.target,
                _part(copy.target_box, (*outer, first), count),
            )


def _part(box: Box, first: Shape, count: int) -> Box:
    """``count`` indices of one axis, from ``first[-1]`` on, and one index of each axis before it."""
    axis = len(first) - 1
    start = tuple(a + b for a, b in zip(box.start, (*first, *[0] * (len(box.start) - axis - 1)), strict=True))
    return Box(start, (*[1] * axis, count, *box.shape[axis + 1 :]))


def byte_rows(
    source_shape: Shape,
    source_box: Box,
    target_shape: Shape,
    target_box: Box,
    item: int,
    address: int,
    *,
    target_item: int = 0,
    convert: int = 0,
) -> list[Rows]:
    """The copy of one box onto another of the same shape, as rows that are contiguous on both sides.

    :param item: bytes of one element of the source; of the target too unless ``target_item`` says otherwise.
    :param address: of the target's first element.
    :param convert: what the rows say of how elements become others.
    :raises ValueError: when a box leaves its tensor.
    """
    made = target_item or item
    if len(source_shape) == len(target_shape) == 2 and len(source_box.start) == len(target_box.start) == 2:
        matrix = _matrix_rows(source_shape, source_box, target_shape, target_box, item, address, made, convert)
        if matrix is not None:
            return matrix
    if not source_box.inside(source_shape) or not target_box.inside(target_shape):
        raise ValueError(f"{source_box} of {list(source_shape)} cannot become {target_box} of {list(target_shape)}")
    if source_box.shape and source_box.shape[1:] == source_shape[1:] == target_shape[1:]:  # whole rows: the common case
        width, count = prod(source_shape[1:]), source_box.shape[0]
        size = width * count
        if not size:
            return []
        to = address + target_box.start[0] * width * made
        return [Rows(source_box.start[0] * width * item, size * item, size * item, 1, to, size * made, convert)]
    there, here = _strides(source_shape), _strides(target_shape)
    start, to, size, axes = 0, 0, 1, list[tuple[int, int, int]]()  # all in elements
    for axis in range(len(there) - 1, -1, -1):
        count, from_source, to_target = source_box.shape[axis], there[axis], here[axis]
        start += source_box.start[axis] * from_source
        to += target_box.start[axis] * to_target
        if count == 1:
            continue
        if not axes and from_source == to_target == size:
            size *= count
        elif axes and _continues(axes[-1], from_source, to_target):
            inner = axes[-1]
            axes[-1] = (inner[0] * count, inner[1], inner[2])
        else:
            axes.append((count, from_source, to_target))
    start, address = start * item, address + to * made
    if not axes:
        return [Rows(start, size * item, size * item, 1, address, size * made, convert)] if size else []
    (count, from_source, to_target), *outer = axes
    if not size * count:
        return []
    step = (from_source * item, size * item, count)
    if not outer:
        return [Rows(start, *step, address, to_target * made, convert)]
    return [
        Rows(
            start + item * sum(i * axis[1] for i, axis in zip(at, reversed(outer), strict=True)),
            *step,
            address + made * sum(i * axis[2] for i, axis in zip(at, reversed(outer), strict=True)),
            to_target * made,
            convert,
        )
        for at in product(*(range(axis[0]) for axis in reversed(outer)))
    ]


def _matrix_rows(
    source_shape: Shape,
    source_box: Box,
    target_shape: Shape,
    target_box: Box,
    item: int,
    address: int,
    made: int,
    convert: int,
) -> list[Rows] | None:
    """The same for two matrices, in the few steps that thousands of small copies can pay for.

    None for what the general way is to answer or to refuse: empty boxes, and boxes that leave their tensor.
    """
    (high, wide), (to_high, to_wide) = source_shape, target_shape
    (row, column), (to_row, to_column) = source_box.start, target_box.start
    rows, columns = source_box.shape
    if (
        target_box.shape != source_box.shape
        or rows < 1
        or columns < 1
        or row < 0
        or column < 0
        or to_row < 0
        or to_column < 0
        or row + rows > high
        or column + columns > wide
        or to_row + rows > to_high
        or to_column + columns > to_wide
    ):
        return None
    start, to = (row * wide + column) * item, address + (to_row * to_wide + to_column) * made
    if rows == 1 or columns == wide == to_wide:
        count = rows * columns
        return [Rows(start, count * item, count * item, 1, to, count * made, convert)]
    return [Rows(start, wide * item, columns * item, rows, to, to_wide * made, convert)]


def _continues(inner: tuple[int, int, int], from_source: int, to_target: int) -> bool:
    """Whether an axis goes on where the one inside it ends, on both sides."""
    count, source_stride, stride = inner
    return from_source == count * source_stride and to_target == count * stride


@lru_cache(maxsize=4096)
def _strides(shape: Shape) -> tuple[int, ...]:
    """Elements from one index to the next on each axis of a row-major tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
