"""The page about reliability names tests that exist, and every requirement."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
#: How many requirements each letter has.
COUNTS = {"D": 8, "F": 8, "H": 8, "T": 5, "N": 5, "A": 3, "I": 3, "W": 8, "L": 7, "X": 4, "O": 3, "S": 3}
IDS = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]
#: Whose tests have names of their own.
ELSEWHERE = {"F8", "L6", "L7"}


def rows() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"[A-Z]\d", cells[0]):
            assert len(cells) == 4, line
            assert cells[0] not in found, line
            assert len(cells[1]) > 20, line
            found[cells[0]] = re.findall(r"`(tests/[^`]+)`", cells[2])
    return found


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, and names that a test case was bound to."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def test_every_requirement_has_one_row() -> None:
    assert list(rows()) == IDS


@pytest.mark.parametrize("requirement", IDS)
def test_each_row_names_tests_that_exist_and_one_has_its_id(requirement: str) -> None:
    named = rows()[requirement]
    assert named, "a row without a test"
    for place in named:
        file, _, test = place.partition("::")
        assert (ROOT / file).is_file(), place
        assert test in names_in(ROOT / file), place
    own = f"test_{requirement.lower()}_"
    both = f"_and_{requirement.lower()}_"
    if requirement not in ELSEWHERE:
        assert any(own in place or both in place for place in named), f"no test of {requirement} is named after it"


def test_no_test_is_named_after_a_requirement_that_there_is_not() -> None:
    known = {one.lower() for one in IDS}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in names_in(path):
            match = re.match(r"test_([dfhtnaiwlxos]\d)_", name)
            assert match is None or match[1] in known, f"{path}: {name}"
