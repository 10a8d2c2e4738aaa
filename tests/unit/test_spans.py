"""Boxes, spans and coverage: right values and the words of a refusal."""

from __future__ import annotations

import pytest

from gtp_serve.errors import LayoutMismatch
from gtp_serve.layout.spans import Box, Span, check_coverage, intersect, overlaps


def test_intersection_of_boxes_is_their_common_rectangle() -> None:
    assert intersect(Box((0, 0), (4, 4)), Box((2, 3), (5, 5))) == Box((2, 3), (2, 1))
    assert intersect(Box((0,), (4,)), Box((4,), (1,))) is None
    assert intersect(Box((0,), (0,)), Box((0,), (4,))) is None


def test_a_box_prints_as_slices() -> None:
    assert str(Box((2, 0), (3, 4))) == "[2:5, 0:4]"


def test_overlap_gives_both_local_boxes() -> None:
    have = Span("w", Box((10, 0), (4, 8)), Box((4, 0), (4, 8)))
    want = Span("w", Box((0, 1), (8, 3)), Box((0, 2), (8, 3)))

    assert overlaps(have, want) == (Box((10, 2), (4, 3)), Box((4, 1), (4, 3)))
    assert overlaps(have, Span("v", want.local, want.logical)) is None


def test_a_span_of_two_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="span of w"):
        Span("w", Box((0,), (2,)), Box((0,), (3,)))


def test_exact_coverage_passes_in_any_order_and_ignores_empty_boxes() -> None:
    check_coverage("w", (4, 4), [(Box((2, 0), (2, 4)), "b"), (Box((0, 0), (2, 4)), "a"), (Box((4, 0), (0, 4)), "e")])
    check_coverage("w", (2, 4), [(Box((0, 2), (2, 2)), "b"), (Box((0, 0), (2, 2)), "a")])


def test_a_hole_is_named_with_its_rows() -> None:
    with pytest.raises(LayoutMismatch, match=r"w: elements \[2:3, 0:4\] are missing"):
        check_coverage("w", (4, 4), [(Box((0, 0), (2, 4)), "a"), (Box((3, 0), (1, 4)), "b")])


def test_a_missing_tensor_says_who_needs_it() -> None:
    with pytest.raises(LayoutMismatch, match=r"w: the whole tensor \[4\] is missing; needed by: layer 0"):
        check_coverage("w", (4,), [], "layer 0")


def test_doubled_elements_are_named_with_both_shards() -> None:
    with pytest.raises(LayoutMismatch, match=r"w: elements \[1:2, 0:4\] come twice; from: a and b"):
        check_coverage("w", (3, 4), [(Box((0, 0), (2, 4)), "a"), (Box((1, 0), (2, 4)), "b")])


def test_a_double_that_hides_a_hole_of_the_same_size_is_found() -> None:
    with pytest.raises(LayoutMismatch, match="come twice"):
        check_coverage("w", (4,), [(Box((0,), (2,)), "a"), (Box((0,), (2,)), "b")])


def test_elements_outside_the_tensor_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match=r"a claims \[3:5\], outside"):
        check_coverage("w", (4,), [(Box((3,), (2,)), "a")])
