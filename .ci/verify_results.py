"""Read pytest's junit file and refuse a run that only looks green.

Refused: a failure, too few tests, a test file of which nothing ran, and a skip or xfail without a reason.
Standard library only.  Files under ``gpu/`` are left out, since a machine without a GPU runs none of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

#: What pytest writes where nobody gave a reason.
NO_REASON = frozenset({"", "unconditional skip", "collection skipped"})


@dataclass(frozen=True)
class Case:
    """One test of the junit file."""

    place: str
    """File and class in dotted form: ``tests.unit.test_spans`` or ``tests.unit.test_spans.TestBoxes``."""
    name: str
    outcome: str
    """``passed``, ``failed``, ``skipped`` or ``xfailed``; an xfail ran, a skip did not."""
    reason: str


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when the run holds, 1 when it does not (each fault on a line of its own)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("junit", type=Path)
    parser.add_argument("--tests", type=Path, required=True, help="the folder whose test_*.py must all have run")
    parser.add_argument("--more-than", type=int, required=True, metavar="N", help="more tests than this must have run")
    options = parser.parse_args(argv)

    try:
        cases = list(read_cases(options.junit))
    except (OSError, ElementTree.ParseError) as error:
        print(f"verify: {options.junit} cannot be read: {error}")
        return 1
    faults = [
        *find_failures(cases),
        *find_shortage(cases, options.more_than),
        *find_idle_files(cases, test_files(options.tests)),
        *find_missing_reasons(cases),
    ]
    for fault in faults:
        print(f"verify: {fault}")
    if not faults:
        files = len(test_files(options.tests))
        skipped = sum(case.outcome == "skipped" for case in cases)
        print(f"verify: {sum(map(ran, cases))} tests ran in {files} files, {skipped} skipped with a reason")
    return 1 if faults else 0


def read_cases(junit: Path) -> Iterator[Case]:
    """Each testcase of the file."""
    for element in ElementTree.parse(junit).iter("testcase"):
        outcome, reason = read_outcome(element)
        yield Case(element.get("classname", ""), element.get("name", ""), outcome, reason)


def read_outcome(case: ElementTree.Element) -> tuple[str, str]:
    """Outcome and, of a skip or an xfail, the reason as given."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed", ""
    skip = case.find("skipped")
    if skip is None:
        return "passed", ""
    reason = (skip.get("message") or "").strip()
    return ("xfailed" if skip.get("type") == "pytest.xfail" else "skipped"), reason


def test_files(folder: Path) -> list[str]:
    """Every test file below the folder but those for a GPU, as pytest names them."""
    return sorted(
        path.relative_to(folder.parent).as_posix()
        for path in folder.rglob("test_*.py")
        if "gpu" not in path.relative_to(folder).parts
    )


def ran(case: Case) -> bool:
    """Whether the body of the test was executed."""
    return case.outcome != "skipped"


def find_failures(cases: Iterable[Case]) -> Iterator[str]:
    """Tests that failed."""
    return (f"failed: {case.place}::{case.name}" for case in cases if case.outcome == "failed")


def find_shortage(cases: Iterable[Case], more_than: int) -> Iterator[str]:
    """Too few tests in all."""
    count = sum(map(ran, cases))
    if count <= more_than:
        yield f"only {count} tests ran; more than {more_than} must"


def find_idle_files(cases: Iterable[Case], files: Iterable[str]) -> Iterator[str]:
    """Test files of which nothing ran."""
    active = {f"{case.place}." for case in cases if ran(case)}
    for file in files:
        place = file.removesuffix(".py").replace("/", ".") + "."
        if not any(other.startswith(place) for other in active):
            yield f"no test of {file} ran"


def find_missing_reasons(cases: Iterable[Case]) -> Iterator[str]:
    """Skips and xfails that do not say why."""
    for case in cases:
        if case.outcome in ("skipped", "xfailed") and case.reason in NO_REASON:
            yield f"{case.outcome} without a reason: {case.place}::{case.name}"


if __name__ == "__main__":
    sys.exit(main())
