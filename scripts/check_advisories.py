"""Compare what is pinned and what pyproject.toml lets in with scripts/advisories.toml.  Needs no network.

Exit status 1 when a pinned version, or a lower bound, is in the range of an advisory that was not accepted with a
reason.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("advisories.toml")
LOCKS = ("requirements-dev.lock", "requirements-docs.lock")
#: After so long the list is called old; that alone is no failure, since nothing here has changed.
OLD_DAYS = 120


class Use(NamedTuple):
    """A version that somebody may get, and why."""

    package: str
    version: Version
    why: str


class Finding(NamedTuple):
    """A use that an advisory is about."""

    use: Use
    advisory: str
    affected: str

    def __str__(self) -> str:
        use = self.use
        return f"{use.package} {use.version} ({use.why}) is affected by {self.advisory}: {self.affected}"


def pinned(text: str, file: str) -> Iterator[Use]:
    """Each ``name==version`` of a lock file."""
    for line in text.splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)==([^\s;#]+)", line):
            yield Use(canonicalize_name(match[1]), Version(match[2]), file)


def lowest(project: Mapping[str, Any]) -> Iterator[Use]:
    """The lowest version that each requirement of a pyproject.toml lets in.

    :raises ValueError: for one without a lower bound: it lets in every version there ever was.
    """
    required = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for lines in project["project"].get("optional-dependencies", {}).values():
        required += lines
    for line in required:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) == canonicalize_name(project["project"]["name"]):
            continue  # its own extras
        bounds = [Version(part.version) for part in requirement.specifier if part.operator in (">=", "==", "~=")]
        if not bounds:
            raise ValueError(f"pyproject.toml: {line} has no lower bound")
        yield Use(canonicalize_name(requirement.name), min(bounds), "the lowest that pyproject.toml lets in")


def is_affected(version: Version, ranges: str) -> bool:
    """Whether a version lies in one of the ranges."""
    return any(SpecifierSet(part.strip()).contains(version, prereleases=True) for part in ranges.split("|"))


def findings(uses: list[Use], packages: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Every use that an advisory is about."""
    known = {str(canonicalize_name(name)): advisories for name, advisories in packages.items()}
    for use in uses:
        for advisory, affected in known.get(use.package, {}).items():
            if is_affected(use.version, affected):
                yield Finding(use, advisory, affected)


def main(root: Path = ROOT, today: date | None = None) -> int:
    """Print what was found; 1 when something has to be done."""
    told = tomllib.loads(LIST.read_text(encoding="utf-8"))
    uses = list(lowest(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))))
    for name in LOCKS:
        uses += pinned((root / name).read_text(encoding="utf-8"), name)
    bad = 0
    for finding in findings(uses, told["packages"]):
        reason = told["accepted"].get(finding.advisory)
        bad += reason is None
        print(f"advisories: {finding}" + (f"; accepted: {reason}" if reason else ""))
    age = ((today or date.today()) - told["checked"]).days
    print(f"advisories: {len(uses)} versions compared with the list of {told['checked']}, {bad} affected")
    if age > OLD_DAYS:
        print(f"advisories: the list is {age} days old; scripts/advisories.toml says how to refresh it")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
