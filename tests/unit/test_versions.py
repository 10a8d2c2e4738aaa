"""Labels of versions: their form, their order, and the one that comes next."""

from __future__ import annotations

import pytest

from gtp_serve.errors import UpdateRefused
from gtp_serve.refit.versions import MAX_LABEL_CHARS, Labels, check_form, next_label


@pytest.mark.parametrize(
    ("current", "following"),
    [
        ("0", "1"),
        ("99", "100"),
        ("step-41", "step-42"),
        ("iter_0000200", "iter_0000201"),
        ("v2.9", "v2.10"),
        ("default", "default-1"),
        ("default-1", "default-2"),
        ("7b", "7b-1"),
        ("x" * MAX_LABEL_CHARS, "x" * (MAX_LABEL_CHARS - 2) + "-1"),
    ],
)
def test_the_next_label_raises_the_trailing_number(current: str, following: str) -> None:
    assert next_label(current) == following
    check_form(following)


@pytest.mark.parametrize("label", ["", "a b", "a\n", "\x00", "x" * (MAX_LABEL_CHARS + 1), "a\u00a0b"])
def test_what_is_no_label_is_refused(label: str) -> None:
    with pytest.raises(UpdateRefused, match="is no label"):
        check_form(label)


@pytest.mark.parametrize("label", ["0", "step-41", "x" * MAX_LABEL_CHARS, "größe", "main@3f2a"])
def test_labels_may_be_any_printable_word(label: str) -> None:
    check_form(label)


def test_a_label_is_taken_once_and_numbers_only_rise() -> None:
    labels = Labels("5")
    labels.check("6")
    labels.check("best")
    labels.set_live("6")
    for label, code in (("6", "version-repeated"), ("5", "version-repeated"), ("4", "version-reordered")):
        with pytest.raises(UpdateRefused) as caught:
            labels.check(label)
        assert caught.value.code == code
    labels.set_live("best")
    labels.check("4")


def test_whoever_keeps_no_order_may_take_any_label() -> None:
    labels = Labels("5")
    for label in ("5", "4"):
        labels.check(label, any_order=True)
    with pytest.raises(UpdateRefused):
        labels.check("a b", any_order=True)
