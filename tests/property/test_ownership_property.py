"""Every element of every logical tensor has exactly one owner, among those that hold it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.training.exchange import route, waves
from gtp_serve.training.ownership import Owned, owned_boxes, owners, shapes_of

ROWS, COLUMNS = 7, 4


@st.composite
def _shards(draw: st.DrawFn) -> list[list[Shard]]:
    """Ranks with rectangles of two tensors, which may be equal, overlap or miss elements; padding above."""
    everyone = []
    for _ in range(draw(st.integers(1, 5))):
        shards = []
        for name in draw(st.lists(st.sampled_from(["a", "b"]), unique=True)):
            row = draw(st.integers(0, ROWS - 1))
            rows = draw(st.integers(1, ROWS - row))
            column = draw(st.sampled_from([0, 2]))
            columns = draw(st.sampled_from([2, COLUMNS - column]))
            pad = draw(st.integers(0, 2))
            span = Span(name, Box((pad, 0), (rows, columns)), Box((row, column), (rows, columns)))
            shards.append(Shard(f"key {name}", (rows + pad, columns), "float32", (span,)))
        everyone.append(shards)
    return everyone


def _elements(box: Box) -> list[tuple[int, ...]]:
    return [(r, c) for r in range(box.start[0], box.stop[0]) for c in range(box.start[1], box.stop[1])]


@settings(max_examples=150, deadline=None)
@given(everyone=_shards())
def test_what_is_held_is_owned_once_by_a_holder(everyone: list[list[Shard]]) -> None:
    held = {
        (span.name, at)
        for shards in everyone
        for shard in shards
        for span in shard.spans
        for at in _elements(span.logical)
    }
    owned = owners(everyone)
    counted = Counter((span.name, at) for one in owned for span in one.shard.spans for at in _elements(span.logical))
    assert set(counted) == held
    assert set(counted.values()) <= {1}
    for one in owned:
        (original,) = everyone[one.rank][one.index].spans
        for span in one.shard.spans:
            moved = tuple(a - b for a, b in zip(original.local.start, original.logical.start, strict=True))
            assert span.local == span.logical.shifted(moved)
            assert set(_elements(span.logical)) <= set(_elements(original.logical))
    boxes = [box for rank in range(len(everyone)) for found in owned_boxes(owned, rank).values() for box in found]
    assert sum(box.volume for box in boxes) == len(held)


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(1, ROWS - 1), max_size=3, unique=True), copies=st.integers(1, 3))
def test_a_route_brings_every_element_of_an_item_from_its_owner(cuts: list[int], copies: int) -> None:
    starts = [0, *sorted(cuts)]
    ends = [*sorted(cuts), ROWS]
    everyone = [
        [Shard("key", (b - a, 2), "float32", (Span("a", Box.whole((b - a, 2)), Box((a, 0), (b - a, 2))),))]
        for _ in range(copies)
        for a, b in zip(starts, ends, strict=True)
    ]
    want = [
        Shard("top", (3, 2), "float32", (Span("a", Box.whole((3, 2)), Box((0, 0), (3, 2))),)),
        Shard("rest", (4, 2), "float32", (Span("a", Box.whole((4, 2)), Box((3, 0), (4, 2))),)),
    ]
    items = route(owners(everyone), want, shapes_of(everyone), [0] * len(everyone))
    for item in items:
        covered = [at for piece in item.pieces for at in _elements(piece.target_box)]
        assert sorted(covered) == sorted(_elements(Box.whole(item.shard.shape)))
        assert item.worker in {piece.source for piece in item.pieces}
    seen = [item.number for wave in waves(items, len(everyone)) for item in wave]
    assert sorted(seen) == [0, 1]
    for wave in waves(items, len(everyone)):
        assert len({item.worker for item in wave}) == len(wave)


def test_equal_copies_are_shared_out_evenly() -> None:
    names = [f"w{n}" for n in range(12)]
    mine = [Shard(n, (4, 4), "float32", (Span(n, Box.whole((4, 4)), Box.whole((4, 4))),)) for n in names]
    owned: list[Owned] = owners([mine, mine, mine])
    assert Counter(one.rank for one in owned) == {0: 4, 1: 4, 2: 4}
