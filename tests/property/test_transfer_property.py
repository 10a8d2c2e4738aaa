"""For any ranks that hold anything, once or several times: each element leaves once and arrives where it is wanted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gtp_serve.layout.spans import Box, Shape, Shard, Span
from gtp_serve.refit.apply import Target, apply_plan
from gtp_serve.refit.transports.buckets import LEAST_BUCKET_BYTES, Exchange, offsets, plan_exchange
from gtp_serve.refit.transports.shares import sole_owners

ITEM = 4


@dataclass(frozen=True)
class World:
    shapes: dict[str, Shape]
    trainers: list[list[Shard]]
    engines: list[list[Shard]]


@st.composite
def boxes(draw: st.DrawFn, shape: Shape) -> Box:
    start, size = [], []
    for length in shape:
        first = draw(st.integers(0, length - 1))
        start.append(first)
        size.append(draw(st.integers(1, length - first)))
    return Box(tuple(start), tuple(size))


def shard(key: str, name: str, box: Box, margin: int) -> Shard:
    """A box of a logical tensor with rows of padding before it."""
    if not box.shape:
        return Shard(key, (), "float32", (Span(name, box, box),))
    local = Box((margin, *(0 for _ in box.shape[1:])), box.shape)
    return Shard(key, (box.shape[0] + margin, *box.shape[1:]), "float32", (Span(name, local, box),))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Trainer ranks with whatever boxes, and one of them with whole tensors so that nothing is missing."""
    sizes = draw(st.lists(st.lists(st.integers(1, 30), max_size=3).map(tuple), min_size=1, max_size=3))
    shapes: dict[str, Shape] = {f"t{at}": shape for at, shape in enumerate(sizes)}
    trainers: list[list[Shard]] = [[] for _ in range(draw(st.integers(1, 4)))]
    engines: list[list[Shard]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for name, shape in shapes.items():
        trainers[draw(st.integers(0, len(trainers) - 1))].append(shard(name, name, Box.whole(shape), 0))
        for ranks, most in ((trainers, 5), (engines, 4)):
            for at in range(draw(st.integers(0, most))):
                rank = draw(st.integers(0, len(ranks) - 1))
                ranks[rank].append(shard(f"{name}/{at}", name, draw(boxes(shape)), draw(st.integers(0, 2))))
    return World(shapes, [draw(st.permutations(shards)) for shards in trainers], engines)


@given(worlds())
@settings(max_examples=150, deadline=None)
def test_every_logical_element_has_exactly_one_owner(world: World) -> None:
    owned = sole_owners(world.trainers, world.shapes)

    for name, shape in world.shapes.items():
        count = np.zeros(shape, np.int64)
        for shards in owned:
            for one in shards:
                for span in one.spans:
                    if span.name == name:
                        count[slices(span.logical)] += 1
        assert (count == 1).all()
    for before, after in zip(world.trainers, owned, strict=True):
        for held, kept in zip(before, after, strict=True):
            assert all(lies_in(span, held.spans) for span in kept.spans)


def lies_in(span: Span, held: tuple[Span, ...]) -> bool:
    """Whether the part of a shard really is that part of the logical tensor."""
    for one in held:
        offset = [a - b for a, b in zip(span.logical.start, one.logical.start, strict=True)]
        inside = Box(tuple(offset), span.logical.shape).inside(one.logical.shape)
        moved = tuple(a + b for a, b in zip(one.local.start, offset, strict=True))
        if span.name == one.name and inside and span.local.start == moved:
            return True
    return False


@given(worlds(), st.integers(LEAST_BUCKET_BYTES, 3000))
@settings(max_examples=150, deadline=None)
def test_buckets_are_bounded_and_bring_each_wanted_element_once_to_its_place(world: World, most: int) -> None:
    exchange = plan_exchange(world.trainers, world.engines, world.shapes, most)

    values = {name: numbers(at, shape) for at, (name, shape) in enumerate(world.shapes.items())}
    wanted = {name: np.zeros(shape, bool) for name, shape in world.shapes.items()}
    for shards in world.engines:
        for one in shards:
            wanted[one.spans[0].name][slices(one.spans[0].logical)] = True
    assert all(bucket.size <= most for bucket in exchange.buckets)
    assert exchange.payload_bytes == ITEM * sum(int(mask.sum()) for mask in wanted.values())
    for rank, shards in enumerate(world.engines):
        got = carry_out(exchange, world, values, rank)
        for one, tensor in zip(shards, got, strict=True):
            expected = np.zeros(one.shape, np.float32)
            expected[slices(one.spans[0].local)] = values[one.spans[0].name][slices(one.spans[0].logical)]
            assert np.array_equal(tensor, expected)


@given(worlds(), st.integers(LEAST_BUCKET_BYTES, 3000))
@settings(max_examples=50, deadline=None)
def test_both_sides_decide_the_same_transfer_and_first_receivers_pass_on(world: World, most: int) -> None:
    exchange = plan_exchange(world.trainers, world.engines, world.shapes, most)
    again = plan_exchange(
        [tuple(shards) for shards in world.trainers], [tuple(shards) for shards in world.engines], world.shapes, most
    )

    assert again.buckets == exchange.buckets
    assert again.digest() == exchange.digest()
    for bucket in exchange.buckets:
        assert sorted(set(bucket.receivers)) == sorted({rank for piece in bucket.pieces for rank, _, _ in piece.places})
        assert all(counted == 1 for counted in Counter(bucket.receivers).values())


def numbers(seed: int, shape: Shape) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) + np.float32(100)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def carry_out(
    exchange: Exchange, world: World, values: dict[str, npt.NDArray[np.float32]], rank: int
) -> list[npt.NDArray[np.float32]]:
    """What an engine rank holds after its buckets, as the two ends pack and unpack them."""
    targets = [Target(one, torch.full(one.shape, -1.0)) for one in world.engines[rank]]
    apply_plan(exchange.padding_plan(rank), Bytes((), b"", []), targets, threads=1)
    for bucket in exchange.buckets:
        if rank not in bucket.receivers:
            continue
        payload = bytearray(bucket.size)
        for piece, start in zip(bucket.pieces, offsets(bucket), strict=True):
            held = world.trainers[bucket.trainer][piece.shard]
            whole = np.full(held.shape, np.nan, np.float32)
            whole[slices(held.spans[0].local)] = values[held.spans[0].name][slices(held.spans[0].logical)]
            payload[start : start + piece.size] = np.ascontiguousarray(whole[slices(piece.box)]).tobytes()
        plan = exchange.bucket_plan(bucket, rank)
        apply_plan(plan, Bytes(plan.have, bytes(payload), offsets(bucket)), targets, threads=1)
    return [target.tensor.numpy() for target in targets]


@dataclass
class Bytes:
    """A WeightSource over a bucket's payload."""

    parts: tuple[Shard, ...]
    payload: bytes
    starts: list[int]

    def shards(self) -> tuple[Shard, ...]:
        return self.parts

    def read(self, index: int) -> memoryview:
        ends = [*self.starts[1:], len(self.payload)]
        return memoryview(self.payload)[self.starts[index] : ends[index]]

    def close(self) -> None:
        pass
