"""Which bytes go where: copies from the shards on offer to the shards that are wanted.  No torch.

A plan is decided, checked and printable before anything is touched: every logical tensor must be on offer
exactly once, and every element of a wanted span is then written exactly once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from gtp_serve.errors import LayoutMismatch
from gtp_serve.layout.spans import Box, Shape, Shard, Span, check_coverage, holes, overlaps
from gtp_serve.refit.collector import collector_paused

ITEM_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch's name without the prefix."""

CONVERTIBLE = frozenset({"float64", "float32", "bfloat16", "float16"})
"""Types that convert into one another by value; any other type is copied to its own kind only."""

_SHOWN_PROBLEMS = 5
_SHOWN_ROWS = 20

Placed = tuple[int, Span]
"""A span with the index of its shard."""


class Copy(NamedTuple):
    """Elements ``source_box`` of shard ``source`` become ``target_box`` of wanted shard ``target``."""

    source: int
    source_box: Box
    target: int
    target_box: Box


@dataclass(frozen=True, slots=True)
class Fill:
    """Elements ``box`` of wanted shard ``target`` are padding and become zero."""

    target: int
    box: Box


@dataclass(frozen=True, slots=True)
class RefitPlan:
    """Copies in the order of the source's shards, and the padding to be zeroed; ``str`` shows both."""

    have: tuple[Shard, ...]
    want: tuple[Shard, ...]
    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes that the copies read."""
        return sum(self.copy_bytes())

    def copy_bytes(self) -> list[int]:
        """Bytes that each copy reads."""
        have = self.have
        return [prod(box.shape) * ITEM_BYTES[have[source].dtype] for source, box, _, _ in self.copies]

    @property
    def target_bytes(self) -> int:
        """Bytes that the copies write."""
        return sum(copy.target_box.volume * item_bytes(self.want[copy.target]) for copy in self.copies)

    @property
    def padding_bytes(self) -> int:
        """Bytes that are zeroed."""
        return sum(fill.box.volume * item_bytes(self.want[fill.target]) for fill in self.fills)

    def table(self, max_rows: int = _SHOWN_ROWS) -> str:
        """One line for each copy, cut after ``max_rows``."""
        lines = [self._row(copy) for copy in self.copies[:max_rows]]
        if len(self.copies) > max_rows:
            lines.append(f"  ... and {len(self.copies) - max_rows:,} more copies")
        return "\n".join(lines)

    def _row(self, copy: Copy) -> str:
        have, want = self.have[copy.source], self.want[copy.target]
        dtype = have.dtype if have.dtype == want.dtype else f"{have.dtype} to {want.dtype}"
        return f"  {have.key} {copy.source_box} -> {want.key} {copy.target_box}  {dtype}"

    def __str__(self) -> str:
        used = len({copy.source for copy in self.copies})
        head = (
            f"{len(self.copies):,} copies from {used:,} of {len(self.have):,} shards "
            f"to {len(self.want):,} parameters, {self.source_bytes:,} bytes read, "
            f"{self.target_bytes:,} bytes written, {self.padding_bytes:,} bytes of padding zeroed"
        )
        return "\n".join([head, self.table()]) if self.copies else head


def item_bytes(shard: Shard) -> int:
    """Bytes of one element of the shard."""
    return ITEM_BYTES[shard.dtype]


def build_plan(have: Sequence[Shard], want: Sequence[Shard], shapes: Mapping[str, Shape]) -> RefitPlan:
    """Decide the copies that fill every span of ``want`` from ``have``.

    :param have: shards on offer; a shard without spans is ignored.
    :param want: shards to fill, for example one rank's parameters: they need not want every tensor.
    :param shapes: each logical tensor with its shape.
    :raises LayoutMismatch: when a tensor of ``shapes`` is not on offer exactly once, a span names a tensor
        that is not in ``shapes`` or leaves its shard, wanted spans overlap, or a dtype cannot be converted.
    """
    with collector_paused():
        return _build(have, want, shapes)


def _build(have: Sequence[Shard], want: Sequence[Shard], shapes: Mapping[str, Shape]) -> RefitPlan:
    problems = _Problems()
    _check_shards(have, shapes, problems)
    fills = _check_wanted(want, shapes, problems)
    problems.refuse()
    offered, wanted = _by_name(have), _by_name(want)
    for name, shape in shapes.items():
        _check_offered(name, shape, offered.get(name, []), have, problems)
    problems.refuse()
    copies = [copy for name, spans in wanted.items() for copy in _copies(offered[name], spans)]
    copies.sort(key=lambda copy: (copy.source, copy.source_box.start))
    plan = RefitPlan(tuple(have), tuple(want), tuple(copies), tuple(fills))
    _check_dtypes(plan, problems)
    problems.refuse()
    return plan


class _Problems:
    """Refusals, collected so that one message tells how many there are."""

    def __init__(self) -> None:
        self.found: list[LayoutMismatch] = []

    def add(self, message: str, *details: tuple[str, str]) -> None:
        self.found.append(LayoutMismatch(message, details, code="ckpt-coverage"))

    def refuse(self) -> None:
        """Raise when something was found: a single problem as it is, several as a summary."""
        if not self.found:
            return
        if len(self.found) == 1:
            raise self.found.pop()  # kept here too it would hold itself, and with its frames the memory of the source
        shown = [(str(n), str(one)) for n, one in enumerate(self.found[:_SHOWN_PROBLEMS], 1)]
        if len(self.found) > _SHOWN_PROBLEMS:
            shown.append(("and", f"{len(self.found) - _SHOWN_PROBLEMS} more"))
        raise LayoutMismatch(
            f"the weights on offer do not fit the model in {len(self.found)} places",
            shown,
            code="ckpt-coverage",
        )


def _check_shards(shards: Sequence[Shard], shapes: Mapping[str, Shape], problems: _Problems) -> None:
    for shard in shards:
        if shard.dtype not in ITEM_BYTES:
            problems.add(f"{shard.key}: dtype {shard.dtype} is not known", ("known", ", ".join(ITEM_BYTES)))
        for span in shard.spans:
            shape = shapes.get(span.name)
            if shape is None:
                problems.add(f"{shard.key}: it holds {span.name}, which this model does not have")
            elif not span.logical.inside(shape):
                problems.add(f"{shard.key}: {span.logical} lies outside {span.name}", ("its shape", str(list(shape))))
            if not span.local.inside(shard.shape):
                problems.add(
                    f"{shard.key}: {span.local} of {span.name} lies outside the shard",
                    ("its shape", str(list(shard.shape))),
                )


def _check_wanted(want: Sequence[Shard], shapes: Mapping[str, Shape], problems: _Problems) -> list[Fill]:
    """Check the wanted shards; returns their padding."""
    before = len(problems.found)
    _check_shards(want, shapes, problems)
    if len(problems.found) > before:
        return []
    fills: list[Fill] = []
    for index, shard in enumerate(want):
        try:
            fills += [Fill(index, box) for box in _padding(shard)]
        except LayoutMismatch as doubled:
            problems.found.append(doubled)
    return fills


def _padding(shard: Shard) -> list[Box]:
    """What no span covers; refuses when two spans claim one element."""
    if len(shard.spans) == 1 and shard.spans[0].local.shape == shard.shape:
        return []
    pieces = [(span.local, span.name) for span in sorted(shard.spans, key=lambda span: span.local.start)]
    full = sum(box.volume for box, _ in pieces) == prod(shard.shape)
    padding = [] if full else holes(shard.shape, [box for box, _ in pieces])
    check_coverage(shard.key, shard.shape, [*pieces, *((box, "padding") for box in padding)])
    return padding


def _by_name(shards: Sequence[Shard]) -> dict[str, list[Placed]]:
    groups: dict[str, list[Placed]] = {}
    for index, shard in enumerate(shards):
        for span in shard.spans:
            groups.setdefault(span.name, []).append((index, span))
    return groups


def _check_offered(
    name: str, shape: Shape, offered: Sequence[Placed], have: Sequence[Shard], problems: _Problems
) -> None:
    if _is_grid(shape, [span.logical for _, span in offered]):
        return
    try:
        check_coverage(name, shape, [(span.logical, have[index].key) for index, span in offered])
    except LayoutMismatch as problem:
        problems.found.append(problem)


def _is_grid(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Whether the boxes cut the tensor along straight lines and cover it once: the usual case, told fast."""
    if len(boxes) == 1:
        return boxes[0].shape == shape  # it lies inside, so it starts at 0
    cells = 1
    for axis, size in enumerate(shape):
        cuts = sorted({(box.start[axis], box.shape[axis]) for box in boxes})
        ends = [first + count for first, count in cuts]
        if [first for first, _ in cuts] != [0, *ends[:-1]] or ends[-1:] != [size]:
            return False
        cells *= len(cuts)
    return bool(boxes) and len(boxes) == len(set(boxes)) == cells


def _copies(offered: Sequence[Placed], wanted: Sequence[Placed]) -> Iterator[Copy]:
    """Copies for one logical tensor whose offered spans are disjoint."""
    index = _SpanIndex(offered) if len(wanted) > 1 else None
    for target, want in wanted:
        for source, have in offered if index is None else index.near(want):
            found = overlaps(have, want)
            if found is not None:
                yield Copy(source, found[0], target, found[1])


class _SpanIndex:
    """Disjoint spans sorted along the axis that tells most of them apart: a search skips the others."""

    def __init__(self, spans: Sequence[Placed]) -> None:
        self.spans, self.axis, self.longest = spans, 0, 0
        self.starts: list[int] = []
        rank = len(spans[0][1].logical.start) if spans else 0
        if len(spans) < 2 or rank == 0:
            return
        self.axis = max(range(rank), key=lambda axis: len({span.logical.start[axis] for _, span in spans}))
        self.spans = sorted(spans, key=lambda placed: placed[1].logical.start[self.axis])
        self.starts = [span.logical.start[self.axis] for _, span in self.spans]
        self.longest = max(span.logical.shape[self.axis] for _, span in self.spans)

    def near(self, want: Span) -> Sequence[Placed]:
        """Spans that may meet ``want``, and few others."""
        if not self.starts:
            return self.spans
        first, size = want.logical.start[self.axis], want.logical.shape[self.axis]
        return self.spans[bisect_right(self.starts, first - self.longest) : bisect_left(self.starts, first + size)]


def _check_dtypes(plan: RefitPlan, problems: _Problems) -> None:
    seen: set[tuple[int, int]] = set()
    for copy in plan.copies:
        have, want = plan.have[copy.source], plan.want[copy.target]
        if have.dtype == want.dtype or {have.dtype, want.dtype} <= CONVERTIBLE:
            continue
        if (copy.source, copy.target) not in seen:
            seen.add((copy.source, copy.target))
            problems.add(f"{have.key}: {have.dtype} cannot become the {want.dtype} of {want.key}")
