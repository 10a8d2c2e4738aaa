"""The path of the value that a position in a JSON text lies in."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gtp_serve.server.json_place import path_at

WORDS = ("a", "text", "top_p", "x-y", "3", "n.0")
OTHERS: tuple[Any, ...] = (1, "b", 'q"\\[{', [], {}, [1, {"c": ":,"}], None)


def hide(rng: random.Random, depth: int) -> tuple[Any, str]:
    """A value with one odd number somewhere in it, and the number's path from there."""
    if depth == 0:
        return float("nan"), ""
    inner, path = hide(rng, depth - 1)
    if rng.random() < 0.5:
        before = [rng.choice(OTHERS) for _ in range(rng.randrange(3))]
        return [*before, inner, rng.choice(OTHERS)], f"[{len(before)}]{path}"
    names = rng.sample(WORDS, 3)
    return {names[0]: rng.choice(OTHERS), names[1]: inner, names[2]: rng.choice(OTHERS)}, f".{names[1]}{path}"


def test_a_number_is_found_wherever_it_is() -> None:
    rng = random.Random(4)
    for _ in range(2000):
        value, path = hide(rng, rng.randint(1, 6))
        text = json.dumps(value, indent=rng.choice((None, 1)))
        assert path_at(text, text.index("NaN")) == path.removeprefix("."), text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NaN",
        "{",
        '{"a b": ',
        '{"\u00e9": ',
        '{"a": 1, "b',
        "]",
        '{"a": {"<script>": ',
        '{"' + "k" * 65 + '": ',
        '{"a": ' * 120,
        '{"a": "' + "x" * (256 << 10) + '", "b": ',
        "[" * 5000,
    ],
)
def test_no_path_is_better_than_a_wrong_or_a_long_one(text: str) -> None:
    assert path_at(text, len(text)) is None


def test_it_takes_time_by_the_length_only() -> None:
    text = '["' + '\\"' * (127 << 10) + "\\"
    assert path_at(text, len(text)) == "[0]"
