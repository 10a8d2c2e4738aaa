"""For any way of cutting tensors on either side, a plan moves each element to where it belongs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gtp_serve.errors import LayoutMismatch
from gtp_serve.layout.spans import Box, Shape, Shard, Span
from gtp_serve.refit import apply, writers
from gtp_serve.refit.apply import Target, apply_plan, dtype_name
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.source import Rows

MARGIN = st.integers(0, 2)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))


@st.composite
def tilings(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Boxes that cover the shape once, cut again and again at random (so mostly no grid)."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[axis]))
        boxes += [part for part in split(box, axis, at) if part.volume]
    return boxes


def split(box: Box, axis: int, at: int) -> tuple[Box, Box]:
    first, rest = list(box.shape), list(box.shape)
    first[axis], rest[axis] = at, box.shape[axis] - at
    start = list(box.start)
    start[axis] += at
    return Box(box.start, tuple(first)), Box(tuple(start), tuple(rest))


@st.composite
def placed(draw: st.DrawFn, key: str, pieces: list[tuple[str, Box]]) -> Shard:
    """A shard that holds the pieces side by side on its first axis, with padding before and after each."""
    rank = len(pieces[0][1].shape)
    size = [max(box.shape[axis] for _, box in pieces) + draw(MARGIN) for axis in range(rank)]
    row, spans = draw(MARGIN), []
    for name, box in pieces:
        start = (row, *(draw(st.integers(0, size[axis] - box.shape[axis])) for axis in range(1, rank)))
        spans.append(Span(name, Box(start, box.shape), box))
        row += box.shape[0] + draw(MARGIN)
    return Shard(key, (row, *size[1:]), draw(st.sampled_from(["float32", "float64"])), tuple(spans))


@st.composite
def cut(draw: st.DrawFn, key: str, tensors: dict[str, Shape]) -> list[Shard]:
    """The tensors (of one rank) as shards of one to three pieces each, in any order."""
    pieces = [(name, box) for name, shape in tensors.items() for box in draw(tilings(shape))]
    pieces = draw(st.permutations(pieces))
    shards: list[Shard] = []
    while pieces:
        count = draw(st.integers(1, 3))
        shards.append(draw(placed(f"{key}{len(shards)}", pieces[:count])))
        pieces = pieces[count:]
    return shards


@dataclass(frozen=True)
class World:
    shapes: dict[str, Shape]
    have: list[Shard]
    want: list[Shard]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    rank = draw(st.integers(1, 3))
    one = st.tuples(*[st.integers(1, 9)] * rank)
    tensors = {f"t{n}": draw(one) for n in range(draw(st.integers(1, 3)))}
    return World(tensors, draw(cut("have", tensors)), draw(cut("want", tensors)))


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def logical(world: World) -> dict[str, Tensor]:
    """Each element a number of its own."""
    tensors, first = {}, 1
    for name, shape in world.shapes.items():
        count = Box.whole(shape).volume
        tensors[name] = torch.arange(first, first + count, dtype=torch.float64).view(shape)
        first += count
    return tensors


class Source:
    def __init__(self, shards: list[Shard], tensors: dict[str, Tensor]) -> None:
        self.listed, self.bytes = shards, []
        for shard in shards:
            stored = torch.full(shard.shape, -1.0, dtype=getattr(torch, shard.dtype))
            for span in shard.spans:
                stored[index(span.local)] = tensors[span.name][index(span.logical)].to(stored.dtype)
            self.bytes.append(memoryview(bytes(stored.view(-1).view(torch.uint8).numpy())))

    def shards(self) -> list[Shard]:
        return self.listed

    def read(self, index: int) -> memoryview:
        return self.bytes[index]

    def close(self) -> None:
        self.bytes.clear()


class Direct(Source):
    """Writes into the targets itself, one row after another."""

    def read(self, index: int) -> memoryview:
        raise AssertionError("a direct source is not asked for views")

    def read_into(self, index: int, rows: Sequence[Rows]) -> None:
        data = self.bytes[index]
        for row in rows:
            for i in range(row.count):
                start = row.start + i * row.source_stride
                assert start + row.size <= len(data)
                ctypes.memmove(row.address + i * row.stride, bytes(data[start : start + row.size]), row.size)


@pytest.mark.parametrize("kind", [Source, Direct])
@settings(deadline=None, max_examples=75)
@given(limit=st.sampled_from([16 << 20, 40, 1]), world=worlds())
def test_every_element_arrives_and_padding_is_zero(kind: type[Source], limit: int, world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply, "PIECE_BYTES", limit)
        patch.setattr(writers, "STAGED_BYTES", limit)
        check_fill(world, kind)


def check_fill(world: World, kind: type[Source]) -> None:
    tensors = logical(world)
    targets = [Target(shard, torch.full(shard.shape, -2.0, dtype=getattr(torch, shard.dtype))) for shard in world.want]
    plan = build_plan(world.have, world.want, world.shapes)
    total = sum(tensor.numel() for tensor in tensors.values())
    assert sum(copy.source_box.volume for copy in plan.copies) == total
    assert apply_plan(plan, kind(world.have, tensors), targets) == plan.source_bytes
    for target in targets:
        expected = torch.zeros_like(target.tensor)
        for span in target.shard.spans:
            expected[index(span.local)] = tensors[span.name][index(span.logical)].to(expected.dtype)
        assert torch.equal(target.tensor, expected), dtype_name(expected)


@settings(deadline=None, max_examples=100)
@given(worlds(), st.data())
def test_a_missing_or_doubled_piece_is_always_refused(world: World, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(world.have) - 1))
    shard = world.have[at]
    span = data.draw(st.sampled_from(shard.spans))
    if data.draw(st.booleans()):
        spoiled = [*world.have, Shard("again", shard.shape, shard.dtype, (span,))]
    else:
        rest = tuple(other for other in shard.spans if other is not span)
        spoiled = [
            *world.have[:at],
            Shard(shard.key, shard.shape, shard.dtype, rest),
            *world.have[at + 1 :],
        ]
    with pytest.raises(LayoutMismatch, match=span.name):
        build_plan(spoiled, world.want, world.shapes)


@settings(deadline=None, max_examples=100)
@given(shapes(), st.data())
def test_a_shifted_piece_is_always_refused(shape: Shape, data: st.DataObject) -> None:
    boxes = data.draw(tilings(shape))
    at = data.draw(st.integers(0, len(boxes) - 1))
    by = tuple(data.draw(st.sampled_from([-1, 0, 1])) for _ in shape)
    if not any(by):
        by = (1, *by[1:])
    boxes[at] = boxes[at].shifted(by)
    have = [
        Shard(f"s{n}", box.shape, "float32", (Span("t", Box.whole(box.shape), box),)) for n, box in enumerate(boxes)
    ]
    with pytest.raises(LayoutMismatch):
        build_plan(have, [], {"t": shape})
