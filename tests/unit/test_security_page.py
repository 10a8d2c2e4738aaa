"""SECURITY.md: each limit is the one in the code, and each thing that a reader looks for is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "Mi": 1 << 20}


def limits() -> list[tuple[str, list[float], list[str]]]:
    """(what, numbers, places in the code)."""
    table = TEXT.partition("## Limits")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if "`gtp_serve." in line]
    found = []
    for what, numbers, places in rows:
        plain = re.sub(r"\(.*\)", "", numbers).replace("`", "")
        parts = re.findall(r"(\d[\d,]*\d|\d)(?:\s*(KiB|MiB|Mi)\b)?", plain)
        values = [float(number.replace(",", "")) * UNITS[unit] for number, unit in parts]
        found.append((what.strip(), values, re.findall(r"`(gtp_serve\.[\w.]+)`", places)))
    return found


def value_of(place: str) -> Any:
    """A constant of a module, or the default of a class's field."""
    module, _, name = place.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        module, _, owner = module.rpartition(".")
        return getattr(importlib.import_module(module), owner).__dataclass_fields__[name].default


@pytest.mark.parametrize(
    ("what", "values", "places"), limits(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_limit_is_the_one_in_the_code(what: str, values: list[float], places: list[str]) -> None:
    assert len(values) == len(places)
    assert [float(value_of(place)) for place in places] == values


def test_the_limits_that_matter_most_are_listed() -> None:
    listed = {place for _, _, places in limits() for place in places}
    assert len(listed) > 25
    for module, name in (
        ("server.body", "MAX_BODY_BYTES"),
        ("server.http_server", "MAX_HEADER_BYTES"),
        ("server.schemas", "MAX_N"),
        ("config", "EngineConfig.max_waiting"),
        ("engine.limits", "MAX_TOP_LOGPROBS"),
    ):
        assert f"gtp_serve.{module}.{name}" in listed


def test_a_reader_finds_trust_severity_limits_what_is_none_and_where_to_report() -> None:
    headings = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    assert headings == [
        "Whom gtp-serve trusts",
        "Limits",
        "What an operator has to do",
        "What counts as a vulnerability",
        "What is not a vulnerability",
        "Reporting",
    ]
    assert "private vulnerability reporting" in TEXT
    for path in re.findall(r"`((?:docs|scripts)/[\w./-]+)`", TEXT):
        assert (ROOT / path).is_file(), path
