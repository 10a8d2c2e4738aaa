"""Plans: what is copied where, what is refused, and how fast."""

from __future__ import annotations

import time

import pytest

from gtp_serve.errors import LayoutMismatch
from gtp_serve.layout.spans import Box, Shape, Shard, Span
from gtp_serve.refit.plan import Copy, Fill, RefitPlan, build_plan


def box(*bounds: tuple[int, int]) -> Box:
    """``box((0, 2), (4, 8))`` is rows 0 to 2, columns 4 to 8."""
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


def whole(name: str, *shape: int, dtype: str = "bfloat16") -> Shard:
    return Shard(name, shape, dtype, (Span(name, Box.whole(shape), Box.whole(shape)),))


def rows(key: str, name: str, first: int, stop: int, width: int, *, stored: int | None = None) -> Shard:
    """Rows of a matrix, with padding below when more are stored."""
    span = Span(name, box((0, stop - first), (0, width)), box((first, stop), (0, width)))
    return Shard(key, (stored or stop - first, width), "bfloat16", (span,))


SHAPES: dict[str, Shape] = {"gate": (6, 4), "up": (6, 4)}
HAVE = [
    rows("gate.0", "gate", 0, 4, 4),
    rows("gate.1", "gate", 4, 6, 4, stored=4),
    rows("gate.2", "gate", 0, 0, 4, stored=4),
    whole("up", 6, 4),
]
FUSED = Shard(
    "gate_up",
    (14, 4),
    "bfloat16",
    (
        Span("gate", box((0, 6), (0, 4)), box((0, 6), (0, 4))),
        Span("up", box((6, 12), (0, 4)), box((0, 6), (0, 4))),
    ),
)


def test_padded_shards_are_copied_into_a_fused_parameter_and_its_padding_is_zeroed() -> None:
    plan = build_plan(HAVE, [FUSED], SHAPES)
    assert plan.copies == (
        Copy(0, box((0, 4), (0, 4)), 0, box((0, 4), (0, 4))),
        Copy(1, box((0, 2), (0, 4)), 0, box((4, 6), (0, 4))),
        Copy(3, box((0, 6), (0, 4)), 0, box((6, 12), (0, 4))),
    )
    assert plan.fills == (Fill(0, box((12, 14), (0, 4))),)
    assert (plan.source_bytes, plan.target_bytes, plan.padding_bytes) == (96, 96, 16)


def test_a_rank_may_want_less_than_there_is() -> None:
    want = Shard("half", (6, 2), "bfloat16", (Span("up", box((0, 6), (0, 2)), box((0, 6), (2, 4))),))
    plan = build_plan(HAVE, [want], SHAPES)
    assert plan.copies == (Copy(3, box((0, 6), (2, 4)), 0, box((0, 6), (0, 2))),)


def test_a_scalar_is_a_tensor_too() -> None:
    plan = build_plan([whole("scale")], [whole("scale")], {"scale": ()})
    assert plan.copies == (Copy(0, Box((), ()), 0, Box((), ())),)


def refusal(have: list[Shard], want: list[Shard], shapes: dict[str, Shape] = SHAPES) -> str:
    with pytest.raises(LayoutMismatch) as caught:
        build_plan(have, want, shapes)
    return str(caught.value)


def test_missing_rows_are_refused_by_name_and_range() -> None:
    assert refusal([HAVE[0], HAVE[3]], [FUSED]) == "gate: elements [4:6, 0:4] are missing"


def test_doubled_rows_are_refused_with_both_shards() -> None:
    doubled = rows("again", "gate", 3, 4, 4)
    assert refusal([*HAVE, doubled], [FUSED]) == ("gate: elements [3:4, 0:4] come twice; from: gate.0 and again")


def test_a_whole_tensor_on_offer_twice_is_refused() -> None:
    assert "up: elements [0:6, 0:4] come twice" in refusal([*HAVE, whole("up", 6, 4)], [FUSED])


def test_an_absent_tensor_is_refused_even_when_this_rank_does_not_want_it() -> None:
    assert refusal(HAVE, [FUSED], SHAPES | {"norm": (4,)}) == "norm: the whole tensor [4] is missing"


def test_a_tensor_that_the_model_does_not_have_is_refused() -> None:
    assert "it holds bias, which this model does not have" in refusal([*HAVE, whole("bias", 4)], [FUSED])
    assert "it holds bias, which this model does not have" in refusal(HAVE, [FUSED, whole("bias", 4)])


def test_a_tensor_of_another_shape_is_refused() -> None:
    assert "[0:7, 0:4] lies outside up; its shape: [6, 4]" in refusal([*HAVE[:3], whole("up", 7, 4)], [FUSED])
    assert "lies outside up" in refusal([*HAVE[:3], whole("up", 6)], [FUSED])
    assert "up: elements [5:6, 0:4] are missing" in refusal([*HAVE[:3], whole("up", 5, 4)], [FUSED])


def test_a_span_that_leaves_its_shard_is_refused() -> None:
    long = Shard("up", (5, 4), "bfloat16", (Span("up", box((0, 6), (0, 4)), box((0, 6), (0, 4))),))
    assert "[0:6, 0:4] of up lies outside the shard; its shape: [5, 4]" in refusal([*HAVE[:3], long], [FUSED])


def test_two_wanted_spans_on_one_element_are_refused() -> None:
    clash = Shard(
        "clash",
        (11, 4),
        "bfloat16",
        (FUSED.spans[0], Span("up", box((5, 11), (0, 4)), box((0, 6), (0, 4)))),
    )
    assert refusal(HAVE, [clash]) == "clash: elements [5:6, 0:4] come twice; from: gate and up"


def test_many_problems_are_summarised() -> None:
    shapes: dict[str, Shape] = {f"t{n}": (2,) for n in range(9)}
    text = refusal([], [], shapes)
    assert text.startswith("the weights on offer do not fit the model in 9 places; 1: t0: the whole tensor [2]")
    assert text.endswith("5: t4: the whole tensor [2] is missing; and: 4 more")


def test_quantised_numbers_never_become_weights_by_a_cast() -> None:
    assert refusal([whole("w", 4, dtype="int8")], [whole("w", 4)], {"w": (4,)}) == (
        "w: int8 cannot become the bfloat16 of w"
    )
    assert build_plan([whole("w", 4, dtype="float32")], [whole("w", 4)], {"w": (4,)}).source_bytes == 16
    assert build_plan([whole("w", 4, dtype="int8")], [whole("w", 4, dtype="int8")], {"w": (4,)}).copies


def test_an_unknown_dtype_is_refused() -> None:
    assert "dtype complex64 is not known" in refusal([whole("w", 4, dtype="complex64")], [whole("w", 4)], {"w": (4,)})


def test_a_plan_tells_its_counts_and_a_table_that_is_cut() -> None:
    text = str(build_plan(HAVE, [FUSED], SHAPES))
    assert text.splitlines() == [
        "3 copies from 3 of 4 shards to 1 parameters, 96 bytes read, 96 bytes written, 16 bytes of padding zeroed",
        "  gate.0 [0:4, 0:4] -> gate_up [0:4, 0:4]  bfloat16",
        "  gate.1 [0:2, 0:4] -> gate_up [4:6, 0:4]  bfloat16",
        "  up [0:6, 0:4] -> gate_up [6:12, 0:4]  bfloat16",
    ]
    many = {f"t{n}": (2,) for n in range(30)}
    shards = [whole(name, 2, dtype="float32") for name in many]
    lines = str(build_plan(shards, [whole(name, 2) for name in many], many)).splitlines()
    assert lines[1] == "  t0 [0:2] -> t0 [0:2]  float32 to bfloat16"
    assert (len(lines), lines[-1]) == (22, "  ... and 10 more copies")


def timed(have: list[Shard], want: list[Shard], shapes: dict[str, Shape]) -> tuple[float, RefitPlan]:
    start = time.process_time()
    plan = build_plan(have, want, shapes)
    return time.process_time() - start, plan


def test_a_hundred_thousand_tensors_are_planned_in_seconds() -> None:
    every = Box.whole((768, 2048))
    shapes: dict[str, Shape] = {f"layers.{n}.weight": every.shape for n in range(100_000)}
    shards = [Shard(name, every.shape, "bfloat16", (Span(name, every, every),)) for name in shapes]
    seconds, plan = timed(shards, shards, shapes)
    assert len(plan.copies) == 100_000
    assert seconds < 10  # under 1 on an idle machine; all pairs would take hours


def test_a_tensor_in_a_fine_grid_is_planned_in_seconds() -> None:
    cells = [(i * 10, j * 10) for i in range(150) for j in range(150)]
    have = [
        Shard(f"{i}.{j}", (10, 10), "bfloat16", (Span("w", Box((0, 0), (10, 10)), Box((i, j), (10, 10))),))
        for i, j in cells
    ]
    want = [rows(f"r{n}", "w", n * 30, n * 30 + 30, 1500) for n in range(50)]
    seconds, plan = timed(have, want, {"w": (1500, 1500)})
    assert len(plan.copies) == len(cells)
    assert seconds < 6
